"""The proxy: each request in a slot that has as much of its prompt as can be had.

Nothing that goes wrong with the cache is a reason for a request to fail: it is then passed on as it
came. The truth is llama-server's own: it compares the prompt with what is in the slot, token by
token, so a wrong guess here costs time and never text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import numpy as np
from aiohttp import web
from yarl import URL

from ...proto.errors import CallerError
from ...proto.vocabulary import SaveReason, Tier
from ..aio import AsyncClient
from ..policy import SavePolicy
from .counts import Counts
from .decisions import SaveGates
from .folder import SlotFolder
from .identity import Unsupported
from .model import Model
from .requests import KEPT_BYTES, Asked, Bypassed, shorter_chats, timings_of, understand
from .slot_file import BadSlotFile, Tokens, common_tokens
from .slots import Slot
from .states import Restored
from .upstream import FAILURES, Auth, ModelServer, Refused, Upstream

logger = logging.getLogger("prefixd.llama_server")

#: Headers that belong to one connection.
_HOP: Final = (
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
#: Headers that authorise.
_AUTH: Final = ("authorization", "x-api-key")
#: Models of a router that are known at a time.
_MOST_MODELS: Final = 64
#: More than llama-server takes.
_MOST_BODY_BYTES: Final = 1 << 30
#: What calls about a state may fail with.
_PROBLEMS: Final = (*FAILURES, Unsupported, BadSlotFile, CallerError)


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
        self._models: dict[str, Model] = {}
        self._router: bool | None = None
        self._auth: dict[str, Auth] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._idle: dict[Slot, asyncio.TimerHandle] = {}
        self._closing = False
        self.counts = Counts()

    def application(self) -> web.Application:
        """The web application, which serves llama-server's paths and `/prefixd/`."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_get("/prefixd/stats", self._stats)
        app.router.add_get("/prefixd/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

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
        try:
            if not await self._routes(self._settings.auth):
                model, server = self._model_of("", self._settings.auth)
                await model.refresh(server)
        except _PROBLEMS as why:
            logger.info("llama-server is not identified yet: %s", why)

    # ---- a request

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = understand(request.method, request.path, body)
        if isinstance(asked, Bypassed):
            return await self._bypass(request, body, asked)
        try:
            prepared = await self._prepare(asked, _auth_of(request))
        except _PROBLEMS as why:
            self._failed("prepare", why)
            return await self._bypass(request, body, Bypassed("not prepared"))
        model = prepared.model
        slot = await model.take_slot(prepared.tokens, prepared.salt)
        tail = _Tail()
        restored: Restored | None = None
        try:
            self._stop_idling(slot)
            async with self._lock_of(model, slot):
                restored = await self._fill(prepared, slot)
            return await self._forward(request, asked.in_slot(slot.number), tail)
        finally:
            self._after(prepared, slot, tail, restored)

    async def _prepare(self, asked: Asked, auth: Auth) -> Prepared:
        """Everything about a request that llama-server says. Raises one of `_PROBLEMS`."""
        name = asked.model if await self._routes(auth) else ""
        model, server = self._model_of(name, auth)
        tokens, other = await asyncio.gather(
            self._tokens(server, asked), model.refresh(server), return_exceptions=False
        )
        if other:
            tokens = await self._tokens(server, asked)
        self._auth[name] = auth
        if not len(tokens):
            raise Refused("/tokenize: an empty prompt")
        heads = []
        if asked.chat and not model.cuts:
            for chat in shorter_chats(asked.template_body()):
                text = await server.apply_template(chat)
                head = np.asarray(await server.tokenize(text), "<i4")
                heads.append(common_tokens(tokens, head))
        salt = b""
        if self._settings.tenants and auth:
            salt = hashlib.sha256(repr(sorted(auth.items())).encode()).digest()
        return Prepared(asked, model, server, tokens, heads, salt)

    @staticmethod
    async def _tokens(server: ModelServer, asked: Asked) -> Tokens:
        if asked.chat:
            text = await server.apply_template(asked.template_body())
        elif isinstance(asked.body["prompt"], str):
            text = asked.body["prompt"]
        else:
            return np.asarray(asked.body["prompt"], "<i4")
        return np.asarray(await server.tokenize(text), "<i4")

    async def _fill(self, prepared: Prepared, slot: Slot) -> Restored | None:
        """Get as much of the prompt into the slot as the cache has. Returns what was restored and
        is not proved yet. Never raises a problem."""
        model, tokens, salt = prepared.model, prepared.tokens, prepared.salt
        common = held = slot.holds(tokens, salt)
        if not model.cuts and common < len(slot.tokens):
            held = 0  # the server can't go back to it
        found: Restored | str = "failure"
        try:
            if self._gates.when_replaced(slot.length, slot.saved, held):
                await self._save_now(prepared.server, model, slot, SaveReason.EVICT)
            found = await self._restore(prepared, slot, held)
        except _PROBLEMS as why:
            slot.forget()
            held = 0
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
            if others or (not model.cuts and common < slot.restored):
                await self._erase(prepared, slot)
        slot.took(tokens, salt, kept=held)
        restored = found if isinstance(found, Restored) else None
        if not model.cuts and await self._evaluate_to_the_stops(prepared, slot, held, restored):
            return None
        return restored

    async def _restore(self, prepared: Prepared, slot: Slot, held: int) -> Restored | str:
        model = prepared.model
        if model.bypassing and not model.cuts:
            return "others may use the slot"

        worth = held + model.benefit.min_gain_tokens
        if saves := model.saves_of(prepared.tokens, worth):
            await asyncio.wait(saves, timeout=self._settings.policy.session_resume_wait_ms / 1e3)

        async def load(name: str, count: int) -> None:
            slot.forget()
            restored = await prepared.server.restore(slot.number, name)
            if restored != count:
                raise Refused(f"a restore of {count} tokens gave {restored}")
            slot.was_restored(prepared.tokens[:count], prepared.salt)

        found = await model.states(prepared.salt).restore(
            prepared.tokens, held, prepared.heads, model.benefit.why_not, load
        )
        if isinstance(found, Restored):
            model.benefit.restored(found.payload_bytes, found.seconds)
        elif not self._cache.connected:
            return "no daemon"
        return found

    async def _erase(self, prepared: Prepared, slot: Slot) -> None:
        """Empty a slot: it has another tenant's state, or one of which the server believes more
        than was restored."""
        try:
            await prepared.server.erase(slot.number)
            slot.forget()
        except _PROBLEMS as why:
            self._failed("erase", why)

    async def _evaluate_to_the_stops(
        self, prepared: Prepared, slot: Slot, present: int, restored: Restored | None
    ) -> bool:
        """Save a state that can't be cut later where later prompts may go on. Returns whether
        anything was evaluated, which proves what was restored."""
        model, tokens = prepared.model, prepared.tokens
        if model.states(prepared.salt).would_drop(0):
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
            slot.tokens, slot.prompt = tokens, len(tokens)
            slot.length = len(tokens)
        except _PROBLEMS as why:
            self._failed("evaluate", why)
        return proved

    def _after(
        self, prepared: Prepared, slot: Slot, tail: _Tail, restored: Restored | None
    ) -> None:
        """The request ended, well or not. Waits for nothing."""
        model, name = prepared.model, prepared.asked.model if self._router else ""
        timings = timings_of(bytes(tail.kept))
        if timings is not None:
            evaluated_s = timings.evaluated_ms / 1e3
            model.benefit.evaluated(timings.evaluated_tokens, evaluated_s)
            if restored is not None:
                model.benefit.reused(restored.tokens, timings.cached_tokens)
            slot.length = len(prepared.tokens) + timings.generated_tokens
            self.counts.add("tokens", "reused", timings.cached_tokens)
            self.counts.add("tokens", "evaluated", timings.evaluated_tokens)
        model.give_back(slot)
        if self._closing:
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
            if slot.busy or not any(slot is each for each in model.slots):
                return
            auth = self._settings.auth or self._auth.get(name, {})
            server = ModelServer(self._upstream, name, auth, load=False)
            try:
                if await model.is_same(server):
                    await self._save_now(server, model, slot, reason)
                else:
                    slot.forget()
            except _PROBLEMS as why:
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
        """Have the server save a slot whose lock is held, and save its state from there. Raises one
        of `_PROBLEMS`."""
        states = model.states(slot.salt)
        if states.would_drop(slot.length):
            self.counts.add("failures", "save dropped")
            return
        name = self._folder.offer()
        try:
            written = await server.save(slot.number, name, self._settings.save_timeout_ms / 1e3)
            memory = self._folder.take(name)
        finally:
            self._folder.unlink(name)
        if len(memory) != written:
            raise BadSlotFile(f"it has {len(memory)} bytes of {written}")
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

    @contextlib.asynccontextmanager
    async def _lock_of(self, model: Model, slot: Slot) -> AsyncIterator[None]:
        """Between a request's beginning and a save. A slot of an earlier process has none."""
        if not any(slot is each for each in model.slots):
            yield
            return
        async with model.locks[slot.number]:
            yield

    # ---- what passes through

    async def _bypass(
        self, request: web.Request, body: bytes, bypassed: Bypassed
    ) -> web.StreamResponse:
        if not bypassed.takes_a_slot:
            if request.method == "POST" and request.path.endswith("/lora-adapters"):
                # What runs meanwhile is of neither these adapters nor those.
                for model in self._models.values():
                    model.forget()
            return await self._forward(request, body)
        self.counts.add("requests", "bypassed")
        self.counts.add("bypassed", bypassed.why)
        # It may get a slot that was restored, of which a server with --swa-full believes more than
        # it has: such slots are erased, and none is restored until it has ended.
        models = [each for each in self._models.values() if each.probe and not each.cuts]
        for model in models:
            model.bypassing += 1
        try:
            for model in models:
                await self._erase_restored(model)
            return await self._forward(request, body)
        finally:
            for model in models:
                model.bypassing -= 1

    async def _erase_restored(self, model: Model) -> None:
        names = [name for name, each in self._models.items() if each is model]
        for slot in [each for each in model.slots if each.restored]:
            server = self._model_of(names[0], self._auth.get(names[0], {}))[1]
            async with self._lock_of(model, slot):
                try:
                    if slot.restored:
                        await server.erase(slot.number)
                        slot.forget()
                except _PROBLEMS as why:
                    self._failed("erase", why)

    async def _forward(
        self, request: web.Request, body: bytes, tail: _Tail | None = None
    ) -> web.StreamResponse:
        """Pass a request on, and its answer back as it comes."""
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _HOP]
        url = self._upstream.url + request.raw_path
        try:
            upstream = await self._upstream.session.request(
                request.method,
                URL(url, encoded=True),
                data=body or None,
                headers=headers,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as why:
            self._failed("forward", why)
            # As llama-server itself while it loads: worth another try.
            error = {"message": "llama-server can't be reached", "type": "unavailable_error"}
            return web.json_response({"error": {"code": 503, **error}}, status=503)
        async with upstream:
            kept = [(k, v) for k, v in upstream.headers.items() if k.lower() not in _HOP]
            answer = web.StreamResponse(status=upstream.status, reason=upstream.reason)
            for name, value in kept:
                answer.headers.add(name, value)
            length = upstream.headers.get("Content-Length")
            if length is not None and length.isdigit():
                answer.content_length = int(length)
            await answer.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    if tail is not None:
                        tail.add(chunk)
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
            props = await self._upstream.call("GET", "/props", auth=auth)
            self._router = isinstance(props, dict) and props.get("role") == "router"
        return self._router

    def _model_of(self, name: str, auth: Auth) -> tuple[Model, ModelServer]:
        model = self._models.get(name)
        if model is None:
            if len(self._models) >= _MOST_MODELS:
                raise Refused("too many models")
            settings = self._settings
            model = Model(
                self._cache, self._folder, settings.tier, fingerprint=settings.fingerprint
            )
            self._models[name] = model
        return model, ModelServer(self._upstream, name, auth)

    def _failed(self, what: str, why: BaseException) -> None:
        self.counts.add("failures", what)
        logger.log(
            logging.INFO if isinstance(why, Unsupported) else logging.WARNING,
            "%s: %s",
            what,
            str(why) or type(why).__name__,
        )

    async def _stats(self, _request: web.Request) -> web.Response:
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
            "pending_saves": self._cache.pending_saves,
            **self.counts.to_json(),
            "models": models,
        }
        return web.json_response(stats, dumps=lambda value: json.dumps(value, indent=2) + "\n")

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self.counts.to_prometheus(), content_type="text/plain", charset="utf-8"
        )


class _Tail:
    """The end of an answer."""

    def __init__(self) -> None:
        self.kept = bytearray()

    def add(self, chunk: bytes) -> None:
        self.kept += chunk
        if len(self.kept) > 2 * KEPT_BYTES:
            del self.kept[:-KEPT_BYTES]


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
    return {k: v for k, v in request.headers.items() if k.lower() in _AUTH}
