"""Payloads that lie in a client's own memory, which it lends for a save: copied out of its process.

Cross-memory attach (process_vm_readv(2)): one copy, no memory between, and no first page to be
touched. The kernel allows it for processes of the same user, if neither its Yama module nor a
container's PID namespace keeps them apart.

What is read there is the client's word only while it lends the memory: a client may give up, or
die, and its process number be another's. So it names a random token, which it overwrites before
it uses the memory again. A turn reads the token before its first copy and after its last one, and
seals nothing unless it was there both times.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

from ...proto import limits
from ...proto.errors import PrefixdError, UnreadableMemory
from ...proto.payload import address_of, unset_bytearray
from .devices import Devices
from .writes import Write

#: Copied and checksummed piece by piece, so that the checksum finds its bytes in the cache.
_PIECE_BYTES: Final = limits.CHUNK_BYTES
#: Of a client's memory, so many ranges are read by one call (IOV_MAX).
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


class LentMemory:
    """What one process lends for one save. On any thread."""

    def __init__(self, pid: int, token: bytes, token_address: int) -> None:
        self._pid = pid
        self._token = token
        self._token_address = token_address

    def reach(self, payloads: Iterable[LentPayload]) -> None:
        """Raises UnreadableMemory unless it is lent, and each range of these begins in memory that
        can be read."""
        self.prove()
        begins = [address for payload in payloads for address in payload.addresses]
        for start in range(0, len(begins), _RANGES):
            some = begins[start : start + _RANGES]
            self.read(memoryview(bytearray(len(some))), some, [1] * len(some))

    def prove(self) -> None:
        """Raises UnreadableMemory unless the token is where the client put it."""
        found = bytearray(len(self._token))
        self.read(memoryview(found), (self._token_address,), (len(found),))
        if not hmac.compare_digest(found, self._token):
            raise UnreadableMemory("the memory is not lent any more")

    def read(self, room: memoryview, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """Fill `room` from ranges that are as long together, `_RANGES` of them at most. Raises
        UnreadableMemory.

        May take as long as the client likes: a page of its memory may be one that it brings itself
        (userfaultfd, FUSE).
        """
        ranges = (_Range * len(addresses))(*map(_Range, addresses, lengths))
        with address_of(room, writable=True) as to:
            here = _Range(to, len(room))
            came_bytes = _process_vm_readv(
                *(self._pid, ctypes.byref(here), 1),
                *(ctypes.byref(ranges), len(ranges), 0),
            )
            problem = ctypes.get_errno()
        if came_bytes < 0:
            raise UnreadableMemory(
                f"the client's memory: {_WHY.get(problem, os.strerror(problem))}"
            )
        if came_bytes != len(room):
            raise UnreadableMemory(f"{came_bytes} of {len(room)} bytes could be read there")


_WHY: Final = {
    errno.EPERM: "this daemon may not read it (another user, Yama's ptrace_scope, seccomp)",
    errno.ESRCH: "the process that lent it is not there, or in another PID namespace",
    errno.EFAULT: "there is nothing that could be read at that address",
}


class LentPayload:
    """The ranges of one payload, read from the first byte to the last."""

    def __init__(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        self.addresses: Final = addresses
        self._lengths = lengths
        self._ends = list(accumulate(lengths))
        #: the range that the next byte lies in, and how much of all has been taken
        self._at = 0
        self._taken_bytes = 0
        self.length_bytes: Final = self._ends[-1] if self._ends else 0

    @property
    def left_bytes(self) -> int:
        return self.length_bytes - self._taken_bytes

    def take(self, most_bytes: int) -> tuple[list[int], list[int]]:
        """The addresses and lengths of the next ranges: so many bytes together, or fewer."""
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


class LentTurn:
    """Some payloads of a save on their way from a client's memory to where they will lie: a turn of
    `Incoming`."""

    def __init__(
        self,
        memory: LentMemory,
        devices: Devices,
        writes: Sequence[Write],
        payloads: Sequence[LentPayload],
    ) -> None:
        self.writes: Final[Sequence[Write]] = writes
        #: It watches its own writing: what a client makes it wait for is not the device's fault.
        self.tier: Final = None
        self._memory = memory
        self._devices = devices
        self._payloads = payloads

    def take(self) -> PrefixdError | None:
        copied: list[Write] = []
        try:
            self._memory.prove()
            for write, payload in zip(self.writes, self._payloads, strict=True):
                try:
                    self._copy(write, payload)
                    copied.append(write)
                except PrefixdError:
                    raise
                except Exception as problem:  # of one save; whoever waits for the others is told
                    write.fail(problem)
            self._memory.prove()
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
        """The client is told of the whole only."""

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
                self._memory.read(room, addresses, lengths)
                writer.filled(len(room))
                continue
            if scratch is None:
                scratch = memoryview(unset_bytearray(most_bytes))
            addresses, lengths = payload.take(most_bytes)
            came = scratch[: sum(lengths)]
            self._memory.read(came, addresses, lengths)
            with self._devices.under_way(entry.tier):
                writer.write(came)


def turns_of(
    memory: LentMemory,
    devices: Devices,
    writes: Sequence[Write],
    payloads: Sequence[LentPayload],
    turn_bytes: int,
) -> list[LentTurn]:
    """Turns of about so many bytes each."""
    turns: list[LentTurn] = []
    start, taken_bytes = 0, 0
    for end, payload in enumerate(payloads, start=1):
        taken_bytes += payload.length_bytes
        if taken_bytes >= turn_bytes or end == len(payloads):
            turns.append(LentTurn(memory, devices, writes[start:end], payloads[start:end]))
            start, taken_bytes = end, 0
    return turns
