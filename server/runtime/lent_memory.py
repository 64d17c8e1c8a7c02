"""Payloads in a client's own memory, which it lends for a save: copied out of its process.

Cross-memory attach (process_vm_readv(2)) needs one copy, no memory between, and touches no new
pages. The kernel allows it for processes of the same user, unless its Yama module or a container's
PID namespace separates them.

What is read there is valid only while the client lends the memory: a client may give up, or die,
and another process may get its process number. So it names a random token, which it overwrites
before it uses the memory again. A turn reads the token before its first copy and after its last
one, and seals nothing unless the token was there both times.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from ...proto import limits
from ...proto.errors import PrefixdError, UnreadableMemory
from ...proto.payload import address_of, unset_bytearray
from .devices import Devices
from .writes import Write

#: Bytes that are copied and then checksummed, while they are in the cache.
_PIECE_BYTES: Final = limits.CHUNK_BYTES
#: Ranges of a client's memory that one call reads at most (IOV_MAX).
_RANGES: Final = 1024


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_uint64), ("length_bytes", ctypes.c_uint64))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_process_vm_readv: Final = _libc.process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
)


@dataclass(slots=True)
class LentMemory:
    """The memory that one process lends for one save. On any thread."""

    pid: int
    token: bytes
    token_address: int

    def reach(self, payloads: Iterable[LentPayload]) -> None:
        """Raises UnreadableMemory unless it is lent and the first byte of each range can be
        read."""
        self.prove()
        begins = [address for payload in payloads for address in payload.addresses]
        for start in range(0, len(begins), _RANGES):
            some = begins[start : start + _RANGES]
            self.read(memoryview(bytearray(len(some))), some, [1] * len(some))

    def prove(self) -> None:
        """Raises UnreadableMemory unless the token is where the client put it."""
        found = bytearray(len(self.token))
        self.read(memoryview(found), (self.token_address,), (len(found),))
        if not hmac.compare_digest(found, self.token):
            raise UnreadableMemory("the memory is not lent any more")

    def read(self, room: memoryview, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill `room` from ranges of the same total length, `_RANGES` of them at most. Raises
        UnreadableMemory.

        A client can make this take as long as it likes: it may itself supply a page of its memory
        (userfaultfd, FUSE).
        """
        ranges = (_Range * len(addresses))(*map(_Range, addresses, lengths))
        with address_of(room, writable=True) as to:
            here = _Range(to, len(room))
            read_bytes = _process_vm_readv(
                *(self.pid, ctypes.byref(here), 1),
                *(ctypes.byref(ranges), len(ranges), 0),
            )
            problem = ctypes.get_errno()
        if read_bytes < 0:
            raise UnreadableMemory(
                f"the client's memory: {_WHY.get(problem, os.strerror(problem))}"
            )
        if read_bytes != len(room):
            raise UnreadableMemory(f"{read_bytes} of {len(room)} bytes could be read there")


_WHY: Final = {
    errno.EPERM: "this daemon may not read it (another user, Yama's ptrace_scope, seccomp)",
    errno.ESRCH: "the process that lent it is not there, or in another PID namespace",
    errno.EFAULT: "there is nothing that could be read at that address",
}


class LentPayload:
    """The ranges of one payload, which is read from its first byte to its last."""

    def __init__(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        self.addresses: Final = addresses
        self._lengths = lengths
        self._ends = list(accumulate(lengths))
        #: the range of the next byte, and how many bytes of the payload have been taken
        self._at = 0
        self._taken_bytes = 0
        self.length_bytes: Final = self._ends[-1] if self._ends else 0

    @property
    def left_bytes(self) -> int:
        return self.length_bytes - self._taken_bytes

    def take(self, most_bytes: int) -> tuple[list[int], list[int]]:
        """The addresses and lengths of the next ranges, `most_bytes` together at most."""
        addresses: list[int] = []
        lengths: list[int] = []
        while most_bytes and self._at < len(self._ends) and len(addresses) < _RANGES:
            end = self._ends[self._at]
            start = end - self._lengths[self._at]
            length_bytes = min(end - self._taken_bytes, most_bytes)
            addresses.append(self.addresses[self._at] + self._taken_bytes - start)
            lengths.append(length_bytes)
            most_bytes -= length_bytes
            self._taken_bytes += length_bytes
            if self._taken_bytes == end:
                self._at += 1
        return addresses, lengths


@dataclass(slots=True)
class LentTurn:
    """A turn of `Incoming` that copies some payloads of a save from a client's memory into the
    store."""

    memory: LentMemory
    devices: Devices
    writes: Sequence[Write]
    payloads: Sequence[LentPayload]

    @property
    def tier(self) -> None:
        """None: `_copy` has its own writing watched. While a client keeps it waiting, the device
        does not hang."""

    def take(self) -> PrefixdError | None:
        copied: list[Write] = []
        try:
            self.memory.prove()
            for write, payload in zip(self.writes, self.payloads, strict=True):
                try:
                    self._copy(write, payload)
                    copied.append(write)
                except PrefixdError:
                    raise
                except Exception as problem:  # fails one save; the others go on
                    write.fail(problem)
            self.memory.prove()
        except PrefixdError as problem:
            return problem
        for write in copied:
            try:
                if write.problem is None and not write.stopping:
                    write.finish(None)
            except Exception as problem:
                write.fail(problem)
        return None

    def then(self) -> None:
        """Does nothing: the client gets one answer for the whole call."""

    def _copy(self, write: Write, payload: LentPayload) -> None:
        writer, entry = write.writer, write.entry
        if payload.length_bytes != entry.payload_bytes:
            write.mismatched(payload.length_bytes)
            return
        scratch: memoryview | None = None
        while payload.left_bytes and not write.stopping:
            most_bytes = min(payload.left_bytes, _PIECE_BYTES)
            room = writer.room(most_bytes)
            if room is not None:
                addresses, lengths = payload.take(len(room))
                room = room[: sum(lengths)]
                self.memory.read(room, addresses, lengths)
                writer.filled(len(room))
                continue
            if scratch is None:
                scratch = memoryview(unset_bytearray(most_bytes))
            addresses, lengths = payload.take(most_bytes)
            piece = scratch[: sum(lengths)]
            self.memory.read(piece, addresses, lengths)
            with self.devices.under_way(entry.tier):
                writer.write(piece)


def turns_of(
    memory: LentMemory,
    devices: Devices,
    writes: Sequence[Write],
    payloads: Sequence[LentPayload],
    turn_bytes: int,
) -> list[LentTurn]:
    """Cut the payloads into turns of about `turn_bytes` each."""
    turns: list[LentTurn] = []
    start, taken_bytes = 0, 0
    for end, payload in enumerate(payloads, start=1):
        taken_bytes += payload.length_bytes
        if taken_bytes >= turn_bytes or end == len(payloads):
            turns.append(LentTurn(memory, devices, writes[start:end], payloads[start:end]))
            start, taken_bytes = end, 0
    return turns
