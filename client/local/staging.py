"""How the payloads of saves get to a daemon on this host: through staging memory, or by lending.

The client copies payloads into slots of its staging memory, and the daemon copies them out. A slot
takes several payloads, or a part of a large one; messages tell the daemon what lies where. While
the daemon copies what one message named, the client goes on filling.

Large payloads are lent instead: the daemon reads them from the memory of this process, for as long
as the call lasts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.kernel import native
from ...proto.limits import LENT_TOKEN_BYTES, MAX_LENT_PIECES, STAGED_MESSAGE_BYTES
from ...proto.payload import (
    FlatBytes,
    Pieces,
    address_of,
    addresses_of,
    all_buffers_of,
    copy_crc32c,
)
from ..wire.deadline import Deadline
from ..wire.framed_calls import REFUSALS, FramedCalls
from ..wire.framed_connection import FramedConnection
from ..wire.messages import results_of

#: Size of a slot: most payloads fit in one piece, and there are several slots.
SLOT_BYTES: Final = 8 * 2**20
#: Most bytes that one message names, unless a payload is larger. Large enough that a message costs
#: little beside its copy; small enough that the daemon begins early and copies from the CPU cache.
MESSAGE_BYTES: Final = STAGED_MESSAGE_BYTES
#: Less is staged: it mostly lies in the CPU cache, and copying it twice takes less time than the
#: kernel needs to find the pages (48 payloads of 2 or 5 MiB: 0.7 of the time; of 192 KiB: 1.2).
LEND_BYTES = 32 * 2**20
_MADV_POPULATE_WRITE: Final = 23
_libc: Final = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class StagingMemory:
    """The staging memory of this session, and its free slots. Thread-safe. It is unmapped when the
    last view of it goes."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """The caller keeps `fd`. Raises OSError, ValueError."""
        self._view: Final = memoryview(mmap.mmap(fd, size_bytes))
        self.slot_bytes: Final = min(SLOT_BYTES, size_bytes)
        self._free = deque(range(0, size_bytes - self.slot_bytes + 1, self.slot_bytes))
        self._slots: Final = len(self._free)
        self._changed = threading.Condition()
        # Otherwise the first copy into each page takes three times as long.
        threading.Thread(target=_populate, args=(self._view,), daemon=True).start()

    def take_free(self) -> int | None:
        """The offset of a free slot, if there is one."""
        with self._changed:
            return self._free.pop() if self._free else None

    def take_all(self, length_bytes: int) -> list[int]:
        """The offsets of enough slots for `length_bytes`. Empty: too few are free, or that would be
        more than half of all slots."""
        slots = -(-length_bytes // self.slot_bytes)
        with self._changed:
            if slots > len(self._free) or 2 * slots > self._slots:
                return []
            return [self._free.pop() for _ in range(slots)]

    def take(self, deadline: Deadline) -> int:
        """The offset of a free slot; waits for one. Raises DeadlineExceeded."""
        with self._changed:
            while not self._free:
                self._changed.wait(deadline.left_s())
            return self._free.pop()

    def give(self, slot: int) -> None:
        """Give back a slot that neither side uses any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def room(self, offset_bytes: int, length_bytes: int) -> memoryview:
        return self._view[offset_bytes : offset_bytes + length_bytes]

    def gather(self, places: Sequence[int], payloads: Sequence[FlatBytes]) -> list[int]:
        """Copy each payload to its place, and return their CRC32Cs."""
        if not native:
            return [
                copy_crc32c(self.room(place, len(payload)), payload)
                for place, payload in zip(places, payloads, strict=True)
            ]
        lengths = list(map(len, payloads))
        return native.gather(self._view, places, lengths, all_buffers_of(payloads), False)


def _populate(view: memoryview) -> None:
    """Map all pages, which the daemon has allocated, into this process at once, without the GIL. A
    kernel before 5.14 can't; then the first copies map them."""
    start = ctypes.c_char.from_buffer(view)  # keeps it mapped until the end
    _libc.madvise(ctypes.addressof(start), len(view), _MADV_POPULATE_WRITE)


def can_lend(payloads: Sequence[FlatBytes]) -> bool:
    """Whether the payloads are large enough to lend, and in few enough pieces."""
    if sum(map(len, payloads)) < LEND_BYTES:
        return False
    return sum(len(_pieces(payload)) for payload in payloads) <= MAX_LENT_PIECES


def save_lent(
    calls: FramedCalls,
    opening: pb.SaveStagedRequest,
    payloads: Sequence[FlatBytes],
    deadline: Deadline,
) -> list[pb.SaveResult]:
    """Save `payloads` from where they lie. `opening`: the first message without parts.

    Raises PrefixdError: UnreadableMemory or LimitReached when they have to be saved in another way;
    OSError: there is no connection to the daemon, and nothing was sent.
    """
    request = pb.SaveLentRequest(token=os.urandom(LENT_TOKEN_BYTES))
    if opening.HasField("reserved"):
        request.reserved.CopyFrom(opening.reserved)
    else:
        request.header.CopyFrom(opening.header)
    views: list[memoryview] = []
    for payload in payloads:
        pieces = _pieces(payload)
        views += pieces
        request.pieces.append(len(pieces))
    request.lengths_bytes.extend(map(len, views))
    token = bytearray(request.token)
    with addresses_of(views) as addresses, address_of(token) as token_address:
        request.addresses.extend(addresses)
        request.token_address = token_address
        try:
            with calls.connection(deadline.left_s()) as connection:
                connection.begin(pb.FramedRequest(save_lent=request), deadline.left_s())
                return list(results_of(connection.response().save_lent))
        finally:
            # From here on the caller may change the memory. The daemon publishes nothing that it
            # copies after the token has gone.
            token[:] = bytes(len(token))


def _pieces(payload: FlatBytes) -> Sequence[memoryview]:
    return payload.views if isinstance(payload, Pieces) else [payload]


def save_staged(
    memory: StagingMemory,
    calls: FramedCalls,
    opening: pb.SaveStagedRequest,
    payloads: Sequence[FlatBytes],
    deadline: Deadline,
) -> list[pb.SaveResult]:
    """Save `payloads` through `memory`: the client fills the next slot while the daemon empties the
    ones before. `opening`: the first message, which parts are added to.

    Raises PrefixdError; OSError: there is no connection to the daemon, and nothing was sent.
    """
    return _StagedSave(memory, deadline).run(calls, opening, payloads)


class _StagedSave:
    """One save: the slots that it holds, and its results."""

    def __init__(self, memory: StagingMemory, deadline: Deadline) -> None:
        self._memory = memory
        self._deadline = deadline
        #: Slots that the daemon is still copying from, oldest first.
        self._slots: deque[int] = deque()
        #: Slots that were taken at the start and not filled yet.
        self._ready: list[int] = []
        #: They are enough for the whole save, so the daemon need not report emptied slots.
        self._enough = False
        self._connection: FramedConnection | None = None
        self._results: list[pb.SaveResult] = []

    def run(
        self, calls: FramedCalls, opening: pb.SaveStagedRequest, payloads: Sequence[FlatBytes]
    ) -> list[pb.SaveResult]:
        self._ready = self._memory.take_all(sum(map(len, payloads)))
        self._enough = bool(self._ready)
        filled = _filled(self._memory, self._take, opening, payloads)
        try:
            # Before there is a connection: other saves may hold the slots for long, and the daemon
            # hangs up on a client that connects and sends nothing.
            first = self._expect(*next(filled))
            with calls.connection(self._deadline.left_s()) as connection:
                self._connection = connection
                self._send(connection, first)
                for slot, request in filled:
                    self._send(connection, self._expect(slot, request))
                while not self._results:
                    self._receive(connection)
            return self._results
        finally:
            filled.close()
            for slot in (*self._slots, *self._ready):
                self._memory.give(slot)

    def _take(self) -> int:
        """A free slot. If there is none, wait until the daemon has emptied one of this save's."""
        if self._ready:
            return self._ready.pop()
        while (slot := self._memory.take_free()) is None:
            if self._connection is None or not self._slots:
                return self._memory.take(self._deadline)  # other saves hold them all
            self._receive(self._connection)
        return slot

    def _expect(self, slot: int | None, request: pb.SaveStagedRequest) -> pb.SaveStagedRequest:
        """Say which requests the daemon answers. Each response wakes this process, so it answers
        only those that empty a slot, and none if there are enough slots. The results stand for the
        last one."""
        if slot is not None:
            self._slots.append(slot)
        request.quiet = slot is None or request.last or self._enough
        return request

    def _send(self, connection: FramedConnection, request: pb.SaveStagedRequest) -> None:
        connection.begin(pb.FramedRequest(save_staged=request), self._deadline.left_s())

    def _receive(self, connection: FramedConnection) -> None:
        try:
            response = connection.response().save_staged
        except REFUSALS:
            if not connection.in_step:  # the daemon waits for the end of what it has refused
                end = pb.SaveStagedRequest(last=True)
                connection.begin(pb.FramedRequest(save_staged=end), self._deadline.left_s())
            raise
        if response.parts_copied:
            self._memory.give(self._slots.popleft())
        self._results += results_of(response)


def _filled(
    memory: StagingMemory,
    take: Callable[[], int],
    request: pb.SaveStagedRequest,
    payloads: Sequence[FlatBytes],
) -> Generator[tuple[int | None, pb.SaveStagedRequest], None, None]:
    """Copy payloads into slots, and yield the messages that name what was copied, `request` first.

    With each comes the slot that it fills up, if it does; the caller gives these back.
    """
    sizes_bytes = list(map(len, payloads))
    #: Where each payload begins if they lie one after the other; then where the last one ends.
    begins = list(accumulate(sizes_bytes, initial=0))
    left_bytes = begins[-1]
    slot: int | None = None
    used_bytes = named_bytes = 0
    #: Of the parts that the next message names: item, place, length, whether it is the last, and
    #: the CRC32C of the payload in the last one.
    items: list[int] = []
    places: list[int] = []
    lengths: list[int] = []
    lasts: list[bool] = []
    crcs: list[int] = []

    def named() -> pb.SaveStagedRequest:
        nonlocal request, named_bytes
        message, request, named_bytes = request, pb.SaveStagedRequest(), 0
        message.items.extend(items)
        message.staging_offset_bytes.extend(places)
        message.length_bytes.extend(lengths)
        message.last_parts.extend(lasts)
        message.payload_crc32c.extend(crcs)
        for column in (items, places, lengths, lasts, crcs):
            column.clear()
        return message

    try:
        if left_bytes > MESSAGE_BYTES:
            # The daemon makes room for the whole save while the first part is copied here.
            slot = take()
            yield None, request
            request = pb.SaveStagedRequest()
        item = offset_bytes = crc = 0
        while left_bytes:
            if slot is None:
                slot, used_bytes = take(), 0
            room_bytes = memory.slot_bytes - used_bytes
            place = slot + used_bytes
            stop = item
            if not offset_bytes:
                # As many whole payloads as slot and message have room for.
                begin = begins[item]
                whole_bytes = min(room_bytes, MESSAGE_BYTES - named_bytes)
                stop = bisect_right(begins, begin + whole_bytes, lo=item) - 1
            if stop > item:
                taken_bytes = begins[stop] - begin
                wholes = [place + each - begin for each in begins[item:stop]]
                items += range(item, stop)
                places += wholes
                lengths += sizes_bytes[item:stop]
                lasts += [True] * (stop - item)
                crcs += memory.gather(wholes, payloads[item:stop])
                item = stop
            else:
                payload = payloads[item]
                taken_bytes = min(sizes_bytes[item] - offset_bytes, room_bytes)
                if items and named_bytes + taken_bytes > MESSAGE_BYTES:
                    yield None, named()
                    continue
                piece = payload[offset_bytes : offset_bytes + taken_bytes]
                crc = copy_crc32c(memory.room(place, taken_bytes), piece, crc)
                offset_bytes += taken_bytes
                last = offset_bytes == sizes_bytes[item]
                items.append(item)
                places.append(place)
                lengths.append(taken_bytes)
                lasts.append(last)
                crcs.append(crc if last else 0)
                if last:
                    item, offset_bytes, crc = item + 1, 0, 0
            used_bytes += taken_bytes
            named_bytes += taken_bytes
            left_bytes -= taken_bytes
            if used_bytes == memory.slot_bytes or not left_bytes:
                request.last = not left_bytes
                full, slot = slot, None
                yield full, named()
    finally:
        if slot is not None:
            memory.give(slot)
