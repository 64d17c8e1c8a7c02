"""prefixd keeps the KV state of LLM prompt prefixes and gives it back at memory speed.

The sub-packages live at the top of the repository and are linked in here, so that nothing named
``server`` or ``client`` is installed into site-packages.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    """`__version__`, looked up on first use, because that takes as long as the rest of the import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("prefixd")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+unknown"
