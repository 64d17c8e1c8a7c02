"""The `Admin` service: what operators see (`admin_views`), and what they do.

Whatever takes long is done in slices, so that no client waits for it. Each call that changes the
daemon leaves a line in the log that says who made it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Final

import structlog

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidBatch, InvalidSize, MalformedMessage, UnknownSession
from ...proto.index import unpack_row
from ...proto.keys import Key
from ...proto.namespaces import check_label, tag_of
from ...proto.vocabulary import DeleteStatus, Tier
from ..core.checking import MAX_PROBLEMS
from ..core.entries import EntryTable
from ..core.events import Tick
from ..core.journal import EvictionCause
from ..runtime.gate import stopping
from ..runtime.recovery import collect_garbage, durable_deletes
from ..runtime.resizing import evict
from ..runtime.rounds import Slices, recount
from ..runtime.verification import Reading, Swept, Verifications
from . import messages
from .admin_views import AdminViews
from .calls import Caller, audit
from .service import DELETE_WAIT_S, delete_entries, drop_entries

log = structlog.get_logger("prefixd.audit")

#: How often a drain checks whether anything is still held.
_DRAIN_CHECK_S: Final = 0.02
#: The part of health that says that the daemon drains.
_DRAIN: Final = "drain"
#: Log levels of the contract, by their names of Python.
_LEVELS: Final = {
    name.removeprefix("LOG_LEVEL_"): number for name, number in pb.LogLevel.items() if number
}
#: Keys of a delete that the log names.
_LOGGED_KEYS: Final = 8
#: No search finds the entry any more.
_DELETED: Final = frozenset({DeleteStatus.DELETED, DeleteStatus.ERASING})
#: How often the client of a Verify hears of its progress.
_PROGRESS_EVERY_S: Final = 0.2


@dataclass(eq=False, repr=False)
class AdminService(AdminViews):
    """See prefixd.proto for what each rpc promises."""

    #: Tells how the configuration changed, and (True) applies it. None: there is no file to read
    #: again. The daemon sets this and the two below.
    configurer: Callable[[bool], Awaitable[pb.ConfigureResponse]] | None = None
    #: Called when an operator gives an option another value.
    overridden: Callable[[str, object], None] = lambda _option, _value: None
    #: Stops the daemon in order.
    stopper: Callable[[], None] = lambda: None

    # ---- entries

    async def evict(self, request: pb.EvictRequest, caller: Caller) -> pb.EvictResponse:
        core = self._core
        if request.free_bytes == 0:
            raise InvalidSize("free_bytes is 0; say how many bytes to free")
        tiers = messages.tiers_of(request.tiers, core.stores)
        if not tiers:
            raise InvalidBatch("tiers is empty; name the tiers to evict from")
        results = []
        for tier in tiers:
            entries, freed = await evict(core, tier, request.free_bytes, EvictionCause.OPERATOR)
            results.append(pb.EvictResult(tier=tier.value, entries=entries, freed_bytes=freed))  # type: ignore[arg-type]
        audit(
            caller,
            "evict",
            free_bytes=request.free_bytes,
            tiers=[tier.label for tier in tiers],
            entries=sum(result.entries for result in results),
            freed_bytes=sum(result.freed_bytes for result in results),
        )
        return pb.EvictResponse(results=results)

    async def drop(self, request: pb.DropRequest, caller: Caller) -> pb.DropResponse:
        keys = messages.keys_of("keys", request.keys)
        results = await delete_entries(self._core, None, keys)
        response = pb.DropResponse(results=[r.value for r in results])  # type: ignore[misc]
        dropped = sum(result in _DELETED for result in results)
        first_keys = [key.hex() for key in keys[:_LOGGED_KEYS]]
        audit(caller, "delete", keys=len(keys), deleted=dropped, first_keys=first_keys)
        return response

    async def kick(self, request: pb.KickRequest, caller: Caller) -> pb.KickResponse:
        session = self._core.state.tables.sessions.get(request.session_id)
        listener = self._core.listener(request.session_id)
        if session is None or listener is None:
            raise UnknownSession(f"there is no session {request.session_id}")
        listener.ended(UnknownSession("an operator ended this session; open a new one"))
        audit(caller, "kick", session=request.session_id, owner=session.owner)
        return pb.KickResponse()

    async def configure(self, request: pb.ConfigureRequest, caller: Caller) -> pb.ConfigureResponse:
        if self.configurer is None:
            return pb.ConfigureResponse()
        response = await self.configurer(request.apply)
        if request.apply:
            live = [each.option for each in response.changed if each.live]
            audit(caller, "reload", changed=live)
        return response

    async def clear(self, request: pb.ClearRequest, caller: Caller) -> pb.ClearResponse:
        core = self._core
        tiers = set(messages.tiers_of(request.tiers, core.stores) or core.stores)
        label = check_label(request.namespace)
        # Labels don't survive a restart; the tag in a key, which names its namespace, does.
        tag = tag_of(label)
        response = pb.ClearResponse()
        slices = Slices()
        for shard in core.state.tables.entries.shards:
            stored_bytes: dict[Key, int] = {}
            pinned = 0
            for entry in shard.values():
                if entry.tier in tiers:
                    if entry.label == label or entry.key.endswith(tag):
                        stored_bytes[entry.key] = entry.stored_bytes
                        pinned += bool(entry.pins)
                    else:
                        response.unknown_entries += not entry.label
            if request.dry_run:
                response.entries += len(stored_bytes)
                response.freed_bytes += sum(stored_bytes.values())
                response.pinned_entries += pinned
                await slices.pause()
                continue
            # An engine that did not answer once is asked in the background.
            until_s = monotonic() + (0.0 if response.erasing else DELETE_WAIT_S)
            results, withdrawn = await drop_entries(
                core, None, tuple(stored_bytes), until_s, announced=False
            )
            response.erasing |= not withdrawn
            for key, result in zip(stored_bytes, results, strict=True):
                if result in _DELETED:
                    response.entries += 1
                    response.freed_bytes += stored_bytes[key]
                response.pinned_entries += result is DeleteStatus.PINNED
            await slices.pause()
        if request.dry_run:
            return response
        until_s = monotonic() + DELETE_WAIT_S
        if core.entry_listener is not None and not request.tiers:
            response.erasing |= not await core.entry_listener.cleared(label, until_s)
            # They are dropped on every node, claimed or not.
            response.entries += response.pinned_entries
            response.pinned_entries = 0
        response.erasing |= not await durable_deletes(core, (), 0, until_s)
        audit(
            caller,
            "clear",
            namespace=label,
            tiers=[tier.label for tier in sorted(tiers)],
            entries=response.entries,
        )
        return response

    async def resize(self, request: pb.ResizeRequest, caller: Caller) -> pb.ResizeResponse:
        core = self._core
        tier = messages.tier_of(request.tier, core.state.tables.ledgers)
        if not 0 < request.budget_bytes < 2**63:
            raise InvalidSize("say how many bytes; a tier is switched off with a restart only")
        before_bytes = core.state.tables.ledgers[tier].budget_bytes
        resized = await self.resizing.resize(tier, request.budget_bytes)
        self.overridden(f"{tier.label}.budget", resized.budget_bytes)
        kept_bytes = self.resizing.kept_bytes(tier)
        audit(
            caller,
            "resize",
            tier=tier.label,
            before_bytes=before_bytes,
            budget_bytes=resized.budget_bytes,
            entries=resized.entries,
            kept_bytes=kept_bytes,
        )
        store = core.stores[tier]
        return pb.ResizeResponse(
            budget_bytes=resized.budget_bytes,
            entries=resized.entries,
            freed_bytes=resized.freed_bytes,
            kept_bytes=kept_bytes,
            secured_bytes=resized.budget_bytes - (store.size_bytes - store.secured_bytes),
        )

    # ---- the daemon

    async def drain(self, request: pb.DrainRequest, caller: Caller) -> pb.DrainResponse:
        core = self._core
        if request.resume and (request.stop or request.within_ms):
            raise MalformedMessage("resume goes with nothing else")
        within_s = (
            messages.milliseconds("within_ms", request.within_ms, 0, limits.MAX_LEASE_MS) / 1e9
        )
        if core.gate.stopping:
            raise stopping()
        audit(caller, "resume" if request.resume else "drain", stop=request.stop)
        core.gate.drained = not request.resume
        if request.resume:
            core.health.conditions.pop(_DRAIN, None)
            return self._drained()
        core.health.conditions[_DRAIN] = "an operator drained it: no new sessions, claims or saves"
        deadline_s = asyncio.get_running_loop().time() + within_s
        while not self._drained().drained and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(_DRAIN_CHECK_S)
            if not core.gate.drained:
                break  # another call has resumed meanwhile
        response = self._drained()
        log.info("drained", done=response.drained, claims=response.claims)
        if request.stop and core.gate.drained:
            self.stopper()
        return response

    def _drained(self) -> pb.DrainResponse:
        t = self._core.state.tables
        response = pb.DrainResponse(
            claims=len(t.claims),
            reservations=len(t.reservations),
            calls=self._core.calls_working,
            sessions=len(t.sessions),
        )
        held = response.claims or response.reservations or response.calls
        response.drained = self._core.gate.drained and not held
        return response

    async def set_log_level(
        self, request: pb.SetLogLevelRequest, caller: Caller
    ) -> pb.SetLogLevelResponse:
        if request.level not in _LEVELS.values():
            raise MalformedMessage(f"a log level is one of {', '.join(_LEVELS)}")
        root = logging.getLogger()
        before = logging.getLevelName(root.level)
        (level,) = (name for name, number in _LEVELS.items() if number == request.level)
        audit(caller, "log_level", before=before.lower(), level=level.lower())
        root.setLevel(level)
        self.overridden("log.level", level.lower())
        return pb.SetLogLevelResponse(before=_LEVELS.get(before, pb.LOG_LEVEL_UNSPECIFIED))

    # ---- upkeep

    async def gc(self, request: pb.GcRequest, caller: Caller) -> pb.GcResponse:
        core = self._core
        counters = core.state.tables.counters
        claims, reservations = counters.claims_lost, counters.reservations_lost
        core.post(Tick(core.clock.now_ns(), flush=True))
        records, rows = await collect_garbage(core)
        audit(caller, "gc", records=records, index_rows=rows)
        return pb.GcResponse(
            expired_claims=counters.claims_lost - claims,
            expired_reservations=counters.reservations_lost - reservations,
            orphan_records=records,
            orphan_index_rows=rows,
        )

    async def check(self, request: pb.CheckRequest, _caller: Caller) -> pb.CheckResponse:
        problems, count = await recount(self._core.state)
        response = pb.CheckResponse(problem_count=count, problems=problems[:MAX_PROBLEMS])
        async for problem in self._index_problems():
            response.problem_count += 1
            if len(response.problems) < MAX_PROBLEMS:
                response.problems.append(problem)
        response.entries = len(self._core.state.tables.entries)
        return response

    async def _index_problems(self) -> AsyncGenerator[str, None]:
        """What the index says that the state does not. It may lack what it has no room for."""
        index, entries = self._core.index, self._core.state.tables.entries
        if index.revoked:
            return
        slices = Slices()
        start = 0
        while True:
            rows, start = index.rows(start)
            for row in rows:
                listed = unpack_row(row)
                entry = entries.find(listed.key)
                if entry is None:
                    yield f"the index lists {listed.key.hex()}, which is not there"
                elif (entry.generation, entry.location) != (listed.generation, listed.location):
                    yield f"the index has something else for {listed.key.hex()}"
            if not start:
                break
            await slices.pause()
            if index is not self._core.index:
                return  # it was replaced, and is closed
        if len(index) + index.stats().unlisted < len(entries):
            yield f"the index lacks {len(entries) - len(index)} entries"

    async def verify(
        self, request: pb.VerifyRequest, caller: Caller
    ) -> AsyncGenerator[pb.VerifyResponse, None]:
        core = self._core
        tiers = messages.tiers_of(request.tiers, core.stores) or tuple(core.stores)
        counters = core.state.tables.tier_counters
        report = _Verified({tier: counters[tier].payload_bytes for tier in tiers})
        # In a task of its own, so that the client hears of progress while a device takes its time.
        reading = asyncio.create_task(report.read(core.verifications, core.state.tables.entries))
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=_PROGRESS_EVERY_S)
                if not reading.done():
                    yield report.message()
            reading.result()
            yield report.message(done=True)
        finally:
            reading.cancel()
            totals = report.totals
            audit(
                caller,
                "verify",
                tiers=[tier.label for tier in tiers],
                entries=totals.entries,
                dropped_entries=totals.damaged_entries,
            )


class _Verified:
    """Reads tiers back, and adds up what it finds."""

    def __init__(self, tier_bytes: Mapping[Tier, int]) -> None:
        """`tier_bytes`: payload bytes of each tier, which weigh its part of the progress."""
        self._weights: Final = {tier: max(1, size) for tier, size in tier_bytes.items()}
        self._done_weight = 0
        self._named = 0
        self.totals: Final = pb.VerifyResponse()

    async def read(self, verifications: Verifications, entries: EntryTable) -> None:
        total = sum(self._weights.values())
        for tier, weight in self._weights.items():
            async with aclosing(verifications.sweep(entries, tier)) as steps:
                async for swept in steps:
                    self._add(swept)
                    done_weight = self._done_weight + swept.share * weight
                    self.totals.progress_permille = int(1_000 * done_weight / total)
            self._done_weight += weight

    def _add(self, swept: Swept) -> None:
        swept.count_in(self.totals)
        for entry, verdict in swept.judged:
            name = f"entry {entry.key.hex()}"
            if verdict.reading is Reading.FAILED:
                self._name(f"{name} could not be read: {verdict.why}")
            elif verdict.reading is Reading.DAMAGED:
                self._name(f"{name}: {verdict.why}")

    def _name(self, problem: str) -> None:
        if self._named < MAX_PROBLEMS:
            self._named += 1
            self.totals.problems.append(problem)

    def message(self, *, done: bool = False) -> pb.VerifyResponse:
        """The totals, and the problems that were found since the last message."""
        message = pb.VerifyResponse()
        message.CopyFrom(self.totals)
        message.done = done
        del self.totals.problems[:]
        return message
