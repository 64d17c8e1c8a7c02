"""Watchers: they are sent all cached keys, and every change of them (`Admin.Watch`).

A watcher gets a snapshot of the entry table while the table changes. The table is walked in pieces;
before each piece the watcher has been sent every change until then. So what it knows of the walked
keys is right at every moment, and after the last piece it knows all keys. The changes are in one
log for all watchers (`runtime.changes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final

from ...proto import limits, watch_events
from ...proto import prefixd_pb2 as pb
from ...proto.errors import LimitReached, NotPermitted
from ...proto.vocabulary import Tier
from ...tiers.store import Damaged, StoreError
from ..config.options import Config
from ..core.entries import EntryState
from ..core.shares import Holder, Shares
from ..runtime.changes import ChangeLog, WatchedTooSlowly, body_of
from ..runtime.gate import stopping
from ..runtime.limited_log import LimitedLog
from ..runtime.loop import Core
from . import messages
from .access import Access, namespace_of
from .calls import Caller, taken_within

log = LimitedLog("prefixd.watching")

#: Events in one message, about 60 KiB; with token ids at most 4 MiB.
_MOST_EVENTS: Final = 512
_MOST_EVENTS_WITH_IDS: Final = 128
#: Longer token ids are left out: they are those of whole prompts, saved as one entry.
MAX_TOKEN_IDS_BYTES: Final = 32 * 2**10
#: After this many events that don't concern a watcher it is sent the last sequence number.
_QUIET_EVENTS: Final = 1_024


class Watching:
    """See prefixd.proto for what `Watch` promises. The event loop's."""

    def __init__(self, core: Core, config: Config, incarnation: bytes) -> None:
        self._core = core
        self._incarnation = incarnation
        self._stall_s = config.server.stall_timeout_s
        self.log: Final = ChangeLog(config.watch.history_bytes)
        core.change_log = self.log
        #: Watchers that were too slow.
        self.cut_off = 0
        #: Those that watch now.
        self.places: Final = Shares("watchers ([watch] max_watchers)", config.watch.max_watchers)
        self._watchers: set[_Watcher] = set()

    def in_flight(self) -> dict[str, int]:
        """What watchers occupy of the daemon's memory, and how many were refused or cut off."""
        return {
            "watchers": self.log.watchers,
            "watch_history_bytes": self.log.size_bytes,
            "watcher_refusals": self.places.refusals,
            "watchers_cut_off": self.cut_off,
        }

    def close(self) -> None:
        """End every watcher. Idempotent."""
        self.log.close()

    async def watch(self, request: pb.WatchRequest, caller: Caller) -> AsyncGenerator[bytes, None]:
        tiers = messages.tiers_of(request.tiers, self._core.stores)
        access = caller.access
        watcher = _Watcher(self._core, self._incarnation, self.log, tiers, request, access)
        holder = Holder(caller.tenant)
        self.places.take(holder)
        self._watchers.add(watcher)
        self.log.begin()
        try:
            caller.lasts()
            async with aclosing(watcher.responses()) as responses:
                async for response in responses:
                    with taken_within(self._stall_s, "what it watches", self._was_slow):
                        yield response
        except WatchedTooSlowly:
            self._was_slow()
            raise LimitReached(
                "this watcher is further behind than the daemon remembers ([watch] history): "
                "begin anew, and read faster"
            ) from None
        finally:
            self._watchers.discard(watcher)
            self.log.end()
            self.places.give(holder)

    def end_revoked(self, known: frozenset[Access]) -> None:
        """End the watchers whose token is no longer among these."""
        for watcher in self._watchers:
            if watcher.access is not None and watcher.access not in known:
                watcher.revoked = True
        self.log.wake()

    def _was_slow(self) -> None:
        self.cut_off += 1
        log.warning("watcher_cut_off", watchers=self.log.watchers)


class _Watcher:
    """One watcher: its position in the log, and the messages that it is sent."""

    def __init__(
        self,
        core: Core,
        incarnation: bytes,
        changes: ChangeLog,
        tiers: Sequence[Tier],
        request: pb.WatchRequest,
        access: Access | None,
    ) -> None:
        """`tiers`: empty for all. An `access` with a namespace limits the watcher to its keys."""
        self.access: Final = access
        #: Whether its token is no longer valid.
        self.revoked = False
        self._namespace = namespace_of(access)
        self._core = core
        self._incarnation = incarnation
        self._changes = changes
        self._tiers = frozenset(map(int, tiers or Tier))
        self._token_ids = request.token_ids
        self._most = _MOST_EVENTS_WITH_IDS if request.token_ids else _MOST_EVENTS
        #: The last event that it was sent, or that does not concern it.
        self._sequence = changes.sequence
        #: The rest of the snapshot. None: it is complete.
        self._snapshot: Iterator[list[bytes]] | None = None
        self._why = ""
        if request.incarnation == incarnation and changes.reaches(request.sequence):
            self._sequence = request.sequence
            self._resumed = True
        else:
            self._resumed = False
            if request.incarnation:
                self._why = "resync: " + (
                    "what happened since is not remembered"
                    if request.incarnation == incarnation
                    else "the daemon was started again"
                )

    async def responses(self) -> AsyncGenerator[bytes, None]:
        """Encoded responses. Raises WatchedTooSlowly, Draining, NotPermitted."""
        changes = self._changes
        if self._resumed:
            yield self._response([_control(pb.WATCH_KIND_SYNCED, self._sequence)])
        else:
            yield self._begin_anew(self._why)
        sent = self._sequence
        while not changes.closed:
            if self.revoked:
                raise NotPermitted("the token of this watcher is not known any more")
            if self._sequence < changes.lost_before:
                yield self._begin_anew("resync: the daemon lost count, and looks again")
                continue
            bodies = changes.since(self._sequence, self._most)
            if bodies:
                self._sequence += len(bodies)
                concerning = [body for body in bodies if self._concerns(body)]
                if concerning or self._sequence - sent >= _QUIET_EVENTS:
                    sent = self._sequence
                    yield self._response(await self._complete(concerning))
                else:
                    await asyncio.sleep(0)
            elif self._snapshot is not None:
                # Every change until now has been sent, and none happens before this is read.
                piece = next(self._snapshot, None)
                if piece is None:
                    self._snapshot = None
                    sent = self._sequence
                    yield self._response([_control(pb.WATCH_KIND_SYNCED, self._sequence)])
                    continue
                # A large piece takes several messages, with no change between them.
                for start in range(0, len(piece), self._most):
                    part = piece[start : start + self._most]
                    yield self._response(await self._complete(part))
                await asyncio.sleep(0)
            elif not await changes.wait(self._sequence, limits.WATCH_BEAT_MS / 1000):
                sent = self._sequence
                yield self._response([])
        raise stopping()

    def _concerns(self, body: bytes) -> bool:
        its_own = self._namespace
        return watch_events.tier_number(body) in self._tiers and (
            its_own is None or watch_events.tag_of(body) == its_own.tag
        )

    def _begin_anew(self, why: str) -> bytes:
        self._sequence = self._changes.sequence
        self._snapshot = self._walk()
        return self._response([_control(pb.WATCH_KIND_CLEARED, self._sequence, why)])

    def _response(self, bodies: Sequence[bytes]) -> bytes:
        # A watcher can't resume in the middle of a snapshot.
        sequence = 0 if self._snapshot is not None else self._sequence
        return watch_events.response(self._incarnation, bodies, sequence)

    def _walk(self) -> Iterator[list[bytes]]:
        """All entries, in pieces. Each is read at the moment at which it is asked for."""
        piece: list[bytes] = []
        looked_at = 0
        for shard in self._core.state.tables.entries.shards:
            # A shard is read as a whole: it may change before the next piece.
            its_own = self._namespace
            piece += [
                body_of(entry, self._sequence)
                for entry in shard.values()
                if entry.tier in self._tiers and (its_own is None or its_own.has(entry.key))
            ]
            looked_at += len(shard)
            if looked_at >= _MOST_EVENTS:
                yield piece
                piece, looked_at = [], 0
        yield piece

    # ---- token ids

    async def _complete(self, bodies: list[bytes]) -> list[bytes]:
        """The events, with the token ids of entries that are still cached, if requested."""
        if not self._token_ids:
            return bodies
        by_tier: dict[Tier, list[tuple[int, EntryState, int]]] = {}
        entries = self._core.state.tables.entries
        for place, body in enumerate(bodies):
            if not watch_events.is_published(body):
                continue
            entry = entries.find(watch_events.key_of(body))
            generation = watch_events.generation_of(body)
            if (
                entry is not None
                and entry.generation == generation
                and 0 < entry.token_ids_bytes <= MAX_TOKEN_IDS_BYTES
            ):
                by_tier.setdefault(entry.tier, []).append((place, entry, generation))
        complete = list(bodies)
        for tier, wanted in by_tier.items():
            found = await self._read(tier, [entry for _, entry, _ in wanted])
            for (place, entry, generation), token_ids in zip(wanted, found, strict=True):
                # Still published: its place was not overwritten while it was read.
                if token_ids and entry.published and entry.generation == generation:
                    complete[place] = watch_events.with_token_ids(bodies[place], token_ids)
        return complete

    async def _read(self, tier: Tier, entries: Sequence[EntryState]) -> list[bytes]:
        """The token ids of each entry; empty for those that can't be read."""
        core, store = self._core, self._core.stores[tier]

        def read() -> list[bytes]:
            found = []
            with core.devices.under_way(tier):
                for entry in entries:
                    try:
                        found.append(store.token_ids(entry))
                    except (Damaged, StoreError):
                        found.append(b"")
            return found

        if not store.blocking:
            return read()
        return await core.devices.run(tier, read)


def _control(kind: pb.WatchKind.ValueType, sequence: int, why: str = "") -> bytes:
    return pb.WatchEvent(kind=kind, sequence=sequence, why=why).SerializeToString()
