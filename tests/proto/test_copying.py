"""Copies and their checksums, on both sides of the size from which the GIL is released."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from prefixd.proto import copying
from prefixd.proto.copying import RELEASE_BYTES, address_of, copy, copy_crc32c, unset_bytearray
from prefixd.proto.layout import crc32c

SIZES = [0, 1, RELEASE_BYTES - 1, RELEASE_BYTES, 512 * 2**10 + 1, 3 * 2**20 + 5]


def noise(length_bytes: int) -> bytes:
    return random.Random(length_bytes).randbytes(length_bytes)


@pytest.mark.parametrize("length_bytes", SIZES)
def test_all_bytes_and_no_others_are_copied(length_bytes: int) -> None:
    data = noise(length_bytes)
    for source in (data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        room = bytearray(length_bytes + 20)
        copy(memoryview(room)[7 : 7 + length_bytes], source)
        assert room == bytes(7) + data + bytes(13)


@pytest.mark.parametrize("length_bytes", SIZES)
def test_the_checksum_is_that_of_the_copy_and_continues(length_bytes: int) -> None:
    data = noise(length_bytes)
    room = bytearray(length_bytes)
    assert copy_crc32c(memoryview(room), memoryview(data)) == crc32c(data)
    assert room == data
    assert copy_crc32c(memoryview(room), data, crc32c(b"before")) == crc32c(b"before" + data)


@pytest.mark.parametrize("length_bytes", [16, 4 * RELEASE_BYTES])
def test_wider_items_are_copied_as_bytes(length_bytes: int) -> None:
    data = noise(length_bytes)
    room = bytearray(length_bytes)
    copy(memoryview(room), np.frombuffer(data, np.float32).reshape(4, -1))
    assert room == data


@pytest.mark.parametrize("length_bytes", [100, 2 * RELEASE_BYTES])
@pytest.mark.parametrize("operation", [copy, copy_crc32c])
def test_what_does_not_fit_is_refused(operation: object, length_bytes: int) -> None:
    assert callable(operation)
    room = bytearray(length_bytes)
    for wrong in (length_bytes - 1, length_bytes + 1, 0):
        with pytest.raises(ValueError, match=f"{wrong} bytes do not fill {length_bytes}"):
            operation(memoryview(room), noise(wrong))
    with pytest.raises((TypeError, BufferError)):
        operation(memoryview(bytes(room)), noise(length_bytes))
    assert room == bytes(length_bytes)


def test_large_copies_go_through_a_function_that_releases_the_gil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pythonapi_flag = 0x4  # set on functions that ctypes calls while it holds the GIL
    assert not ctypes.memmove._flags_ & pythonapi_flag  # type: ignore[attr-defined]
    moved: list[int] = []
    memmove = ctypes.memmove

    def counted(to: int, at: int, length_bytes: int) -> None:
        moved.append(length_bytes)
        memmove(to, at, length_bytes)

    monkeypatch.setattr(copying.ctypes, "memmove", counted)
    room = bytearray(RELEASE_BYTES)
    copy(memoryview(room)[1:], bytes(RELEASE_BYTES - 1))
    assert not moved
    copy(memoryview(room), noise(RELEASE_BYTES))
    assert moved == [RELEASE_BYTES]
    assert room == noise(RELEASE_BYTES)


def test_an_address_is_that_of_the_bytes_which_stay_exported() -> None:
    data = bytearray(b"hello")
    with address_of(memoryview(data)[1:]) as address:
        assert ctypes.string_at(address, 4) == b"ello"
        with pytest.raises(BufferError):
            data.append(1)
    data.append(1)
    with pytest.raises(BufferError), address_of(b"read-only", writable=True):
        pytest.fail("a read-only buffer was taken for writing")


@pytest.mark.parametrize("length_bytes", SIZES)
def test_an_unset_bytearray_is_a_bytearray(length_bytes: int) -> None:
    room = unset_bytearray(length_bytes)
    assert type(room) is bytearray
    assert len(room) == length_bytes
    copy(memoryview(room), noise(length_bytes))
    assert room == noise(length_bytes)
    room += b"more"
    assert room == noise(length_bytes) + b"more"
