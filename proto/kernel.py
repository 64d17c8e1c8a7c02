"""The native kernel, where it was built: `native` is its module, or None.

`proto/native/` holds it: a small C module over plain buffers, which setup.py builds if there is a
compiler. It takes the innermost loops of copies, checksums, hashes and look-ups. Each of them also
exists in Python, gives the same results bit for bit, and runs where the module is missing or
`PREFIXD_PURE=1` is set.

Without the module, checked copies of 64 to 640 KiB take about twice as long. On AArch64 the module
also orders the loads of a validated read, which Python can't.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Final

#: Of the module that this code can use. In an editable checkout, and where a file of an earlier
#: installation was left, there may be another one.
ABI: Final = 3


def _load() -> tuple[ModuleType | None, str]:
    """The module, and the form that runs, in words."""
    if os.environ.get("PREFIXD_PURE", "0") not in ("", "0"):
        return None, "pure Python (PREFIXD_PURE is set)"
    if sys.byteorder != "little":
        return None, "pure Python (the native kernel is for little-endian processors)"
    try:
        from . import _native
    except ModuleNotFoundError:
        return None, "pure Python (the native kernel was not built: there was no C compiler)"
    except ImportError as problem:
        return None, f"pure Python (the native kernel can't be loaded: {problem})"
    if getattr(_native, "ABI", 0) != ABI:
        why = "the native kernel is of another version of prefixd"
        warnings.warn(
            f"{why} and is not used: install prefixd again, or run `make` in its checkout "
            f"({_native.__file__})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, f"pure Python ({why})"
    return _native, f"native ({', '.join(_native.form())})"


_loaded = _load()
#: The form that runs, for operators: "native (avx512, sha)", or why it is not native.
FORM: Final = _loaded[1]
if TYPE_CHECKING:
    from . import _native

    native = _native
else:
    native: Final = _loaded[0]
