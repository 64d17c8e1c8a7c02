"""Payloads: their layout and checksum, the pieces that they lie in, and copies of them.

The native kernel copies and computes the checksum in one pass, without the GIL (`kernel`). Without
it: a slice assignment is as fast as the machine, but holds the GIL: 5 MiB stop an event loop for
a quarter of a millisecond. Copies of `RELEASE_BYTES` and more go through `ctypes.memmove` here,
which releases the GIL and reaches the same 12-19 GB/s (`preadv` from a memfd: 7-9). Finding the two
addresses takes 4 us, so small copies stay slice assignments.

Both sides check layouts and token ids here. How the daemon stores them is in `tiers/rows.py`.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from fastcrc import crc32

from .errors import InvalidSize
from .kernel import native
from .keys import Key, Namespace, block_key_of_bytes, prefix_key_of_bytes
from .limits import MAX_LAYERS, MAX_PAYLOAD_BYTES, MAX_TOKEN_IDS_BYTES
from .tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

RELEASE_BYTES: Final = 256 * 2**10
#: Copied and checksummed piece by piece, so that the checksum finds its bytes in the cache. Where
#: memcpy of 5 MiB has speed 1, both together have 0.82, and 0.85 in pieces of 0.25 to 1 MiB
#: (tests/bench/bench_checksums.py).
_PIECE_BYTES: Final = 2**20
_MADV_POPULATE_READ: Final = 22
_SIMPLE: Final = 0
_WRITABLE: Final = 1

# ---- checksum

#: CRC32C (Castagnoli, as in iSCSI) of any contiguous buffer, continuing the second argument. It
#: releases the GIL from 16 KiB on. Both forms use carry-less multiplication where the processor has
#: it, which takes 0.6 of the time of the processor's own CRC32C instruction
#: (tests/bench/bench_checksums.py).
crc32c = native.crc32c if native else crc32.iscsi


# ---- layout


def check_layout(payload_bytes: int, layer_count: int) -> None:
    """Raises `InvalidSize` unless a payload can have this size and this many equal layers."""
    if not 0 < payload_bytes <= MAX_PAYLOAD_BYTES:
        raise InvalidSize(f"a payload has 1 ... {MAX_PAYLOAD_BYTES} bytes, not {payload_bytes}")
    if not 0 <= layer_count <= MAX_LAYERS:
        raise InvalidSize(f"a payload has 0 ... {MAX_LAYERS} layers, not {layer_count}")
    if layer_count and payload_bytes % layer_count:
        raise InvalidSize(f"{payload_bytes} bytes are not {layer_count} equal layers")


def layer_slice(payload_bytes: int, layer_count: int, layer: int) -> slice:
    """Where layer `layer` lies in the payload. Raises `InvalidSize` if there is no such layer."""
    check_layout(payload_bytes, layer_count)
    if not 0 <= layer < layer_count:
        raise InvalidSize(f"there is no layer {layer} of {layer_count}")
    layer_bytes = payload_bytes // layer_count
    return slice(layer * layer_bytes, (layer + 1) * layer_bytes)


# ---- token ids


def check_token_ids(token_ids_bytes: int) -> None:
    """Raises `InvalidSize` unless an entry can have this many bytes of token ids."""
    if token_ids_bytes > MAX_TOKEN_IDS_BYTES or token_ids_bytes % TOKEN_BYTES:
        raise InvalidSize(
            f"token ids are at most {MAX_TOKEN_IDS_BYTES} bytes, {TOKEN_BYTES} each, "
            f"not {token_ids_bytes}"
        )


def verify_token_ids(
    namespace: Namespace,
    key: Key,
    token_ids: Buffer,
    parent: Key | None = None,
    index: int | None = None,
) -> bool:
    """Is `key` the key of these stored token ids?

    Without `index` the key is that of a prefix entry. With `index` it is that of this block of a
    chain, after `parent` (None: the namespace's root, before block 0).
    """
    if index is None:
        return prefix_key_of_bytes(namespace, token_ids) == key
    return block_key_of_bytes(namespace.root if parent is None else parent, index, token_ids) == key


# ---- pieces


class Pieces:
    """Bytes that lie in several places: what a flat memoryview is to those that lie in one.

    `len`, slices, `readonly` and `tobytes` are those of a memoryview. A slice copies nothing; it is
    a memoryview if all of it lies in one view.
    """

    __slots__ = ("_ends", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        """`views`: one-dimensional, of unsigned bytes, none of them empty."""
        self.views: Final = views
        self._ends: Final = list(accumulate(map(len, views)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def nbytes(self) -> int:
        return len(self)

    @property
    def readonly(self) -> bool:
        return any(view.readonly for view in self.views)

    def tobytes(self) -> bytes:
        return b"".join(self.views)

    def __getitem__(self, part: slice) -> FlatBytes:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a part of pieces has no steps")
        if not start and stop == len(self):
            return self
        found: list[memoryview] = []
        number = bisect_right(self._ends, start)
        while start < stop:
            view, end = self.views[number], self._ends[number]
            first = start - (end - len(view))
            taken = view[first : first + stop - start]
            found.append(taken)
            start += len(taken)
            number += 1
        return found[0] if len(found) == 1 else Pieces(found)


FlatBytes: TypeAlias = memoryview | Pieces


def views_of(data: FlatBytes) -> Sequence[memoryview]:
    """The views that `data` consists of, in order."""
    return data.views if isinstance(data, Pieces) else (data,)


def buffers_of(data: Buffer | Pieces) -> Buffer | Sequence[memoryview]:
    """`data` as the native kernel takes it."""
    return data.views if isinstance(data, Pieces) else data


def all_buffers_of(data: Sequence[FlatBytes]) -> Sequence[Buffer | Sequence[memoryview]]:
    """`buffers_of` each."""
    if Pieces not in set(map(type, data)):
        return cast("Sequence[memoryview]", data)  # without a call for each
    return [buffers_of(each) for each in data]


def pairs(one: FlatBytes, other: FlatBytes) -> Iterator[tuple[memoryview, memoryview]]:
    """The two buffers side by side, cut wherever either of them has a seam.

    Raises ValueError unless they have the same length.
    """
    if len(one) != len(other):
        raise ValueError(f"{len(other)} bytes do not fill {len(one)}")
    if isinstance(other, memoryview):
        start = 0
        for view in views_of(one):
            end = start + len(view)
            yield view, other[start:end]
            start = end
        return
    ones, others = iter(views_of(one)), iter(views_of(other))
    here, there = memoryview(b""), memoryview(b"")
    for _ in range(len(views_of(one)) + len(views_of(other))):
        here, there = here or next(ones, here), there or next(others, there)
        both = min(len(here), len(there))
        if not both:
            return
        yield here[:both], there[:both]
        here, there = here[both:], there[both:]


# ---- copies


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable ABI: the only way to the address of a read-only buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_new_bytearray.restype = ctypes.py_object


def unset_bytearray(length_bytes: int) -> bytearray:
    """A bytearray with undefined content; write it before you read it.

    `bytearray(length_bytes)` also zeroes it, which takes as long as the copy into it.
    """
    made: bytearray = _new_bytearray(None, length_bytes)
    return made


@contextmanager
def address_of(buffer: Buffer, *, writable: bool = False) -> Iterator[int]:
    """The address of a contiguous buffer, which stays exported until the context ends.

    Raises BufferError if the buffer is not contiguous, or if it is read-only and `writable` is set.
    """
    exported = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(exported), _WRITABLE if writable else _SIMPLE)
    try:
        yield exported.buf or 0
    finally:
        _release_buffer(ctypes.byref(exported))


@contextmanager
def addresses_of(buffers: Sequence[Buffer]) -> Iterator[list[int]]:
    """`address_of` many buffers, for reading."""
    exported = (_PyBuffer * len(buffers))()
    done = 0
    try:
        for buffer, slot in zip(buffers, exported, strict=True):
            _get_buffer(buffer, ctypes.byref(slot), _SIMPLE)
            done += 1
        yield [slot.buf or 0 for slot in exported]
    finally:
        for slot in exported[:done]:
            _release_buffer(ctypes.byref(slot))


def copy(destination: FlatBytes, source: Buffer | Pieces) -> None:
    """Copy `source` into `destination`. Raises ValueError if their lengths differ."""
    if native:
        native.copy(buffers_of(destination), buffers_of(source))
        return
    if isinstance(destination, Pieces) or isinstance(source, Pieces):
        whole = source if isinstance(source, Pieces) else _bytes_of(destination, source)
        for room, part in pairs(destination, whole):
            copy(room, part)
        return
    data = _bytes_of(destination, source)
    if len(data) < RELEASE_BYTES:
        destination[:] = data
        return
    with address_of(destination, writable=True) as to, address_of(data) as at:
        ctypes.memmove(to, at, len(data))


def copy_crc32c(destination: FlatBytes, source: Buffer | Pieces, crc: int = 0) -> int:
    """`copy`, and return the CRC32C of what is in `destination` afterwards, continuing `crc`."""
    if native:
        return native.copy_crc32c(buffers_of(destination), buffers_of(source), crc)
    if isinstance(source, Pieces):
        for room, part in pairs(destination, source):
            crc = copy_crc32c(room, part, crc)
        return crc
    if isinstance(destination, Pieces):
        # Written out for speed: a page of an engine consists of many pieces.
        flat = _bytes_of(destination, source)
        start = 0
        for room in destination.views:
            end = start + len(room)
            if end - start < RELEASE_BYTES:
                room[:] = flat[start:end]
                crc = crc32c(room, crc)
            else:
                crc = copy_crc32c(room, flat[start:end], crc)
            start = end
        return crc
    data = _bytes_of(destination, source)
    if len(data) < RELEASE_BYTES:
        destination[:] = data
        return crc32c(destination, crc)
    with address_of(destination, writable=True) as to, address_of(data) as at:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = destination[start : start + _PIECE_BYTES]
            ctypes.memmove(to + start, at + start, len(piece))
            crc = crc32c(piece, crc)
    return crc


def prefault(views: Sequence[memoryview]) -> None:
    """Put the pages of shared mappings into this process's page table, without the GIL.

    This takes 0.1 ms per MiB, which the first copy of each page takes otherwise. Kernels before
    5.14 do nothing here. No view may be empty.
    """
    page = mmap.PAGESIZE
    with addresses_of(views) as addresses:
        for start, view in zip(addresses, views, strict=True):
            before = start % page
            _madvise(start - before, before + view.nbytes, _MADV_POPULATE_READ)


def crc32c_of(data: FlatBytes, crc: int = 0) -> int:
    """The CRC32C of `data`, continuing `crc`."""
    for view in views_of(data):
        crc = crc32c(view, crc)
    return crc


def _bytes_of(destination: FlatBytes, source: Buffer) -> memoryview:
    """`source` as a view of bytes. Raises ValueError unless it fills `destination` exactly."""
    data = memoryview(source)
    if data.format != "B" or data.ndim != 1:
        data = data.cast("B")
    fills = isinstance(destination, Pieces) or destination.format == "B"
    if len(data) != len(destination) or not fills:
        raise ValueError(f"{data.nbytes} bytes do not fill {destination.nbytes}")
    return data
