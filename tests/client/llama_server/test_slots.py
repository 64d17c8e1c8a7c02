"""Which slot a prompt gets, what is believed of a slot, when it is saved, and when a restore is
worth it."""

from __future__ import annotations

import numpy as np
import pytest

from prefixd.client.llama_server.slot_file import Tokens
from prefixd.client.llama_server.slots import Benefit, SaveGates, Slot, choose
from prefixd.client.policy import SavePolicy
from prefixd.proto.vocabulary import SaveReason

GATES = SaveGates(SavePolicy())


def tokens(*parts: range | int) -> Tokens:
    flat = [each for part in parts for each in (part if isinstance(part, range) else [part])]
    return np.asarray(flat, "<i4")


def slot(number: int, held: Tokens, used: int = 0) -> Slot:
    made = Slot(number, used=used)
    made.took(held, b"", kept=0)
    return made


def test_a_prompt_goes_on_where_most_of_it_is() -> None:
    slots = [slot(0, tokens(range(10))), slot(1, tokens(range(30))), slot(2, tokens(range(20)))]
    assert choose(slots, tokens(range(40))) is slots[1]
    slots[1].busy = True
    assert choose(slots, tokens(range(40))) is slots[2]


def test_a_slot_whose_content_is_mostly_another_is_left_to_its_conversation() -> None:
    shared = range(10)
    slots = [slot(0, tokens(shared, range(100, 200)), used=9), Slot(1)]
    assert choose(slots, tokens(shared, 7, 8, 9)) is slots[1]
    slots = [slot(0, tokens(shared, range(100, 200)), used=9), slot(1, tokens(range(50, 60)))]
    assert choose(slots, tokens(shared, 7, 8, 9)) is slots[1], "the least recently used"


def test_without_a_free_slot_there_is_none() -> None:
    only = Slot(0, busy=True)
    assert choose([only], tokens(range(3))) is None


def test_the_content_of_one_tenant_is_none_for_another() -> None:
    held = Slot(0)
    held.took(tokens(range(10)), b"one", kept=0)
    assert held.holds(tokens(range(10)), b"one") == 10
    assert held.holds(tokens(range(10)), b"two") == 0
    assert held.holds(tokens(range(10))) == 0


def test_what_is_saved_follows_what_is_in_the_slot() -> None:
    held = Slot(0)
    held.was_restored(tokens(range(10)), b"")
    assert (held.length, held.saved, held.restored) == (10, 10, 10)
    held.took(tokens(range(10), 99), b"", kept=10)
    assert (held.length, held.saved) == (11, 10)
    held.took(tokens(range(4), 7), b"", kept=4)
    assert (held.length, held.saved) == (5, 4)
    held.was_saved(tokens(range(4), 7, 8))
    assert (held.length, held.saved) == (6, 6)
    held.forget()
    assert (held.length, held.saved, len(held.tokens)) == (0, 0, 0)
    assert held.restored == 10, "the server may still have it"
    held.taint()
    held.was_erased()
    assert (held.restored, held.tainted) == (0, False)
    held.taint()
    held.was_restored(tokens(range(5)), b"")
    assert (held.restored, held.tainted) == (5, False)


def test_a_restart_is_noticed_by_the_number_of_tokens() -> None:
    held = slot(0, tokens(range(10)))
    assert held.agrees(12), "the answer's tokens"
    assert held.agrees(12)
    assert not held.agrees(13), "another client used it"
    assert not held.agrees(0), "a new process"


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
