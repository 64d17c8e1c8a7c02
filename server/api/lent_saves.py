"""Saves from memory that a client on this host lends, see `runtime.lent_memory`."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Final

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidBatch, LimitReached, MalformedMessage, UnreadableMemory
from ..runtime.lent_memory import LentMemory, LentPayload, turns_of
from ..runtime.limited_log import LimitedLog
from .calls import Caller, to_its_end
from .saves import Saves, short_results

log = LimitedLog("prefixd.lent_saves")

#: Threads for all of these saves. A client can occupy a thread that reads its memory for as long
#: as it likes. So no call waits for a free thread: it is refused, and the client saves in another
#: way.
THREADS: Final = min(16, max(4, 2 * (os.cpu_count() or 1)))
#: Threads that one session may occupy at once.
_SESSION_THREADS: Final = 2
#: What one thread copies before the client's token is checked again. Larger saves are divided
#: between two threads.
_TURN_BYTES: Final = 8 * 2**20


class LentSaves:
    """The call `save_lent` of the local socket. The event loop's."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._executor: Final = ThreadPoolExecutor(THREADS, "prefixd-lent")
        self._free = THREADS
        #: Threads that each session occupies, if any.
        self._taken: dict[int, int] = {}
        #: Saves that were refused because no thread was free.
        self.refusals = 0

    async def save(self, request: pb.SaveLentRequest, caller: Caller) -> pb.SaveLentResponse:
        """Raises PrefixdError: UnreadableMemory if the daemon can't read the memory, LimitReached
        if no thread is free."""
        saves = self._saves
        membership = saves.opened(request, caller)
        process = caller.process
        if process is None or not process.pid:
            raise UnreadableMemory("the process that lends it is in another PID namespace")
        payloads = _payloads(request)
        reserved = request.HasField("reserved")
        keys = len(request.reserved.tokens if reserved else request.header.keys)
        if keys != len(payloads):
            raise MalformedMessage(f"{len(payloads)} payloads are lent for {keys} keys")
        memory = LentMemory(process.pid, request.token, request.token_address)
        lent_bytes = sum(payload.length_bytes for payload in payloads)
        session = membership.number
        loop = asyncio.get_running_loop()
        threads = self._take(session, 1 if lent_bytes < _TURN_BYTES else _SESSION_THREADS)
        try:
            with saves.measured():
                # Before anything is reserved or begun: a client whose memory can't be read saves
                # in another way.
                reached = loop.run_in_executor(self._executor, memory.reach, payloads)
                await to_its_end(reached)
                refusals, incoming = await saves.begin(request, membership)
                async with incoming.to_the_end():
                    granted = [n for n, refused in enumerate(refusals) if refused is None]
                    turns = turns_of(
                        memory,
                        saves.core.devices,
                        [incoming.write_of(number) for number in granted],
                        [payloads[number] for number in granted],
                        min(_TURN_BYTES, -(-lent_bytes // threads)),
                    )
                    await incoming.take_turns(turns, self._executor, threads)
                return await short_results(pb.SaveLentResponse, refusals, incoming)
        finally:
            self._give(session, threads)

    @property
    def threads_taken(self) -> int:
        return THREADS - self._free

    def _take(self, session: int, most: int) -> int:
        """Occupy threads for one save. Raises LimitReached if none is free."""
        threads = min(most, self._free, _SESSION_THREADS - self._taken.get(session, 0))
        if threads <= 0:
            if not self.refusals:
                log.warning("lent_memory_busy", threads=THREADS)
            self.refusals += 1
            raise LimitReached("no thread is free to read this client's memory")
        self._free -= threads
        self._taken[session] = self._taken.get(session, 0) + threads
        return threads

    def _give(self, session: int, threads: int) -> None:
        self._free += threads
        self._taken[session] -= threads
        if not self._taken[session]:
            del self._taken[session]


def _payloads(request: pb.SaveLentRequest) -> list[LentPayload]:
    """Raises MalformedMessage, InvalidBatch."""
    pieces = len(request.addresses)
    if pieces > limits.MAX_LENT_PIECES or len(request.pieces) > limits.MAX_BATCH_KEYS:
        raise InvalidBatch(
            f"{pieces} pieces of {len(request.pieces)} payloads are lent at once, at most "
            f"{limits.MAX_LENT_PIECES} of {limits.MAX_BATCH_KEYS}"
        )
    if len(request.token) != limits.LENT_TOKEN_BYTES:
        raise MalformedMessage(f"a token has {limits.LENT_TOKEN_BYTES} bytes")
    if len(request.lengths_bytes) != pieces or sum(request.pieces) != pieces:
        raise MalformedMessage("each lent piece has an address, a length and a payload")
    addresses, lengths = list(request.addresses), list(request.lengths_bytes)
    if not all(lengths):
        raise MalformedMessage("a lent piece is not empty")
    ends = pairwise(accumulate(request.pieces, initial=0))
    return [LentPayload(addresses[start:end], lengths[start:end]) for start, end in ends]
