"""Reserve, write, commit, publish, or lose."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.errors import LimitReached, UnknownReservation, UnknownTier
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from prefixd.server.core.events import KeyToSave
from prefixd.server.core.sessions import Stage
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from tests.support.state_driver import Driver, key, keys, ledger, listed, names


@pytest.fixture
def driver() -> Driver:
    """Sessions 1 (alice) and 2 (bob)."""
    driver = Driver()
    driver.open("alice")
    driver.open("bob")
    return driver


def ended(driver: Driver) -> dict[int, SaveStatus]:
    return {
        token: effect.outcome for effect in driver.of_kind(fx.SaveEnded) for token in effect.tokens
    }


# ---- reserve


def test_an_order_says_all_that_a_writer_needs(driver: Driver) -> None:
    driver.now_ns = 50
    item = KeyToSave(key("a"), Content(4, 3, 8, 2), token_ids=b"12345678")
    answer = driver.ask(
        ev.ReserveAsked(
            driver.request(), 1, Tier.RAM, SaveReason.EVICT, (item,), (), True, 70, 50, 50
        )
    )
    assert isinstance(answer, an.ReserveAnswer)
    (order,) = answer.results
    assert isinstance(order, an.WriteOrder)
    assert (answer.ttl_ns, order.token, order.key, order.token_ids) == (
        70,
        1,
        key("a"),
        b"12345678",
    )
    entry = order.entry
    assert (entry.tier, entry.reason, entry.generation) == (Tier.RAM, SaveReason.EVICT, 50)
    assert (entry.location, entry.payload_bytes, entry.token_count) == ((6, 4), 4, 3)
    assert (entry.layer_count, entry.token_ids_bytes, entry.created_ns) == (2, 8, 50)
    driver.seal(1)
    assert driver.entry("a") is entry
    assert (entry.generation, entry.location, entry.payload_crc32c) == (50, (6, 4), 7)


def test_what_is_not_begun_is_reserved_only(driver: Driver) -> None:
    driver.reserve(1, "a")
    driver.reserve(1, "b", begin=True)
    stages = [reservation.stage for reservation in driver.tables.reservations.values()]
    assert stages == [Stage.RESERVED, Stage.WRITING]


def test_a_tier_that_is_not_there(driver: Driver) -> None:
    del driver.tables.ledgers[Tier.SHM]
    answer = driver.reserve(1, "a", tier=Tier.SHM)
    assert isinstance(answer.error, UnknownTier)
    assert not answer.error.retryable


def test_only_so_many_reservations() -> None:
    driver = Driver(max_reservations_per_session=2)
    alice, bob = driver.open("alice"), driver.open("bob")
    assert isinstance(driver.reserve(alice, "a b c").error, LimitReached)
    assert not driver.tables.reservations
    (token,) = driver.granted(alice, "a")
    driver.reserve(alice, "b")
    assert isinstance(driver.reserve(alice, "c").error, LimitReached)
    driver.cancel(alice, token)
    assert isinstance(driver.reserve(alice, "c").error, LimitReached), "it still holds room"
    driver.stop(token)
    assert isinstance(driver.reserve(alice, "c").results[0], an.WriteOrder)
    assert isinstance(driver.reserve(bob, "x y").results[1], an.WriteOrder)


def test_only_so_many_wait() -> None:
    driver = Driver(max_waiters=1)
    session = driver.open()
    driver.reserve(session, "a")
    assert driver.reserve(session, "a", wait_ns=10) is None
    assert isinstance(driver.reserve(session, "a", wait_ns=10).results[0], an.FlightInfo)
    assert driver.counters.waits == 1


def test_a_tenant_leaves_waits_to_others() -> None:
    """Who may not wait is answered at once."""
    driver = Driver(max_waiters=16)
    session = driver.open()
    driver.reserve(session, "a")

    def waiting(tenant: str) -> int:
        before = driver.counters.waits
        for _ in range(20):
            question = ev.LookupAsked(driver.request(), keys("a"), False, 10, 0, tenant)
            driver.ask(question)
        return driver.counters.waits - before

    assert [waiting(tenant) for tenant in ("one", "two", "three", "")] == [7, 3, 2, 4]
    for _ in range(2):
        driver.now_ns += 10
        driver.tick()
    tables = driver.state.tables
    assert (tables.waiters.used, tables.waits.used) == (0, 0)
    assert waiting("two") == 7


def test_what_is_present_is_a_use_of_it(driver: Driver) -> None:
    driver.save(1, "a b")
    answer = driver.reserve(2, "b")
    assert answer.results == (SaveStatus.PRESENT,)
    assert driver.order() == "a b"
    assert driver.entry("b").hits == 1
    assert driver.counters.duplicate_saves == 1


def test_a_key_has_one_tier(driver: Driver) -> None:
    driver.save(1, "a")
    assert driver.reserve(1, "a", tier=Tier.DISK).results == (SaveStatus.PRESENT,)


def test_what_is_in_flight_is_somebodys(driver: Driver) -> None:
    driver.reserve(1, "a")
    driver.now_ns = 20
    assert driver.reserve(2, "a").results == (an.FlightInfo("alice", 20),)
    assert driver.reserve(1, "a").results == (an.FlightInfo("alice", 20),)
    assert driver.counters.in_flight_refusals == 2


def test_a_key_that_a_batch_names_twice_is_granted_once(driver: Driver) -> None:
    first, second = driver.reserve(1, "a a").results
    assert isinstance(first, an.WriteOrder)
    assert isinstance(second, an.FlightInfo)


def test_too_large_for_ever_and_no_room_for_now(driver: Driver) -> None:
    assert driver.reserve(1, "a", payload_bytes=11).results == (SaveStatus.TOO_LARGE,)
    driver.save(1, "b", payload_bytes=4)
    driver.claim(1, "b")
    assert driver.reserve(1, "a", payload_bytes=7).results == (SaveStatus.NO_ROOM,)
    assert driver.reserve(1, "a", payload_bytes=10).results == (SaveStatus.NO_ROOM,)
    assert driver.order() == "", "nothing was evicted in vain"
    assert "b" in names(driver.tables.entries)
    counters = driver.counters
    assert (counters.too_large_refusals, counters.no_room_refusals) == (1, 2)


def test_a_refused_save_evicts_nothing(driver: Driver) -> None:
    driver.save(1, "a b", payload_bytes=3)
    driver.granted(1, "c", payload_bytes=4)
    assert driver.reserve(1, "d", payload_bytes=7).results == (SaveStatus.NO_ROOM,)
    assert driver.order() == "b a"


def test_exactly_what_is_needed_is_evicted(driver: Driver) -> None:
    driver.save(1, "a b c", payload_bytes=3)
    driver.reserve(1, "d", payload_bytes=1)
    assert driver.of_kind(fx.Erase) == [], "one byte was free"
    driver.reserve(1, "e", payload_bytes=4)
    (erased,) = driver.of_kind(fx.Erase)
    assert names(entry.key for entry in erased.entries) == "c b"
    ram = driver.tables.tier_counters[Tier.RAM]
    assert (ram.evictions, ram.evicted_bytes) == (2, 6)


def test_a_batch_does_not_evict_what_it_names(driver: Driver) -> None:
    """b is the least recent, and becomes the most recent before room is made for x."""
    driver.save(1, "a b", payload_bytes=4)
    answer = driver.reserve(1, "b x", payload_bytes=4)
    assert answer.results[0] is SaveStatus.PRESENT
    assert driver.order() == "b"


def test_ancestors_are_refreshed_and_not_used(driver: Driver) -> None:
    driver.save(1, "a b c")
    driver.save(1, "d", after="b c")
    assert driver.order() == "a d c b"
    assert [driver.entry(one).hits for one in "abcd"] == [0, 0, 0, 0]


def test_ancestors_that_are_pinned_come_back_after_their_descendants(driver: Driver) -> None:
    driver.save(1, "a b")
    driver.claim(1, "a b")
    driver.save(1, "c", after="a b")
    driver.release(1, 1)
    assert driver.order() == "c b a"


def test_ancestors_of_another_tier_are_refreshed_there(driver: Driver) -> None:
    driver.save(1, "a b", tier=Tier.SHM)
    driver.save(1, "c", after="b")
    assert driver.order(Tier.SHM) == "a b"


def test_a_chain_is_touched_when_its_last_save_ended_however_it_ended(driver: Driver) -> None:
    driver.save(1, "a")
    one, two, three = driver.granted(1, "b c d", after="a")
    driver.seal(two)
    driver.seal(one)
    driver.save(2, "x")
    assert driver.order() == "a c b x", "not yet"
    driver.stop(three)
    assert driver.order() == "x c b a"


def test_a_waiting_save_gets_what_is_left_of_the_wait(driver: Driver) -> None:
    driver.reserve(1, "a", ttl_ns=30)
    assert driver.reserve(2, "a", wait_ns=100, ttl_ns=5) is None
    request = driver.last_request
    driver.now_ns = 30
    driver.tick()
    (order,) = driver.replies[request].results
    assert driver.tables.reservations[order.token].expires_ns == 35, "counted from the grant"


def test_waiters_are_served_in_the_order_in_which_they_asked(driver: Driver) -> None:
    driver.reserve(1, "a")
    requests = []
    for _ in range(3):
        assert driver.reserve(2, "a", wait_ns=100) is None
        requests.append(driver.last_request)
    driver.cancel(1, 1)
    assert isinstance(driver.replies[requests[0]].results[0], an.WriteOrder)
    assert list(driver.tables.waiting) == requests[1:]
    assert driver.counters.waits == 3


# ---- write


def test_a_write_begins_once(driver: Driver) -> None:
    driver.reserve(1, "a")
    assert driver.begin(1, 1).key == key("a")
    again = driver.begin(1, 1)
    assert isinstance(again.error, UnknownReservation)
    assert "already" in str(again.error)


@pytest.mark.parametrize(
    ("session", "token"), [(2, 1), (1, 9), (1, 2), (1, 3)], ids=["foreign", "none", "gone", "lost"]
)
def test_nothing_to_write(driver: Driver, session: int, token: int) -> None:
    driver.reserve(1, "a")
    driver.save(1, "b")
    driver.granted(1, "c")
    driver.cancel(1, 3)
    answer = driver.begin(session, token)
    assert isinstance(answer.error, UnknownReservation)
    assert "reserve again" in str(answer.error)


def test_wrong_bytes_are_never_seen(driver: Driver) -> None:
    one, two = driver.granted(1, "a b")
    driver.lookup("a", wait_ns=10)
    request = driver.last_request
    driver.seal(one, wrong=True)
    assert ended(driver) == {one: SaveStatus.CRC_MISMATCH}
    assert "00000007" in driver.of_kind(fx.SaveEnded)[0].why
    assert driver.replies[request].results == (None,)
    assert driver.counters.crc_mismatches == 1
    driver.seal(two)
    assert ended(driver) == {two: SaveStatus.SAVED}
    assert driver.tables.ledgers[Tier.RAM].published_bytes == 1


def test_every_write_of_a_batch_is_judged_by_itself(driver: Driver) -> None:
    tokens = driver.granted(1, "a b c")
    driver.cancel(1, tokens[1])
    driver.happens(ev.WriteSealed(tuple(tokens), (7, 7, 7), (7, 7, 8), 0))
    assert list(ended(driver).values()) == [
        SaveStatus.SAVED,
        SaveStatus.LOST,
        SaveStatus.CRC_MISMATCH,
    ]


def test_what_is_published_together_is_told_together(driver: Driver) -> None:
    """Their order is kept around a save between them that fails."""
    tokens = driver.granted(1, "a b c d")
    effects = driver.happens(ev.WriteSealed(tuple(tokens), (7, 7, 7, 7), (7, 7, 8, 7), 0))
    told = [e.tokens for e in effects if isinstance(e, fx.SaveEnded)]
    assert [list(each) for each in told] == [tokens[:2], tokens[2:3], tokens[3:]]
    assert listed(effects) == "a b d"
    assert driver.order() == "d b a", "the root last"


def test_one_message_may_seal_what_was_reserved_apart(driver: Driver) -> None:
    (one,) = driver.granted(1, "a")
    two, open_still = driver.granted(1, "b c")
    driver.seal(two, one)
    assert ended(driver) == {one: SaveStatus.SAVED, two: SaveStatus.SAVED}
    driver.seal(open_still)
    assert driver.order() == "a c b"


def test_a_publication_comes_before_anybody_hears_of_it(driver: Driver) -> None:
    (token,) = driver.granted(1, "a")
    driver.claim(2, "a", wait_ns=10)
    kinds = [type(effect) for effect in driver.seal(token)]
    assert kinds == [fx.IndexPut, fx.SaveEnded, fx.Reply]
    counters = driver.tables.tier_counters[Tier.RAM]
    assert (counters.saves, counters.saved_bytes, counters.payload_bytes) == (1, 1, 1)


@pytest.mark.parametrize(
    ("outcome", "counted"), [(SaveStatus.LENGTH_MISMATCH, 1), (SaveStatus.FAILED, 0)]
)
def test_a_writer_that_gives_up_gives_its_room_back(
    driver: Driver, outcome: SaveStatus, counted: int
) -> None:
    (token,) = driver.granted(1, "a", payload_bytes=10)
    driver.stop(token, outcome)
    assert ended(driver) == {token: outcome}
    assert driver.counters.length_mismatches == counted
    driver.granted(2, "a", payload_bytes=10)


# ---- blocking tiers


def test_a_blocking_tier_publishes_when_it_is_committed(driver: Driver) -> None:
    one, two = driver.granted(1, "a b", tier=Tier.DISK)
    assert driver.seal(one, two) == [fx.Commit(Tier.DISK, (one, two))]
    assert driver.lookup("a").results == (an.FlightInfo("alice", 0),)
    driver.commit(two, one)
    assert listed(driver.effects) == "b a"
    assert driver.order(Tier.DISK) == "b a", "root last, whatever came first"


def test_one_message_may_seal_for_several_tiers(driver: Driver) -> None:
    (disk,) = driver.granted(1, "a", tier=Tier.DISK)
    (ram,) = driver.granted(1, "b")
    driver.seal(disk, ram)
    assert ended(driver) == {ram: SaveStatus.SAVED}
    assert driver.of_kind(fx.Commit) == [fx.Commit(Tier.DISK, (disk,))]


@pytest.mark.parametrize(
    ("full", "outcome"), [(True, SaveStatus.DEVICE_FULL), (False, SaveStatus.FAILED)]
)
def test_a_failed_commit_leaves_nothing_behind(
    driver: Driver, full: bool, outcome: SaveStatus
) -> None:
    (token,) = driver.granted(1, "a", tier=Tier.DISK)
    assert driver.reserve(2, "a", tier=Tier.DISK, wait_ns=10) is None
    waiter = driver.last_request
    driver.seal(token)
    driver.happens(ev.CommitFailed((token,), full, "no", 0))
    assert ended(driver) == {token: outcome}
    assert driver.counters.failed_saves == 1
    assert isinstance(driver.replies[waiter].results[0], an.WriteOrder)
    disk = driver.tables.ledgers[Tier.DISK]
    assert (disk.published_bytes, disk.reserved_bytes) == (0, 1)


def test_what_is_being_committed_is_not_lost_any_more(driver: Driver) -> None:
    (token,) = driver.granted(1, "a", tier=Tier.DISK, ttl_ns=20)
    driver.seal(token)
    assert driver.cancel(1, token) == (False,)
    driver.now_ns = 20
    assert driver.tick() == []
    driver.lose(1)
    driver.commit(token)
    assert ended(driver) == {token: SaveStatus.SAVED}
    assert driver.counters.reservations_lost == 0
    assert driver.entry("a").tier is Tier.DISK


# ---- loss


def test_a_reservation_runs_out(driver: Driver) -> None:
    driver.reserve(1, "a", ttl_ns=20)
    driver.lookup("a", wait_ns=90)
    request = driver.last_request
    driver.now_ns = 19
    assert driver.tick() == []
    driver.now_ns = 20
    driver.tick()
    why = "its time to live ran out"
    assert driver.effects == [
        fx.TellReservationLost(1, 1, key("a"), why),
        fx.SaveEnded((1,), SaveStatus.LOST, why),
        fx.Reply(request, an.LookupAnswer((None,))),
    ]
    assert driver.counters.reservations_lost == 1


def test_a_lost_reservation_keeps_its_room_while_somebody_writes_into_it(driver: Driver) -> None:
    (token,) = driver.granted(1, "a", payload_bytes=6)
    assert driver.cancel(1, token) == (True,)
    assert driver.effects[0] == fx.StopWriting(token)
    assert driver.lookup("a").results == (None,), "the key is free"
    assert driver.reserve(2, "a", payload_bytes=6).results == (SaveStatus.NO_ROOM,)
    (again,) = driver.granted(2, "a", payload_bytes=4)
    driver.stop(token)
    assert driver.lookup("a").results == (an.FlightInfo("bob", 0),), "this one is another's"
    driver.seal(again)
    driver.granted(2, "b", payload_bytes=6)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_lost_reservation_is_not_published_however_good_its_bytes(
    driver: Driver, wrong: bool
) -> None:
    (token,) = driver.granted(1, "a")
    driver.cancel(1, token)
    driver.seal(token, wrong=wrong)
    assert ended(driver) == {token: SaveStatus.LOST}
    assert driver.counters.crc_mismatches == 0
    assert not driver.tables.entries


def fails(driver: Driver, token: int) -> None:
    driver.stop(token)


def arrives_wrong(driver: Driver, token: int) -> None:
    driver.seal(token, wrong=True)


def is_cancelled(driver: Driver, token: int) -> None:
    driver.cancel(1, token)


@pytest.mark.parametrize("end", [fails, arrives_wrong, is_cancelled])
def test_who_waits_is_told_that_a_save_ended_without_an_entry(
    driver: Driver, end: Callable[[Driver, int], None]
) -> None:
    """A run ends there at once. A wait for any of several keys goes on for the other keys."""
    first, second = driver.granted(1, "a b")
    driver.lookup("a b", stop=True, wait_ns=90)
    run = driver.last_request
    driver.claim(2, "a b", ClaimMode.FIRST, wait_ns=90)
    any_of_them = driver.last_request
    end(driver, first)
    assert driver.replies[run] == an.LookupAnswer((None,))
    assert any_of_them not in driver.replies
    driver.seal(second)
    assert driver.replies[any_of_them].claimed == (False, True)


def test_a_reservation_is_lost_once(driver: Driver) -> None:
    (token,) = driver.granted(1, "a", ttl_ns=20)
    driver.cancel(1, token)
    assert driver.cancel(1, token, token) == (False, False)
    driver.now_ns = 20
    assert driver.tick() == []
    driver.lose(1)
    assert driver.of_kind(fx.StopWriting) == []
    assert driver.counters.reservations_lost == 1


def test_nobody_cancels_the_reservation_of_another(driver: Driver) -> None:
    driver.reserve(1, "a")
    assert driver.cancel(2, 1) == (False,)
    assert driver.cancel(1, 7) == (False,)
    assert driver.lookup("a").results == (an.FlightInfo("alice", 0),)


def test_the_same_key_can_be_lost_again_and_again_and_saved_in_the_end(driver: Driver) -> None:
    lost = []
    for _ in range(3):
        lost += driver.granted(1, "a")
        driver.cancel(1, lost[-1])
    driver.save(2, "a")
    for token in lost:
        driver.seal(token)
    assert tuple(driver.tables.entries) == keys("a")
    ram = driver.tables.ledgers[Tier.RAM]
    assert (ram.published_bytes, ram.reserved_bytes) == (1, 0)


# ---- memory


def test_what_an_entry_takes_of_memory() -> None:
    """Counts all memory of an entry: key, numbers, and places in tables, arena and eviction order.

    As in a daemon, numbers arrive as separate objects, and stamps are of this century.
    """
    entries, chain, slab_bytes, now_ns = 5_000, 50, 2**16, 1_800_000_000_000_000_000
    ram = ledger(Tier.RAM, entries * slab_bytes, slab_bytes=slab_bytes)
    state = MetaState(StateConfig(), {Tier.RAM: ram}, {Tier.RAM: lambda p, _: p}, frozenset(), 1)
    state.apply(ev.SessionOpened(1, "alice", now_ns))
    gc.collect()
    tracemalloc.start()
    for first in range(1, entries, chain):
        items = tuple(
            KeyToSave(Key(os.urandom(32)), Content(int(str(slab_bytes)), int("512")))
            for _ in range(chain)
        )
        reserve = ev.ReserveAsked(
            2, 1, Tier.RAM, SaveReason.COLD, items, (), True, 10**9, now_ns, now_ns
        )
        state.apply(reserve)
        tokens = tuple(range(first, first + chain))
        crcs = tuple(int.from_bytes(item.key[:4], "big") for item in items)
        state.apply(ev.WriteSealed(tokens, crcs, crcs, now_ns))
    state.apply(ev.Tick(now_ns, flush=True))
    del items, reserve, tokens, crcs
    allocated_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ram.entries == entries
    assert allocated_bytes / entries < 500
