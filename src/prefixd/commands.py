"""The console scripts. Without the server's packages they say what to install."""

from __future__ import annotations

import gc
import sys
from importlib import import_module


def prefixd() -> None:
    """The daemon."""
    _run("prefixd", ".server.daemon")


def prefixctl() -> None:
    """The command line for operators."""
    _run("prefixctl", ".client.ctl.main")


def _run(command: str, module: str) -> None:
    # Imported modules stay, so collecting garbage while they are imported would find nothing.
    gc.disable()
    try:
        main = import_module(module, __package__).main
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith(f"{__package__}."):
            raise
        sys.exit(
            f"{command}: {missing.name} is not installed: pip install '.[server]' in a clone of "
            "prefixd"
        )
    gc.freeze()
    gc.enable()
    main()
