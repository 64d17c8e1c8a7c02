"""A `MetaState` with tiny tiers and a clock that the test moves, for the tests of
`server.core.state` and its helpers. Keys are given by name, amounts in bytes, times in
nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, SaveReason, SaveStatus, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from prefixd.server.core.entries import EntryState
from prefixd.server.core.events import KeyToSave
from prefixd.server.core.shares import HOST
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.tiers.eviction.lru import LRU
from prefixd.tiers.extents import ExtentAllocator
from prefixd.tiers.ledger import Ledger
from prefixd.tiers.store import Location, StoredEntry
from prefixd.tiers.tier_shares import NamespaceShare

LOST_AFTER_NS = 1_000
NO_SHARES: Mapping[str, int] = MappingProxyType({})


def key(name: str) -> Key:
    return Key(name.encode().ljust(32, b"."))


def keys(names: str) -> tuple[Key, ...]:
    """The keys of these names, which are separated by blanks."""
    return tuple(map(key, names.split()))


def name(of: Key) -> str:
    return of.rstrip(b".").decode()


def names(of: Any) -> str:
    return " ".join(name(one) for one in of)


def ledger(
    tier: Tier,
    budget_bytes: int,
    *,
    max_entries: int = 0,
    slab_bytes: int = 1,
    shares: Mapping[str, int] = NO_SHARES,
) -> Ledger:
    """A ledger with LRU eviction, and with an arena of slabs except for the disk tier."""
    return Ledger(
        tier,
        budget_bytes,
        LRU[Key](budget_bytes),
        max_entries=max_entries,
        extents=None if tier is Tier.DISK else ExtentAllocator(budget_bytes, slab_bytes),
        shares=[NamespaceShare(name, share, LRU[Key](share)) for name, share in shares.items()],
    )


def stored(
    of: str,
    *,
    used_ns: int,
    generation: int,
    payload_bytes: int = 1,
    hits: int = 0,
    tier: Tier = Tier.DISK,
    location: Location = (),
) -> StoredEntry:
    record = EntryRecord(
        key=key(of),
        tier=tier,
        reason=SaveReason.FINISH,
        generation=generation,
        created_ns=generation,
        content=Content(payload_bytes, 10),
        location=location,
        payload_crc32c=7,
    )
    return StoredEntry(record, last_used_ns=used_ns, hits=hits)


def listed(effects: Iterable[fx.Effect]) -> str:
    """The names of the entries that became visible, in this order."""
    puts = [effect for effect in effects if isinstance(effect, fx.IndexPut)]
    return names(entry.key for put in puts for entry in put.entries)


def hidden(effects: Iterable[fx.Effect]) -> str:
    """The names of the entries that became invisible, in this order."""
    deletes = [effect for effect in effects if isinstance(effect, fx.IndexDelete)]
    return names(entry.key for delete in deletes for entry in delete.entries)


def erased(effects: Iterable[fx.Effect]) -> list[tuple[Tier, str]]:
    """The tiers and names of the entries that are erased, in order."""
    return [
        (effect.tier, names(entry.key for entry in effect.entries))
        for effect in effects
        if isinstance(effect, fx.Erase)
    ]


class Driver:
    """Applies events, and checks the state after each. A request returns its answer.

    Each tier has 10 bytes, and `disk` is blocking; an entry costs its payload.
    """

    def __init__(
        self, *, stamp_ns: int = 0, shares: Mapping[str, int] = NO_SHARES, **config: int
    ) -> None:
        """`shares`: of every tier, in bytes."""
        self.now_ns = 0
        self.effects: list[fx.Effect] = []
        self._requests = 0
        settings = {"session_lost_after_ns": LOST_AFTER_NS} | config
        self.state = MetaState(
            StateConfig(**settings),
            {tier: ledger(tier, 10, shares=shares) for tier in Tier},
            dict.fromkeys(Tier, lambda payload_bytes, _: payload_bytes),
            frozenset({Tier.DISK}),
            stamp_ns,
        )

    @property
    def tables(self) -> Any:
        return self.state.tables

    @property
    def counters(self) -> Any:
        return self.tables.counters

    def entry(self, of: str) -> EntryState:
        entry: EntryState = self.tables.entries[key(of)]
        return entry

    def order(self, tier: Tier = Tier.RAM) -> str:
        """The names of a tier's entries in the order of eviction."""
        return names(self.tables.ledgers[tier].victims())

    def happens(self, event: ev.Event) -> list[fx.Effect]:
        self.effects = self.state.apply(event)
        assert self.state.check() == []
        return self.effects

    def ask(self, event: ev.Question) -> Any:
        """Apply a request. Returns its answer, or None while it waits."""
        return self.answer_of(event.request, self.happens(event))

    def answer_of(self, request: int, effects: list[fx.Effect]) -> Any:
        answers = [e.answer for e in effects if isinstance(e, fx.Reply) and e.request == request]
        assert len(answers) <= 1
        return answers[0] if answers else None

    def request(self) -> int:
        self._requests += 1
        return self._requests

    @property
    def last_request(self) -> int:
        return self._requests

    def of_kind(self, kind: type) -> list[Any]:
        """The latest effects of one kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def replies(self) -> dict[int, an.Answer]:
        """The latest answers, by request, in order."""
        return {effect.request: effect.answer for effect in self.of_kind(fx.Reply)}

    # ---- sessions and time

    def open(self, owner: str = "alice", tenant: str = HOST) -> int:
        question = ev.SessionOpened(self.request(), owner, self.now_ns, tenant=tenant)
        answer = self.ask(question)
        assert isinstance(answer, an.Opened)
        return answer.session

    def lose(self, session: int) -> list[fx.Effect]:
        return self.happens(ev.SessionLost(session, "it broke", self.now_ns))

    def hear(self, session: int) -> None:
        assert self.happens(ev.HeartbeatCame(session, self.now_ns)) == []

    def tick(self, *, flush: bool = False) -> list[fx.Effect]:
        return self.happens(ev.Tick(self.now_ns, flush))

    # ---- reading

    def lookup(self, of: str, *, stop: bool = False, wait_ns: int = 0) -> Any:
        until_ns = self.now_ns + wait_ns
        return self.ask(ev.LookupAsked(self.request(), keys(of), stop, until_ns, self.now_ns))

    def claim(
        self,
        session: int,
        of: str,
        mode: ClaimMode = ClaimMode.RUN,
        *,
        lease_ns: int = 500,
        wait_ns: int = 0,
    ) -> Any:
        until_ns = self.now_ns + wait_ns
        return self.ask(
            ev.ClaimAsked(self.request(), session, keys(of), mode, lease_ns, until_ns, self.now_ns)
        )

    def release(self, session: int, *claims: int) -> str:
        answer = self.ask(ev.ReleaseAsked(self.request(), session, claims, self.now_ns))
        assert isinstance(answer, an.ReleaseAnswer)
        return " ".join(outcome.name.lower() for outcome in answer.results)

    def touch(self, of: str) -> None:
        assert self.happens(ev.KeysTouched(keys(of), self.now_ns)) == []

    # ---- saving

    def reserve(
        self,
        session: int,
        of: str,
        *,
        tier: Tier = Tier.RAM,
        payload_bytes: int = 1,
        after: str = "",
        begin: bool = False,
        ttl_ns: int = 100,
        wait_ns: int = 0,
    ) -> Any:
        items = tuple(KeyToSave(key(one), Content(payload_bytes, 10)) for one in of.split())
        return self.ask(
            ev.ReserveAsked(
                self.request(),
                session,
                tier,
                SaveReason.COLD,
                items,
                keys(after),
                begin,
                ttl_ns,
                self.now_ns + wait_ns,
                self.now_ns,
            )
        )

    def granted(self, session: int, of: str, **options: Any) -> list[int]:
        """Reserve, which must be granted, and begin the writes. Returns the tokens."""
        answer = self.reserve(session, of, begin=True, **options)
        assert all(isinstance(one, an.WriteOrder) for one in answer.results), answer
        return [one.token for one in answer.results]

    def save(self, session: int, of: str, **options: Any) -> list[int]:
        """Reserve, write, seal and commit, so that the entries are published in any tier."""
        tokens = self.granted(session, of, **options)
        self.seal(*tokens)
        for commit in self.of_kind(fx.Commit):
            self.commit(*commit.tokens)
        return tokens

    def seal(self, *tokens: int, wrong: bool = False) -> list[fx.Effect]:
        crcs = (7,) * len(tokens)
        expected = (8,) * len(tokens) if wrong else crcs
        return self.happens(ev.WriteSealed(tokens, crcs, expected, self.now_ns))

    def stop(self, token: int, outcome: SaveStatus = SaveStatus.LOST) -> list[fx.Effect]:
        return self.happens(ev.WriteStopped(token, outcome, "it stopped", self.now_ns))

    def commit(self, *tokens: int) -> list[fx.Effect]:
        return self.happens(ev.Committed(tokens, self.now_ns))

    def begin(self, session: int, token: int) -> Any:
        return self.ask(ev.WriteBegan(self.request(), session, token, self.now_ns))

    def cancel(self, session: int, *tokens: int) -> tuple[bool, ...]:
        answer = self.ask(ev.CancelAsked(self.request(), session, tokens, self.now_ns))
        assert isinstance(answer, an.CancelAnswer)
        return answer.results

    # ---- operators, stores

    def evict(self, free_bytes: int, tier: Tier = Tier.RAM, max_entries: int = 1_000) -> Any:
        return self.ask(ev.EvictAsked(self.request(), tier, free_bytes, max_entries, self.now_ns))

    def damage(self, of: str) -> list[fx.Effect]:
        entry = self.entry(of)
        return self.happens(
            ev.EntryDamaged(entry.key, entry.generation, "a bit flipped", self.now_ns)
        )

    def close_tier(self, tier: Tier, state: ev.TierState) -> None:
        assert self.happens(ev.TierChanged(tier, state, self.now_ns)) == []

    def recover(self, tier: Tier, *entries: StoredEntry, dropped: int = 0) -> list[fx.Effect]:
        return self.happens(ev.TierRecovered(tier, entries, dropped, self.now_ns))
