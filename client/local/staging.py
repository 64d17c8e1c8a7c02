"""This client's staging memory: saves are copied into slots of it, the daemon copies them out.

A slot is filled with as many payloads, or as much of a large one, as it takes; messages tell the
daemon what lies where. While it copies what one message told of, the client fills on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import DaemonUnavailable, LimitReached
from ...proto.limits import STAGED_MESSAGE_BYTES
from ...proto.payload import FlatBytes, copy_crc32c
from ..wire.deadline import Deadline
from ..wire.messages import results_of
from .calls import Line, LocalCalls

#: Large enough for most payloads in one piece, small enough that there are several.
SLOT_BYTES: Final = 8 * 2**20
#: What one message tells of, unless a payload is larger: large enough that a message costs little
#: beside its copy, small enough that the daemon begins early and copies it from the cache.
MESSAGE_BYTES: Final = STAGED_MESSAGE_BYTES
_MADV_POPULATE_WRITE: Final = 23
_libc: Final = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
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
        self._slots: Final = len(self._free)
        self._changed = threading.Condition()
        self._closed = False
        # What a first copy into each page would take otherwise: three times as long as the copy.
        threading.Thread(target=_populate, args=(self._view,), daemon=True).start()

    def take_free(self) -> int | None:
        """The offset of a free slot, if there is one. Raises LimitReached."""
        with self._changed:
            if self._closed:
                raise LimitReached(_GIVEN_BACK)
            return self._free.pop() if self._free else None

    def take_all(self, length_bytes: int) -> list[int]:
        """The offsets of the slots that `length_bytes` fill. Empty: too few are free, or they would
        be more than half of all."""
        slots = -(-length_bytes // self.slot_bytes)
        with self._changed:
            if self._closed or slots > len(self._free) or 2 * slots > self._slots:
                return []
            return [self._free.pop() for _ in range(slots)]

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


def _populate(view: memoryview) -> None:
    """Put the pages of a mapping, for which the daemon has the memory, into this process's table.
    A kernel before 5.14 does it with the first copies. Without the interpreter's lock."""
    try:
        with view[:] as held:  # a mapping that is looked at is not unmapped
            start = ctypes.c_char.from_buffer(held)
            _libc.madvise(ctypes.addressof(start), len(held), _MADV_POPULATE_WRITE)
            del start
    except (ValueError, BufferError):
        return  # given back already


def save(
    memory: StagingMemory,
    calls: LocalCalls,
    opening: pb.SaveStagedRequest,
    payloads: Sequence[FlatBytes],
    deadline: Deadline,
) -> list[pb.SaveResult]:
    """Save `payloads` (flat bytes) through `memory`: the next slot is filled while the daemon
    empties those before it. `opening` says what they are; it is added to.

    Raises PrefixdError; OSError: there is no connection to the daemon, and nothing was sent.
    """
    return _StagedSave(memory, deadline).run(calls, opening, payloads)


class _StagedSave:
    """One save: the slots that it holds, and the responses so far."""

    def __init__(self, memory: StagingMemory, deadline: Deadline) -> None:
        self._memory = memory
        self._deadline = deadline
        #: of the requests that are not answered yet, oldest first: the slot that is free then
        self._slots: deque[int] = deque()
        #: free ones that are this save's
        self._ready: list[int] = []
        #: they were enough for all of it: the daemon need not tell when it has emptied one
        self._enough = False
        self._line: Line | None = None
        self._results: list[pb.SaveResult] = []

    def run(
        self, calls: LocalCalls, opening: pb.SaveStagedRequest, payloads: Sequence[FlatBytes]
    ) -> list[pb.SaveResult]:
        self._ready = self._memory.take_all(sum(map(len, payloads)))
        self._enough = bool(self._ready)
        filled = _filled(self._memory, self._take, opening, payloads)
        try:
            # Before there is a line: others may have the slots for long, and the daemon hangs up
            # on a client that connects and says nothing.
            first = self._expect(*next(filled))
            with calls.line(self._deadline.left_s()) as line:
                self._line = line
                self._send(line, first)
                for slot, request in filled:
                    self._send(line, self._expect(slot, request))
                while not self._results:
                    self._receive(line)
            return self._results
        finally:
            filled.close()
            for slot in (*self._slots, *self._ready):
                self._memory.give(slot)

    def _take(self) -> int:
        """A free slot: another one, or one that the daemon has emptied."""
        if self._ready:
            return self._ready.pop()
        while (slot := self._memory.take_free()) is None:
            if self._line is None or not self._slots:
                return self._memory.take(self._deadline)  # others have them all
            self._receive(self._line)
        return slot

    def _expect(self, slot: int | None, request: pb.SaveStagedRequest) -> pb.SaveStagedRequest:
        """Each answer wakes this process while the daemon has more to do: it is told of slots
        only, of none if there are enough, and of the last one with the results."""
        if slot is not None:
            self._slots.append(slot)
        request.quiet = slot is None or request.last or self._enough
        return request

    def _send(self, line: Line, request: pb.SaveStagedRequest) -> None:
        try:
            line.send(pb.LocalRequest(save_staged=request), self._deadline.left_s())
        except DaemonUnavailable:
            while True:  # it hung up, and before that said why
                self._receive(line)

    def _receive(self, line: Line) -> None:
        response = line.receive(self._deadline.left_s()).save_staged
        if response.parts_copied:
            self._memory.give(self._slots.popleft())
        self._results += results_of(response)


def _filled(
    memory: StagingMemory,
    take: Callable[[], int],
    request: pb.SaveStagedRequest,
    payloads: Sequence[FlatBytes],
) -> Generator[tuple[int | None, pb.SaveStagedRequest], None, None]:
    """Requests that say what was copied where, `request` first, each with the slot that nothing
    more will be told of, if there is one. The caller gives each slot back."""
    left_bytes = sum(map(len, payloads))
    slot: int | None = None
    used_bytes = told_bytes = 0
    #: what the next request tells of: item, offset, length, is it the last part, CRC32C
    parts: list[tuple[int, int, int, bool, int]] = []
    try:
        if left_bytes > MESSAGE_BYTES:
            # The daemon finds room for all of it while the first of it is copied here.
            slot = take()
            yield None, request
            request = pb.SaveStagedRequest()
        for item, payload in enumerate(payloads):
            crc, offset_bytes, payload_bytes = 0, 0, len(payload)
            while offset_bytes < payload_bytes:
                if slot is None:
                    slot, used_bytes = take(), 0
                room_bytes = memory.slot_bytes - used_bytes
                whole = not offset_bytes and payload_bytes <= room_bytes
                piece = payload if whole else payload[offset_bytes : offset_bytes + room_bytes]
                piece_bytes = len(piece)
                if parts and told_bytes + piece_bytes > MESSAGE_BYTES:
                    yield None, _telling(request, parts)
                    request, parts, told_bytes = pb.SaveStagedRequest(), [], 0
                place = slot + used_bytes
                crc = copy_crc32c(memory.room(place, piece_bytes), piece, crc)
                offset_bytes += piece_bytes
                used_bytes += piece_bytes
                told_bytes += piece_bytes
                left_bytes -= piece_bytes
                last = offset_bytes == payload_bytes
                parts.append((item, place, piece_bytes, last, crc if last else 0))
                if used_bytes == memory.slot_bytes or not left_bytes:
                    request.last = not left_bytes
                    full, slot = slot, None
                    yield full, _telling(request, parts)
                    request, parts, told_bytes = pb.SaveStagedRequest(), [], 0
    finally:
        if slot is not None:
            memory.give(slot)


def _telling(
    request: pb.SaveStagedRequest, parts: Sequence[tuple[int, int, int, bool, int]]
) -> pb.SaveStagedRequest:
    """`request` with these parts, column by column."""
    items, offsets, lengths, last_parts, crc32c = zip(*parts, strict=True)
    request.items.extend(items)
    request.staging_offset_bytes.extend(offsets)
    request.length_bytes.extend(lengths)
    request.last_parts.extend(last_parts)
    request.payload_crc32c.extend(crc32c)
    return request
