"""prefixd keeps the KV state of LLM prompt prefixes and gives it back at memory speed.

The sub-packages live at the top of the repository and are linked in here, so that
nothing called ``server`` or ``client`` lands in anyone's site-packages.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """`__version__`, looked up when it is asked for: that takes as long as all else together."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("prefixd")
    except PackageNotFoundError:  # imported from a source tree that was never installed
        return "0+unknown"
