"""Timing cases by turns, and the rows that result."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from prefixd.client.bench.samples import LIGHT_SAMPLES, ROUNDS, Case, Row, interleave, make_row


class Machine:
    """Cases that record when they ran, and advance the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ran: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def case(self, name: str, seconds: list[float], **options: bool) -> Case:
        """A case that takes these seconds in turn. Preparing it takes longer."""
        number = count()

        def action() -> None:
            self.ran.append(name)
            self.now_s += seconds[next(number) % len(seconds)]

        def before() -> None:
            self.ran.append(f"before {name}")
            self.now_s += 1000

        return Case(name, "op", 2, action, 10**9, before, **options)


def test_cases_take_turns_and_each_turn_begins_with_one_that_does_not_count() -> None:
    machine = Machine()
    cases = [machine.case("a", [1]), machine.case("b", [1])]
    interleave(cases, 2 * ROUNDS, machine.clock)
    turn = [["before a", "a"] * 3, ["before b", "b"] * 3]
    assert machine.ran == (turn[0] + turn[1]) * ROUNDS


def test_only_what_is_timed_counts() -> None:
    """The first run of each turn is the warm-up. 3, 5 and 4 are measured."""
    machine = Machine()
    (row,) = interleave([machine.case("a", [100, 3, 5, 4])], 3 * ROUNDS, machine.clock)
    assert (row.p50_ms, row.gb_per_s) == (4000.0, 0.25)


def test_few_repeats_are_few_turns() -> None:
    machine = Machine()
    interleave([machine.case("a", [1])], 1, machine.clock)
    assert machine.ran.count("a") == 2


def test_what_takes_microseconds_is_sampled_more_often() -> None:
    machine = Machine()
    interleave([machine.case("a", [1], light=True)], 1, machine.clock)
    assert machine.ran.count("a") == 1 + LIGHT_SAMPLES


def test_a_row_has_the_form_that_peers_have() -> None:
    case = Case("me", "save", 48, lambda: None, moved_bytes=48 * 5 * 2**20)
    row = make_row(case, [0.2, 0.1, 0.7])
    assert row.as_dict() == {
        "peer": "me", "op": "save", "blocks": 48, "p50_ms": 200.0, "gb_per_s": 1.26,
    }  # fmt: skip
    probe = make_row(Case("me", "exists", 48, lambda: None), [5e-6])
    assert replace(probe, more={"rpcs": 0}).as_dict() == {
        "peer": "me", "op": "exists", "blocks": 48, "p50_ms": 0.005, "rpcs": 0,
    }  # fmt: skip


def test_a_row_comes_back_from_json() -> None:
    for row in (
        Row("me", "save", 48, 200.0, 1.26),
        Row("me", "exists", 1, 0.005, None, {"rpcs": 0}),
    ):
        assert Row.from_dict(row.as_dict()) == row


@pytest.mark.parametrize(
    "wrong",
    [{}, {"peer": "me", "op": "save", "blocks": "many", "p50_ms": 1},
     {"peer": "me", "op": "save", "blocks": 1, "p50_ms": 0},
     {"peer": "me", "op": "save", "blocks": 1, "p50_ms": None}],
)  # fmt: skip
def test_what_is_no_row_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        Row.from_dict(wrong)
