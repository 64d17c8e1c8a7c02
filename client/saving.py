"""How saves leave: payloads packed into messages, and the queue of the saves that wait.

The messages of a save are encoded here rather than by protobuf, which would copy every payload
three times on its way into a message (into `bytes`, into its arena, out of it; a quarter of the
time of a save). A part is encoded by protobuf without its data and the data appended as the
field that it is, so that the bytes of a payload are copied once, into the message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from ..proto import prefixd_pb2 as pb
from ..proto.record import crc32c

T = TypeVar("T")

_LENGTH_DELIMITED: Final = 2
#: What a message and its part need beside the data, generously.
_OVERHEAD_BYTES: Final = 128


def _tag(field: int) -> bytes:
    """What announces a field of bytes or a message on the wire (fields below 16)."""
    return bytes([field << 3 | _LENGTH_DELIMITED])


# Save and Write streams number their parts alike, so that one packer does for both.
_PARTS_TAG: Final = _tag(pb.SaveRequest.PARTS_FIELD_NUMBER)
_DATA_TAG: Final = _tag(pb.WritePart.DATA_FIELD_NUMBER)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def pack(
    opening: bytes,
    labels: Sequence[pb.WritePart],
    payloads: Sequence[memoryview],
    *,
    chunk_bytes: int,
    max_message_bytes: int,
) -> Iterator[bytes]:
    """The encoded messages of a Save or Write stream.

    `opening` is the encoded first message without parts, `labels` say which item or token each
    of `payloads` (flat bytes, referenced until the last message is out) belongs to. Parts are
    at most `chunk_bytes`; a message holds one, or as many small ones as make up a chunk. The
    CRC32C of a payload is taken while it is cut, a chunk at a time, while that is in the cache.
    """
    chunk_bytes = min(chunk_bytes, max_message_bytes - _OVERHEAD_BYTES)
    pieces: list[bytes | memoryview] = [opening]
    size_bytes = len(opening)
    for label, payload in zip(labels, payloads, strict=True):
        encoded_label = label.SerializeToString()
        crc = 0
        for offset in range(0, len(payload), chunk_bytes):
            data = payload[offset : offset + chunk_bytes]
            full = size_bytes >= chunk_bytes
            if full or size_bytes + len(data) + _OVERHEAD_BYTES > max_message_bytes:
                yield b"".join(pieces)
                pieces, size_bytes = [], 0
            crc = crc32c(data, crc)
            part = pb.WritePart(offset_bytes=offset)
            if offset + len(data) == len(payload):
                part.last, part.payload_crc32c = True, crc
            head = encoded_label + part.SerializeToString() + _DATA_TAG + _varint(len(data))
            length_bytes = len(head) + len(data)
            pieces += [_PARTS_TAG, _varint(length_bytes), head, data]
            size_bytes += length_bytes + _OVERHEAD_BYTES
    yield b"".join(pieces)


class SaveQueue:
    """Does asynchronous saves one after the other, in the order in which they came.

    One at a time: a chain's later blocks follow its earlier ones, and one stream fills the
    connection. Bounded: what does not fit is not taken. Thread-safe.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._changed = threading.Condition()
        self._pending = 0
        self._dropping = False
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefixd-saver")

    def submit(self, save: Callable[[], T], drop: Callable[[], T]) -> Future[T]:
        """`save()` in its turn, or `drop()` at once if too much is waiting. Never blocks.

        What they return or raise is the future's. A future that is cancelled in time is not
        saved.
        """
        future: Future[T] = Future()
        with self._changed:
            taken = self._pending < self._max_pending and not self._dropping
            if taken:
                self._pending += 1
                self._worker.submit(self._run, future, save, drop)
        if not taken:
            _resolve(future, drop)
        return future

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is pending. False: it took longer than that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def drop_pending(self) -> None:
        """From now on whatever is waiting, or comes, is dropped."""
        with self._changed:
            self._dropping = True

    def close(self) -> None:
        """Wait for the save that is under way, which the caller has seen to the end of."""
        self._worker.shutdown(wait=True)

    def _run(self, future: Future[T], save: Callable[[], T], drop: Callable[[], T]) -> None:
        try:
            _resolve(future, drop if self._dropping else save)
        finally:
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()


def _resolve(future: Future[T], action: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as problem:
        future.set_exception(problem)
