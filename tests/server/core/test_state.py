"""`MetaState`: sessions, questions, operators, starts. Other files here test the rules."""

from __future__ import annotations

import pytest

from prefixd.proto.errors import LimitReached, UnknownSession, UnknownTier
from prefixd.proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from prefixd.server.core import superseded
from prefixd.server.core.tables import StateConfig
from prefixd.tiers import extents
from tests.support.state_driver import (
    LOST_AFTER_NS,
    Driver,
    erased,
    hidden,
    key,
    listed,
    stored,
)

# ---- sessions


def test_only_so_many_sessions() -> None:
    driver = Driver(max_sessions=2)
    first, second = driver.open("alice"), driver.open("bob")
    answer = driver.ask(ev.SessionOpened(driver.request(), "carol", 0))
    assert isinstance(answer.error, LimitReached)
    assert driver.counters.sessions_opened == 2
    driver.lose(first)
    assert driver.open("carol") > second, "a session's number is never given out again"


def test_a_session_is_lost_by_silence_and_not_a_moment_earlier() -> None:
    driver = Driver()
    session = driver.open()
    driver.reserve(session, "a", ttl_ns=10 * LOST_AFTER_NS)
    driver.now_ns = 400
    driver.hear(session)
    driver.now_ns = 400 + LOST_AFTER_NS - 1
    driver.tick()
    assert session in driver.tables.sessions
    driver.now_ns += 1
    driver.tick()
    assert session not in driver.tables.sessions
    assert driver.counters.sessions_lost == 1


def test_a_lost_session_is_lost_once() -> None:
    driver = Driver()
    session = driver.open()
    driver.lose(session)
    assert driver.lose(session) == []
    driver.hear(session)
    assert driver.counters.sessions_lost == 1


@pytest.mark.parametrize("session", [1, 2], ids=["ended", "never was"])
def test_nobody_acts_in_a_session_that_is_not_there(session: int) -> None:
    driver = Driver()
    driver.lose(driver.open())
    for answer in (
        driver.claim(session, "a"),
        driver.reserve(session, "a"),
        driver.begin(session, 1),
        driver.ask(ev.ReleaseAsked(driver.request(), session, (1,), 0)),
        driver.ask(ev.CancelAsked(driver.request(), session, (1,), 0)),
    ):
        assert isinstance(answer.error, UnknownSession)
        assert f"session {session}" in str(answer.error)


def test_what_a_session_holds_ends_with_it() -> None:
    driver = Driver()
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.save(alice, "a b")
    driver.claim(alice, "a b")
    driver.reserve(alice, "c")
    (writing,) = driver.granted(alice, "d")
    driver.lose(alice)
    assert not driver.tables.claims
    assert driver.order() == "b a"
    assert list(driver.tables.reservations) == [writing], "somebody still writes into its room"
    assert driver.of_kind(fx.StopWriting) == [fx.StopWriting(writing)]
    assert driver.of_kind(fx.TellReservationLost) == [], "there is nobody to be told"
    driver.stop(writing)
    assert not driver.tables.reservations
    assert not driver.tables.sessions[bob].tokens


def test_a_lost_session_answers_its_own_waits_and_wakes_the_others() -> None:
    driver = Driver()
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.reserve(alice, "a b")
    assert driver.claim(alice, "a", wait_ns=50) is None
    hers = driver.last_request
    assert driver.lookup("a", wait_ns=50) is None
    anybodys = driver.last_request
    assert driver.reserve(bob, "b", wait_ns=50) is None
    his = driver.last_request
    driver.lose(alice)
    assert list(driver.replies) == [hers, anybodys, his]
    assert isinstance(driver.replies[hers].error, UnknownSession)
    assert driver.replies[anybodys] == an.LookupAnswer((None,))
    assert isinstance(driver.replies[his].results[0], an.WriteOrder)
    tables = driver.tables
    assert (tables.waited_keys, tables.anonymous_waited_keys) == (0, 0)


# ---- questions and answers


def test_whoever_hung_up_is_not_answered() -> None:
    driver = Driver()
    session = driver.open()
    (token,) = driver.granted(session, "a")
    assert driver.lookup("a", wait_ns=50) is None
    driver.happens(ev.RequestDropped(driver.last_request, 0))
    assert not driver.tables.waiting
    driver.seal(token)
    assert driver.replies == {}


def test_hanging_up_after_the_answer_changes_nothing() -> None:
    driver = Driver()
    driver.lookup("a")
    assert driver.happens(ev.RequestDropped(driver.last_request, 0)) == []
    assert driver.happens(ev.RequestDropped(99, 0)) == []


# ---- operators


def test_operators_evict_what_is_next_until_it_is_enough() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a b c", payload_bytes=2)
    driver.save(session, "d", tier=Tier.DISK, payload_bytes=3)
    driver.claim(session, "c b", ClaimMode.ANY)
    assert driver.evict(1) == an.EvictAnswer(1, 2, more=True)
    assert hidden(driver.effects) == "a"
    assert driver.evict(1) == an.EvictAnswer(0, 0, more=False), "b, c are claimed"
    assert driver.evict(9, Tier.DISK) == an.EvictAnswer(1, 3, more=False)
    assert driver.tables.tier_counters[Tier.RAM].evictions == 1
    assert driver.tables.tier_counters[Tier.DISK].evicted_bytes == 3


def test_one_event_evicts_no_more_than_it_says() -> None:
    driver = Driver()
    driver.save(driver.open(), "a b c d e")
    assert driver.evict(4, max_entries=3) == an.EvictAnswer(3, 3, more=True)
    assert driver.evict(1, max_entries=3) == an.EvictAnswer(1, 1, more=True)
    assert driver.order() == "a"


def test_evicting_from_a_tier_that_is_not_there_is_refused() -> None:
    driver = Driver()
    driver.save(driver.open(), "a")
    del driver.tables.ledgers[Tier.SHM]
    answer = driver.evict(1, Tier.SHM)
    assert isinstance(answer.error, UnknownTier)
    assert "shm" in str(answer.error)


def test_room_is_free_before_it_is_given_away_and_readers_know_first() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a", payload_bytes=10)
    driver.reserve(session, "b", payload_bytes=10)
    kinds = [type(effect) for effect in driver.effects]
    assert kinds == [fx.IndexDelete, fx.Erase, fx.Reply]


def test_a_damaged_entry_is_dropped_if_it_is_still_that_one() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a")
    old = driver.entry("a")
    entry = driver.entry("a")
    gone, *rest = driver.damage("a")
    assert gone == fx.IndexDelete([entry])
    assert erased(rest) == [(Tier.RAM, "a")]
    assert not old.published
    gone = ev.EntryDamaged(key("a"), old.generation, "again", 0)
    assert driver.happens(gone) == []
    driver.save(session, "a")
    assert driver.happens(gone) == [], "these are other bytes"
    assert driver.tables.tier_counters[Tier.RAM].corrupt == 1


@pytest.mark.parametrize("sure_bytes", [0, 1])
def test_a_damaged_entry_that_is_claimed_is_gone_at_once_and_its_room_later(
    sure_bytes: int,
) -> None:
    """`sure_bytes`: the share of another namespace; without it the tier has no shares."""
    driver = Driver(shares={"team": sure_bytes} if sure_bytes else {})
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.save(alice, "a b")
    one = driver.claim(alice, "a b").claim
    two = driver.claim(bob, "b").claim
    damaged = driver.entry("b")
    gone, *rest = driver.damage("b")
    assert gone == fx.IndexDelete([damaged])
    assert erased(rest) == [(Tier.RAM, "b")]
    assert not damaged.published
    assert driver.lookup("b").results == (None,)
    ram = driver.tables.ledgers[Tier.RAM]
    assert (ram.published_bytes, ram.pinned_bytes) == (2, 2), "its bytes are still looked at"
    driver.save(alice, "b", payload_bytes=8 - sure_bytes)
    assert driver.entry("b").location[0] != damaged.location[0]
    assert driver.release(alice, one) == "lost", "what was read under it may be wrong"
    assert driver.release(alice, one) == "lost", "also if it asks again"
    assert driver.release(bob, two) == "lost"
    assert driver.counters.claims_lost == 2
    assert (ram.published_bytes, ram.pinned_bytes) == (9 - sure_bytes, 0)
    assert not driver.tables.condemned


def test_a_damaged_entry_costs_no_claim_that_does_not_hold_it() -> None:
    driver = Driver()
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.save(alice, "a b")
    holds, does_not = driver.claim(alice, "a b").claim, driver.claim(alice, "a").claim
    other = driver.claim(bob, "a").claim
    driver.damage("b")
    assert driver.release(bob, other) == "released"
    assert driver.release(alice, does_not, holds) == "released lost"
    assert driver.counters.claims_lost == 1


def test_an_arena_grows() -> None:
    driver = Driver()
    session = driver.open()
    ram = driver.tables.ledgers[Tier.RAM]
    ram.budget_bytes = ram.arena_bytes = 12
    assert driver.reserve(session, "a", payload_bytes=12).results == (SaveStatus.NO_ROOM,)
    driver.happens(ev.ArenaGrown(Tier.RAM, 12, 0))
    assert len(driver.granted(session, "a", payload_bytes=12)) == 1


# ---- starts


def test_what_survived_comes_back_in_its_order_with_its_hits() -> None:
    driver = Driver()
    driver.recover(
        Tier.DISK,
        stored("b", used_ns=10, generation=2),
        stored("c", used_ns=20, generation=1),
        stored("a", used_ns=30, generation=3, hits=5),
        dropped=4,
    )
    assert driver.order(Tier.DISK) == "b c a"
    assert listed(driver.effects) == "b c a"
    assert driver.entry("a").hits == 5
    assert driver.entry("a").reason is SaveReason.FINISH
    counters = driver.tables.tier_counters[Tier.DISK]
    assert (counters.recovered_entries, counters.recovered_bytes) == (3, 3)
    assert counters.dropped_at_start == 4
    assert driver.tick(flush=True) == [], "the store knows all that"


def test_an_entry_is_not_older_than_its_creation() -> None:
    driver = Driver()
    driver.recover(Tier.DISK, stored("a", used_ns=0, generation=40))
    assert driver.entry("a").last_used_ns == 40


def test_what_is_beyond_the_budget_is_erased_oldest_first() -> None:
    driver = Driver()
    driver.recover(
        Tier.DISK,
        *(stored(one, used_ns=n, generation=n, payload_bytes=3) for n, one in enumerate("abcd")),
    )
    assert driver.order(Tier.DISK) == "b c d"
    assert erased(driver.effects) == [(Tier.DISK, "a")]
    assert hidden(driver.effects) == "a"
    assert driver.tables.tier_counters[Tier.DISK].dropped_at_start == 1


def test_what_survived_in_more_pieces_than_are_given_now_is_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extents, "MAX_EXTENTS", 1)
    driver = Driver()
    driver.tables.ledgers[Tier.SHM].scattered_bytes = 1
    between = [
        stored(name, used_ns=1, generation=1, tier=Tier.SHM, location=(2 * place + 1, 1))
        for place, name in enumerate("abcde")
    ]
    driver.recover(Tier.SHM, *between)
    pieces = stored(
        "p", used_ns=1, generation=2, payload_bytes=2, tier=Tier.SHM, location=(0, 1, 4, 1)
    )
    driver.recover(Tier.SHM, pieces)
    assert driver.order(Tier.SHM) == "a b c d e p"


def test_a_key_that_two_tiers_have_stays_where_more_of_it_survives() -> None:
    driver = Driver()
    driver.recover(Tier.SHM, stored("a", used_ns=1, generation=1, tier=Tier.SHM, location=(4, 1)))
    driver.recover(Tier.DISK, stored("a", used_ns=9, generation=2))
    assert erased(driver.effects) == [(Tier.SHM, "a")]
    assert driver.entry("a").tier is Tier.DISK
    driver.recover(Tier.SHM, stored("a", used_ns=1, generation=3, tier=Tier.SHM, location=(5, 1)))
    assert erased(driver.effects) == [(Tier.SHM, "a")]
    assert len(driver.effects) == 1, "its row stays"
    assert driver.entry("a").tier is Tier.DISK
    (token,) = driver.granted(driver.open(), "b", tier=Tier.SHM, payload_bytes=10)
    assert sum(driver.tables.reservations[token].entry.location[1::2]) == 10, "all of it is free"


def test_what_was_saved_while_a_tier_recovers_gives_way_to_what_is_found_there() -> None:
    """It survives more. Claims on the lesser copy keep its bytes."""
    driver = Driver()
    session = driver.open()
    driver.close_tier(Tier.DISK, ev.TierState.RECOVERING)
    driver.save(session, "free claimed")
    held = driver.claim(session, "claimed").claim
    reserved, writing = driver.granted(session, "reserved writing")
    one, *others = (
        stored(name, used_ns=9, generation=n, location=())
        for n, name in enumerate(["free", "claimed", "reserved", "writing"], 1)
    )
    driver.recover(Tier.DISK, one, *others)
    for name in ("free", "claimed", "reserved", "writing"):
        assert driver.entry(name).tier is Tier.DISK
    ram = driver.tables.ledgers[Tier.RAM]
    assert (ram.entries, ram.pinned_entries) == (1, 1), "its claim holds its bytes"
    assert driver.release(session, held) == "lost"
    assert driver.stop(reserved)
    assert driver.stop(writing)
    assert (ram.published_bytes, ram.reserved_bytes) == (0, 0)


def test_the_later_save_of_other_content_wins_in_whatever_tier() -> None:
    driver = Driver()
    session = driver.open()
    driver.close_tier(Tier.DISK, ev.TierState.RECOVERING)
    driver.save(session, "a b", tier=Tier.SHM, payload_bytes=2)
    mine = driver.entry("a").generation
    older, newer = (
        stored(name, used_ns=9, generation=generation, payload_bytes=3)
        for name, generation in (("a", mine - 1), ("b", mine + 100))
    )
    driver.recover(Tier.DISK, older, newer)
    assert driver.entry("a").tier is Tier.SHM
    assert (Tier.DISK, "a") in erased(driver.effects)
    assert driver.entry("b").tier is Tier.DISK


def test_neither_copy_goes_before_the_other_has_its_room() -> None:
    """A claim holds the room that the found entry would need."""
    driver = Driver()
    session = driver.open()
    driver.close_tier(Tier.DISK, ev.TierState.RECOVERING)
    driver.save(session, "a", tier=Tier.SHM)
    limit = driver.tables.ledgers[Tier.DISK].limit_bytes
    driver.recover(Tier.DISK, stored("p", used_ns=1, generation=1, payload_bytes=limit))
    assert driver.claim(session, "p").claim
    driver.recover(Tier.DISK, stored("a", used_ns=2, generation=2))
    assert driver.entry("a").tier is Tier.SHM


def test_a_save_that_is_being_committed_replaces_what_was_found_meanwhile() -> None:
    """Its device hangs, so that the recovery of the other tier could not wait for it."""
    for works in (True, False):
        driver = Driver()
        session = driver.open()
        driver.close_tier(Tier.SHM, ev.TierState.RECOVERING)
        (token,) = driver.granted(session, "a", tier=Tier.DISK)
        driver.begin(session, token)
        driver.seal(token)
        found = stored("a", used_ns=1, generation=1, tier=Tier.SHM, location=(4, 1))
        driver.recover(Tier.SHM, found)
        assert driver.entry("a").tier is Tier.SHM
        if works:
            driver.commit(token)
        else:
            driver.happens(ev.CommitFailed((token,), False, "on purpose", driver.now_ns))
        assert driver.entry("a").tier is (Tier.DISK if works else Tier.SHM)
        assert not driver.tables.overtaken


@pytest.mark.parametrize("how", ["evicted", "damaged", "deleted"])
def test_an_older_record_does_not_follow_a_later_save_that_has_left(how: str) -> None:
    driver = Driver()
    session = driver.open()
    driver.close_tier(Tier.DISK, ev.TierState.UNAVAILABLE)
    driver.save(session, "a b")
    generation = driver.entry("a").generation
    match how:
        case "evicted":
            driver.evict(2**40)
        case "damaged":
            driver.damage("a")
        case "deleted":
            driver.ask(ev.DeleteAsked(driver.request(), session, (key("a"),), 0))
    older = stored("a", used_ns=1, generation=generation - 1)
    driver.recover(Tier.DISK, older)
    assert key("a") not in driver.tables.entries
    assert driver.tables.tier_counters[Tier.DISK].dropped_at_start == 1
    # A record of a save that came later is the answer, unless its key was deleted.
    driver.recover(Tier.DISK, stored("a", used_ns=1, generation=generation + 1))
    assert (key("a") in driver.tables.entries) == (how != "deleted")
    driver.close_tier(Tier.DISK, ev.TierState.SERVING)
    assert not len(driver.tables.superseded)
    assert driver.state.check() == []


def test_deletes_of_nothing_cost_others_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is noted while a tier is away, and so many notes would cover records of other keys."""
    monkeypatch.setattr(superseded, "MAX_KEYS", 2)
    monkeypatch.setattr(superseded, "MOST_BITS_OF", 3)
    driver = Driver()
    session = driver.open()

    def delete(name: str) -> object:
        return driver.ask(ev.DeleteAsked(driver.request(), session, (key(name),), 0))

    driver.close_tier(Tier.DISK, ev.TierState.UNAVAILABLE)
    assert all(isinstance(delete(name), an.DeleteAnswer) for name in "abcde")
    refused = delete("f")
    assert isinstance(refused, an.Refused)
    assert isinstance(refused.error, LimitReached)
    driver.close_tier(Tier.DISK, ev.TierState.SERVING)
    assert isinstance(delete("f"), an.DeleteAnswer)


def test_what_is_being_saved_gives_way_wherever_it_goes() -> None:
    """No client was told of the save, and it may fail. The record is there."""
    driver = Driver()
    session = driver.open()
    driver.close_tier(Tier.SHM, ev.TierState.RECOVERING)
    driver.granted(session, "a", tier=Tier.DISK)
    driver.recover(Tier.SHM, stored("a", used_ns=1, generation=1, tier=Tier.SHM, location=(4, 1)))
    assert driver.entry("a").tier is Tier.SHM


def test_what_gives_way_last_of_its_batch_is_no_later_use_than_what_is_found() -> None:
    """Its end refreshes the rest of its batch, which was recovered just before."""
    driver = Driver()
    session = driver.open()
    driver.close_tier(Tier.DISK, ev.TierState.RECOVERING)
    driver.reserve(session, "a b")
    driver.recover(Tier.DISK, stored("a", used_ns=1, generation=1))
    driver.recover(Tier.DISK, stored("b", used_ns=2, generation=2))
    assert driver.entry("a").last_used_ns < driver.entry("b").last_used_ns
    assert list(driver.tables.ledgers[Tier.DISK].victims()) == [key("a"), key("b")]


def test_a_recovery_that_begins_again_drops_nothing() -> None:
    driver = Driver()
    one = stored("a", used_ns=1, generation=1)
    driver.recover(Tier.DISK, one)
    assert driver.recover(Tier.DISK, one) == []
    assert driver.entry("a").tier is Tier.DISK


def test_a_tier_that_recovers_is_read_and_not_saved_into() -> None:
    driver = Driver()
    session = driver.open()
    driver.close_tier(Tier.DISK, ev.TierState.RECOVERING)
    driver.recover(Tier.DISK, stored("a", used_ns=1, generation=1))
    refused = an.Closed(Tier.DISK, ev.TierState.RECOVERING)
    assert driver.reserve(session, "b", tier=Tier.DISK).results == (refused,)
    too_large = driver.reserve(session, "b", tier=Tier.DISK, payload_bytes=11)
    assert too_large.results == (SaveStatus.TOO_LARGE,)
    assert driver.counters.closed_refusals == 1
    assert driver.claim(session, "a").claim
    # Entries used meanwhile and entries recovered later are in one order.
    driver.touch("a")
    driver.recover(Tier.DISK, stored("c", used_ns=2, generation=2))
    driver.close_tier(Tier.DISK, ev.TierState.SERVING)
    driver.save(session, "b", tier=Tier.DISK)


def test_a_tier_that_hangs_is_neither_read_nor_saved_into() -> None:
    driver = Driver()
    session = driver.open()
    driver.save(session, "a", tier=Tier.DISK)
    driver.save(session, "r")
    held = driver.claim(session, "a").claim
    answer = driver.reserve(session, "b", tier=Tier.DISK)
    driver.close_tier(Tier.DISK, ev.TierState.HUNG)
    refused = an.Closed(Tier.DISK, ev.TierState.HUNG)
    assert driver.reserve(session, "c", tier=Tier.DISK).results == (refused,)
    assert isinstance(driver.begin(session, answer.results[0].token), an.Refused)
    assert driver.claim(session, "a").claim == 0
    assert driver.lookup("a").results == (None,)
    assert driver.claim(session, "r").claim, "the others go on"
    assert driver.reserve(session, "a").results == (SaveStatus.PRESENT,), "it is not gone"
    assert driver.release(session, held) == "released"
    driver.close_tier(Tier.DISK, ev.TierState.SERVING)
    assert driver.claim(session, "a").claim


def test_batches_are_adopted_as_if_they_were_one() -> None:
    driver = Driver()
    for number, one in enumerate("abcd"):
        entry = stored(one, used_ns=number, generation=number, payload_bytes=3)
        driver.recover(Tier.DISK, entry)
    assert driver.order(Tier.DISK) == "b c d"
    counters = driver.tables.tier_counters[Tier.DISK]
    assert (counters.recovered_entries, counters.recovered_bytes) == (3, 9)
    assert counters.dropped_at_start == 1
    assert counters.evictions == 0


def test_generations_of_two_starts_may_be_the_same_and_those_of_one_are_not() -> None:
    """Incarnation and generation together identify bytes. A generation may repeat: the clock may
    have been set back since the last start, and the newest entries of that start may be gone."""
    driver = Driver(stamp_ns=50)
    driver.recover(
        Tier.DISK,
        stored("a", used_ns=60, generation=60),
        stored("b", used_ns=60, generation=60),
        stored("c", used_ns=61, generation=70),
    )
    session = driver.open()
    driver.now_ns = 40
    driver.save(session, "d e")
    assert driver.entry("d").generation > 70
    assert driver.entry("e").generation > driver.entry("d").generation
    assert driver.order(Tier.DISK) == "a b c"


def test_the_defaults_are_those_of_the_contract() -> None:
    assert StateConfig().session_lost_after_ns == 4_000_000_000
