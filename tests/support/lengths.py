"""How many times tests repeat their steps, and how many random examples they try.

    PREFIXD_LONG=1 make test

runs the long form of these tests, for a change of the code that they guard.
"""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("PREFIXD_LONG", "") not in ("", "0")


def times(usual: int, long: int) -> int:
    return long if LONG else usual
