"""How much is tried of what is random: little with each run of the suite, and the same each time;
more of it with `HYPOTHESIS_PROFILE=long`."""

from __future__ import annotations

import os
from typing import Final

LONG: Final = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def examples(few: int, many: int) -> int:
    """So many, or in the long form so many."""
    return many if LONG else few
