"""The console scripts. They say what to install where only the client library is."""

from __future__ import annotations

import gc
import sys
from importlib import import_module


def prefixd() -> None:
    """The daemon."""
    _run("prefixd", ".server.daemon")


def prefixctl() -> None:
    """What looks into it."""
    _run("prefixctl", ".client.ctl.main")


def _run(command: str, module: str) -> None:
    # What is imported stays: the collector would look for garbage all the time, and find none.
    gc.disable()
    try:
        main = import_module(module, __package__).main
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith(f"{__package__}."):
            raise
        sys.exit(f"{command}: {missing.name} is not installed: pip install 'prefixd[server]'")
    gc.freeze()
    gc.enable()
    main()
