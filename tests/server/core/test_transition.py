"""The changes that several rules of the state share."""

from __future__ import annotations

import pytest

from prefixd.proto.errors import UnknownSession
from prefixd.proto.vocabulary import ClaimMode, Tier
from prefixd.server.core import effects as fx
from prefixd.server.core import state
from prefixd.server.core.events import LookupAsked
from prefixd.server.core.journal import EvictionCause
from prefixd.server.core.sessions import Claim
from prefixd.server.core.transition import Refusal, Transition
from tests.support.state_driver import Driver, erased, key, keys, names


@pytest.fixture
def driver() -> Driver:
    """Session 1 has saved a and b, and has reserved c and d."""
    driver = Driver()
    driver.open()
    driver.save(1, "a b")
    driver.reserve(1, "c d")
    return driver


def lookup(driver: Driver, until_ns: int) -> LookupAsked:
    return LookupAsked(driver.request(), keys("c d"), False, until_ns, 0)


def test_a_session_that_is_not_there_refuses_the_question(driver: Driver) -> None:
    transition = Transition(driver.tables, 0)
    assert transition.session(1).owner == "alice"
    with pytest.raises(Refusal, match="session 2 ended or never was") as refusal:
        transition.session(2)
    assert isinstance(refusal.value.error, UnknownSession)


def test_a_wait_is_registered_with_all_that_it_waits_for(driver: Driver) -> None:
    transition, question = Transition(driver.tables, 10), lookup(driver, until_ns=11)
    assert transition.park(question, ClaimMode.ANY, keys("c d"))
    saves = [driver.tables.in_flight[key(name)] for name in "cd"]
    assert [list(save.waiters) for save in saves] == [[question.request], [question.request]]
    assert driver.tables.waited_keys == 2
    waiting = transition.unpark(question.request)
    assert waiting is not None
    assert waiting.question is question
    assert [save.waiters for save in saves] == [{}, {}]
    assert driver.tables.waited_keys == 0
    assert transition.unpark(question.request) is None


def test_a_question_waits_no_longer_than_it_says(driver: Driver) -> None:
    question = lookup(driver, until_ns=10)
    assert not Transition(driver.tables, 10).park(question, ClaimMode.ANY, keys("c"))
    assert not driver.tables.waiting


@pytest.mark.parametrize(
    ("mode", "place", "saved", "left"),
    [
        (ClaimMode.ANY, 1, True, [0, 2, 3]),
        (ClaimMode.ANY, 1, False, [0, 2, 3]),
        (ClaimMode.RUN, 1, True, [0, 2, 3]),
        (ClaimMode.RUN, 1, False, [0]),
        (ClaimMode.FIRST, 1, True, [0]),
        (ClaimMode.FIRST, 1, False, [0, 2, 3]),
        (ClaimMode.RUN, 0, False, []),
        (ClaimMode.FIRST, 0, True, []),
        (ClaimMode.RUN, 3, False, [0, 1, 2]),
    ],
)
def test_a_save_that_ends_takes_those_along_that_matter_no_more(
    driver: Driver, mode: ClaimMode, place: int, saved: bool, left: list[int]
) -> None:
    driver.reserve(1, "e f")
    saves = [driver.tables.in_flight[one] for one in keys("c d e f")]
    transition, question = Transition(driver.tables, 10), lookup(driver, until_ns=11)
    assert transition.park(question, mode, keys("c d e f"))
    answered = transition.save_ended(question.request, saves[place].token, saved=saved)
    if left:
        assert answered is None
        assert list(driver.tables.waiting[question.request].pending.values()) == left
    else:
        assert answered is not None
        assert not driver.tables.waiting
    waits = [number for number, save in enumerate(saves) if save.waiters]
    assert [number for number in waits if number != place] == left


def test_a_use_counts_and_a_refresh_does_not(driver: Driver) -> None:
    transition = Transition(driver.tables, 10)
    entry = driver.entry("b")
    transition.refresh_all((entry,))
    assert (entry.hits, driver.order()) == (0, "a b")
    refreshed_ns = entry.last_used_ns
    transition.use(driver.entry("a"))
    transition.use(entry)
    assert (entry.hits, driver.order()) == (1, "a b")
    assert entry.last_used_ns > refreshed_ns


@pytest.mark.parametrize("tier", list(Tier))
def test_use_is_remembered_where_an_entry_outlives_the_daemon(driver: Driver, tier: Tier) -> None:
    driver.save(1, "e f g", tier=tier)
    driver.tick(flush=True)
    transition = Transition(driver.tables, 10)
    for name in "feg":
        transition.use(driver.entry(name))
    transition.refresh_all((driver.entry("f"),))
    unrecorded = () if tier is Tier.RAM else keys("e g f")
    assert tuple(driver.tables.unrecorded) == unrecorded


def test_the_ledger_hears_of_the_first_pin_and_the_last(driver: Driver) -> None:
    transition, ram = Transition(driver.tables, 10), driver.tables.ledgers[Tier.RAM]
    entry, session = driver.entry("a"), driver.tables.sessions[1]
    for pins in (1, 2):
        transition.pin(session, Claim(pins, 1, (entry,), 0, 100))
        assert (entry.pins, ram.pinned_entries) == (pins, 1)
        assert session.pinned_bytes == {Tier.RAM: 1}, "it is charged once"
    transition.unpin(1, session, [entry])
    assert (entry.pins, ram.pinned_entries, driver.order()) == (1, 1, "b")
    transition.unpin(2, session, [entry])
    assert (entry.pins, ram.pinned_entries, driver.order()) == (0, 0, "b a")
    assert session.pinned_bytes == {Tier.RAM: 0}
    assert not session.pins


def test_an_eviction_is_told_to_readers_before_the_store(driver: Driver) -> None:
    transition = Transition(driver.tables, 10)
    victim, entry = driver.tables.ledgers[Tier.RAM].next_victim(), driver.entry("b")
    assert transition.evict(victim, EvictionCause.SAVE) is entry
    assert not entry.published
    gone, *rest = transition.effects
    assert gone == fx.IndexDelete([entry])
    assert erased(rest) == [(Tier.RAM, "b")]
    assert driver.state.check() == []


def test_a_curve_is_shown_what_is_read_in_its_tier_and_what_is_saved_there() -> None:
    driver = Driver(curve_keys=1_000)
    session = driver.open()

    def shown() -> dict[Tier, str]:
        unobserved = driver.tables.unobserved
        for _, _, token_counts, stored_bytes in unobserved:
            assert (set(token_counts), set(stored_bytes)) == ({10}, {1})
        seen = {tier: names(keys) for tier, keys, *_ in unobserved}
        assert driver.tables.unobserved_keys == sum(len(keys) for _, keys, *_ in unobserved)
        driver.tables.observe_now()
        return seen

    tokens = driver.granted(session, "a b")
    assert shown() == {Tier.RAM: "a b"}
    driver.seal(*tokens)
    assert shown() == {}
    driver.save(session, "c", tier=Tier.SHM)
    driver.claim(session, "a c b")
    assert shown() == {Tier.RAM: "a b", Tier.SHM: "c"}
    driver.reserve(session, "b d", tier=Tier.SHM)
    assert shown() == {Tier.RAM: "b", Tier.SHM: "d"}, "b is there already"
    driver.touch("c b a")
    assert shown() == {Tier.RAM: "a b", Tier.SHM: "c"}, "the root first"


def test_accesses_are_counted_by_the_curves_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_OBSERVED_AT_ONCE", 4)
    driver = Driver(curve_keys=1_000)
    session = driver.open()
    curve = driver.tables.curves[Tier.RAM]
    driver.save(session, "a b c")
    assert (len(curve), driver.state.busy) == (0, False)
    assert driver.state.curve(Tier.RAM) is curve
    assert len(curve) == 3, "whoever asks for it sees them"
    driver.save(session, "d")
    driver.tick(flush=True)
    assert len(curve) == 4
    driver.claim(session, "a b c d")
    assert driver.state.busy
    assert sum(curve._values.values()) == 0
    driver.tick()
    assert not driver.state.busy
    assert sum(curve._values.values()) == 40, "a hit of each, of 10 tokens"
    assert Driver().state.curve(Tier.RAM) is None
