"""Hypothesis drives `MetaState` and its twin with the same events and compares all output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from prefixd.server.core.checking import Recount
from prefixd.server.core.events import KeyToSave
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.tiers.ledger import Admission
from prefixd.tiers.store import StoredEntry
from tests.model import tiers
from tests.model.tiers import (
    RAM_BYTES,
    RAM_SLAB_BYTES,
    SHM_BYTES,
    SHM_ENTRIES,
    SHM_HEADER_BYTES,
    shm_cost,
)
from tests.model.twin import Twin, TwinLimits
from tests.model.witness import NAMES, Witness, facts_of, key_of, keys_of, name_of

LIMITS = TwinLimits(
    sessions=3,
    claims=3,
    reservations=4,
    waiters=4,
    lost_after=90,
    waited=7,
    waited_of_one=4,
    unwritten=30,
)
#: Some of these sizes are exactly the largest that a tier accepts, and some are just above.
PAYLOADS = st.sampled_from([1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 12, 14, 28, 29, 37, 38, 40, 41])


KEY = st.sampled_from(NAMES)
SOME_KEYS = st.lists(KEY, min_size=1, max_size=4, unique=True) | st.just(list(NAMES))
TIER = st.sampled_from(["ram", "shm", "disk"])
WAIT = st.sampled_from([0, 0, 15, 35])
#: Selects one of the existing sessions, claims or saves, see the methods that pick.
PICK = st.integers(0, 11)
PICKS = st.lists(PICK, min_size=1, max_size=3, unique=True)
ITEM = st.tuples(KEY, PAYLOADS, st.sampled_from([0, 0, 1, 4]))
ITEMS = st.lists(ITEM, min_size=1, max_size=3, unique_by=lambda item: item[0])
STOPS = [SaveStatus.LENGTH_MISMATCH, SaveStatus.LOST, SaveStatus.FAILED]


def outcome_name(outcome: SaveStatus) -> str:
    return outcome.name.lower().replace("_", " ")


def one_usage(facts: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Join the uses of several effects. The twin reports all uses of a tier at once."""
    found = [fact for fact in facts if fact[0] != "usage"]
    by_tier: dict[str, list[Any]] = {}
    for fact in facts:
        if fact[0] == "usage":
            by_tier.setdefault(fact[1], []).extend(fact[2])
    return found + [("usage", tier, uses) for tier, uses in by_tier.items()]


class MetaStateMachine(RuleBasedStateMachine):
    """See the module. `max_steps`: the most backlog steps in one event. `shares`: the shares of
    each tier by namespace. `parts`: the namespaces of keys."""

    max_steps = 4096
    shares: ClassVar[dict[str, dict[str, int]]] = {"ram": {}, "shm": {}, "disk": {}}
    parts: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__()
        #: a recount that runs while events are applied
        self.recount: Recount | None = None
        self.recount_steps: Iterator[None] = iter(())
        self.now = 1_000
        self.broken = False
        self.requests = 0
        self.commits: list[tuple[int, ...]] = []
        self.found = self.found_bytes = 0
        ledgers = tiers.ledgers(self.shares, self.parts)
        self.state = MetaState(
            StateConfig(
                session_lost_after_ns=LIMITS.lost_after,
                max_sessions=LIMITS.sessions,
                max_claims_per_session=LIMITS.claims,
                max_reservations_per_session=LIMITS.reservations,
                max_waiters=LIMITS.waiters,
                max_waited_keys=LIMITS.waited,
                max_waited_keys_per_session=LIMITS.waited_of_one,
                unwritten_ttl_ns=LIMITS.unwritten,
                max_steps=self.max_steps,
            ),
            ledgers,
            tiers.COSTS,
            frozenset({Tier.DISK}),
            stamp_ns=500,
        )
        self.twin = Twin(
            tiers.twins(self.shares),
            LIMITS,
            self.parts,
        )
        self.witness = Witness(self.state)

    # ---- the state and the twin

    def happens(self, event: ev.Event, twin: Callable[[], Any]) -> list[fx.Effect]:
        self.broken = True
        effects = self.applied(event)
        self.witness.check(event, effects)
        expected = self.twin.happens(self.now, twin)
        facts = [fact for effect in effects for fact in facts_of(effect)]
        assert sorted(one_usage(facts), key=repr) == sorted(expected, key=repr)
        self.commits += [e.tokens for e in effects if isinstance(e, fx.Commit)]
        self.compare_state(event)
        self.broken = False
        return effects

    def applied(self, event: ev.Event) -> list[fx.Effect]:
        """All effects of an event, including the work that it leaves for later."""
        flush = isinstance(event, ev.Tick) and event.flush
        if isinstance(event, ev.Tick):
            event = replace(event, flush=False)
        effects = self.step(event)
        while True:
            due_ns = self.state.next_deadline_ns()
            if self.state.busy:
                effects += self.step(ev.WorkLeft(self.now))
            elif isinstance(event, ev.Tick) and due_ns is not None and due_ns <= self.now:
                effects += self.step(ev.Tick(self.now))
            elif flush:
                flush = False
                effects += self.step(ev.Tick(self.now, flush=True))
            else:
                return effects

    def step(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.state.apply(event)
        assert self.state.check() == []
        self.go_on_counting(1)
        return effects

    def go_on_counting(self, steps: int) -> None:
        for _ in range(steps):
            if self.recount is not None and next(self.recount_steps, 0) == 0:
                self.recount.__exit__(None, None, None)
                problems, self.recount = self.recount.problems, None
                assert problems == [], "found by a recount during other events"

    @rule(steps=st.sampled_from([1, 4, 12]))
    def count(self, steps: int) -> None:
        if self.recount is None:
            self.recount = self.state.recount(items_a_step=1).__enter__()
            self.recount_steps = self.recount.steps()
        self.go_on_counting(steps)

    def compare_state(self, event: ev.Event) -> None:
        tables, twin = self.state.tables, self.twin
        for tier, ledger in tables.ledgers.items():
            assert ledger.published_bytes + ledger.reserved_bytes <= ledger.limit_bytes
            assert (ledger.published_bytes + ledger.reserved_bytes) == twin.used(tier.label)[0]
            # Several entries at once, as in an operator's request.
            for entries in (1, SHM_ENTRIES, SHM_ENTRIES + 1):
                too_many = 0 < ledger.max_entries < entries
                assert (ledger.admission(1, entries) is Admission.TOO_LARGE) == too_many
            for part in ("", *self.shares[tier.label]):
                names = [""] if ledger.shares is None else ["", *ledger.shares.namespaces]
                of_part = ledger.policy.orders()[names.index(part)]
                victims = [tables.entries[key] for key in of_part.victims()]
                expected = [k for k in twin.order[tier.label] if twin.part(tier.label, k) == part]
                assert [name_of(entry.key) for entry in victims] == expected
                stamps = [entry.last_used_ns for entry in victims]
                assert stamps == sorted(set(stamps)), (
                    "equal stamps: a restart would change the order"
                )
        assert set(map(name_of, tables.entries)) == twin.entries.keys()
        assert tables.claims.keys() == twin.claims.keys()
        assert tables.reservations.keys() == twin.saves.keys()
        assert tables.sessions.keys() == twin.sessions.keys()
        assert tables.waiting.keys() == twin.parked.keys()
        due, next_ns = twin.due(), self.state.next_deadline_ns()
        if due:
            assert next_ns is not None
            assert next_ns <= due[0][0] + twin.credit, "the next tick would be too late"
        if isinstance(event, ev.Tick) and next_ns is not None:
            assert next_ns > self.now, "the next tick would be due at once, forever"

    def question(self) -> int:
        self.requests += 1
        self.witness.requested(self.requests)
        return self.requests

    # ---- picking: mostly something alive, sometimes something that ended, rarely an unknown number

    def a_session(self, pick: int) -> int:
        live = sorted(self.twin.sessions)
        return live[pick % len(live)] if live and pick != 5 else 99

    def owner_of(self, pick: int, held: dict[int, dict[str, Any]], numbers: list[int]) -> int:
        """The session that holds one of these, or any session."""
        owners = [held[number]["session"] for number in numbers if number in held]
        return owners[0] if owners and pick < 9 else self.a_session(pick)

    def some_of(self, picks: list[int], held: dict[int, dict[str, Any]], given: int) -> list[int]:
        """Some numbers of live objects, and some of all numbers up to `given`."""
        live = sorted(held)
        return [
            99 if pick == 5 else given - pick if pick < 2 or not live else live[pick % len(live)]
            for pick in picks
        ]

    def tokens(self, *stages: str) -> list[int]:
        return sorted(t for t, save in self.twin.saves.items() if save["stage"] in stages)

    # ---- sessions

    @initialize(
        found=st.lists(
            st.tuples(KEY, TIER, PAYLOADS, st.integers(0, 9), st.sampled_from([0, 1])),
            max_size=8,
            unique_by=lambda one: (one[0], one[1]),
        ),
        batch=st.sampled_from([1, 3, 8]),
    )
    def start(self, found: list[tuple[str, str, int, int, int]], batch: int) -> None:
        for tier in (Tier.SHM, Tier.DISK):
            self.begin_recovery(tier)
            self.recover(tier, [one for one in found if one[1] == tier.label], batch)
        self.open()
        self.open()

    def begin_recovery(self, tier: Tier) -> None: ...

    def recover(self, tier: Tier, found: list[tuple[str, str, int, int, int]], batch: int) -> None:
        stored, expected = [], []
        for key, _, payload, used, ids in found:
            location: tuple[int, ...] = ()
            if tier is Tier.SHM:
                location = (SHM_HEADER_BYTES + self.found_bytes, shm_cost(payload, ids))
                if self.found_bytes + location[1] > SHM_BYTES:
                    break
                self.found_bytes += location[1]
            self.found += 1
            # Uses are distinct, in any order. Generations are from an earlier start.
            used_ns = 100 + 100 * used + self.found
            record = EntryRecord(
                key=key_of(key),
                tier=tier,
                reason=SaveReason.COLD,
                generation=self.found,
                created_ns=7,
                content=Content(payload, 2 * payload, ids),
                location=location,
                payload_crc32c=77,
            )
            stored.append(StoredEntry(record, used_ns, hits=used))
            expected.append(
                {
                    "key": key,
                    "generation": self.found,
                    "payload": payload,
                    "token_ids": ids,
                    "tokens": 2 * payload,
                    "crc": 77,
                    "used": used_ns,
                    "hits": used,
                }
            )
        stored.sort(key=lambda one: one.last_used_ns)
        expected.sort(key=lambda one: one["used"])
        for at in range(0, len(stored), batch):
            entries = tuple(stored[at : at + batch])
            event = ev.TierRecovered(tier, entries, dropped=1, now_ns=self.now)
            self.happens(event, partial(self.twin.recover, tier.label, expected[at : at + batch]))

    def open(self) -> None:
        request = self.question()
        owner = f"worker {request}"
        event = ev.SessionOpened(request, owner, self.now)
        self.happens(event, partial(self.twin.open, request, owner))

    def heartbeat(self, who: int) -> None:
        session = self.a_session(who)

        def twin() -> None:
            if session in self.twin.sessions:
                one = self.twin.sessions[session]
                one["heard"] = max(one["heard"], self.twin.served)
                one["alive"] = max(one["alive"], self.twin.served)

        self.happens(ev.HeartbeatCame(session, self.now), twin)

    def lose_session(self, who: int) -> None:
        session = self.a_session(who)
        event = ev.SessionLost(session, "its connection broke", self.now)
        self.happens(event, partial(self.twin.lose_session, session))

    @rule(what=st.sampled_from(["open", "heartbeat", "heartbeat", "lose"]), who=PICK)
    def session(self, what: str, who: int) -> None:
        if what == "open":
            self.open()
        elif what == "heartbeat":
            self.heartbeat(who)
        else:
            self.lose_session(who)

    # ---- reading

    @precondition(lambda self: self.twin.entries or self.twin.saves)
    @rule(keys=SOME_KEYS, stop=st.booleans(), wait=WAIT)
    def lookup(self, keys: list[str], stop: bool, wait: int) -> None:
        request, until = self.question(), self.now + wait
        event = ev.LookupAsked(request, keys_of(keys), stop, until, self.now)
        attempt = partial(self.twin.lookup, keys, stop)
        self.happens(event, partial(self.twin.ask, request, until, None, attempt))

    @precondition(lambda self: self.twin.entries or self.twin.saves)
    @rule(
        who=PICK,
        keys=SOME_KEYS,
        mode=st.sampled_from(list(ClaimMode)),
        lease=st.sampled_from([10, 30, 150]),
        wait=WAIT,
    )
    def claim(self, who: int, keys: list[str], mode: ClaimMode, lease: int, wait: int) -> None:
        request, until, session = self.question(), self.now + wait, self.a_session(who)
        event = ev.ClaimAsked(request, session, keys_of(keys), mode, lease, until, self.now)
        attempt = partial(self.twin.claim, session, keys, mode.name.lower(), lease)
        self.happens(event, partial(self.twin.ask, request, until, session, attempt))

    @precondition(lambda self: self.twin.claimed)
    @rule(who=PICK, which=PICKS)
    def release(self, who: int, which: list[int]) -> None:
        claims = self.some_of(which, self.twin.claims, self.twin.claimed)
        request, session = self.question(), self.owner_of(who, self.twin.claims, claims)
        event = ev.ReleaseAsked(request, session, tuple(claims), self.now)
        self.happens(event, partial(self.twin.release, request, session, claims))

    @precondition(lambda self: self.twin.entries)
    @rule(keys=st.lists(KEY, min_size=1, max_size=3))
    def touch(self, keys: list[str]) -> None:
        self.happens(ev.KeysTouched(keys_of(keys), self.now), partial(self.twin.touch, keys))

    @precondition(lambda self: self.twin.entries)
    @rule(name=KEY, how=st.sampled_from(["suspect", "suspect", "damage", "stale"]))
    def doubt(self, name: str, how: str) -> None:
        """A reader or a store finds a wrong checksum."""
        if how == "suspect" or name not in self.twin.entries:
            self.suspect([name])
        else:
            self.damage(name, stale=how == "stale")

    def suspect(self, keys: list[str]) -> None:
        self.happens(ev.KeysSuspected(keys_of(keys), self.now), partial(self.twin.suspect, keys))

    @precondition(lambda self: self.twin.parked)
    @rule(which=PICK)
    def drop_request(self, which: int) -> None:
        waiting = sorted(self.twin.parked)
        request = waiting[which % len(waiting)]
        self.witness.dropped(request)
        event = ev.RequestDropped(request, self.now)
        self.happens(event, partial(self.twin.parked.__delitem__, request))

    # ---- saving

    def _reserve(
        self,
        who: int,
        tier: str,
        items: list[tuple[str, int, int]],
        ancestors: list[str],
        begin: bool,
        wait: int,
        ttl: int = 30,
    ) -> list[fx.Effect]:
        request, until, session = self.question(), self.now + wait, self.a_session(who)
        event = ev.ReserveAsked(
            request,
            session,
            Tier[tier.upper()],
            SaveReason.COLD,
            tuple(
                KeyToSave(key_of(key), Content(size, 2 * size, ids), bytes(ids))
                for key, size, ids in items
            ),
            keys_of(ancestors),
            begin,
            ttl,
            until,
            self.now,
        )
        reserve = self.twin.reserve
        attempt = partial(reserve, session, tier, list(items), list(ancestors), begin, ttl)
        return self.happens(event, partial(self.twin.ask, request, until, session, attempt))

    @rule(
        who=PICK,
        tier=TIER,
        items=ITEMS,
        ancestors=st.lists(KEY, max_size=2, unique=True),
        begin=st.booleans(),
        wait=WAIT,
        ttl=st.sampled_from([12, 50]),
    )
    def reserve(
        self,
        who: int,
        tier: str,
        items: list[tuple[str, int, int]],
        ancestors: list[str],
        begin: bool,
        wait: int,
        ttl: int,
    ) -> None:
        self._reserve(who, tier, items, ancestors, begin, wait, ttl)

    @rule(who=PICK, tier=TIER, items=ITEMS, ancestors=st.lists(KEY, max_size=2, unique=True))
    def save(
        self, who: int, tier: str, items: list[tuple[str, int, int]], ancestors: list[str]
    ) -> None:
        """Reserve and write at once, so that there are entries to read."""
        before = self.twin.reserved
        self._reserve(who, tier, items, ancestors, begin=True, wait=0)
        self._seal([(token, 5, 5) for token in range(before + 1, self.twin.reserved + 1)])

    @precondition(lambda self: self.twin.reserved)
    @rule(who=PICK, which=PICK)
    def begin(self, who: int, which: int) -> None:
        (token,) = self.some_of([which], self.twin.saves, self.twin.reserved)
        request, session = self.question(), self.owner_of(who, self.twin.saves, [token])
        event = ev.WriteBegan(request, session, token, self.now)
        self.happens(event, partial(self.twin.begin, request, session, token))

    def _seal(self, writes: list[tuple[int, int, int]]) -> None:
        if not writes:
            return
        tokens, crcs, expected = zip(*writes, strict=True)
        event = ev.WriteSealed(tokens, crcs, expected, self.now)
        self.happens(event, partial(self.twin.seal, writes))

    @precondition(lambda self: self.tokens("writing", "doomed"))
    @rule(which=PICKS, right=st.lists(st.booleans(), min_size=3, max_size=3))
    def seal(self, which: list[int], right: list[bool]) -> None:
        writing = self.tokens("writing", "doomed")
        tokens = list(dict.fromkeys(writing[pick % len(writing)] for pick in which))
        self._seal([(t, 9, 9 if ok else 8) for t, ok in zip(tokens, right, strict=False)])

    @precondition(lambda self: self.tokens("writing", "doomed"))
    @rule(which=PICK, outcome=st.sampled_from(STOPS))
    def stop(self, which: int, outcome: SaveStatus) -> None:
        writing = self.tokens("writing", "doomed")
        token = writing[which % len(writing)]
        event = ev.WriteStopped(token, outcome, "as it is", self.now)
        self.happens(event, partial(self.twin.end, token, outcome_name(outcome)))

    @precondition(lambda self: self.commits)
    @rule(which=PICK, split=PICK)
    def commit(self, which: int, split: int) -> None:
        tokens = self._take_commit(which, split)

        def twin() -> None:
            for token in tokens:
                self.twin.publish(token)

        self.happens(ev.Committed(tokens, self.now), twin)

    @precondition(lambda self: self.commits)
    @rule(which=PICK, split=PICK, full=st.booleans())
    def fail_commit(self, which: int, split: int, full: bool) -> None:
        tokens = self._take_commit(which, split)

        def twin() -> None:
            for token in tokens:
                self.twin.end(token, "device full" if full else "failed")

        self.happens(ev.CommitFailed(tokens, full, "no space left", self.now), twin)

    def _take_commit(self, which: int, split: int) -> tuple[int, ...]:
        """The first tokens of one of the unfinished commits."""
        tokens = self.commits.pop(which % len(self.commits))
        some = 1 + split % len(tokens)
        if tokens[some:]:
            self.commits.append(tokens[some:])
        return tokens[:some]

    @precondition(lambda self: self.twin.reserved)
    @rule(who=PICK, which=PICKS)
    def cancel(self, who: int, which: list[int]) -> None:
        tokens = self.some_of(which, self.twin.saves, self.twin.reserved)
        request, session = self.question(), self.owner_of(who, self.twin.saves, tokens)
        event = ev.CancelAsked(request, session, tuple(tokens), self.now)
        self.happens(event, partial(self.twin.cancel, request, session, tokens))

    # ---- operators, stores, time

    @precondition(lambda self: self.twin.entries)
    @rule(tier=TIER, free=st.sampled_from([1, 1, 5, 14, 99]), most=st.sampled_from([1, 2, 9]))
    def evict(self, tier: str, free: int, most: int) -> None:
        request = self.question()
        event = ev.EvictAsked(request, Tier[tier.upper()], free, most, self.now)
        self.happens(event, partial(self.twin.evict, request, tier, free, most))

    def damage(self, name: str, stale: bool) -> None:
        generation = self.witness.index[key_of(name)].generation - stale
        event = ev.EntryDamaged(key_of(name), generation, "a bit flipped", self.now)
        self.happens(event, lambda: None if stale else self.twin.damage(name))

    @precondition(lambda self: self.twin.tiers["ram"].limit < RAM_BYTES)
    @rule(slabs=st.integers(1, 2))
    def grow(self, slabs: int) -> None:
        secured = min(self.twin.tiers["ram"].limit + slabs * RAM_SLAB_BYTES, RAM_BYTES)
        self.twin.tiers["ram"].limit = secured
        self.happens(ev.ArenaGrown(Tier.RAM, secured, self.now), lambda: None)

    @rule(passed=st.sampled_from([1, 9, 20]))
    def time_passes(self, passed: int) -> None:
        """Time passes without a tick, so that the next event is late."""
        self.now += passed

    @rule(
        passed=st.sampled_from([0, 1, 9, 20, 45]),
        flush=st.booleans(),
        heard=st.sampled_from([True, True, False]),
        late=st.sampled_from([0, 0, 0, 5, 60]),
    )
    def tick(self, passed: int, flush: bool, heard: bool = False, late: int = 0) -> None:
        """`late`: the time for which the daemon did not serve."""
        self.now += passed + late
        if heard:
            for who in range(len(self.twin.sessions)):
                self.heartbeat(who)
        self.happens(ev.Tick(self.now, flush, late), partial(self.twin.tick, flush, late))

    # ---- the end

    def teardown(self) -> None:
        """End all sessions and check that nothing is held."""
        if self.broken:
            return  # a failure was already reported
        for session in sorted(self.twin.sessions):
            event = ev.SessionLost(session, "the daemon stops", self.now)
            self.happens(event, partial(self.twin.lose_session, session))
        while self.commits:
            self.commit(0, 10)
        while self.tokens("doomed"):
            self.stop(0, SaveStatus.LOST)
        # Longer than any lease and any lateness that is credited.
        self.tick(1_000, flush=True)
        tables = self.state.tables
        held = [tables.claims, tables.reservations, tables.in_flight, tables.waiting]
        held += [tables.ending, tables.condemned, tables.unpinning]
        assert held == [{}] * 7
        assert tables.timers == tables.old_timers == []
        assert tables.waited_keys == tables.anonymous_waited_keys == 0
        assert not tables.backlog
        assert not tables.waking
        assert tables.unrecorded == {}
        for ledger in tables.ledgers.values():
            assert ledger.reserved_bytes == ledger.pinned_bytes == 0
