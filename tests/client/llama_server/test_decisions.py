"""When a slot is saved, and when a restore is worth it."""

from __future__ import annotations

import pytest

from prefixd.client.llama_server.decisions import Benefit, SaveGates
from prefixd.client.policy import SavePolicy
from prefixd.proto.vocabulary import SaveReason

GATES = SaveGates(SavePolicy())


@pytest.mark.parametrize(
    ("prompt", "length", "saved", "reason"),
    [
        (3_000, 3_100, 0, SaveReason.COLD),
        (3_000, 3_100, 1, SaveReason.COLD),  # another prompt was there
        (600, 700, 0, SaveReason.FINISH),  # no whole stride of the cold boundary
        (40_000, 40_100, 0, SaveReason.FINISH),  # above cold_max_tokens
        (300, 400, 0, None),  # computing it again is cheaper
        (3_100, 3_200, 3_100, None),  # a little is new: later
        (4_300, 4_400, 3_100, SaveReason.CONTINUED),  # it grew by a quarter
        (60_000, 60_100, 58_000, SaveReason.CONTINUED),  # by continued_interval_tokens
        (60_000, 60_000, 60_000, None),
    ],
)
def test_after_a_request(prompt: int, length: int, saved: int, reason: SaveReason | None) -> None:
    assert GATES.after_request(prompt, length, saved) is reason


def test_an_idle_slot_is_saved_if_something_is_new() -> None:
    assert GATES.when_idle(3_200, 3_100) is SaveReason.FINISH
    assert GATES.when_idle(3_110, 3_100) is None
    assert GATES.when_idle(400, 0) is None


def test_a_slot_that_another_prompt_takes_is_saved_unless_it_keeps_everything() -> None:
    assert GATES.when_replaced(3_000, 0, 0) is SaveReason.EVICT
    assert GATES.when_replaced(3_000, 0, 1_000) is SaveReason.EVICT
    assert GATES.when_replaced(3_000, 3_000, 0) is None
    assert GATES.when_replaced(3_000, 0, 2_990) is None
    assert GATES.when_replaced(0, 0, 0) is None


def test_stops_of_a_state_that_cannot_be_cut() -> None:
    # Behind the system prompt, before the last message, and before the last token.
    assert GATES.stops(4_000, 0, [1_000, 3_500]) == [1_000, 3_500, 3_999]
    # Not where the slot has the state already, nor for a few tokens.
    assert GATES.stops(4_000, 3_500, [1_000, 3_500]) == [3_999]
    assert GATES.stops(4_000, 0, [1_000, 3_990]) == [1_000, 3_999]
    assert GATES.stops(4_000, 3_999, []) == []
    # A prompt without messages: the trimmed boundary of the cold save.
    assert GATES.stops(4_000, 0, []) == [2_048, 3_999]
    assert GATES.stops(400, 0, [100]) == []
    assert GATES.stops(4_000, 0, [100]) == [3_999], "below min_tokens"


def test_a_hit_slower_than_prefill_is_no_hit() -> None:
    benefit = Benefit()
    benefit.evaluated(1_000, 1.0)
    assert benefit.why_not(100, 10**12) is None, "nothing was measured yet"
    benefit.restored(1_000_000, 1.0)
    assert benefit.why_not(100, 50_000) is None
    assert benefit.why_not(100, 200_000) == "slower than prefill"
    assert benefit.why_not(31, 1) == "small gain"


def test_one_in_so_many_is_tried_again() -> None:
    benefit = Benefit()
    benefit.evaluated(1_000, 1.0)
    benefit.restored(1_000_000, 1_000.0)
    answers = [benefit.why_not(100, 10_000) for _ in range(64)]
    assert answers.count(None) == 2


def test_restores_that_bring_nothing_stop() -> None:
    benefit = Benefit()
    for _ in range(2):
        benefit.reused(1_000, 0)
    assert not benefit.is_open
    benefit.reused(1_000, 1_000)
    for _ in range(3):
        assert not benefit.is_open
        benefit.reused(1_000, 499)
    assert benefit.is_open
    assert benefit.why_not(1_000, 1) == "restores brought nothing"
    answers = [benefit.why_not(1_000, 1) for _ in range(40)]
    assert answers.count(None) == 1
    benefit.reused(1_000, 1_000)
    assert not benefit.is_open


def test_few_tokens_measure_nothing() -> None:
    benefit = Benefit()
    benefit.evaluated(1, 10.0)
    assert benefit.prefill_tokens_per_s == 0
    benefit.evaluated(500, 0.5)
    assert benefit.prefill_tokens_per_s == 1_000
