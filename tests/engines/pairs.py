"""Random pairs of set-ups of an engine: one key only where the state is the same."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

PAIRS: Final = 200


def check_pairs(
    seen: Sequence[tuple[bytes, Any]],
    equal: Callable[[Any, Any], bool] = operator.eq,
    may_share: Callable[[Any, Any], bool] | None = None,
) -> None:
    """Compare 200 random pairs of `seen`, which has key and state of each set-up. Two with one key
    must be `equal` (`may_share`, if that is less than bit-equal). Prints how many could share a key
    and don't."""
    pairs = random.Random(1).sample(list(itertools.combinations(seen, 2)), PAIRS)
    same_key = [(one[1], other[1]) for one, other in pairs if one[0] == other[0]]
    assert all(itertools.starmap(may_share or equal, same_key)), "one key for two states"
    could = [(one, other) for one, other in pairs if equal(one[1], other[1])]
    lost = [1 for one, other in could if one[0] != other[0]]
    print(
        f"of {PAIRS} pairs {len(same_key)} have one key, {len(could)} the same state bit by bit, "
        f"and {len(lost)} of these have two keys"
    )
    assert same_key
    assert len(could) < PAIRS
