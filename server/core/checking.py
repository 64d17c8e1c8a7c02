"""Recounts the whole state from scratch, in steps; events may be applied between them.

The result is exact. Statements about one entry, claim, reservation, session or request hold at any
moment, and are checked when its turn comes. Sums cover what was counted so far: a change of
something that was counted is reported (`Recount.entered` and the methods after it), so after the
last step they are the sums of that moment. The shard or the number of a thing tells whether it was
counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, compress
from operator import attrgetter
from typing import Final

from ...proto.vocabulary import Tier
from ...tiers.ledger import Ledger
from ...tiers.order import OrderOfKeys, Recency
from ...tiers.tier_shares import Tally
from .entries import SHARDS, EntryState, shard_of
from .sessions import Claim, HeldReservation, Session, Stage, Tenant
from .tables import Tables, Timer

#: Further problems are counted without a sentence.
MAX_PROBLEMS: Final = 1_000
#: Items of one step, which takes some hundred microseconds.
ITEMS_A_STEP: Final = 128
_STORED_BYTES: Final = attrgetter("stored_bytes")
_BOOKED: Final = (
    *("published_bytes", "entries", "pinned_bytes", "pinned_entries"),
    *("reserved_bytes", "reservations"),
)


def _name(key: bytes) -> str:
    return key.hex()[:16]


class _Count:
    """What was counted in one tier so far."""

    def __init__(self, ledger: Ledger) -> None:
        self.published_bytes = self.entries = self.payload_bytes = 0
        self.pinned_bytes = self.pinned_entries = 0
        self.reserved_bytes = self.reservations = 0
        self.placed_bytes = 0
        self.slab_bytes = 0 if ledger.extents is None else ledger.extents.slab_bytes
        #: 1 for every slab of the arena that a counted entry lies on.
        self.used = bytearray()
        self.shares = Tally(ledger.shares)


class Recount:
    """One recount: a context manager. Take its `steps` within the context.

    `problems` has a sentence for each mismatch: at most `MAX_PROBLEMS` of the `found` ones.
    """

    def __init__(self, tables: Tables, items_a_step: int = ITEMS_A_STEP) -> None:
        self.problems: list[str] = []
        self.found = 0
        self._t = tables
        self._items_a_step = items_a_step
        self._counts = {tier: _Count(ledger) for tier, ledger in tables.ledgers.items()}
        #: Shards of entries that were counted: those below this number.
        self._shard = 0
        #: Claims and reservations that were counted. Newer ones are counted as they come.
        self._claims: set[int] = set()
        self._tokens: set[int] = set()
        self._first_new_claim = tables.next_claim
        self._first_new_token = tables.next_token
        #: By shard: how many of the counted claims pin an entry.
        self._held: defaultdict[int, dict[EntryState, int]] = defaultdict(dict)
        self._unpublished = 0

    def __enter__(self) -> Recount:
        self._t.recounts.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._t.recounts.remove(self)

    def _say(self, problem: str) -> None:
        self.found += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    # ---- changes during the recount, reported before they are made

    def entered(self, entry: EntryState) -> None:
        """An entry enters the table."""
        if shard_of(entry.key) < self._shard:
            self._count(entry)

    def left(self, entry: EntryState) -> None:
        """An entry leaves the table."""
        if shard_of(entry.key) < self._shard:
            self._count(entry, -1)

    def claimed(self, entry: EntryState) -> None:
        """A new claim pins an entry."""
        held = self._held[shard_of(entry.key)]
        held[entry] = held.get(entry, 0) + 1
        if not entry.pins and shard_of(entry.key) < self._shard:
            self._count_pinned(entry, 1)

    def unclaimed(self, claim: int, entry: EntryState) -> None:
        """A claim unpins an entry."""
        shard = shard_of(entry.key)
        if claim in self._claims or claim >= self._first_new_claim:
            held = self._held[shard]
            held[entry] = held.get(entry, 0) - 1
            if not held[entry]:
                del held[entry]
        if entry.pins == 1 and entry.published and shard < self._shard:
            self._count_pinned(entry, -1)

    def reserved(self, reservation: HeldReservation) -> None:
        """A reservation gets its room."""
        self._count_reserved(reservation)

    def settled(self, reservation: HeldReservation) -> None:
        """A reservation ends."""
        token = reservation.token
        if token in self._tokens or token >= self._first_new_token:
            self._count_reserved(reservation, -1)

    # ---- counting

    def _count(self, entry: EntryState, sign: int = 1) -> None:
        count = self._counts[entry.tier]
        count.published_bytes += sign * entry.stored_bytes
        count.payload_bytes += sign * entry.payload_bytes
        count.entries += sign
        count.shares.charge(entry, sign, 0)
        if entry.pins:
            self._count_pinned(entry, sign)
        self._place(count, entry, sign)

    def _count_pinned(self, entry: EntryState, sign: int) -> None:
        count = self._counts[entry.tier]
        count.pinned_bytes += sign * entry.stored_bytes
        count.pinned_entries += sign
        count.shares.charge(entry, 0, sign)

    def _count_reserved(self, reservation: HeldReservation, sign: int = 1) -> None:
        count = self._counts[reservation.tier]
        count.reserved_bytes += sign * reservation.entry.stored_bytes
        count.reservations += sign
        count.shares.charge(reservation.entry, sign, sign)
        self._place(count, reservation.entry, sign)

    def _place(self, count: _Count, entry: EntryState, sign: int) -> None:
        """Mark the slabs of an entry, or remove the marks."""
        if not count.slab_bytes:
            return
        location, tier = entry.location, entry.tier.label
        if sign == 1 and sum(location[1::2]) != entry.stored_bytes:
            lies = sum(location[1::2])
            self._say(f"{tier}: an entry of {entry.stored_bytes} bytes lies on {lies}")
        used = count.used
        for offset, length in zip(location[::2], location[1::2], strict=True):
            start, end = offset // count.slab_bytes, (offset + length) // count.slab_bytes
            if end > len(used):
                used.extend(bytes(end - len(used)))
            if sign == 1 and used.find(1, start, end) != -1:
                taken = used.find(1, start, end) * count.slab_bytes
                self._say(f"{tier}: two entries share the bytes at {taken}")
            used[start:end] = (b"\1" if sign == 1 else b"\0") * (end - start)
            count.placed_bytes += sign * length

    # ---- the steps

    def steps(self) -> Iterator[None]:
        """The recount. Yields between two steps."""
        items = 0
        for more in self._visits():
            items += more
            if items >= self._items_a_step:
                items = 0
                yield
        self._compare()

    def _visits(self) -> Iterator[int]:
        """Visit everything once. Yields the number of items visited; a step may end there."""
        t = self._t
        timed, unpinning = {timer: list(t.timed[timer]) for timer in Timer}, list(t.unpinning)
        if not t.old_timers and len(t.timers) > t.max_timers:
            self._say(f"{len(t.timers)} timers are kept, at most {t.max_timers} are of use")
        yield sum(map(len, timed.values()))
        # Everything with a deadline now has a timer now. If it still exists when it is visited, its
        # timer must be among these.
        timers = [*t.timers, *t.old_timers]
        yield len(timers)
        for number in chain(unpinning, timed[Timer.CLAIM]):
            yield self._visit_claim(number)
        for token in timed[Timer.RESERVATION]:
            self._visit_reservation(token)
            yield 1
        yield from self._visit_in_flight()
        for number in [*timed[Timer.SESSION], *t.ending]:
            session = t.sessions.get(number) or t.ending.get(number)
            if session is not None:
                yield self._visit_session(session)
                yield from self._visit_pins(f"session {number}", session)
        for name in list(t.tenants):
            yield from self._visit_tenant(name)
        for number in timed[Timer.WAITING]:
            yield self._visit_waiting(number)
        yield from self._visit_timers(timed, timers)
        yield from self._visit_entries()
        for key, entry in list(t.unrecorded.items()):
            if t.unrecorded.get(key) is entry is not t.entries.find(key):
                self._say(f"unrecorded use of {_name(key)}, which is not published")
            yield 1
        for ledger in t.ledgers.values():
            yield from self._visit_extents(ledger)

    def _visit_claim(self, number: int) -> int:
        """Count the pins of a claim, also of one that ended and still pins entries."""
        t = self._t
        claim, unpin = t.claims.get(number), t.unpinning.get(number)
        if claim is not None:
            self._check_claim(number, claim)
            entries = claim.entries
        elif unpin is not None:
            entries = unpin.entries[: unpin.left]
        else:
            return 1
        self._claims.add(number)
        for entry in entries:
            held = self._held[shard_of(entry.key)]
            held[entry] = held.get(entry, 0) + 1
        return len(entries)

    def _check_claim(self, number: int, claim: Claim) -> None:
        t = self._t
        session = t.sessions.get(claim.session) or t.ending.get(claim.session)
        if session is None:
            self._say(f"claim {number} belongs to session {claim.session}, which ended")
        elif number not in session.claims:
            self._say(f"session {claim.session} does not know its claim {number}")
        if not claim.entries:
            self._say(f"claim {number} holds nothing")

    def _visit_reservation(self, token: int) -> None:
        t = self._t
        reservation = t.reservations.get(token)
        if reservation is None:
            return
        self._tokens.add(token)
        self._count_reserved(reservation)
        key, stage = reservation.key, reservation.stage
        if stage in (Stage.PUBLISHED, Stage.GONE):
            self._say(f"reservation {token} ended and is still listed")
        in_flight = t.in_flight.get(key) is reservation
        if in_flight == (stage is Stage.DOOMED):
            name = stage.name.lower()
            self._say(f"reservation {token} of {_name(key)} is {name}, in flight: {in_flight}")
        session = t.sessions.get(reservation.session) or t.ending.get(reservation.session)
        if session is not None and token not in session.tokens:
            self._say(f"session {session.session} does not know its reservation {token}")
        if session is None and stage in (Stage.RESERVED, Stage.WRITING):
            self._say(f"reservation {token} outlived session {reservation.session}")
        unsettled = reservation.batch.unsettled
        # The first reservation of a batch checks it for all.
        if token not in unsettled or (
            token == min(unsettled) and unsettled - t.reservations.keys()
        ):
            self._say(f"the batch of reservation {token} miscounts its open saves")
        for request in reservation.waiters:
            waiting = t.waiting.get(request)
            if waiting is None or token not in waiting.pending:
                self._say(f"reservation {token} would wake request {request}, which is gone")
        policy = t.ledgers[reservation.tier].policy.of(key)
        if policy.keeps_pinned and in_flight and not policy.holds(reservation.entry):
            self._say(f"{reservation.tier.label}: the eviction order lacks {_name(key)}")

    def _visit_in_flight(self) -> Iterator[int]:
        t = self._t
        for key in list(t.in_flight):
            reservation = t.in_flight.get(key)
            if reservation is not None and (
                key != reservation.key or t.reservations.get(reservation.token) is not reservation
            ):
                self._say(f"{_name(key)} is in flight without a reservation")
            yield 1

    def _visit_session(self, session: Session) -> int:
        t, number = self._t, session.session
        for claim in [each for each in session.claims if each not in t.claims]:
            self._say(f"session {number} holds claim {claim}, which does not exist")
        for token in [each for each in session.tokens if each not in t.reservations]:
            self._say(f"session {number} holds reservation {token}, which does not exist")
        for request in [each for each in session.waits if each not in t.waiting]:
            self._say(f"session {number} counts request {request}, which does not wait")
        waits = [t.waiting[each].waited_keys for each in session.waits if each in t.waiting]
        if session.waited_keys != sum(waits):
            self._say(f"session {number} is charged {session.waited_keys} waited keys, not its own")
        held = [t.reservations[token].entry for token in session.tokens if token in t.reservations]
        reserved_bytes = sum(session.reserved_bytes.values())
        if reserved_bytes != sum(map(_STORED_BYTES, held)):
            self._say(
                f"session {number} is charged {reserved_bytes} reserved bytes, and holds others"
            )
        return 1 + len(session.claims) + len(session.tokens) + len(session.waits)

    def _visit_pins(self, name: str, holder: Session | Tenant) -> Iterator[int]:
        """Check what is charged for pins. If there are many, and they change between two steps,
        this can't be checked."""
        pins = holder.pins
        changes, stored_bytes = pins.changes, 0
        for part in pins.parts:
            if changes != pins.changes:
                return
            stored_bytes += sum(map(_STORED_BYTES, part))
            if pins.mask:
                yield len(part)
        pinned_bytes = sum(holder.pinned_bytes.values())
        if changes == pins.changes and pinned_bytes != stored_bytes:
            self._say(f"{name} is charged {pinned_bytes} pinned bytes, and holds others")

    def _visit_tenant(self, name: str) -> Iterator[int]:
        """Check what a tenant is charged, as far as it does not change between two steps."""
        t, tenant = self._t, self._t.tenants.get(name)
        if tenant is None:
            return
        its_own = [s for s in (*t.sessions.values(), *t.ending.values()) if s.of is tenant]
        yield len(its_own)
        if tenant.sessions != len(its_own):
            self._say(f"tenant {name} has {len(its_own)} sessions, not {tenant.sessions}")
        reserved_bytes = sum(sum(session.reserved_bytes.values()) for session in its_own)
        if sum(tenant.reserved_bytes.values()) != reserved_bytes:
            self._say(f"tenant {name} is charged other reserved bytes than its sessions")
        yield from self._visit_pins(f"tenant {name}", tenant)

    def _visit_waiting(self, request: int) -> int:
        t = self._t
        waiting = t.waiting.get(request)
        if waiting is None:
            return 1
        for token in waiting.pending:
            if token in t.waking:
                continue
            reservation = t.reservations.get(token)
            if reservation is None or t.in_flight.get(reservation.key) is not reservation:
                self._say(f"request {request} waits for a save that ended")
            if reservation is not None and request not in reservation.waiters:
                self._say(f"reservation {token} would not wake request {request}")
        return len(waiting.pending)

    def _visit_timers(
        self, timed: dict[Timer, list[int]], timers: list[tuple[int, Timer, int]]
    ) -> Iterator[int]:
        # Many small sets: a large one stops everything when it grows and when it is freed.
        armed: defaultdict[int, set[tuple[Timer, int]]] = defaultdict(set)
        for _, timer, number in timers:
            armed[number >> 10].add((timer, number))
            yield 1
        for timer, numbers in timed.items():
            for number in numbers:
                if self._has_deadline(timer, number) and (timer, number) not in armed[number >> 10]:
                    self._say(f"{timer.name.lower()} {number} would never run out")
                yield 1
        while armed:
            yield len(armed.popitem()[1])

    def _has_deadline(self, timer: Timer, number: int) -> bool:
        """Whether it needs a timer of its own. Claims of an ending session don't, nor do
        reservations that are being committed or are lost already."""
        alive = self._t.timed[timer].get(number)
        if isinstance(alive, HeldReservation):
            return alive.stage in (Stage.RESERVED, Stage.WRITING)
        if isinstance(alive, Claim):
            return alive.session not in self._t.ending
        return alive is not None

    # ---- entries

    def _visit_entries(self) -> Iterator[int]:
        # Stamps of this start are unique. Those of earlier starts may repeat, if the clock was set
        # back in between. Many small sets: a large one stops everything when it grows.
        generations: defaultdict[int, set[int]] = defaultdict(set)
        shards = self._t.entries.shards
        # Nearly all shards of a small table are empty. `compress` skips them in C.
        for number in compress(range(SHARDS), shards):
            shard = shards[number]
            held = self._held.get(number, {})
            for key, entry in shard.items():
                if entry.key != key:
                    self._say(f"entry {_name(entry.key)} is listed under {_name(key)}")
                self._check_entry(entry)
                generation = entry.generation
                if generation > self._t.adopted_ns:
                    seen = generations[generation >> 8 & SHARDS - 1]
                    if generation in seen:
                        self._say(f"generation {generation} was given out 2 times")
                    seen.add(generation)
                pins = held.get(entry, 0)
                if entry.pins != pins:
                    self._say(f"entry {_name(key)} counts {entry.pins} pins, {pins} claims hold it")
                self._count(entry)
            self._shard = number + 1
            yield len(shard)
        self._shard = SHARDS
        for number, held in list(self._held.items()):
            for entry in held:
                if shards[number].get(entry.key) is not entry:
                    self._unpublished += entry.generation not in self._t.condemned
            yield len(held)

    def _check_entry(self, entry: EntryState) -> None:
        t, key = self._t, entry.key
        if not entry.published:
            self._say(f"entry {_name(key)} can be found though it was dropped")
        if key in t.in_flight and key not in t.overtaken:
            self._say(f"{_name(key)} is published and in flight at once")
        if max(entry.generation, entry.last_used_ns) > t.stamp_ns:
            self._say(f"entry {_name(key)} has a stamp of the future")
        policy, tier = t.ledgers[entry.tier].policy.of(key), entry.tier.label
        if not policy.holds(entry) and (policy.keeps_pinned or not entry.pins):
            self._say(f"{tier}: the eviction order lacks {_name(key)}")
        elif policy.is_pinned(entry) != bool(entry.pins):
            says = "may" if entry.pins else "can't"
            self._say(f"{tier}: {_name(key)} {says} be evicted, it has {entry.pins} pins")
        elif isinstance(policy, Recency):
            self._check_follower(policy, entry)

    def _check_follower(self, policy: Recency, entry: EntryState | None) -> None:
        """Check the ring of a recency order: if the follower of its start and of every entry is a
        published entry that was used later, then it is one ring, and nothing else is in it."""
        follower = policy.follower(entry)
        if follower is None:
            return
        if self._t.entries.find(follower.key) is not follower:
            self._say(f"the eviction order holds {_name(follower.key)}, which is not published")
            return
        assert isinstance(follower, EntryState)
        if entry is not None and follower.last_used_ns <= entry.last_used_ns:
            self._say(f"{_name(follower.key)} would be evicted too late for its last use")

    def _visit_extents(self, ledger: Ledger) -> Iterator[int]:
        if ledger.extents is None:
            return
        try:
            for _ in ledger.extents.copy().check_steps():
                yield self._items_a_step
        except AssertionError as problem:
            self._say(f"{ledger.tier.label}: the extents are inconsistent: {problem}")

    # ---- sums, at one moment

    def _compare(self) -> None:
        t = self._t
        if self._unpublished:
            self._say(f"{self._unpublished} claimed entries are not published")
        waited_keys = sum(waiting.waited_keys for waiting in t.waiting.values())
        if waited_keys != t.waited_keys:
            self._say(f"{t.waited_keys} keys are said to be waited for, {waited_keys} are")
        if (t.waiters.used, t.waits.used) != (len(t.waiting), waited_keys):
            self._say(f"shares of {t.waiters.used} waiting requests and {t.waits.used} waits")
        batches = {id(r.batch): len(r.batch.chain) for r in t.reservations.values()}
        held = sum(claim.keys for claim in t.claims.values()) + sum(batches.values())
        if t.held.used != held:
            self._say(f"{t.held.used} held keys are counted, {held} are held")
        for entry in t.condemned.values():
            if entry.published or not entry.pins:
                self._say(f"entry {_name(entry.key)} is condemned without a claim on it")
            self._count(entry)
            # `TierCounters.payload_bytes` covers published entries only.
            self._counts[entry.tier].payload_bytes -= entry.payload_bytes
        for ledger in t.ledgers.values():
            self._compare_tier(ledger, self._counts[ledger.tier])

    def _compare_tier(self, ledger: Ledger, count: _Count) -> None:
        t, tier = self._t, ledger.tier
        for name in _BOOKED:
            booked, counted = getattr(ledger, name), getattr(count, name)
            if booked != counted:
                self._say(f"{tier.label}: {name} is booked as {booked} and counts {counted}")
        shown, there = t.tier_counters[tier].payload_bytes, count.payload_bytes
        if shown != there:
            self._say(f"{tier.label}: {shown} payload bytes are shown and {there} are there")
        used = count.published_bytes + count.reserved_bytes
        if used > ledger.limit_bytes or ledger.limit_bytes > ledger.budget_bytes:
            self._say(
                f"{tier.label}: {used} bytes used of {ledger.limit_bytes}, "
                f"the budget is {ledger.budget_bytes}"
            )
        if ledger.max_entries and count.entries + count.reservations > ledger.max_entries:
            self._say(f"{tier.label}: more than {ledger.max_entries} entries")
        if not count.shares.agrees():
            self._say(f"{tier.label}: what namespaces take is booked wrong")
        orders = ledger.policy.orders()
        for order in orders:
            if isinstance(order, Recency):
                self._check_follower(order, None)
        if ledger.policy.keeps_pinned:
            held = sum(len(order) for order in orders if isinstance(order, OrderOfKeys))
            self._compare_order(tier, held, count)
        if ledger.extents is not None:
            capacity_bytes = ledger.extents.capacity_bytes
            if ledger.limit_bytes != capacity_bytes - ledger.retired_bytes:
                self._say(f"{tier.label}: the limit is not what is there less what was retired")
            free_bytes = capacity_bytes - count.placed_bytes - ledger.retired_bytes
            if ledger.extents.free_bytes != free_bytes:
                called = ledger.extents.free_bytes
                self._say(f"{tier.label}: {called} bytes are called free, {free_bytes} are")

    def _compare_order(self, tier: Tier, held: int, count: _Count) -> None:
        t = self._t
        condemned = sum(entry.tier is tier for entry in t.condemned.values())
        in_flight = sum(reservation.tier is tier for reservation in t.in_flight.values())
        expected = count.entries - condemned + in_flight
        if held != expected:
            self._say(
                f"{tier.label}: the eviction order holds {held} entries, {expected} are "
                "published or in flight"
            )
