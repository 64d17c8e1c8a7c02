"""The local socket: the framed protocol (proto.frames) over a Unix socket, for clients on this
host.

The kernel tells which process connects: another user's is refused. Only here are descriptors handed
over, and payloads saved from memory that client and daemon share, or that the client lends.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    InvalidBatch,
    LimitReached,
    MalformedMessage,
    UnknownStaging,
    UnreadableMemory,
)
from ...proto.frames import DISK, INDEX, RAM, SHM, STAGING
from ...proto.vocabulary import Tier
from ...tiers.arena_stores import DiskStore, RamStore, ShmStore
from ..runtime.lent_memory import LentMemory, LentPayload, turns_of
from ..runtime.limited_log import LimitedLog
from ..runtime.loop import Core
from ..runtime.staging import StagingPool
from .access import namespace_of
from .calls import Caller, Process, failure_of, to_its_end
from .connections import Connections
from .data_streams import BACKLOG, DataFrames, HungUp, Stream
from .save_calls import Saves, short_results
from .service import CacheService
from .session_streams import Membership
from .unix_sockets import UnixSocket

log = LimitedLog("prefixd.lent_saves")

#: The tiers whose arenas clients can map, by the names of their descriptors.
_ARENAS: Final = {RAM: Tier.RAM, SHM: Tier.SHM, DISK: Tier.DISK}
_NAMES: Final = (INDEX, *_ARENAS, STAGING)
#: Names in one request. A newer client may know some that this daemon does not.
_MAX_WANTED: Final = 64
#: Threads for all saves of lent memory. A client can occupy a thread that reads its memory for as
#: long as it likes. So no call waits for a free thread: it is refused, and the client saves in
#: another way.
LENT_THREADS: Final = min(16, max(4, 2 * (os.cpu_count() or 1)))
#: Threads of these that one session may occupy at once.
_SESSION_THREADS: Final = 2
#: What one thread copies before the client's token is checked again. Larger saves are divided
#: between two threads.
_TURN_BYTES: Final = 8 * 2**20


class LocalServer(Connections):
    """Listens on `ServerSection.local_socket`; `start` and `close` belong to the event loop."""

    name = "local"

    def __init__(self, core: Core, service: CacheService, saves: Saves, hand_over: Handoff) -> None:
        super().__init__(core, service, saves, service.config.server.max_connections)
        self.socket: Final = UnixSocket("server.address", Path(self.config.local_socket), 0o600)
        self.hand_over: Final = hand_over
        self.lent: Final = LentSaves(saves)
        self._saves = saves
        self.methods["save_lent"] = self.lent.save
        self.streaming["hand_over"] = self._hand_over
        self.streaming["save_staged"] = self._save_staged

    async def start(self) -> None:
        """Bind and listen; again if the socket is gone, for new connections: open ones stay. The
        daemon holds the lock of the socket. Raises OSError."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(listening.bind)
            listening.setblocking(False)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        self._accept_at(listening)

    async def close(self) -> None:
        self.socket.remove()
        await super().close()

    def _accepted(self, sock: socket.socket) -> tuple[Stream, str]:
        process = Process.behind(sock)
        return Stream(sock, process), str(process.pid)

    async def _hand_over(
        self, request: pb.HandOverRequest, caller: Caller, frames: DataFrames
    ) -> None:
        membership = self.sessions.prove(request.session, caller)
        package = self.hand_over.pack(membership, request.wanted)
        try:
            response = pb.FramedResponse(hand_over=package.response)
            await frames.tell_with(response, package.fds)
        finally:
            package.close()

    async def _save_staged(
        self, first: pb.SaveStagedRequest, caller: Caller, frames: DataFrames
    ) -> None:
        """Save, and drop the rest of a save that failed: it would be taken for another one."""
        async with AsyncExitStack() as rooms:
            following = _Following(first, frames, rooms)
            frames.in_step = False
            try:
                await self._saves.save_staged(first, following, caller, following.tell)
            except (OSError, HungUp):
                raise
            except Exception as problem:
                failure = failure_of("save_staged", problem)
                frames.tell_soon(pb.FramedResponse(failure=failure))
                if following.out_of_step:
                    raise LimitReached("a staged save ended early") from None
                await following.drop(self.config.stall_timeout_s)
            frames.in_step = True
            await frames.flush()


class _Following:
    """The requests of a staged save that follow the first one (`saves.StagedRequests`)."""

    def __init__(
        self, first: pb.SaveStagedRequest, frames: DataFrames, rooms: AsyncExitStack
    ) -> None:
        """`rooms`: has the memory of the latest one."""
        self._frames = frames
        self._rooms = rooms
        #: Whether the last one has come.
        self._over = first.last
        #: Whether something else came in its place.
        self.out_of_step = False

    def tell(self, response: pb.SaveStagedResponse) -> None:
        self._frames.tell_soon(pb.FramedResponse(save_staged=response))

    def take_staged(self) -> pb.SaveStagedRequest | None:
        request = self._frames.next_small_now()
        return None if request is None else self._staged(request)

    async def wait_staged(self) -> pb.SaveStagedRequest:
        await self._rooms.aclose()  # the request before this one is done with
        return self._staged(await self._frames.next(self._rooms))

    async def drop(self, within_s: float) -> None:
        """Take requests until the last one has come. Raises LimitReached when it does not come, and
        MalformedMessage when something else does."""
        try:
            async with asyncio.timeout(within_s):
                while not self._over:
                    await self.wait_staged()
        except TimeoutError:
            raise LimitReached(f"the rest of a save did not come for {within_s:g} s") from None

    def _staged(self, request: pb.FramedRequest) -> pb.SaveStagedRequest:
        if request.WhichOneof("kind") != "save_staged":
            self.out_of_step = True
            raise MalformedMessage("another request came before the end of a staged save")
        self._over = request.save_staged.last
        return request.save_staged


class _Missing(Exception):  # an answer: its message says why
    """This client gets no such descriptor."""


class Package:
    """A response, and the descriptors that are sent with it."""

    def __init__(self) -> None:
        self.response: Final = pb.HandOverResponse()
        self.fds: Final[list[int]] = []
        self._opened = ExitStack()

    def add(self, name: str, fd: int, size_bytes: int, *, opened: bool = False) -> None:
        """Add a descriptor, and how much of it can be mapped. `opened`: for this package only, so
        that `close` closes it."""
        self.response.descriptors.add(name=name, size_bytes=size_bytes)
        self.fds.append(fd)
        if opened:
            self._opened.callback(os.close, fd)

    def close(self) -> None:
        """Close what was opened for it. Idempotent."""
        self._opened.close()


class Handoff:
    """Makes packages for sessions that have been proved: the descriptors that a client on this host
    is given to read and save in place, and for each that it is not given the reason."""

    def __init__(self, core: Core, stagings: StagingPool) -> None:
        self._core = core
        self._stagings = stagings

    def pack(self, membership: Membership, wanted: Collection[str] = ()) -> Package:
        """The wanted descriptors, or all if none is named. The caller closes the package. A session
        that is bound to a namespace gets its staging memory only: index and arenas hold the entries
        of all namespaces. Raises InvalidBatch."""
        if len(wanted) > _MAX_WANTED:
            raise InvalidBatch(f"{len(wanted)} names are wanted, at most {_MAX_WANTED} at once")
        bound = namespace_of(membership.access) is not None
        package = Package()
        try:
            for name in _NAMES:
                if wanted and name not in wanted:
                    continue
                try:
                    if name == STAGING:
                        memory = self._stagings.open(membership.number)
                        package.add(name, memory.fd, memory.size_bytes)
                    elif bound:
                        raise _Missing(
                            "it has the entries of all namespaces, and this session is of one"
                        )
                    elif name == INDEX:
                        self._add_index(package)
                    else:
                        self._add_arena(package, name)
                except (_Missing, UnknownStaging, OSError) as problem:
                    package.response.refused[name] = str(problem)
        except BaseException:
            package.close()
            raise
        return package

    def _add_index(self, package: Package) -> None:
        index = self._core.index
        if index.revoked:
            raise _Missing("it is not kept any more: something failed that may have left it wrong")
        package.add(INDEX, index.open_reader(), index.size_bytes, opened=True)

    def _add_arena(self, package: Package, name: str) -> None:
        store = self._core.stores.get(_ARENAS[name])
        if store is not None and not store.is_open:
            raise _Missing("the tier could not be opened yet")
        match store:
            case RamStore():
                # The seals of the memfd protect it, although the descriptor is writable.
                package.add(name, store.arena.fd, store.arena.max_bytes)
            case ShmStore() | DiskStore():
                package.add(name, store.arena.open_reader(), store.arena.max_bytes, opened=True)
            case _:
                raise _Missing("the tier is switched off")


class LentSaves:
    """Saves from memory that a client lends (`runtime.lent_memory`), the call `save_lent`. The
    event loop's."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._executor: Final = ThreadPoolExecutor(LENT_THREADS, "prefixd-lent")
        self._free = LENT_THREADS
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
        return LENT_THREADS - self._free

    def _take(self, session: int, most: int) -> int:
        """Occupy threads for one save. Raises LimitReached if none is free."""
        threads = min(most, self._free, _SESSION_THREADS - self._taken.get(session, 0))
        if threads <= 0:
            if not self.refusals:
                log.warning("lent_memory_busy", threads=LENT_THREADS)
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
