"""Checks the effects of `MetaState` in order, and fails on any that must never happen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveStatus, Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from prefixd.server.core.entries import EntryState
from prefixd.server.core.state import MetaState
from prefixd.tiers.store import Location

#: Keys are named by letters, which makes failing runs readable.
NAMES = "abcdef"

#: What owns a unit of a tier: a save, an entry, a condemned entry, or a retired extent.
Owner = tuple[str, object]


def key_of(name: str) -> Key:
    return Key(name.encode() * 32)


def keys_of(names: Iterable[str]) -> tuple[Key, ...]:
    return tuple(map(key_of, names))


def name_of(key: Key) -> str:
    return chr(key[0])


class Witness:
    """Keeps the index and the arenas as an executor of the effects would have them."""

    def __init__(self, state: MetaState) -> None:
        self.state = state
        self.outstanding: set[int] = set()
        self.index: dict[bytes, EntryState] = {}
        #: dropped entries whose bytes are still pinned, by generation
        self.condemned: dict[int, EntryState] = {}
        self.owners: dict[tuple[Tier, int], Owner] = {}
        self.orders: dict[int, an.WriteOrder] = {}
        #: the generations of the entries of each claim
        self.claims: dict[int, tuple[int, ...]] = {}
        self.generations: set[int] = set()
        self.last_generation = 0

    def requested(self, request: int) -> None:
        self.outstanding.add(request)

    def dropped(self, request: int) -> None:
        self.outstanding.discard(request)

    def check(self, event: ev.Event, effects: list[fx.Effect]) -> None:
        if isinstance(event, ev.SessionLost):
            self.end_claims_of(event.session)
        starting = isinstance(event, ev.TierRecovered)
        # The loop also carries out all index changes before any erasure.
        for effect in sorted(effects, key=lambda effect: isinstance(effect, fx.Erase)):
            self.check_effect(effect, event, starting)
        for number in set(self.claims) - self.state.tables.claims.keys():
            del self.claims[number]
        tables = self.state.tables
        self.free_condemned()
        assert self.claims.keys() == tables.claims.keys(), "a claim was not reported to its session"
        assert self.outstanding == tables.waiting.keys()

    def check_put(self, entry: EntryState, starting: bool) -> None:
        assert entry.key not in self.index
        assert entry.generation not in self.generations, "a generation was used twice"
        self.generations.add(entry.generation)
        self.index[entry.key] = entry
        if not starting:
            (token,) = (t for t, order in self.orders.items() if order.entry is entry)
            self.free(entry.tier, entry.location, ("save", token))
        self.take(entry.tier, entry.location, ("entry", entry.key))

    def check_effect(self, effect: fx.Effect, event: ev.Event, starting: bool) -> None:
        match effect:
            case fx.Reply():
                assert effect.request in self.outstanding, (
                    "a reply without a request, or the second one"
                )
                self.outstanding.remove(effect.request)
                self.check_answer(effect.answer)
            case fx.IndexPut(entries):
                for entry in entries:
                    self.check_put(entry, starting)
            case fx.IndexDelete(entries):
                for entry in entries:
                    if starting and entry.key not in self.index:
                        continue  # a row of an earlier start
                    entry = self.index.pop(entry.key)
                    self.free(entry.tier, entry.location, ("entry", entry.key))
                # Claims that ended within this event are not in the tables any more.
                live = self.state.tables.claims.keys() & self.claims.keys()
                pinned = any(entry.generation in self.claims[number] for number in live)
                dropped = isinstance(event, ev.EntryDamaged | ev.TierRecovered)
                assert not pinned or dropped, "a pinned entry was evicted"
                if dropped and entry.pins:
                    self.condemned[entry.generation] = entry
                    self.take(entry.tier, entry.location, ("condemned", entry.generation))
            case fx.Erase():
                for entry in effect.entries:
                    indexed = self.index.get(entry.key)
                    assert indexed is None or (starting and indexed.generation != entry.generation)
            case fx.Commit():
                assert set(effect.tokens) <= self.orders.keys()
                assert isinstance(event, ev.WriteSealed)
            case fx.StopWriting():
                assert effect.token in self.orders
            case fx.SaveEnded():
                for token in effect.tokens:
                    entry = self.orders.pop(token).entry
                    if effect.outcome is not SaveStatus.SAVED:
                        self.free(entry.tier, entry.location, ("save", token))
            case fx.Verify(entry):
                assert self.index[entry.key] is entry
            case fx.RecordUsage():
                used = [usage.last_used_ns for usage in effect.usages]
                assert used == sorted(set(used)), "uses are not in order"
                for usage in effect.usages:
                    entry = self.index[usage.entry.key]
                    assert entry.tier is effect.tier
                    # A request that is answered within this event may use the entry again.
                    assert entry.last_used_ns >= usage.last_used_ns
            case fx.TellClaimLost():
                del self.claims[effect.claim]
            case fx.TellReservationLost():
                assert self.orders[effect.token].key == effect.key
            case _:
                assert_never(effect)

    def check_answer(self, answer: an.Answer) -> None:
        if isinstance(answer, an.ReserveAnswer):
            for order in answer.results:
                if isinstance(order, an.WriteOrder):
                    entry = order.entry
                    assert entry.generation > self.last_generation
                    self.last_generation = entry.generation
                    self.orders[order.token] = order
                    self.take(entry.tier, entry.location, ("save", order.token))
        elif isinstance(answer, an.ClaimAnswer):
            entries = [
                entry
                for entry, mine in zip(answer.results, answer.claimed, strict=True)
                if mine and isinstance(entry, EntryState)
            ]
            assert len(entries) == sum(answer.claimed)
            for entry in entries:
                assert self.index[entry.key] is entry, "claimed but not in the index"
            if answer.claim:
                self.claims[answer.claim] = tuple(entry.generation for entry in entries)

    def end_claims_of(self, session: int) -> None:
        for number in set(self.claims) - self.state.tables.claims.keys():
            del self.claims[number]
        assert all(c.session != session for c in self.state.tables.claims.values())

    # ---- arenas

    def free_condemned(self) -> None:
        """Free the extents of condemned entries whose claims have ended."""
        for generation in self.condemned.keys() - self.state.tables.condemned.keys():
            gone = self.condemned.pop(generation)
            assert not gone.pins
            self.free(gone.tier, gone.location, ("condemned", generation))

    def take(self, tier: Tier, location: Location, owner: Owner) -> None:
        self.free_condemned()
        for unit in units(location):
            assert (tier, unit) not in self.owners, f"{owner} and {self.owners[tier, unit]}"
            self.owners[tier, unit] = owner

    def free(self, tier: Tier, location: Location, owner: Owner) -> None:
        for unit in units(location):
            assert self.owners.pop((tier, unit)) == owner


def units(location: Location) -> list[int]:
    pairs = zip(location[::2], location[1::2], strict=True)
    return [unit for offset, length in pairs for unit in range(offset, offset + length)]


# ---- effects in the form of the twin's output


def facts_of(effect: fx.Effect) -> list[tuple[Any, ...]]:
    """One tuple for each effect, or one for each entry that it concerns."""
    if isinstance(effect, fx.IndexPut):
        return [("put", name_of(entry.key)) for entry in effect.entries]
    if isinstance(effect, fx.IndexDelete):
        return [("delete", name_of(entry.key)) for entry in effect.entries]
    if isinstance(effect, fx.Erase):
        return [("erase", effect.tier.label, name_of(entry.key)) for entry in effect.entries]
    if isinstance(effect, fx.SaveEnded):
        outcome = effect.outcome.name.lower().replace("_", " ")
        return [("ended", token, outcome) for token in effect.tokens]
    return [plain(effect)]


def plain(effect: fx.Effect) -> tuple[Any, ...]:
    match effect:
        case fx.Reply(request, answer):
            return ("reply", request, plain_answer(answer))
        case fx.Commit(tier, tokens):
            return ("commit", tier.label, list(tokens))
        case fx.StopWriting(token):
            return ("stop", token)
        case fx.Verify(entry):
            return ("verify", name_of(entry.key))
        case fx.RecordUsage(tier, usages):
            return (
                "usage",
                tier.label,
                [(name_of(usage.entry.key), usage.hits) for usage in usages],
            )
        case fx.TellClaimLost(session, claim):
            return ("claim lost", session, claim)
        case fx.TellReservationLost(session, token, key):
            return ("reservation lost", session, token, name_of(key))
        case _:
            assert_never(effect)


def plain_answer(answer: an.Answer) -> tuple[Any, ...]:
    match answer:
        case an.Refused(error):
            return ("refused", error.name)
        case an.Opened(session):
            return ("opened", session)
        case an.LookupAnswer(results):
            return ("lookup", [plain_found(found) for found in results])
        case an.ClaimAnswer(claim, lease, results, claimed):
            return ("claim", claim, lease, [plain_found(found) for found in results], list(claimed))
        case an.ReleaseAnswer(results):
            return ("release", [outcome.name.lower() for outcome in results])
        case an.ReserveAnswer(ttl, results):
            return ("reserve", ttl, [plain_reserved(reserved) for reserved in results])
        case an.CancelAnswer(results):
            return ("cancel", list(results))
        case an.WriteOrder():
            return plain_reserved(answer)
        case an.EvictAnswer(entries, freed_bytes, more):
            return ("evict", entries, freed_bytes, more)
        case an.ResizeAnswer(entries, freed_bytes, retired, done):
            return ("resize", entries, freed_bytes, sum(retired[1::2]), done)
        case _:
            assert_never(answer)


def plain_found(found: an.Found) -> tuple[Any, ...] | None:
    if found is None:
        return None
    if isinstance(found, an.FlightInfo):
        return ("in flight", found.owner, found.age_ns)
    return (
        "entry",
        name_of(found.key),
        found.tier.label,
        found.payload_bytes,
        found.token_count,
        found.payload_crc32c,
    )


def plain_reserved(reserved: an.Reserved) -> Any:
    match reserved:
        case an.WriteOrder(token, entry):
            size = entry.payload_bytes, entry.token_count
            return ("order", token, name_of(entry.key), entry.tier.label, *size)
        case an.FlightInfo():
            return plain_found(reserved)
        case an.Closed(tier, state):
            return ("closed", tier.label, state.label)
        case an.OverShare(tier, for_ever):
            return ("over share", tier.label, for_ever)
        case _:
            return reserved.name.lower().replace("_", " ")
