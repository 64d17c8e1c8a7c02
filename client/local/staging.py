"""This client's staging memory: saves are copied into slots of it, the daemon copies them out.

A slot is filled with as many payloads, or as much of a large one, as it takes; one message tells
the daemon what lies where. While it copies one slot, the client fills the next.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import grpc

from ...proto import prefixd_pb2 as pb
from ...proto import prefixd_pb2_grpc as pb_grpc
from ...proto.copying import copy_crc32c
from ...proto.errors import LimitReached, PrefixdError
from ..deadline import Deadline

#: Large enough that a message costs little beside its copy, small enough to stay in the cache.
SLOT_BYTES: Final = 8 * 2**20
_GIVEN_BACK: Final = "the staging memory was given back"


class StagingMemory:
    """The mapping and its free slots. Thread-safe; takes over `fd`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        try:
            self._mapping = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        self._view = memoryview(self._mapping)
        self.slot_bytes: Final = min(SLOT_BYTES, size_bytes)
        self._free = deque(range(0, size_bytes - self.slot_bytes + 1, self.slot_bytes))
        self._changed = threading.Condition()
        self._closed = False

    def take(self, deadline: Deadline) -> int:
        """The offset of a free slot; waits for one. Raises DeadlineExceeded, LimitReached."""
        with self._changed:
            while not self._free:
                if self._closed:
                    raise LimitReached(_GIVEN_BACK)
                self._changed.wait(deadline.left_s())
            return self._free.popleft()

    def give(self, slot: int) -> None:
        """A slot is no longer looked at by anybody."""
        with self._changed:
            if not self._closed:
                self._free.append(slot)
                self._changed.notify()

    def room(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Raises LimitReached."""
        try:
            return self._view[offset_bytes : offset_bytes + length_bytes]
        except ValueError:
            raise LimitReached(_GIVEN_BACK) from None

    def close(self) -> None:
        """Unmap it, now or when the last copy into it is done."""
        with self._changed:
            self._closed = True
            self._free.clear()
            self._changed.notify_all()
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:
            return


class StagedSave:
    """The messages of one SaveStaged call, and the slots that they are under way in."""

    def __init__(
        self,
        memory: StagingMemory,
        header: pb.SaveHeader,
        payloads: Sequence[memoryview],
        deadline: Deadline,
    ) -> None:
        self._memory = memory
        self._header = header
        self._payloads = payloads
        self._deadline = deadline
        self._lock = threading.Lock()
        #: of the messages that were sent and not answered, oldest first
        self._slots: deque[int] = deque()
        self._over = False
        #: Why not everything was sent; None: it was.
        self.problem: PrefixdError | None = None

    def run(self, stub: pb_grpc.CacheStub, timeout_s: float) -> list[pb.SaveResult]:
        """Make the call. Raises grpc.RpcError, DeadlineExceeded, LimitReached."""
        call = stub.SaveStaged(self.requests(), timeout=timeout_s)
        results: list[pb.SaveResult] = []
        try:
            for response in call:
                if response.parts_copied:
                    self.answered()
                results.extend(response.results)
        except grpc.RpcError:
            if self.problem is None:
                raise  # else the daemon only says that something is missing
        finally:
            call.cancel()  # no effect once it has ended
            self.abandon()
        if self.problem is not None:
            raise self.problem
        return results

    def requests(self) -> Iterator[pb.SaveStagedRequest]:
        """What gRPC sends, in its own thread: fills slots while the daemon empties others.

        Ends early when no slot gets free in time, see `problem`, or when the call is over.
        """
        try:
            yield from self._messages()
        except PrefixdError as problem:
            self.problem = problem

    def _messages(self) -> Iterator[pb.SaveStagedRequest]:
        request = pb.SaveStagedRequest(header=self._header)
        filling: int | None = None
        used_bytes = 0
        try:
            for item, payload in enumerate(self._payloads):
                crc, offset_bytes = 0, 0
                while offset_bytes < len(payload):
                    if filling is None:
                        filling, used_bytes = self._memory.take(self._deadline), 0
                    left_bytes = self._memory.slot_bytes - used_bytes
                    piece = payload[offset_bytes : offset_bytes + left_bytes]
                    place = filling + used_bytes
                    crc = copy_crc32c(self._memory.room(place, len(piece)), piece, crc)
                    offset_bytes += len(piece)
                    used_bytes += len(piece)
                    request.parts.add(
                        item=item,
                        staging_offset_bytes=place,
                        length_bytes=len(piece),
                        last=offset_bytes == len(payload),
                        payload_crc32c=crc,
                    )
                    if used_bytes == self._memory.slot_bytes:
                        if not self._send(filling):
                            return
                        filling = None
                        yield request
                        request = pb.SaveStagedRequest()
            if filling is not None and self._send(filling):
                filling = None
                yield request
        finally:
            if filling is not None:
                self._memory.give(filling)

    def _send(self, slot: int) -> bool:
        """False: the call is over, and the slot still the caller's."""
        with self._lock:
            if not self._over:
                self._slots.append(slot)
            return not self._over

    def answered(self) -> None:
        """The daemon has copied the oldest message that was not answered."""
        with self._lock:
            self._memory.give(self._slots.popleft())

    def abandon(self) -> None:
        """The call is over, and the daemon looks at its slots no more. One that is being filled
        at this moment is given back by whoever fills it."""
        with self._lock:
            self._over = True
            while self._slots:
                self._memory.give(self._slots.popleft())
