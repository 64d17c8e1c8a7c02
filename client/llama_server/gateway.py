"""The proxy: each request in a slot that has as much of its prompt as can be had.

Nothing that goes wrong with the cache is a reason for a request to fail: it is then passed on as it
came. The truth is llama-server's own: it compares the prompt with what is in the slot, token by
token, so a wrong guess here costs time and never text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web
from multidict import CIMultiDictProxy
from yarl import URL

from ...proto.errors import CallerError
from ...proto.vocabulary import SaveReason, Tier
from ..aio import AsyncClient
from ..policy import SavePolicy
from .counts import PromptCounts
from .folder import SlotFolder
from .model import Model
from .requests import KEPT_BYTES, Asked, Bypassed, shorter_chats, timings_of, understand
from .server_identity import Unsupported
from .slot_file import BadSlotFile, Tokens, common_tokens
from .slots import SaveGates, Slot
from .states import Restored
from .upstream import EVALUATION_TIMEOUT_S, FAILURES, Auth, ModelServer, Upstream, UpstreamRefused

logger = logging.getLogger("prefixd.llama_server")

#: Headers that belong to one connection, as does what "Connection" names.
_HOP: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "content-length", "expect", "host"),
    )
)
#: Headers that the HTTP library would add to a request.
_NOT_ADDED: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
#: Headers that authorise.
_AUTH: Final = ("authorization", "x-api-key")
#: Models of a router that are known at a time.
_MOST_MODELS: Final = 64
#: A longer body is passed on as it comes, unread: it is media, or longer than any context.
_MOST_READ_BYTES: Final = 16 << 20
#: What calls about a state may fail with.
_PROBLEMS: Final = (*FAILURES, Unsupported, BadSlotFile, CallerError)
#: How long a request waits until its slot was emptied.
_ERASE_TIMEOUT_S: Final = 30.0
#: What a request says: read, or as it comes.
Body = bytes | AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chose."""

    tier: Tier = Tier.SHM
    policy: SavePolicy = field(default_factory=SavePolicy)
    #: A slot that was not used for so long is saved.
    idle_s: float = 5.0
    #: How long a save by llama-server may take, and all saves at the end.
    save_timeout_ms: int = 30_000
    #: Text for the weights.
    fingerprint: str | None = None
    #: Keep the states of different API keys apart.
    tenants: bool = False
    #: The server may have been started with --swa-full.
    swa_full: bool = True
    #: Why nothing is kept; None: it is.
    unsupported: str | None = None
    #: The headers for saves that no request causes; those of the last request if empty.
    auth: Auth = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose prompt is known."""

    asked: Asked
    model: Model
    server: ModelServer
    tokens: Tokens
    #: Where later prompts may differ.
    heads: list[int]
    salt: bytes


class FilledSlot(NamedTuple):
    """What became of a slot before its request."""

    #: What was restored, if nothing has proved yet that it is of use.
    unproved: Restored | None = None
    #: The request may go on from what is in the slot.
    usable: bool = True


class Gateway:
    """A proxy in front of one llama-server. To be made in the loop that runs it."""

    def __init__(
        self, upstream: Upstream, cache: AsyncClient, folder: SlotFolder, settings: Settings
    ) -> None:
        """The caller keeps all of them."""
        self._upstream = upstream
        self._cache = cache
        self._folder = folder
        self._settings = settings
        self._gates = SaveGates(settings.policy)
        #: By the names that requests use, the last one used last; and those that no answer has
        #: confirmed yet.
        self._models: dict[str, Model] = {}
        self._asked: dict[str, Model] = {}
        self._router: bool | None = None
        self._auth: dict[str, Auth] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._idle: dict[Slot, asyncio.TimerHandle] = {}
        self._closing = False
        #: Whether the last request got to the server; None: there was none.
        self._reached: bool | None = None
        self.counts = PromptCounts()

    def runner(self) -> web.AppRunner:
        """What serves llama-server's paths and `/prefixd/`. Bodies pass as they came, and who hangs
        up ends its request."""
        app = web.Application()
        app.router.add_get("/prefixd/stats", self._stats)
        app.router.add_get("/prefixd/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=1.0,
        )

    async def close(self) -> None:
        """Save what is not saved, within the time for it. Requests may still come, and pass."""
        self._closing = True
        for handle in self._idle.values():
            handle.cancel()
        self._idle.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(self._settings.save_timeout_ms / 1e3):
                await asyncio.gather(*self._background, return_exceptions=True)
                for name, model in self._models.items():
                    for slot in list(model.slots):
                        length, saved = slot.length, slot.saved
                        if not slot.busy and self._gates.when_idle(length, saved):
                            await self._save(name, model, slot, SaveReason.SHUTDOWN)
                await asyncio.gather(*self._background, return_exceptions=True)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def identify(self) -> None:
        """Find out which model it is, before the first request needs it. Failures are logged."""
        await self._cache.wait_connected()
        if self._settings.unsupported is not None:
            return
        try:
            if not await self._routes(self._settings.auth):
                model, auth = self._model_of(""), self._settings.auth
                try:
                    await model.refresh(ModelServer(self._upstream, "", auth))
                finally:
                    self._keep("", model, auth)
        except Exception as why:
            logger.info("llama-server is not identified yet: %s", str(why) or type(why).__name__)

    # ---- a request

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not _target_of(request).startswith("/"):
            raise web.HTTPBadRequest(text="the request names no path")
        try:
            body = await _read(request)
        except (aiohttp.ClientError, web.RequestPayloadError, OSError, ValueError):
            raise web.HTTPBadRequest(text="the body is not whole") from None
        if not isinstance(body, bytes):
            return await self._bypass(request, body, Bypassed("large body", taints=True))
        action = request.query.get("action", "")
        asked = understand(request.method, request.path, body, action)
        if isinstance(asked, Bypassed):
            return await self._bypass(request, body, asked)
        try:
            prepared = await self._prepare(asked, _auth_of(request))
        except Exception as why:
            self._failed("prepare", why)
            self._router = None  # another server may be there now
            return await self._bypass(request, body, Bypassed("not prepared"))
        model = prepared.model
        slot = await model.take_slot(prepared.tokens, prepared.salt)
        tail = bytearray()
        filled = FilledSlot()
        try:
            self._stop_idling(slot)
            async with self._lock_of(model, slot):
                filled = await self._fill(prepared, slot)
            sent = asked.in_slot(slot.number, reuse=filled.usable)
            return await self._forward(request, sent, tail)
        finally:
            self._after(prepared, slot, tail, filled.unproved)

    async def _prepare(self, asked: Asked, auth: Auth) -> Prepared:
        """Everything about a request that llama-server says."""
        if self._settings.unsupported is not None:
            raise Unsupported(self._settings.unsupported)
        name = asked.model if await self._routes(auth) else ""
        model, server = self._model_of(name), ModelServer(self._upstream, name, auth)
        try:
            tokens, other = await asyncio.gather(self._tokens(server, asked), model.refresh(server))
        finally:
            model = self._keep(name, model, auth)
        if other:
            tokens = await self._tokens(server, asked)
        if not len(tokens):
            raise UpstreamRefused("/tokenize: an empty prompt")
        heads: list[int] = []
        if asked.chat and not model.cuts:
            chats = shorter_chats(asked.template_body())
            found = await asyncio.gather(*(self._head(server, chat, tokens) for chat in chats))
            heads = [each for each in found if each]
        salt = b""
        if self._settings.tenants and auth:
            salt = hashlib.sha256(repr(sorted(auth.items())).encode()).digest()
        return Prepared(asked, model, server, tokens, heads, salt)

    @staticmethod
    async def _head(server: ModelServer, chat: dict[str, Any], tokens: Tokens) -> int:
        """How many tokens a prompt begins with in common with a shorter chat; 0 if the template
        takes no such chat."""
        try:
            text = await server.apply_template(chat)
        except UpstreamRefused:
            return 0
        return common_tokens(tokens, np.asarray(await server.tokenize(text), "<i4"))

    @staticmethod
    async def _tokens(server: ModelServer, asked: Asked) -> Tokens:
        if asked.chat:
            text = await server.apply_template(asked.template_body())
        elif isinstance(asked.body["prompt"], str):
            text = asked.body["prompt"]
        else:
            return np.asarray(asked.body["prompt"], "<i4")
        return np.asarray(await server.tokenize(text), "<i4")

    async def _fill(self, prepared: Prepared, slot: Slot) -> FilledSlot:
        """Get as much of the prompt into the slot as the cache has. Never raises a problem."""
        model, tokens, salt = prepared.model, prepared.tokens, prepared.salt
        if slot.tainted and not await self._erase(prepared.server, slot):
            slot.took(tokens, salt, kept=0)
            return FilledSlot(usable=False)
        common = held = slot.holds(tokens, salt)
        if not model.cuts and common < len(slot.tokens):
            held = 0  # the server can't go back to it
        found: Restored | str = "failure"
        try:
            if self._gates.when_replaced(slot.length, slot.saved, held):
                try:
                    await self._save_now(prepared.server, model, slot, SaveReason.EVICT)
                except BadSlotFile as why:  # a request that passed had the slot, for one
                    slot.forget()
                    common = held = 0
                    self._failed("save", why)
            found = await self._restore(prepared, slot, held)
        except Exception as why:
            slot.taint()
            common = held = 0
            self._failed("restore", why)
        if isinstance(found, Restored):
            held = found.tokens
            self.counts.add("tokens", "restored", found.tokens)
            self.counts.add("requests", "restored")
        else:
            self.counts.add("missed", found)
            outcome = "live" if held >= model.benefit.min_gain_tokens else "missed"
            self.counts.add("requests", outcome)
            others = slot.length > 0 and slot.salt != salt
            dirty = slot.tainted or others or (self._careful_of(model) and common < slot.restored)
            if dirty and not await self._erase(prepared.server, slot):
                slot.took(tokens, salt, kept=0)
                return FilledSlot(usable=False)
        slot.took(tokens, salt, kept=held)
        restored = found if isinstance(found, Restored) else None
        if not model.cuts and await self._evaluate_to_the_stops(prepared, slot, held, restored):
            return FilledSlot()
        return FilledSlot(restored)

    def _careful_of(self, model: Model) -> bool:
        """Whether the server may believe that it has more of a restored state than the file had."""
        return not model.cuts and (self._settings.swa_full or bool(self._router))

    async def _restore(self, prepared: Prepared, slot: Slot, held: int) -> Restored | str:
        model = prepared.model
        if model.bypassing and self._careful_of(model):
            return "others may use the slot"
        worth = held + model.benefit.min_gain_tokens
        if held and worth > len(prepared.tokens):
            return "small gain"  # whatever the cache has
        if saves := model.saves_of(prepared.tokens, worth):
            await asyncio.wait(saves, timeout=self._settings.policy.session_resume_wait_ms / 1e3)

        async def load(name: str, count: int) -> None:
            slot.taint()  # until it is known what came of it
            restored = await prepared.server.restore(slot.number, name)
            if restored != count:
                raise UpstreamRefused(f"a restore of {count} tokens gave {restored}")
            if not await model.is_same(prepared.server):
                raise UpstreamRefused("it was restarted meanwhile")
            slot.was_restored(prepared.tokens[:count], prepared.salt)

        found = await model.states(prepared.salt).restore(
            prepared.tokens, held, prepared.heads, model.benefit.why_not, load
        )
        if isinstance(found, Restored):
            model.benefit.restored(found.payload_bytes, found.seconds)
        elif not self._cache.connected:
            return "no daemon"
        return found

    async def _erase(
        self, server: ModelServer, slot: Slot, timeout_s: float = _ERASE_TIMEOUT_S
    ) -> bool:
        """Empty a slot. Returns whether it is empty."""
        try:
            await server.erase(slot.number, timeout_s)
        except Exception as why:
            self._failed("erase", why)
            return False
        slot.was_erased()
        return True

    async def _evaluate_to_the_stops(
        self, prepared: Prepared, slot: Slot, present: int, restored: Restored | None
    ) -> bool:
        """Save a state that can't be cut later where later prompts may go on. Returns whether
        anything was evaluated, which proves what was restored."""
        model, tokens = prepared.model, prepared.tokens
        if not model.trusts(slot) or model.states(prepared.salt).would_drop(0):
            return False
        proved = False
        try:
            for stop in self._gates.stops(len(tokens), present, prepared.heads):
                answer = await prepared.server.evaluate(slot.number, tokens[:stop])
                timings = timings_of(json.dumps(answer).encode())
                if timings is not None:
                    model.benefit.evaluated(timings.evaluated_tokens, timings.evaluated_ms / 1e3)
                    self.counts.add("tokens", "evaluated", timings.evaluated_tokens)
                    if restored is not None and not proved:
                        model.benefit.reused(restored.tokens, timings.cached_tokens)
                        proved = True
                slot.length = stop
                await self._save_now(
                    prepared.server, model, slot, SaveReason.COLD, known=tokens[:stop]
                )
        except Exception as why:
            self._failed("evaluate", why)
        slot.tokens, slot.prompt = tokens, len(tokens)
        slot.length = max(slot.length, len(tokens))
        return proved

    def _after(
        self, prepared: Prepared, slot: Slot, tail: bytearray, restored: Restored | None
    ) -> None:
        """The request ended, well or not. Waits for nothing."""
        model, name = prepared.model, prepared.asked.model if self._router else ""
        timings = timings_of(bytes(tail))
        if timings is not None:
            evaluated_s = timings.evaluated_ms / 1e3
            model.benefit.evaluated(timings.evaluated_tokens, evaluated_s)
            if restored is not None:
                model.benefit.reused(restored.tokens, timings.cached_tokens)
            slot.length = len(prepared.tokens) + timings.generated_tokens
            self.counts.add("tokens", "reused", timings.cached_tokens)
            self.counts.add("tokens", "evaluated", timings.evaluated_tokens)
        model.give_back(slot)
        if self._closing or not model.trusts(slot):
            return
        reason = self._gates.after_request(slot.prompt, slot.length, slot.saved)
        if reason is not None:
            self._spawn(self._save(name, model, slot, reason))
        elif self._gates.when_idle(slot.length, slot.saved):
            loop = asyncio.get_running_loop()
            self._idle[slot] = loop.call_later(
                self._settings.idle_s, self._became_idle, name, model, slot
            )

    # ---- saves

    def _became_idle(self, name: str, model: Model, slot: Slot) -> None:
        self._idle.pop(slot, None)
        if not slot.busy:
            self._spawn(self._save(name, model, slot, SaveReason.FINISH))

    def _stop_idling(self, slot: Slot) -> None:
        if handle := self._idle.pop(slot, None):
            handle.cancel()

    async def _save(self, name: str, model: Model, slot: Slot, reason: SaveReason) -> None:
        """Save a slot that no request uses. Never raises a problem."""
        async with self._lock_of(model, slot):
            if slot.busy or not model.trusts(slot):
                return
            try:
                server = self._server_of(name, load=False)
                await self._save_now(server, model, slot, reason)
            except Exception as why:
                slot.forget()
                self._failed("save", why)

    async def _save_now(
        self,
        server: ModelServer,
        model: Model,
        slot: Slot,
        reason: SaveReason,
        known: Tokens | None = None,
    ) -> None:
        """Have the server save a slot whose lock is held, and save its state from there."""
        if not model.trusts(slot):
            return
        states = model.states(slot.salt)
        if states.would_drop(slot.length):
            self.counts.add("failures", "save dropped")
            return
        with self._folder.offer() as name:
            written = await server.save(slot.number, name, self._settings.save_timeout_ms / 1e3)
            memory = self._folder.take(name)
        if len(memory) != written:
            raise BadSlotFile(f"it has {len(memory)} bytes of {written}")
        if not await model.is_same(server):
            slot.taint()
        if not model.trusts(slot):
            return  # it became another model's, or anybody's, meanwhile
        known = slot.tokens if known is None else known
        tokens, saving = await states.save(memory, slot.prompt, known, reason)
        slot.was_saved(tokens)
        if saving is not None:
            self.counts.add("saves", reason.name.lower())
            task = self._spawn(_outcome(saving, slot, tokens))
            model.saving[task] = tokens
            task.add_done_callback(model.saving.pop)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @staticmethod
    def _lock_of(model: Model, slot: Slot) -> contextlib.AbstractAsyncContextManager[None]:
        """Between a request's beginning and a save. A slot of an earlier process has none."""
        return model.locks[slot.number] if slot in model.slots else contextlib.nullcontext()

    # ---- what passes through

    async def _bypass(
        self, request: web.Request, body: Body, bypassed: Bypassed
    ) -> web.StreamResponse:
        with contextlib.ExitStack() as stack:
            for model in self._all:
                if bypassed.taints or (bypassed.takes_a_slot and self._settings.tenants):
                    stack.enter_context(model.tainting())
            if not bypassed.takes_a_slot:
                return await self._forward_an_order(request, body)
            self.counts.add("requests", "bypassed")
            self.counts.add("bypassed", bypassed.why)
            for model in self._all:
                stack.enter_context(model.passing())
            try:
                for name, model in list(self._models.items()):
                    if model.probe and self._careful_of(model):
                        await self._erase_restored(name, model)
            except UpstreamRefused as why:
                self._failed("erase", why)
                return _unavailable("a slot can't be emptied")
            return await self._forward(request, body)

    async def _forward_an_order(self, request: web.Request, body: Body) -> web.StreamResponse:
        if request.method != "POST" or not request.path.rstrip("/").endswith("/lora-adapters"):
            return await self._forward(request, body)
        # What runs meanwhile is of neither these adapters nor those.
        self._forget()
        try:
            return await self._forward(request, body)
        finally:
            self._forget()

    def _forget(self) -> None:
        for model in self._all:
            model.forget()

    async def _erase_restored(self, name: str, model: Model) -> None:
        """The server may give a request that passes any slot, also one that was restored, of which
        it believes more than it has. None is restored meanwhile. Raises Refused."""
        for slot in [each for each in model.slots if each.restored or each.tainted]:
            async with self._lock_of(model, slot):
                # It waits for what runs in there: only then the slot can be another's.
                server = self._server_of(name)
                dirty = slot.restored or slot.tainted
                if dirty and not await self._erase(server, slot, EVALUATION_TIMEOUT_S):
                    raise UpstreamRefused("a restored slot could not be erased")

    async def _forward(
        self, request: web.Request, body: Body, tail: bytearray | None = None
    ) -> web.StreamResponse:
        """Pass a request on, and its answer back as it comes. `tail` gets the end of the answer."""
        headers = _end_to_end(request.headers)
        if not isinstance(body, bytes) and request.content_length is not None:
            headers.append(("Content-Length", str(request.content_length)))
        try:
            upstream = await self._upstream.session.request(
                request.method,
                URL(self._upstream.url + _target_of(request), encoded=True),
                data=io.BytesIO(body) if isinstance(body, bytes) and body else body or None,
                headers=headers,
                skip_auto_headers=_NOT_ADDED,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, ValueError) as why:
            self.counts.add("failures", "forward")
            if self._reached is not False:  # said once: whoever waits for it asks often
                logger.warning("llama-server can't be reached: %s", why)
            self._reached = False
            return _unavailable("llama-server can't be reached")
        self._reached = True
        async with upstream:
            answer = web.StreamResponse(status=upstream.status, reason=upstream.reason)
            for name, value in _end_to_end(upstream.headers):
                answer.headers.add(name, value)
            length = upstream.headers.get("Content-Length")
            if length is not None and length.isdigit():
                answer.content_length = int(length)
            try:
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    if tail is not None:
                        _keep_end(tail, chunk)
                    await answer.write(chunk)
                await answer.write_eof()
            except (aiohttp.ClientError, OSError) as why:
                # One of the two ends is gone. A cut answer must not look like a whole one.
                self._failed("answer", why)
                if request.transport is not None:
                    request.transport.abort()
            return answer

    # ---- its own

    async def _routes(self, auth: Auth) -> bool:
        """Whether the server is a router of several models."""
        if self._router is None:
            props = await ModelServer(self._upstream, "", auth).call("/props")
            self._router = isinstance(props, dict) and props.get("role") == "router"
        return self._router

    def _model_of(self, name: str) -> Model:
        """The model of that name. To be followed by `_keep`."""
        settings = self._settings
        return self._models.get(name) or self._asked.setdefault(
            name, Model(self._cache, self._folder, settings.tier, fingerprint=settings.fingerprint)
        )

    def _keep(self, name: str, model: Model, auth: Auth) -> Model:
        """Remember a model if the server knows it. Returns the same one, or the one that is it by
        another name."""
        self._asked.pop(name, None)
        if not model.was_told:
            return model
        if self._models.pop(name, None) is None:
            others = (each for each in self._models.values() if each.is_process_of(model))
            model = next(others, model)
        # The last one is the one that was used last.
        self._models[name], self._auth[name] = model, auth
        for old, each in list(self._models.items())[:-_MOST_MODELS]:
            if not any(slot.busy for slot in each.slots):
                del self._models[old], self._auth[old]
        return model

    @property
    def _all(self) -> list[Model]:
        return [*self._models.values(), *self._asked.values()]

    def _server_of(self, name: str, *, load: bool = True) -> ModelServer:
        """For calls that no request causes."""
        auth = self._settings.auth or self._auth.get(name, {})
        return ModelServer(self._upstream, name, auth, load=load)

    def _failed(self, what: str, why: BaseException) -> None:
        self.counts.add("failures", what)
        if not isinstance(why, _PROBLEMS):
            logger.error("%s failed; the request goes on without it", what, exc_info=why)
            return
        # Why nothing is kept was said once.
        level = logging.DEBUG if isinstance(why, Unsupported) else logging.WARNING
        logger.log(level, "%s: %s", what, str(why) or type(why).__name__)

    async def _allow(self, request: web.Request) -> None:
        """Show what the cache does only to whom the server shows what it does. Raises HTTPException
        if it refuses."""
        try:
            await ModelServer(self._upstream, "", _auth_of(request)).call("/props")
        except UpstreamRefused as why:
            if why.status in (401, 403):
                raise web.HTTPUnauthorized(text=f"{why}\n") from None
        except FAILURES:
            return  # it is down or busy: that is when this is looked at

    async def _stats(self, request: web.Request) -> web.Response:
        await self._allow(request)
        models = {
            name: {
                "identity": None if model.identity is None else model.identity.digest.hex(),
                "entries": model.probe.form if model.probe else None,
                "block_tokens": model.probe.block_tokens if model.probe else None,
                "prefill_tokens_per_s": round(model.benefit.prefill_tokens_per_s),
                "restore_bytes_per_s": round(model.benefit.restore_bytes_per_s),
                "restores_stopped": model.benefit.is_open,
                "slots": [
                    {"tokens": slot.length, "saved": slot.saved, "busy": slot.busy}
                    for slot in model.slots
                ],
            }
            for name, model in self._models.items()
        }
        stats = {
            "connected": self._cache.connected,
            "pending_saves": sum(len(model.saving) for model in set(self._all)),
            **self.counts.to_json(),
            "models": models,
        }
        return web.json_response(stats, dumps=lambda value: json.dumps(value, indent=2) + "\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._allow(request)
        return web.Response(
            body=self.counts.to_prometheus(), content_type="text/plain", charset="utf-8"
        )


def _keep_end(tail: bytearray, chunk: bytes) -> None:
    """Add to the end of an answer, of which the last `KEPT_BYTES` at least are kept."""
    tail.extend(chunk)
    if len(tail) > 2 * KEPT_BYTES:
        del tail[:-KEPT_BYTES]


async def _outcome(saving: Awaitable[object], slot: Slot, tokens: Tokens) -> None:
    """Wait for a save. If it was not taken, the slot counts as unsaved again."""
    found = await saving
    outcomes = found if isinstance(found, list) else [found]
    refused = [each for each in outcomes if not getattr(each, "ok", True)]
    if refused:
        logger.info("a save was not taken: %s", refused[0])
        if slot.tokens is tokens:
            slot.saved = 0


def _auth_of(request: web.Request) -> Auth:
    return {name: request.headers[name] for name in _AUTH if name in request.headers}


def _target_of(request: web.Request) -> str:
    """Path and query, as they came."""
    target = request.raw_path
    return target if target.startswith("/") else request.rel_url.raw_path_qs


def _end_to_end(headers: CIMultiDictProxy[str]) -> list[tuple[str, str]]:
    """The headers that are not about one connection."""
    named = ",".join(headers.getall("Connection", ())).lower().split(",")
    dropped = _HOP.union(each.strip() for each in named)
    return [(name, value) for name, value in headers.items() if name.lower() not in dropped]


async def _read(request: web.Request) -> Body:
    """The body, or one that is to be passed on as it comes."""
    kept = bytearray()
    async for chunk in request.content.iter_any():
        kept += chunk
        if len(kept) > _MOST_READ_BYTES:
            return _both(bytes(kept), request.content.iter_any())
    return bytes(kept)


async def _both(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk


def _unavailable(why: str) -> web.Response:
    """As llama-server itself while it loads: worth another try."""
    error = {"code": 503, "message": why, "type": "unavailable_error"}
    return web.json_response({"error": error}, status=503)
