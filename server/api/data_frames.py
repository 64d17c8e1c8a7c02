"""A stream of the data socket as requests and responses (proto.frames).

What a client sends ahead waits in the kernel, but for one small request's worth of it. A client
that stands still in the middle of a request, or of an answer, is given up after `stall_timeout`.
The event loop's.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import LimitReached
from .parsing import parse
from .streams import Stream

_HEAD: Final = frames.HEAD


class HungUp(Exception):  # no failure: clients may
    """The client closed its end between two requests."""


class DataFrames:
    """Requests come out of a stream, responses go into it. What ends with `_now` never waits."""

    def __init__(self, stream: Stream, stall_timeout_s: float) -> None:
        self.stream: Final = stream
        self._stall_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        #: received bytes that are not parsed yet: from `_start` to `_end`
        self._buffer = memoryview(bytearray(_HEAD.size + frames.DATA_SMALL_REQUEST_BYTES))
        self._start = self._end = 0
        #: Did the last receive fill the buffer? Then TLS may hold bytes that no poll tells of.
        self.filled = False
        #: the part of the last answer that the socket did not take
        self._unsent = memoryview(b"")
        #: Would the client understand a message now? Not in the middle of a part.
        self.may_tell = True
        #: Would the next bytes be a request? Not in the middle of a save.
        self.in_step = True

    # ---- in

    @property
    def ahead_bytes(self) -> int:
        """Received bytes that are not parsed yet."""
        return self._end - self._start

    def receive_now(self) -> None:
        """Take in what is there. Raises BlockingIOError, HungUp, OSError."""
        self._make_room()
        came_bytes = self._received([self._buffer[self._end :]])
        self._end += came_bytes
        self.filled = self._end == len(self._buffer)

    def next_now(self) -> pb.DataRequest | None:
        """The next request, if it is small and all of it is there. Raises MalformedMessage."""
        start = self._start + _HEAD.size
        if start > self._end:
            return None
        end = start + int(_HEAD.unpack_from(self._buffer, self._start)[0])
        if end > self._end:
            return None
        raw = bytes(self._buffer[start:end])
        self._start = end
        return parse(pb.DataRequest, raw)

    async def head(self) -> int:
        """The length of the next request, however late that begins. Raises HungUp, OSError,
        LimitReached."""
        if not self.ahead_bytes:
            await self._more()
        await self._whole(_HEAD.size)
        return int(_HEAD.unpack_from(self._buffer, self._start)[0])

    async def small(self, size_bytes: int) -> pb.DataRequest:
        """The next request, of DATA_SMALL_REQUEST_BYTES at most, after its `head`. Raises HungUp,
        OSError, LimitReached, MalformedMessage."""
        await self._whole(_HEAD.size + size_bytes)
        request = self.next_now()
        assert request is not None
        return request

    async def large(self, size_bytes: int) -> pb.DataRequest:
        """The next request, of any length, after its `head`. Raises as `small`."""
        request = bytearray(size_bytes)
        came_bytes = self.ahead_bytes - _HEAD.size
        request[:came_bytes] = self._buffer[self._start + _HEAD.size : self._end]
        self._start = self._end = 0
        with memoryview(request) as room, self._stalling():
            while came_bytes < size_bytes:
                async with asyncio.timeout(self._stall_s):
                    came_bytes += await self._receive(room[came_bytes:])
        return parse(pb.DataRequest, bytes(request))

    async def _whole(self, size_bytes: int) -> None:
        """Wait until so much of what has begun is there. Raises HungUp, OSError, LimitReached."""
        if self.ahead_bytes < size_bytes:
            with self._stalling():
                async with asyncio.timeout(self._stall_s):
                    while self.ahead_bytes < size_bytes:
                        await self._more()

    async def _more(self) -> None:
        self._make_room()
        self._end += await self._receive(self._buffer[self._end :])
        self.filled = self._end == len(self._buffer)

    def _make_room(self) -> None:
        """Move the bytes to the front of the buffer, so that a whole small request fits."""
        if self._start:
            left_bytes = self.ahead_bytes
            if left_bytes:
                self._buffer[:left_bytes] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, left_bytes

    async def _receive(self, room: memoryview) -> int:
        """What comes next, however long that takes. Raises HungUp, OSError."""
        while True:
            with suppress(BlockingIOError):
                return self._received([room])
            await self.ready()

    def _received(self, buffers: list[memoryview]) -> int:
        came_bytes = self.stream.receive(buffers)
        if not came_bytes:
            raise HungUp
        return came_bytes

    # ---- out

    def tell_now(self, response: pb.DataResponse) -> bool:
        """Send an answer as far as it goes. False: the rest has to be flushed before anything
        else. Raises OSError."""
        rest = memoryview(frames.frame(response))
        with suppress(BlockingIOError):
            rest = rest[self.stream.send([rest]) :]
        self._unsent = rest
        self.may_tell = not rest
        return self.may_tell

    async def tell(self, response: pb.DataResponse) -> None:
        """Raises OSError, LimitReached."""
        if not self.tell_now(response):
            await self.flush()

    async def flush(self) -> None:
        """Send what is left of the last answer. Raises OSError, LimitReached."""
        while self._unsent:
            await self.until_ready()
            with suppress(BlockingIOError):
                self._unsent = self._unsent[self.stream.send([self._unsent]) :]
        self.may_tell = True

    # ---- waiting

    async def until_ready(self) -> None:
        """Wait for what the stream lacks. Raises LimitReached of a client that reads or sends
        nothing."""
        with self._stalling():
            async with asyncio.timeout(self._stall_s):
                await self.ready()

    async def ready(self) -> None:
        """Wait for what the stream lacks, however long that takes."""
        loop, fd = self._loop, self.stream.fileno()
        ready: asyncio.Future[None] = loop.create_future()
        reading = self.stream.lacks == select.POLLIN
        (loop.add_reader if reading else loop.add_writer)(fd, _set, ready)
        try:
            await ready
        finally:
            (loop.remove_reader if reading else loop.remove_writer)(fd)

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise LimitReached(f"the client stood still for {self._stall_s:g} s") from None


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
