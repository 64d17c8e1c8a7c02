"""This client's staging memory: saves are copied into slots of it, the daemon copies them out.

A slot is filled with as many payloads, or as much of a large one, as it takes; one message tells
the daemon what lies where. While it copies one slot, the client fills the next.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.copying import copy_crc32c
from ...proto.errors import DaemonUnavailable, LimitReached
from ..deadline import Deadline
from .calls import LocalCalls

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

    def take_free(self) -> int | None:
        """The offset of a free slot, if there is one. Raises LimitReached."""
        with self._changed:
            if self._closed:
                raise LimitReached(_GIVEN_BACK)
            return self._free.pop() if self._free else None

    def take(self, deadline: Deadline) -> int:
        """The offset of a free slot; waits for one. Raises DeadlineExceeded, LimitReached."""
        with self._changed:
            while not self._free:
                if self._closed:
                    raise LimitReached(_GIVEN_BACK)
                self._changed.wait(deadline.left_s())
            return self._free.pop()

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


def save(
    memory: StagingMemory,
    calls: LocalCalls,
    opening: pb.SaveStagedRequest,
    payloads: Sequence[memoryview],
    deadline: Deadline,
) -> list[pb.SaveResult]:
    """Save `payloads` (flat bytes) through `memory`: the next slot is filled while the daemon
    empties those before it. `opening` says what they are; it is added to.

    Raises PrefixdError; OSError: there is no line to the daemon, and nothing was asked.
    """
    #: of the requests that were not answered yet, oldest first
    slots: deque[int] = deque()
    results: list[pb.SaveResult] = []
    with calls.line(deadline.left_s()) as line:

        def take() -> int:
            """A free slot: another one, or one that the daemon has emptied."""
            while (slot := memory.take_free()) is None:
                if not slots:
                    return memory.take(deadline)  # others have them all
                receive()
            return slot

        def receive() -> None:
            response = line.receive(deadline.left_s()).save_staged
            if response.parts_copied:
                memory.give(slots.popleft())
            results.extend(response.results)

        try:
            for slot, request in _filled(memory, take, opening, payloads):
                slots.append(slot)
                try:
                    line.send(pb.LocalRequest(save_staged=request), deadline.left_s())
                except DaemonUnavailable:
                    while True:  # it hung up, and before that said why
                        receive()
            while not results:
                receive()
            return results
        finally:
            for slot in slots:
                memory.give(slot)


def _filled(
    memory: StagingMemory,
    take: Callable[[], int],
    request: pb.SaveStagedRequest,
    payloads: Sequence[memoryview],
) -> Iterator[tuple[int, pb.SaveStagedRequest]]:
    """Slots with what was copied into them, and the requests that say so, `request` first.
    Whoever gets a slot gives it back."""
    left_bytes = sum(map(len, payloads))
    slot: int | None = None
    used_bytes = 0
    try:
        for item, payload in enumerate(payloads):
            crc, offset_bytes = 0, 0
            while offset_bytes < len(payload):
                if slot is None:
                    slot, used_bytes = take(), 0
                piece = payload[offset_bytes : offset_bytes + memory.slot_bytes - used_bytes]
                place = slot + used_bytes
                crc = copy_crc32c(memory.room(place, len(piece)), piece, crc)
                offset_bytes += len(piece)
                used_bytes += len(piece)
                left_bytes -= len(piece)
                request.parts.add(
                    item=item,
                    staging_offset_bytes=place,
                    length_bytes=len(piece),
                    last=offset_bytes == len(payload),
                    payload_crc32c=crc,
                )
                if used_bytes == memory.slot_bytes or not left_bytes:
                    request.last = not left_bytes
                    full, slot = slot, None
                    yield full, request
                    request = pb.SaveStagedRequest()
    finally:
        if slot is not None:
            memory.give(slot)
