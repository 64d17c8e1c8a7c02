"""prefixd keeps the KV state of LLM prompt prefixes and gives it back at memory speed.

The four sub-packages live at the top of the repository and are linked in here, so that
nothing called ``server`` or ``client`` lands in anyone's site-packages.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("prefixd")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"
