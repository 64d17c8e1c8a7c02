"""Lookups, claims, releases and deletes."""

from __future__ import annotations

import pytest

from prefixd.proto.errors import LimitReached
from prefixd.proto.vocabulary import ClaimMode, DeleteStatus, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from tests.support.state_driver import Driver, key, keys, stored


def seen(results: tuple[an.Found, ...]) -> str:
    """A letter for each result: present, in flight, or - for absent."""
    letters = {type(None): "-", an.FlightInfo: "f"}
    return "".join(letters.get(type(found), "p") for found in results)


@pytest.fixture
def driver() -> Driver:
    """Session 1 has saved a, b and c, and is saving x. Session 2 is open, too."""
    driver = Driver()
    driver.open("alice")
    driver.open("bob")
    driver.save(1, "a b c")
    driver.reserve(1, "x", ttl_ns=900)
    return driver


# ---- lookups


def test_a_lookup_says_what_is_there(driver: Driver) -> None:
    assert seen(driver.lookup("a x z b").results) == "pf-p"


def test_a_lookup_of_a_run_ends_with_the_first_that_is_not_present(driver: Driver) -> None:
    assert seen(driver.lookup("a b z c", stop=True).results) == "pp-"
    assert seen(driver.lookup("a x b", stop=True).results) == "pf"
    assert seen(driver.lookup("a b c", stop=True).results) == "ppp"


def test_a_lookup_moves_nothing(driver: Driver) -> None:
    before, used = driver.order(), driver.entry("a").last_used_ns
    driver.lookup("c b a")
    assert driver.order() == before
    assert (driver.entry("a").last_used_ns, driver.entry("a").hits) == (used, 0)
    assert driver.claim(1, "b").claim == 1
    driver.now_ns = 499
    driver.lookup("b")
    driver.now_ns = 500
    driver.tick()
    assert driver.counters.claims_lost == 1, "a lookup renews nothing"


def test_lookups_are_counted_when_they_are_answered(driver: Driver) -> None:
    driver.lookup("a z")
    driver.lookup("x", wait_ns=10)
    counters = driver.counters
    assert (counters.lookups, counters.lookup_keys, counters.lookup_hits) == (1, 2, 1)
    driver.cancel(1, 4)
    assert (counters.lookups, counters.lookup_keys, counters.lookup_hits) == (2, 3, 1)


def test_a_lookup_waits_for_what_is_in_flight_only(driver: Driver) -> None:
    assert seen(driver.lookup("a z", wait_ns=10).results) == "p-"
    assert seen(driver.lookup("z x", stop=True, wait_ns=10).results) == "-"
    assert driver.lookup("a x", stop=True, wait_ns=10) is None


def test_who_saves_a_key_and_since_when(driver: Driver) -> None:
    driver.now_ns = 30
    assert driver.lookup("x").results == (an.FlightInfo("alice", 30),)
    (token,) = driver.granted(2, "y", tier=Tier.DISK)
    driver.seal(token)
    driver.lose(2)
    assert driver.lookup("y").results == (an.FlightInfo("a session that ended", 0),)


# ---- claims


@pytest.mark.parametrize(
    ("mode", "names", "expected", "claimed"),
    [
        (ClaimMode.RUN, "a b c", "ppp", "ttt"),
        (ClaimMode.RUN, "a z b", "p-", "tf"),
        (ClaimMode.RUN, "a x b", "pf", "tf"),
        (ClaimMode.RUN, "z a", "-", "f"),
        (ClaimMode.FIRST, "z x b c", "-fp", "fft"),
        (ClaimMode.FIRST, "a z", "p", "t"),
        (ClaimMode.FIRST, "a b", "p", "t"),
        (ClaimMode.FIRST, "z x", "-f", "ff"),
        (ClaimMode.ANY, "z a x c", "-pfp", "ftft"),
    ],
)
def test_which_of_the_keys_a_claim_takes(
    driver: Driver, mode: ClaimMode, names: str, expected: str, claimed: str
) -> None:
    answer = driver.claim(1, names, mode)
    assert seen(answer.results) == expected
    assert answer.claimed == tuple(letter == "t" for letter in claimed)
    assert bool(answer.claim) == any(answer.claimed)
    pinned = sum(entry.pins for entry in driver.tables.entries.values())
    assert pinned == sum(answer.claimed)


def test_a_claim_on_nothing_is_nothing_to_release(driver: Driver) -> None:
    answer = driver.claim(1, "z")
    assert (answer.claim, answer.claimed) == (0, (False,))
    assert not driver.tables.claims
    assert (driver.counters.claims, driver.counters.claims_empty) == (1, 1)


@pytest.mark.parametrize(
    ("mode", "names", "waits"),
    [
        (ClaimMode.RUN, "a x", True),
        (ClaimMode.RUN, "z x", False),
        (ClaimMode.FIRST, "a x", False),
        (ClaimMode.FIRST, "x a", True),
        (ClaimMode.ANY, "a z x", True),
    ],
)
def test_a_claim_waits_for_what_would_change_it(
    driver: Driver, mode: ClaimMode, names: str, waits: bool
) -> None:
    assert (driver.claim(1, names, mode, wait_ns=10) is None) == waits


def test_a_claim_that_waited_takes_what_came(driver: Driver) -> None:
    assert driver.claim(2, "a x", wait_ns=10) is None
    request = driver.last_request
    driver.begin(1, 4)
    driver.seal(4)
    assert driver.replies[request].claimed == (True, True)
    assert driver.entry("x").pins == 1


def test_a_claim_is_one_use_of_each_entry_root_last(driver: Driver) -> None:
    driver.claim(1, "c a b")
    assert [driver.entry(one).hits for one in "abc"] == [1, 1, 1]
    driver.release(1, 1)
    assert driver.order() == "b a c", "the first one named is the root"
    ram = driver.tables.tier_counters[Tier.RAM]
    assert (ram.hits, ram.hit_tokens, driver.counters.claimed_entries) == (3, 30, 3)


def test_an_entry_stays_pinned_until_the_last_claim_on_it_is_gone(driver: Driver) -> None:
    driver.claim(1, "a b")
    driver.claim(2, "a")
    assert driver.order() == "c"
    driver.release(1, 1)
    assert driver.order() == "c b"
    driver.release(2, 2)
    assert driver.order() == "c b a"
    assert driver.tables.ledgers[Tier.RAM].pinned_bytes == 0


def test_a_key_that_is_named_twice_is_pinned_twice_and_free_after_one_release(
    driver: Driver,
) -> None:
    driver.claim(1, "a a")
    assert driver.entry("a").pins == 2
    driver.release(1, 1)
    assert driver.entry("a").pins == 0


def test_only_so_many_claims() -> None:
    driver = Driver(max_claims_per_session=2)
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.save(alice, "a")
    driver.claim(alice, "a")
    driver.claim(alice, "a")
    answer = driver.claim(alice, "a")
    assert isinstance(answer.error, LimitReached)
    assert driver.claim(bob, "a").claim == 3, "each session for itself"
    driver.release(alice, 1)
    assert driver.claim(alice, "a").claim == 4


# ---- what one session may hold


def test_a_claim_takes_nothing_of_what_others_are_sure_of() -> None:
    driver = Driver(shares={"team": 4}, max_pinned_share=1)
    session = driver.open()
    for one in "abcdefg":
        driver.save(session, one)
    assert driver.claim(session, "a b c d e f").claim
    refused = driver.claim(session, "f g")
    assert isinstance(refused.error, LimitReached)
    assert "a claim on 1 bytes more of the ram tier would take" in str(refused.error)
    assert driver.counters.quota_refusals == 1
    assert driver.claim(session, "f").claim, "it is pinned already"


def test_a_session_pins_no_more_than_its_share() -> None:
    driver = Driver(max_pinned_share=0.5)
    alice, bob = driver.open("alice"), driver.open("bob")
    driver.save(alice, "a b c", payload_bytes=2)
    first = driver.claim(alice, "a b", ClaimMode.ANY).claim
    again = driver.claim(alice, "b a", ClaimMode.ANY)
    assert again.claim, "what it holds already costs nothing"
    refused = driver.claim(alice, "c")
    assert isinstance(refused.error, LimitReached)
    assert refused.error.retryable
    assert "4 bytes of the ram tier, and 2 more are above its share of 5" in str(refused.error)
    assert driver.counters.quota_refusals == 1
    assert driver.claim(bob, "c").claim, "others have their own"
    driver.release(alice, first)
    assert isinstance(driver.claim(alice, "c").error, LimitReached), "the other claim holds them"
    driver.release(alice, again.claim)
    assert driver.claim(alice, "c").claim


def test_an_entry_above_the_share_can_be_claimed_alone() -> None:
    driver = Driver(max_pinned_share=0.5)
    session = driver.open()
    driver.save(session, "a", payload_bytes=8)
    driver.save(session, "b", payload_bytes=2)
    assert isinstance(driver.claim(session, "a b", ClaimMode.ANY).error, LimitReached)
    assert driver.claim(session, "a").claim
    assert isinstance(driver.claim(session, "b").error, LimitReached)


# ---- leases


def test_a_lease_is_renewed_by_heartbeats(driver: Driver) -> None:
    driver.claim(1, "a", lease_ns=100)
    driver.now_ns = 60
    driver.hear(1)
    driver.now_ns = 159
    assert driver.tick() == []
    driver.now_ns = 160
    assert driver.tick() == [fx.TellClaimLost(1, 1, "its lease ran out")]
    assert driver.order() == "c b a"


def test_a_heartbeat_before_the_claim_does_not_shorten_its_lease(driver: Driver) -> None:
    driver.hear(1)
    driver.now_ns = 90
    driver.claim(1, "a", lease_ns=100)
    driver.now_ns = 189
    assert driver.tick() == []
    driver.now_ns = 190
    assert len(driver.tick()) == 1


# ---- release


def test_a_release_is_idempotent(driver: Driver) -> None:
    driver.claim(1, "a")
    assert driver.release(1, 1, 1) == "released already"
    assert driver.release(1, 1) == "already"
    assert driver.counters.releases == 1


def test_nobody_releases_the_claim_of_another(driver: Driver) -> None:
    driver.claim(1, "a")
    assert driver.release(2, 1) == "unknown"
    assert driver.entry("a").pins == 1


@pytest.mark.parametrize("claim", [0, 2, 99])
def test_a_claim_that_never_was(driver: Driver, claim: int) -> None:
    driver.claim(1, "a")
    assert driver.release(1, claim) == "unknown"


def test_a_loss_is_told_at_every_release(driver: Driver) -> None:
    """The answer that reported it first may not have arrived."""
    driver.claim(1, "a", lease_ns=10)
    driver.now_ns = 10
    driver.tick()
    assert driver.release(1, 1) == "lost"
    assert driver.release(1, 1) == "lost"
    assert driver.release(2, 1) == "already", "it is not this session's to know more"


def test_so_many_losses_are_remembered_as_there_may_be_claims() -> None:
    driver = Driver(max_claims_per_session=2)
    session = driver.open()
    driver.save(session, "a")
    for _ in range(3):
        driver.claim(session, "a", lease_ns=10)
        driver.now_ns += 10
        driver.hear(session)
        driver.now_ns += 10
        driver.tick()
    assert driver.counters.claims_lost == 3
    assert driver.release(session, 1, 2, 3) == "already lost lost"


# ---- reads without a claim


def test_a_touch_is_one_use_in_the_order_given(driver: Driver) -> None:
    driver.touch("b a z a")
    assert driver.order() == "c b a"
    assert [driver.entry(one).hits for one in "abc"] == [2, 1, 0]
    ram = driver.tables.tier_counters[Tier.RAM]
    assert (driver.counters.touches, ram.hits, ram.hit_tokens) == (3, 3, 30)


def test_a_touch_of_a_pinned_entry_counts_and_moves_nothing(driver: Driver) -> None:
    driver.claim(1, "a")
    driver.touch("a")
    assert driver.entry("a").hits == 2
    assert driver.order() == "c b"


def test_a_suspicion_is_looked_into_before_anything_is_dropped(driver: Driver) -> None:
    driver.happens(ev.KeysSuspected(keys("a z b"), 0))
    assert driver.effects == [fx.Verify(driver.entry("a")), fx.Verify(driver.entry("b"))]
    assert driver.counters.suspects == 2
    assert driver.order() == "c b a"


# ---- deletes


def delete(driver: Driver, session: int, words: str) -> list[DeleteStatus]:
    answer = driver.ask(ev.DeleteAsked(driver.request(), session, tuple(keys(words)), 0))
    assert isinstance(answer, an.DeleteAnswer)
    return list(answer.results)


def test_a_delete_takes_what_nobody_holds(driver: Driver) -> None:
    claim = driver.claim(2, "b").claim
    out = DeleteStatus
    said = [out.DELETED, out.PINNED, out.ABSENT, out.IN_FLIGHT, out.ABSENT]
    assert delete(driver, 1, "a b z x a") == said
    assert seen(driver.lookup("a b c x").results) == "-ppf"
    assert driver.order() == "c"
    assert driver.counters.deletes == 1
    assert driver.tables.tier_counters[Tier.RAM].evictions == 0
    assert driver.state.check() == []
    assert driver.release(2, claim) == "released"
    assert delete(driver, 1, "b c") == [out.DELETED] * 2
    assert driver.state.check() == []
    driver.save(1, "a")
    assert seen(driver.lookup("a").results) == "p"


def test_a_delete_is_told_to_readers_before_the_store(driver: Driver) -> None:
    delete(driver, 1, "a")
    kinds = [type(effect) for effect in driver.effects]
    assert kinds.index(fx.IndexDelete) < kinds.index(fx.Erase)


@pytest.mark.parametrize("saved", [True, False])
def test_what_was_deleted_is_not_found_by_a_recovery(saved: bool) -> None:
    """Recovery may read its record after the client was told that it is deleted."""
    driver = Driver()
    session = driver.open()
    driver.happens(ev.TierChanged(Tier.DISK, ev.TierState.RECOVERING, 0))
    if saved:
        driver.save(session, "a")
    assert delete(driver, session, "a") == [DeleteStatus.DELETED if saved else DeleteStatus.ABSENT]
    for name in "ab":
        driver.happens(ev.TierRecovered(Tier.DISK, (stored(name, used_ns=1, generation=1),), 0, 0))
    assert key("a") not in driver.tables.entries
    assert key("b") in driver.tables.entries
    assert driver.tables.tier_counters[Tier.DISK].dropped_at_start == 1
    driver.happens(ev.TierChanged(Tier.DISK, ev.TierState.SERVING, 0))
    assert not len(driver.tables.superseded)


def test_a_session_that_ended_deletes_nothing(driver: Driver) -> None:
    driver.lose(2)
    answer = driver.ask(ev.DeleteAsked(driver.request(), 2, keys("a"), 0))
    assert isinstance(answer, an.Refused)
    assert seen(driver.lookup("a").results) == "p"
