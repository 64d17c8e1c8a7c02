"""How many times tests repeat their steps, and how many random examples they try.

    PREFIXD_LONG=1 make test

runs the long form of these tests, for a change of the code that they guard.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any, Final

LONG: Final = os.environ.get("PREFIXD_LONG", "") not in ("", "0")


def times(usual: int, long: int) -> int:
    return long if LONG else usual


def pairs(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """For tests with several parameters: combinations of these choices, so that any two choices are
    together in one. The long form has all combinations."""
    every = list(product(*choices))
    if LONG:
        return every
    chosen = []
    left = {pair for row in every for pair in _pairs_of(row)}
    while left:
        best = max(every, key=lambda row: len(left.intersection(_pairs_of(row))))
        left.difference_update(_pairs_of(best))
        chosen.append(best)
    return chosen


def _pairs_of(row: tuple[Any, ...]) -> list[Any]:
    return list(combinations(enumerate(row), 2))
