"""How often a test repeats what shows more the oftener it is done, and how much it tries of what is
random.

    PREFIXD_LONG=1 make test

runs the long form of each, for what a change of what it guards deserves.
"""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("PREFIXD_LONG", "") not in ("", "0")


def times(usual: int, long: int) -> int:
    return long if LONG else usual
