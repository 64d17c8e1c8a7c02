"""One model of a llama-server: who it is, what is in its slots, and what the cache has of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np

from ...proto.vocabulary import Tier
from ..aio import AsyncClient
from ..identity import StateIdentity
from .folder import SlotFolder
from .server_identity import PROBE, Probe, Unsupported, identity_of, read_probe, with_salt
from .slot_file import Tokens, common_tokens
from .slots import DRAFT_MIN_GAIN_TOKENS, MIN_GAIN_TOKENS, Benefit, Slot, choose
from .states import States
from .upstream import ModelServer, UpstreamRefused

logger = logging.getLogger("prefixd.llama_server")

#: Tenants whose namespaces are kept.
_MOST_TENANTS: Final = 256
#: How long the save of the probe may take.
_PROBE_TIMEOUT_S: Final = 30.0
#: How long requests wait for an identification, since it began: hashing a large model takes longer.
_IDENTIFY_WAIT_S: Final = 5.0
#: Before another one is tried after it failed. It empties all slots.
_RETRY_S: Final = 10.0


class Model:
    """A model as it is loaded now. For one loop."""

    def __init__(
        self,
        cache: AsyncClient,
        folder: SlotFolder,
        tier: Tier,
        *,
        fingerprint: str | None = None,
    ) -> None:
        """`fingerprint`: text for the weights, from the user."""
        self._cache = cache
        self._folder = folder
        self._tier = tier
        self._fingerprint = fingerprint
        self._identification: asyncio.Task[None] | None = None
        #: By the loop's clock: when the latest identification began.
        self._began_s = -_RETRY_S
        #: The process and the adapters that everything below is about; None: not known yet.
        self._instance: tuple[str, ...] | None = None
        self._unsupported: str | None = None
        self._adapters: list[dict[str, Any]] = []
        self._states: dict[bytes, States] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.identity: StateIdentity | None = None
        self.probe: Probe | None = None
        self.slots: list[Slot] = []
        self.locks: list[asyncio.Lock] = []
        self.benefit = Benefit()
        #: Requests that may get any slot of the server's choice, and those that may leave there
        #: what is not the model's own state.
        self.bypassing = 0
        self._tainting = 0
        self._uses = 0
        #: Saves that the daemon has not taken yet, and their tokens.
        self.saving: dict[asyncio.Task[Any], Tokens] = {}

    # ---- who it is

    @property
    def cuts(self) -> bool:
        """Whether its states can be cut at any token."""
        return self.probe is not None and not self.probe.has_remainder

    async def refresh(self, server: ModelServer) -> bool:
        """Notice a restart, other adapters, and slots that others used. False: it is still the same
        process. Raises Unsupported, and what calls fail with."""
        unused = {slot: slot.used for slot in self.slots if self._is_idle(slot)}
        props, listed = await asyncio.gather(server.call("/props"), server.call("/slots"))
        adapters = self._adapters
        if adapters or self._instance is None:
            adapters = await server.call("/lora-adapters")
        if _instance(props, adapters) == self._instance:
            if self._unsupported is not None:
                raise Unsupported(self._unsupported)
            self._compare(listed, unused)
            return False
        await self._identified(server, props, listed)
        if self._unsupported is not None:
            raise Unsupported(self._unsupported)
        return True

    async def _identified(self, server: ModelServer, props: Any, listed: Any) -> None:
        """Wait for the identification, which requests share. They go on without it after a
        while. Raises Refused, and what it fails with."""
        now_s = asyncio.get_running_loop().time()
        if self._identification is None or self._identification.done():
            if self._failed and now_s < self._began_s + _RETRY_S:
                raise UpstreamRefused("it could not be identified, and is left alone for a while")
            self._instance, self._began_s = None, now_s
            self._identification = asyncio.ensure_future(self._identify(server, props, listed))
        task = self._identification
        await asyncio.wait([task], timeout=max(0.0, self._began_s + _IDENTIFY_WAIT_S - now_s))
        if not task.done():
            raise UpstreamRefused("it is not identified yet")
        task.result()

    @property
    def _failed(self) -> bool:
        task = self._identification
        return task is not None and task.done() and (task.cancelled() or bool(task.exception()))

    async def is_same(self, server: ModelServer) -> bool:
        """Whether the process and its adapters are those that the slots are about."""
        adapters = await server.call("/lora-adapters") if self._adapters else self._adapters
        return _instance(await server.call("/props"), adapters) == self._instance

    def is_process_of(self, other: Model) -> bool:
        """Whether both are the same process, by different names. Older builds don't tell."""
        told = self._instance is not None and self._instance[0] != "null"
        return told and self._instance == other._instance

    @property
    def was_told(self) -> bool:
        """Whether the server knows this model."""
        return self._identification is not None

    def forget(self) -> None:
        """It has to be identified again, and what its slots hold is not saved."""
        self._instance = None

    def trusts(self, slot: Slot) -> bool:
        """Whether what is in a slot is the state of its tokens, of the model as it is known."""
        known = self._instance is not None and slot in self.slots
        return known and not slot.tainted and not self._tainting

    @contextmanager
    def tainting(self) -> Iterator[None]:
        """While a request runs that may leave anything in any slot. Each is erased before its next
        use."""
        self._tainting += 1
        self._taint()
        try:
            yield
        finally:
            self._tainting -= 1
            self._taint()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """While a request runs that may get any slot."""
        self.bypassing += 1
        try:
            yield
        finally:
            self.bypassing -= 1

    def _taint(self) -> None:
        for slot in self.slots:
            slot.taint()

    def _is_idle(self, slot: Slot) -> bool:
        return not slot.busy and not self.locks[slot.number].locked()

    def _compare(self, listed: Any, unused: Mapping[Slot, int]) -> None:
        """Forget slots that others used. `unused`: those that were idle before they were listed,
        and when they were last used."""
        for each in listed if isinstance(listed, list) else ():
            number = each.get("id") if isinstance(each, dict) else None
            if not isinstance(number, int) or not 0 <= number < len(self.slots):
                continue
            slot, counted = self.slots[number], each.get("n_prompt_tokens", 0)
            idle = self._is_idle(slot) and unused.get(slot) == slot.used
            if not idle or not slot.length or each.get("is_processing") or type(counted) is not int:
                continue
            if slot.agrees(counted):
                slot.length = max(slot.saved, counted)
            else:
                slot.forget()

    async def _identify(self, server: ModelServer, props: Any, listed: Any) -> None:
        build, path, count = _told(props)
        adapters = await server.call("/lora-adapters")
        if not isinstance(listed, list) or not listed or not isinstance(adapters, list):
            raise UpstreamRefused("/slots: no slots")
        self._unsupported, self._adapters = None, adapters
        self.slots = [Slot(number) for number in range(count)]
        self.locks = [asyncio.Lock() for _ in range(count)]
        self._states = {}
        try:
            probe = await self._make_probe(server, count)
        except Unsupported as why:
            logger.warning("prompts of this llama-server are not kept: %s", why)
            self._unsupported = str(why)
            self._instance = _instance(props, adapters)
            return
        identity = await asyncio.to_thread(
            identity_of, build, path, probe, adapters, fingerprint=self._fingerprint
        )
        drafts = any(each.get("speculative") for each in listed)
        self.benefit = Benefit(DRAFT_MIN_GAIN_TOKENS if drafts else MIN_GAIN_TOKENS)
        self.probe, self.identity = probe, identity
        if probe.layout is None:
            logger.warning("states are kept whole, not in blocks: %s", probe.form)
        self._cache.announce(identity)
        self._instance = _instance(props, adapters)
        while self._waiting:
            self._wake()

    async def _make_probe(self, server: ModelServer, count: int) -> Probe:
        tokens = np.asarray(await server.tokenize(PROBE), "<i4")
        try:
            # Cells of before are of other adapters or another client, and might be reused.
            for number in range(count):
                await server.erase(number)
            await server.evaluate(0, tokens, keep=False)
            with self._folder.offer() as name:
                written = await server.save(0, name, _PROBE_TIMEOUT_S)
                memory = self._folder.take(name)
            await server.erase(0)
        except UpstreamRefused as why:
            if why.for_good:
                raise Unsupported(f"it saves no slots: {why}") from None
            raise
        if len(memory) != written:
            raise Unsupported(f"of a slot's {written} bytes it saved {len(memory)}")
        probe = read_probe(memory, count)
        if probe.tokens is not None and probe.tokens.tolist() != tokens.tolist():
            raise UpstreamRefused("another request took the slot of the probe")
        return probe

    def states(self, salt: bytes) -> States:
        """What the cache has for one tenant. Only after `refresh`."""
        assert self.identity is not None
        assert self.probe is not None
        found = self._states.get(salt)
        if found is None:
            if len(self._states) >= _MOST_TENANTS:
                self._states.clear()
            namespace = with_salt(self.identity, salt).namespace()
            found = States(self._cache, self._folder, self._tier, namespace, self.probe)
            self._states[salt] = found
        return found

    def saves_of(self, tokens: Tokens, least: int) -> list[asyncio.Task[Any]]:
        """The saves in progress that have at least so many of these tokens."""
        return [
            task for task, saved in self.saving.items() if common_tokens(saved, tokens) >= least
        ]

    # ---- its slots

    async def take_slot(self, tokens: Tokens, salt: bytes) -> Slot:
        """The slot for a prompt; waits until one is free, in turn. Give it back. It may still be
        about to be saved: hold its lock before you use it."""
        slot = None if self._waiting else choose(self.slots, tokens, salt)
        while slot is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                with suppress(ValueError):
                    self._waiting.remove(turn)
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise
            slot = choose(self.slots, tokens, salt)
        slot.busy = True
        self._uses += 1
        slot.used = self._uses
        return slot

    def give_back(self, slot: Slot) -> None:
        slot.busy = False
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


def _instance(props: Any, adapters: Any) -> tuple[str, ...]:
    if not isinstance(props, Mapping):
        raise UpstreamRefused("/props: no properties")
    told = [props.get(name) for name in ("media_marker", "build_info", "model_path", "total_slots")]
    context = props.get("default_generation_settings", {})
    n_ctx = context.get("n_ctx") if isinstance(context, Mapping) else None
    return tuple(json.dumps(each, sort_keys=True) for each in [*told, n_ctx, adapters])


def _told(props: Any) -> tuple[str, str, int]:
    build, path, count = (props.get(n) for n in ("build_info", "model_path", "total_slots"))
    if not isinstance(build, str) or not isinstance(path, str) or not isinstance(count, int):
        raise UpstreamRefused("/props: it does not say build, model and slots")
    if not 0 < count <= 4096:
        raise UpstreamRefused(f"/props: {count} slots")
    return build, path, count
