"""Which mutants are made of a source, and which tests notice one."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import __main__ as program
from .__main__ import ROOT, TARGETS, Bench, chosen, stages
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
    assert_never(free + 1)
    return free > wanted and free != 7
'''


def test_each_mutant_is_one_line_that_means_something_else() -> None:
    mutants = mutants_of(SOURCE)
    assert {(mutant.line, mutant.description) for mutant in mutants} == {
        (3, "`4` -> `5`"),
        (6, "`0` -> `1`"),
        (8, "`not room` -> `True`"),
        (8, "`not room` -> `False`"),
        (8, "`not ` -> ``"),
        (9, '`raise ValueError("no room")` -> `pass`'),
        (10, "`-` -> `+`"),
        (13, "`free > wanted and free != 7` -> `None`"),
        (13, "`>` -> `>=`"),
        (13, "`>` -> `<`"),
        (13, "`and` -> `or`"),
        (13, "`!=` -> `==`"),
        (13, "`7` -> `8`"),
    }
    for mutant in mutants:
        before, after = SOURCE.splitlines(), mutant.apply(SOURCE).splitlines()
        changed = [
            n for n, (one, other) in enumerate(zip(before, after, strict=True), 1) if one != other
        ]
        assert changed == [mutant.line]


def test_a_seed_determines_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    # To look for them once is enough: the seed has no part in it.
    sources, found = program.all_mutants()
    assert program.all_mutants() == (sources, found)
    monkeypatch.setattr(program, "all_mutants", lambda: (sources, [*found]))
    assert chosen(20, 3) == chosen(20, 3) != chosen(20, 4)
    assert len({path for path, _ in chosen(200, 0)}) > 15


@pytest.mark.parametrize("pattern", TARGETS)
def test_the_tests_of_every_file_exist(pattern: str) -> None:
    paths = [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
    assert paths
    for path in paths:
        found = stages(path)
        assert len(found) > 2
        for stage in found:
            if not stage.startswith("sim "):
                assert all((ROOT / test).exists() for test in stage.split()), stage


class Run(Bench):
    """A bench with given test outputs: one with a mutant, one without."""

    def __init__(self, directory: Path, mutated: str, unmutated: str) -> None:
        self.root = directory
        self._output = directory / "output"
        self._within_s = 60.0
        self._file = directory / "tiers/order.py"
        self._source = SOURCE
        self._outputs = {True: mutated, False: unmutated}
        self._file.parent.mkdir()
        self._file.write_text(SOURCE)

    def passes(self, _stage: str) -> bool:
        output = self._outputs[self._file.read_text() != SOURCE]
        self._output.write_text(output)
        return output == "1 passed"

    def notices(self) -> str | None:
        found = self.noticed_by("tiers/order.py", mutants_of(SOURCE)[0])
        assert self._file.read_text() == SOURCE
        return None if found is None else found[0]


FAILED = "E   AssertionError\nFAILED tests/a.py::test_it - AssertionError\n1 failed"
LATE = "FAILED tests/a.py::test_it - Failed: Timeout (>400.0s) from pytest-timeout.\n1 failed"


def test_a_mutant_is_noticed_by_the_first_test_that_fails(tmp_path: Path) -> None:
    assert Run(tmp_path, FAILED, "1 passed").notices() == FAILED.splitlines()[1]


def test_a_mutant_that_makes_no_difference_survives(tmp_path: Path) -> None:
    assert Run(tmp_path, "1 passed", "1 passed").notices() is None


def test_a_run_that_is_late_without_the_mutant_does_not_count(tmp_path: Path) -> None:
    """The machine may just be too busy."""
    (tmp_path / "busy").mkdir()
    (tmp_path / "stuck").mkdir()
    assert Run(tmp_path / "busy", LATE, LATE).notices() is None
    assert str(Run(tmp_path / "stuck", LATE, "1 passed").notices()).startswith(
        "late: FAILED tests/a"
    )
