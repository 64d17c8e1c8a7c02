"""The local socket: the framed protocol (proto.frames) over a Unix socket, for clients on this
host.

The kernel tells which process connects: another user's is refused. Only here are descriptors handed
over, and payloads saved from memory that client and daemon share, or that the client lends.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import LimitReached, MalformedMessage
from ..runtime.loop import Core
from .calls import Caller, Process, failure_of
from .connections import Connections
from .data_streams import BACKLOG, DataFrames, HungUp, Stream
from .hand_over import Handoff
from .lent_saves import LentSaves
from .saves import Saves
from .service import CacheService
from .unix_sockets import UnixSocket


class LocalServer(Connections):
    """Listens on `ServiceConfig.local_socket`; `start` and `close` belong to the event loop."""

    name = "local"

    def __init__(self, core: Core, service: CacheService, saves: Saves, hand_over: Handoff) -> None:
        super().__init__(core, service, saves, service.config.max_connections)
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

    def _origin(self, sock: socket.socket) -> str:
        return str(Process.behind(sock).pid)

    def _stream(self, sock: socket.socket) -> Stream:
        return Stream(sock, Process.behind(sock))

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
