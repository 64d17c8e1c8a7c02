"""The promises of the daemon, checked against everything that happens in a run.

The oracle knows what clients saved, sees every event of every daemon with its effects, and reads
memory and files directly. A broken promise ends the run with the name of the promise.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prefixd.proto.index import unpack_row
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import DeleteStatus, Tier
from prefixd.server.core import events as ev
from prefixd.server.core.effects import DeleteAnswer, Effect, Erase, IndexDelete, IndexPut, Reply
from prefixd.server.core.entries import EntryState
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.daemon import SimDaemon
    from tests.sim.files import Devices

READS: Final = "what is read under a key was saved under it, or it is a miss"
SURVIVES: Final = "acknowledged entries survive"
BUDGETS: Final = "budgets hold at every moment"
ACCOUNTING: Final = "the accounting is right at every moment"
ROWS: Final = "a row leaves the index before its extent is written again"
VISIBLE: Final = "nothing partial or wrong is ever visible"
FAILURE: Final = "a read error is not damage"
DAMAGE: Final = "damage is not a read error: damaged entries can't be found"
PINNED: Final = "no pinned entry is evicted"
ORDER: Final = "the order of eviction survives a restart"
BOUND: Final = "no wait without a bound"
PROOF: Final = "no call acts for a session without its secret"
ENDED: Final = "a call ends by its deadline, and nothing writes into its buffers afterwards"
LET_GO: Final = "the memory of an ended daemon is let go"
GONE: Final = "removed entries do not come back, except after a kill"
DELETED: Final = "what was answered as deleted does not come back, after a kill either"
HANGS: Final = "readers pass over a tier whose device hangs"
LEAKS: Final = "a client that ended holds nothing"

#: Events between two recounts. A recount takes 0.8 ms: after every event, it would take half of the
#: total time. The sums of the budgets are compared after every event.
_RECOUNT_EVERY: Final = 8
#: Events between two comparisons of all index rows with the entries.
_INDEX_EVERY: Final = 2


#: Answers to deletes after which no entry that was there before comes back.
GONE_FOR_EVER: Final = (DeleteStatus.DELETED, DeleteStatus.ABSENT)


@dataclass(frozen=True)
class Published:
    """An entry that a daemon published."""

    tier: Tier
    generation: int
    crc32c: int
    payload_bytes: int
    location: tuple[int, ...]


@dataclass(frozen=True)
class DeleteCall:
    """A client's delete of one key, before it begins."""

    key: Key
    #: The number of deletes of the key that daemons had done.
    done: int
    #: By tier that recovers: the generation of the key that it has not read yet.
    unread: dict[Tier, int]


class Oracle:
    """Checks the promises in one run."""

    def __init__(self, world: World, devices: Devices) -> None:
        self.world = world
        self.devices = devices
        #: the payloads that clients honestly sent under each key, by CRC32C
        self.attempts: dict[Key, dict[int, bytes]] = {}
        #: what the next start has to find: all published entries that were not removed since
        self.durable: dict[Key, Published] = {}
        #: what the recovery of each tier that still recovers has to find
        self.expected: dict[Tier, dict[Key, Published]] = {}
        #: generations whose records are durably erased; in `_leaving`, perhaps not yet durably
        self.buried: set[int] = set()
        self._leaving: set[int] = set()
        #: generations of an earlier start whose keys this start has saved again, with other bytes
        self._replaced: set[int] = set()
        #: keys that this start has reported to clients as deleted or absent
        self._deleted: set[Key] = set()
        #: by key: what each delete of it removed, if anything
        self._removed: dict[Key, list[int | None]] = {}
        #: generations that were deleted before their tier had read them: such a delete is noted
        #: durably, whether its client is told or not
        self._unread_deleted: set[int] = set()
        #: generations that were durably gone when a client was told so
        self._gone: set[int] = set()
        #: (incarnation, generation) of each published entry, with its checksum
        self.generations: dict[tuple[bytes, int], int] = {}
        #: when each (incarnation, generation) was removed
        self.left_ns: dict[tuple[bytes, int], int] = {}
        #: generations of entries whose bytes or records the nemesis damaged
        self.tainted: set[int] = set()
        #: generations that a recovery replaced by another copy: they may come back and be replaced
        #: again until their erasure is durable
        self.gave_way: set[int] = set()
        #: the eviction order of each tier when the last daemon closed in order
        self.order: dict[Tier, list[Key]] | None = None
        #: whether file reads may return wrong bytes
        self.reads_lie = False
        #: the eviction order of a tier before a start makes it smaller
        self._next_victims: list[Key] = []
        self.events = 0
        self.counts: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def fail(self, promise: str, detail: str) -> None:
        self.world.fail(promise, detail)

    # ---- one daemon

    def watch(self, daemon: SimDaemon) -> None:
        """Observe all events of a daemon's state."""
        self._deleted.clear()
        # A save to ram is gone now, and the record that it replaced need not have been read.
        self._replaced.clear()
        self.expected = {
            tier: {key: one for key, one in self.durable.items() if one.tier is tier}
            for tier, store in daemon.core.stores.items()
            if store.recorded
        }
        state = daemon.core.state
        apply = state.apply

        def watched(event: ev.Event) -> list[Effect]:
            if daemon.process.dead:
                return []  # it unwinds, without visible effects
            self._before(daemon, event)
            effects = apply(event)
            self._after(daemon, event, effects)
            return effects

        state.apply = watched  # type: ignore[method-assign]

    def _before(self, daemon: SimDaemon, event: ev.Event) -> None:
        """Check what must hold between events: all effects of earlier ones were carried out."""
        if self.events % _INDEX_EVERY == 0:
            self._check_index(daemon)
        if isinstance(event, ev.ResizeAsked) and event.tier in self.expected:
            self._next_victims = self._victims(daemon, event.tier)
        if isinstance(event, ev.EntryDamaged):
            entry = daemon.core.state.tables.entries.get(event.key)
            if entry is not None and entry.generation == event.generation:
                self._check_damage(daemon, entry)

    def _check_index(self, daemon: SimDaemon) -> None:
        index, entries = daemon.core.index, daemon.core.state.tables.entries
        if index.revoked:
            self.fail(VISIBLE, f"the index was revoked: {daemon.core.unhealthy()}")
        hung = sum(1 << tier for tier in daemon.core.devices.hung)
        if index.hanging != hung:
            self.fail(HANGS, f"the index says {index.hanging:b}, and {hung:b} hang")
        for key in self.attempts:
            row, entry = index.get(key), entries.get(key)
            if row is None:
                continue
            found = unpack_row(row)
            if entry is None or entry.generation != found.generation:
                self.fail(ROWS, f"the index has a row of {name_of(key)} without its entry")

    def _check_damage(self, daemon: SimDaemon, entry: EntryState) -> None:
        good = self.true_crc(daemon, entry) == entry.payload_crc32c
        if good and not self.reads_lie:
            self.fail(FAILURE, f"{name_of(entry.key)} was dropped although its bytes are good")

    def _after(self, daemon: SimDaemon, event: ev.Event, effects: Sequence[Effect]) -> None:
        self.events += 1
        state = daemon.core.state
        before = dict(self.durable) if isinstance(event, ev.DeleteAsked) else {}
        for effect in effects:
            match effect:
                case IndexPut():
                    found = isinstance(event, ev.TierRecovered)
                    for entry in effect.entries:
                        self._published(daemon, entry, found=found)
                case IndexDelete():
                    for entry in effect.entries:
                        if isinstance(event, ev.TierRecovered) and entry.key in self.durable:
                            self.gave_way.add(self.durable[entry.key].generation)
                        self._left(daemon, entry.key)
                case Reply(answer=DeleteAnswer()):
                    assert isinstance(event, ev.DeleteAsked)
                    results = zip(event.keys, effect.answer.results, strict=True)
                    for key, result in results:
                        if result in GONE_FOR_EVER:
                            self._deleted.add(key)
                            self._unread_deleted.update(
                                expected[key].generation
                                for expected in self.expected.values()
                                if key in expected
                            )
                            there = before.get(key) if result is DeleteStatus.DELETED else None
                            removed = None if there is None else there.generation
                            self._removed.setdefault(key, []).append(removed)
                case Erase():
                    for one in effect.entries:
                        held = getattr(one, "pins", 0) and one.generation not in self.tainted
                        # Recovery found a later save, or the same in a more durable tier.
                        allowed = isinstance(event, ev.EntryDamaged | ev.TierRecovered)
                        # Another node has deleted it.
                        allowed |= isinstance(event, ev.DeleteAsked) and event.claimed
                        if held and not allowed:
                            self.fail(PINNED, f"{name_of(one.key)} was evicted under a claim")
        if isinstance(event, ev.ResizeAsked) and event.tier in self.expected:
            left = [
                entry.key
                for effect in effects
                if isinstance(effect, IndexDelete)
                for entry in effect.entries
            ]
            if left != self._next_victims[: len(left)]:
                order = [*map(name_of, self._next_victims)]
                self.fail(ORDER, f"{[*map(name_of, left)]} were evicted at a start, of {order}")
            if left:
                self.count(f"evicted at a start of {event.tier.label}")
        if isinstance(event, ev.TierRecovered):
            for found in event.entries:
                # A deleted entry is erased when found, even if this recovery does not complete.
                if (
                    found.record.key in self._deleted
                    and found.record.key not in state.tables.entries
                ):
                    self._left(daemon, found.record.key)
        if isinstance(event, ev.TierChanged) and event.state is ev.TierState.SERVING:
            self._recovered(daemon, event.tier)
        for ledger in state.tables.ledgers.values():
            used_bytes = ledger.published_bytes + ledger.reserved_bytes
            if not 0 <= used_bytes <= ledger.limit_bytes <= ledger.budget_bytes:
                self.fail(BUDGETS, f"{ledger.tier.label}: {used_bytes} of {ledger.limit_bytes}")
        if self.expected and daemon.serving:
            self.count(f"while it recovers: {type(event).__name__}")
        if self.events % _RECOUNT_EVERY == 0:
            self.recount(daemon)

    def recount(self, daemon: SimDaemon) -> None:
        problems = daemon.core.state.check()
        if problems:
            self.fail(ACCOUNTING, "; ".join(problems[:3]))

    def _published(self, daemon: SimDaemon, entry: EntryState, *, found: bool) -> None:
        key, crc = entry.key, entry.payload_crc32c
        if crc not in self.attempts.get(key, {}) and entry.generation not in self.tainted:
            self.fail(VISIBLE, f"{name_of(key)} is published with bytes that were never saved")
        if entry.generation not in self.tainted and self.true_crc(daemon, entry) != crc:
            self.fail(VISIBLE, f"{name_of(key)} is published, but its bytes are not in the arena")
        before = self.durable.get(key)
        if (
            found
            and before is not None
            # A later one is a save that was durable, and not acknowledged when the daemon died.
            and before.generation > entry.generation
            and before.generation not in self.tainted
            and entry.generation not in self.gave_way
            # Until its tier has read the later save, this one is found; see `_recovered`.
            and self._unread(before.tier, key) != before.generation
        ):
            self.fail(SURVIVES, f"{name_of(key)} was recovered as it was before its last save")
        replaced = entry.generation in self._replaced and entry.generation not in self.tainted
        if found and entry.generation in self._gone - self.tainted:
            self.fail(DELETED, f"{name_of(key)} came back")
        if found and (entry.generation in self.buried or key in self._deleted or replaced):
            self.fail(GONE, f"{name_of(key)} came back")
        if not found:
            self.count(f"published in {entry.tier.label}")
            # It replaces what an earlier start saved, wherever that is.
            for expected in self.expected.values():
                if (earlier := expected.get(key)) is not None and earlier.crc32c != crc:
                    del expected[key]
                    self._replaced.add(earlier.generation)
        self.generations[daemon.incarnation, entry.generation] = crc
        self.durable[key] = Published(
            entry.tier, entry.generation, crc, entry.payload_bytes, entry.location
        )

    def _unread(self, tier: Tier, key: Key) -> int | None:
        """The generation of a key that a tier still has to find."""
        expected = self.expected.get(tier, {}).get(key)
        return None if expected is None else expected.generation

    def _left(self, daemon: SimDaemon, key: Key) -> None:
        gone = self.durable.pop(key, None)
        if gone is not None:
            self.left_ns[daemon.incarnation, gone.generation] = self.world.now_ns
            self._leaving.add(gone.generation)
            expected = self.expected.get(gone.tier, {}).get(key)
            if expected is not None and expected.generation == gone.generation:
                del self.expected[gone.tier][key]

    def _recovered(self, daemon: SimDaemon, tier: Tier) -> None:
        """Check that a tier has all expected entries when its recovery ends. The daemon may have
        served for some time by then."""
        expected = self.expected.pop(tier, None)
        if expected is None:
            return  # its device works again
        entries = daemon.core.state.tables.entries
        for key, published in expected.items():
            entry = entries.get(key)
            if entry is not None and entry.generation == published.generation:
                self.count(f"survived in {published.tier.label}")
                if published.generation in self.tainted:
                    continue
                if self.true_crc(daemon, entry) != published.crc32c:
                    self.fail(SURVIVES, f"{name_of(key)} was recovered, but its bytes were not")
            elif (
                published.generation in self.tainted | self._unread_deleted or key in self._deleted
            ):
                if self.durable.get(key) is published:
                    del self.durable[key]
            elif entry is None or (
                entry.generation < published.generation
                and (entry.tier <= tier or entry.payload_crc32c != published.crc32c)
            ):
                where = published.tier.label
                self.fail(SURVIVES, f"{name_of(key)} was published in {where} and is gone")
        # Device faults may lose recorded uses, and new uses change the order.
        before = self.order.pop(tier, None) if self.order is not None else None
        if before is not None and not (self.devices.happened or daemon.serving):
            there = set(before)
            now = [key for key in self._victims(daemon, tier) if key in there]
            if now != [key for key in before if key in set(now)]:
                names = [*map(name_of, before)], [*map(name_of, now)]
                self.fail(ORDER, f"{tier.label}: {names[0]} became {names[1]}")
        self.recount(daemon)

    def _victims(self, daemon: SimDaemon, tier: Tier) -> list[Key]:
        return list(daemon.core.state.tables.ledgers[tier].victims())

    def died(self, daemon: SimDaemon) -> None:
        """Note a kill: entries in RAM and unrecorded uses are lost."""
        self.order = None
        self._leaving.clear()
        self._forget(Tier.RAM)
        del daemon

    def closed(self, daemon: SimDaemon) -> None:
        """Note an orderly end."""
        self.order = {tier: self._victims(daemon, tier) for tier in (Tier.SHM, Tier.DISK)}
        self.count("ended in order")
        if not self.devices.happened:
            self.buried |= self._leaving
        self._leaving.clear()
        self._forget(Tier.RAM)

    def power_lost(self) -> None:
        self._forget(Tier.SHM)

    def _forget(self, tier: Tier) -> None:
        self.durable = {key: one for key, one in self.durable.items() if one.tier is not tier}

    # ---- direct access to the arenas

    def true_crc(self, daemon: SimDaemon, entry: Any) -> int:
        """The checksum of the bytes in the extents of an entry."""
        arena: Any = daemon.core.stores[entry.tier].arena  # type: ignore[attr-defined]
        left, crc = entry.payload_bytes, 0
        for start, length in zip(entry.location[::2], entry.location[1::2], strict=True):
            take = min(left, length)
            crc = crc32c(os.pread(arena.fd, take, start), crc)
            left -= take
        return crc

    # ---- reports of clients

    def attempted(self, key: Key, payload: bytes) -> None:
        """A client is about to save this payload."""
        self.attempts.setdefault(key, {})[crc32c(payload)] = payload

    def read(
        self,
        key: Key,
        data: bytes,
        *,
        incarnation: bytes,
        generation: int,
        checked: bool,
        begun_ns: int,
    ) -> None:
        """Check bytes that a client reports as successfully read."""
        self.count("read")
        crc = crc32c(data)
        if generation in self.tainted and not checked:
            return
        if self.attempts.get(key, {}).get(crc) != data:
            self.fail(READS, f"{name_of(key)} was read with bytes that were never saved")
        if self.generations.get((incarnation, generation)) != crc:
            self.fail(
                READS,
                f"generation {generation} of {name_of(key)} was read with the bytes of another",
            )
        if self.left_ns.get((incarnation, generation), begun_ns) < begun_ns:
            self.fail(READS, f"{name_of(key)} was read after it was removed")

    def ended(self, late_ns: int) -> None:
        """A read in place has ended so much too late. Up to 0: it has not."""
        if late_ns > 0:
            self.fail(ENDED, f"a read in place ended {late_ns / 1e6:.0f} ms too late")

    def kept(self, same: bool) -> None:
        """A buffer that was used for something else still has its bytes, or not."""
        self.count(f"buffers that were used again: {same}")
        if not same:
            self.fail(ENDED, "a buffer was written to after its call had ended")

    def let_go(self, arenas: int) -> None:
        """So many arenas of a session that was replaced are still there."""
        if arenas:
            self.fail(LET_GO, f"{arenas} arenas of an ended session were kept")

    def acknowledged(self, key: Key, payload: bytes, incarnation: bytes) -> None:
        """Check that an acknowledged payload was published."""
        self.count("acknowledged")
        crc = crc32c(payload)
        if not any(i == incarnation and c == crc for (i, _), c in self.generations.items()):
            self.fail(SURVIVES, f"a save of {name_of(key)} was acknowledged but not published")

    def delete_begins(self, key: Key) -> DeleteCall:
        """A client is about to delete this key."""
        unread = {
            tier: expected[key].generation
            for tier, expected in self.expected.items()
            if key in expected
        }
        return DeleteCall(key, len(self._removed.get(key, ())), unread)

    def deleted(self, call: DeleteCall) -> None:
        """A client was told that no crash brings back what was there when the call began."""
        if self.reads_lie or self.tainted:
            return  # it may
        removed = self._removed.get(call.key, [])[call.done :]
        if len(removed) == 1 and removed[0] is not None:
            self._gone.add(removed[0])  # else another client deleted it, too
        for tier, generation in call.unread.items():
            left = self.expected.get(tier, {}).get(call.key)
            if left is not None and left.generation == generation:
                self._gone.add(generation)

    # ---- the end

    def check_nothing_held(self, daemon: SimDaemon) -> None:
        """Check that nothing is held after all clients ended and time has passed."""
        tables, core = daemon.core.state.tables, daemon.core
        held = {
            "sessions": tables.sessions,
            "ending sessions": tables.ending,
            "claims": tables.claims,
            "reservations": tables.reservations,
            "in flight": tables.in_flight,
            "waiting": tables.waiting,
            "condemned": tables.condemned,
            "backlog": tables.backlog,
            "writes": core.writes,
            "staging": daemon.stagings,
            "verifications": range(core.verifications.pending),
            "reads": range(daemon.service.reads.used_bytes),
            "saves": range(daemon.saves.arriving.used_bytes),
            "calls": daemon.calls,
        }
        for name, left in held.items():
            if len(left):
                self.fail(LEAKS, f"{name}: {len(left)}")
        for ledger in tables.ledgers.values():
            if ledger.reserved_bytes or ledger.pinned_bytes:
                self.fail(LEAKS, f"{ledger.tier.label}: pinned or reserved bytes")
        self.recount(daemon)


def key_of(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def name_of(key: Key) -> str:
    return f"key {int.from_bytes(key, 'big')}"
