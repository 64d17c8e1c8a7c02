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


def prefixd_llama_server() -> None:
    """llama.cpp's server, with its prompts kept."""
    install = "pip install '.[llama-server]'"
    _run("prefixd-llama-server", ".client.llama_server.main", install)


def _run(command: str, module: str, install: str = "pip install '.[server]'") -> None:
    # Imported modules stay, so collecting garbage while they are imported would find nothing.
    gc.disable()
    try:
        main = import_module(module, __package__).main
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith(f"{__package__}."):
            raise
        sys.exit(f"{command}: {missing.name} is not installed: {install} in a clone of prefixd")
    gc.freeze()
    gc.enable()
    main()
