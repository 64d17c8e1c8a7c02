"""Copies between buffers that let other threads run meanwhile, and their CRC32C.

A slice assignment is as fast as the machine, but holds the GIL: 5 MiB stop an event loop for
a quarter of a millisecond. Here copies of `RELEASE_BYTES` and more go through
`ctypes.memmove`, which releases it and reaches the same 12-19 GB/s (`preadv` from a memfd:
7-9). Finding the two addresses takes 4 us, so that small copies stay slice assignments.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from .layout import crc32c
from .pieces import FlatBytes, Pieces, pairs, views_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

RELEASE_BYTES: Final = 256 * 2**10
#: Copied and checksummed piece by piece, so that the checksum finds its bytes in the cache. The
#: speed of memcpy of 5 MiB is 1: both together 0.82, in pieces of 0.25 to 1 MiB 0.85
#: (tests/bench/bench_checksums.py).
_PIECE_BYTES: Final = 2**20
_MADV_POPULATE_READ: Final = 22
_SIMPLE: Final = 0
_WRITABLE: Final = 1


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable ABI: the one way to the address of a read-only buffer."""

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
    """A bytearray to be written before any of it is read.

    What `bytearray(length_bytes)` does besides, zeroing it, takes as long as the copy into it.
    """
    made: bytearray = _new_bytearray(None, length_bytes)
    return made


@contextmanager
def address_of(buffer: Buffer, *, writable: bool = False) -> Iterator[int]:
    """The address of a contiguous buffer, which stays exported as long as it is used.

    Raises BufferError if the buffer is not contiguous, or read-only and `writable` is asked.
    """
    exported = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(exported), _WRITABLE if writable else _SIMPLE)
    try:
        yield exported.buf or 0
    finally:
        _release_buffer(ctypes.byref(exported))


@contextmanager
def addresses_of(buffers: Sequence[Buffer]) -> Iterator[list[int]]:
    """`address_of` many, which are only read."""
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
    """Copy `source` into `destination`: bytes of the same number, else ValueError."""
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
    """`copy`, and the CRC32C of what then is in `destination`, continuing `crc`."""
    if isinstance(source, Pieces):
        for room, part in pairs(destination, source):
            crc = copy_crc32c(room, part, crc)
        return crc
    if isinstance(destination, Pieces):
        # Written out: a page of an engine is many pieces.
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
    """Put the pages of shared mappings into this process's page table, without the GIL: 0.1 ms a
    MiB, which the first copy of each page takes otherwise. A kernel before 5.14 leaves it to that
    copy. No view is empty."""
    page = mmap.PAGESIZE
    with addresses_of(views) as addresses:
        for start, view in zip(addresses, views, strict=True):
            before = start % page
            _madvise(start - before, before + view.nbytes, _MADV_POPULATE_READ)


def crc32c_of(data: FlatBytes, crc: int = 0) -> int:
    """The CRC32C of all of it, continuing `crc`."""
    for view in views_of(data):
        crc = crc32c(view, crc)
    return crc


def _bytes_of(destination: FlatBytes, source: Buffer) -> memoryview:
    """`source` as bytes. Raises ValueError unless they fill `destination`, bytes as well."""
    data = memoryview(source)
    if data.format != "B" or data.ndim != 1:
        data = data.cast("B")
    fills = isinstance(destination, Pieces) or destination.format == "B"
    if len(data) != len(destination) or not fills:
        raise ValueError(f"{data.nbytes} bytes do not fill {destination.nbytes}")
    return data
