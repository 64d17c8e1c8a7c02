"""What mutants there are, and that the tests of a file are found."""

from __future__ import annotations

import pytest

from .__main__ import ROOT, TARGETS, chosen, stages
from .mutate import mutants_of

SOURCE = '''\
"""A module."""

LIMIT = int(4)


def taken(room: int, wanted: int = 0) -> bool:
    """Says something."""
    if not room:
        raise ValueError("no room")
    free = room - LIMIT
    log.info("said", free=free + 1)
    return free > wanted and free != 7
'''


def test_each_mutant_is_one_line_that_means_something_else() -> None:
    mutants = mutants_of(SOURCE)
    assert {(mutant.line, mutant.what) for mutant in mutants} == {
        (3, "`4` -> `5`"),
        (6, "`0` -> `1`"),
        (8, "`not room` -> `True`"),
        (8, "`not room` -> `False`"),
        (8, "`not ` -> ``"),
        (9, '`raise ValueError("no room")` -> `pass`'),
        (10, "`-` -> `+`"),
        (12, "`free > wanted and free != 7` -> `None`"),
        (12, "`>` -> `>=`"),
        (12, "`>` -> `<`"),
        (12, "`and` -> `or`"),
        (12, "`!=` -> `==`"),
        (12, "`7` -> `8`"),
    }
    for mutant in mutants:
        before, after = SOURCE.splitlines(), mutant.apply(SOURCE).splitlines()
        changed = [
            n for n, (one, other) in enumerate(zip(before, after, strict=True), 1) if one != other
        ]
        assert changed == [mutant.line]


def test_the_same_seed_chooses_the_same() -> None:
    assert chosen(20, 3) == chosen(20, 3) != chosen(20, 4)
    assert len({path for path, _ in chosen(200, 0)}) > 15


@pytest.mark.parametrize("pattern", TARGETS)
def test_every_file_has_tests_that_are_there(pattern: str) -> None:
    paths = [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
    assert paths
    for path in paths:
        found = stages(path)
        assert len(found) > 2
        for stage in found:
            if not stage.startswith("sim "):
                assert all((ROOT / test).exists() for test in stage.split()), stage
