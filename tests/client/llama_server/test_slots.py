"""Which slot a prompt gets, and what is believed of a slot."""

from __future__ import annotations

import numpy as np

from prefixd.client.llama_server.slot_file import Tokens
from prefixd.client.llama_server.slots import Slot, choose


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
    assert (held.length, held.saved, held.unsaved) == (11, 10, 1)
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
