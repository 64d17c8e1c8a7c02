"""What operators change: the calls of the `Admin` service that change the daemon.

Each of them leaves a line in the log that says who made it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidSize, MalformedMessage, UnknownSession
from ...proto.keys import Key
from ...proto.namespaces import check_label, tag_of
from ...proto.vocabulary import DeleteStatus
from ..core.effects import DeleteAnswer
from ..core.events import DeleteAsked
from ..core.journal import EvictionCause
from ..runtime.gate import stopping
from ..runtime.loop import Core
from ..runtime.resizing import EVICTED_AT_ONCE, Resizing, evict
from ..runtime.slices import Slices
from . import messages
from .calls import Caller
from .lists import Lists
from .usage import UsageBook

#: How often a drain looks whether something is still held.
_LOOK_S: Final = 0.02
#: The part of health that says that the daemon drains.
_DRAIN: Final = "drain"
_LEVELS: Final = ("debug", "info", "warning", "error")
#: Keys of a delete that the log names.
_LOGGED_KEYS: Final = 8

log = structlog.get_logger("prefixd.audit")


def audit(caller: Caller, action: str, **what: object) -> None:
    """One line for each thing that an operator changes. gRPC does not tell whose process is at the
    other end: then it is one that may open the operators' socket, of the daemon's user or root."""
    process, access = caller.process, caller.access
    who = f"pid {process.pid}, uid {process.uid}" if process else "an operator on the admin socket"
    who = f"the token {access.token!r} over TCP" if access is not None else who
    log.info("admin_action", action=action, who=who, **what)


class Operations(Lists):
    """See prefixd.proto for what each rpc promises."""

    def __init__(self, core: Core, usage: UsageBook) -> None:
        super().__init__(core, usage)
        self.resizing: Final = Resizing(core)
        #: says what of the configuration changed, and (True) changes it; set by the daemon
        self.configurer: Callable[[bool], Awaitable[pb.ConfigureResponse]] | None = None
        #: is told when an operator gives an option another value; set by the daemon
        self.overridden: Callable[[str, object], None] = lambda _option, _value: None
        #: ends the daemon in order; set by the daemon
        self.stopper: Callable[[], None] = lambda: None

    async def evict(self, request: pb.EvictRequest, caller: Caller) -> pb.EvictResponse:
        core = self._core
        if request.free_bytes == 0:
            raise InvalidSize("free_bytes is 0; say how many bytes to free")
        tiers = messages.tiers_of(request.tiers, core.stores) or tuple(core.stores)
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
        core = self._core
        keys = messages.keys_of("keys", request.keys)
        response, slices = pb.DropResponse(), Slices()
        for start in range(0, len(keys), EVICTED_AT_ONCE):
            part = keys[start : start + EVICTED_AT_ONCE]
            question = DeleteAsked(core.next_request(), None, part, core.clock.now_ns())
            answer = await core.ask(question, DeleteAnswer)
            response.results.extend(r.value for r in answer.results)  # type: ignore[misc]
            await slices.pause()
        dropped = list(response.results).count(pb.DELETE_STATUS_DELETED)
        some = [key.hex() for key in keys[:_LOGGED_KEYS]]
        audit(caller, "delete", keys=len(keys), deleted=dropped, first_keys=some)
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
        if self.configurer is None:  # nothing that could be read again
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
        # The key of an entry names the namespace of its token, also after a restart.
        tag = tag_of(label)
        response = pb.ClearResponse()
        slices = Slices()
        for shard in core.state.tables.entries.shards:
            named: dict[Key, int] = {}
            for entry in shard.values():
                if entry.tier in tiers:
                    if entry.label == label or entry.key.endswith(tag):
                        named[entry.key] = entry.stored_bytes
                    else:
                        response.unknown_entries += not entry.label
            keys = tuple(named)
            for start in range(0, len(keys), EVICTED_AT_ONCE):
                part = keys[start : start + EVICTED_AT_ONCE]
                question = DeleteAsked(core.next_request(), None, part, core.clock.now_ns())
                for key, result in zip(
                    part, (await core.ask(question, DeleteAnswer)).results, strict=True
                ):
                    if result is DeleteStatus.DELETED:
                        response.entries += 1
                        response.freed_bytes += named[key]
                    response.pinned_entries += result is DeleteStatus.PINNED
                await slices.pause()
            await slices.pause()
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

    # ---- the daemon itself

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
            await asyncio.sleep(_LOOK_S)
            if not core.gate.drained:
                break  # told to resume meanwhile
        response = self._drained()
        log.info("drained", done=response.drained, claims=response.claims)
        if request.stop and core.gate.drained:
            self.stopper()
        return response

    def _drained(self) -> pb.DrainResponse:
        t = self._core.state.tables
        left = (len(t.claims), len(t.reservations), self._core.calls_working)
        claims, reservations, calls = left
        return pb.DrainResponse(
            drained=self._core.gate.drained and not any(left),
            claims=claims,
            reservations=reservations,
            calls=calls,
            sessions=len(t.sessions),
        )

    async def set_log_level(
        self, request: pb.SetLogLevelRequest, caller: Caller
    ) -> pb.SetLogLevelResponse:
        if request.level not in _LEVELS:
            raise MalformedMessage(f"a log level is one of {', '.join(_LEVELS)}")
        root = logging.getLogger()
        before = logging.getLevelName(root.level).lower()
        audit(caller, "log_level", before=before, level=request.level)
        root.setLevel(request.level.upper())
        self.overridden("log.level", request.level)
        return pb.SetLogLevelResponse(before=before)
