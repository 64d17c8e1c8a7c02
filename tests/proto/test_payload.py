"""Payloads: layout, token ids, checksum, pieces, and copies."""

from __future__ import annotations

import ast
import ctypes
import random
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto import payload
from prefixd.proto.errors import InvalidSize
from prefixd.proto.keys import Namespace, block_keys, prefix_key
from prefixd.proto.limits import MAX_LAYERS
from prefixd.proto.payload import (
    RELEASE_BYTES,
    Pieces,
    address_of,
    copy,
    copy_crc32c,
    crc32c,
    crc32c_of,
    layer_slice,
    pairs,
    unset_bytearray,
    verify_token_ids,
    views_of,
)
from prefixd.proto.tokens import token_bytes

# ---- layers


@given(st.integers(1, MAX_LAYERS), st.integers(1, 10**6))
def test_layers_tile_the_payload(layer_count: int, layer_bytes: int) -> None:
    payload_bytes = layer_count * layer_bytes
    for layer in {0, layer_count // 2, layer_count - 1}:
        where = layer_slice(payload_bytes, layer_count, layer)
        assert (where.start, where.stop) == (layer * layer_bytes, (layer + 1) * layer_bytes)
    assert layer_slice(payload_bytes, layer_count, layer_count - 1).stop == payload_bytes


@pytest.mark.parametrize(
    ("payload_bytes", "layer_count", "layer"),
    [(8, 2, 2), (8, 2, -1), (8, 0, 0), (7, 2, 0), (0, 1, 0)],
)
def test_layers_that_are_none(payload_bytes: int, layer_count: int, layer: int) -> None:
    with pytest.raises(InvalidSize):
        layer_slice(payload_bytes, layer_count, layer)


# ---- token ids

NS = Namespace(b"w" * 32, "f16", b"c" * 32)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 16))
def test_stored_token_ids_give_the_key_back(tokens: list[int], block_tokens: int) -> None:
    assert verify_token_ids(NS, prefix_key(NS, tokens), token_bytes(tokens))
    raw = bytes(token_bytes(tokens))
    raw += b"\xff" * (-len(raw) % (4 * block_tokens))
    parent = None
    for index, key in enumerate(block_keys(NS, tokens, block_tokens, include_partial=True)):
        block = raw[index * block_tokens * 4 : (index + 1) * block_tokens * 4]
        assert verify_token_ids(NS, key, block, parent, index)
        assert not verify_token_ids(NS, key, block, parent, index + 1)
        assert not verify_token_ids(NS, key, block + b"\0\0\0\0", parent, index)
        parent = key


def test_token_ids_of_another_key_are_seen() -> None:
    tokens = [1, 2, 3, 4]
    chain = block_keys(NS, tokens, 2)
    other = replace(NS, salt="other")
    assert not verify_token_ids(NS, prefix_key(NS, tokens), token_bytes([1, 2, 3, 5]))
    assert not verify_token_ids(other, prefix_key(NS, tokens), token_bytes(tokens))
    assert not verify_token_ids(NS, chain[1], token_bytes([3, 4]), None, 1)
    assert not verify_token_ids(other, chain[0], token_bytes([1, 2]), None, 0)


# ---- CRC32C


def test_the_check_value_of_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@given(st.binary(max_size=200), st.integers(0, 200))
def test_a_crc_goes_on_where_it_stopped(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)
    assert crc32c(memoryview(data).toreadonly()) == crc32c(bytearray(data))


def test_a_big_crc_lets_other_threads_run() -> None:
    # No thread has to yield within the switch interval, so the main thread reaches stop.set() only
    # if a checksum releases the GIL.
    big = memoryview(bytes(8 << 20)).toreadonly()
    started, stop = threading.Event(), threading.Event()
    rounds = 0

    def checksums() -> None:
        nonlocal rounds
        started.set()
        while rounds < 5000 and not stop.is_set():
            crc32c(big)
            rounds += 1

    thread = threading.Thread(target=checksums)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        started.wait()
        stop.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert rounds < 5000


def importers_of(package: str, paths: Iterable[Path]) -> set[str]:
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if any(name.split(".")[0] == package for name in names):
                found.add(path.name)
    return found


def test_the_checksum_has_one_source() -> None:
    root = Path(__file__).resolve().parents[2]
    paths = [p for d in ("proto", "tiers", "server", "client") for p in (root / d).rglob("*.py")]
    # The process of the LMDB rows imports nothing of this package, to start fast and stay small.
    # The weights' CRC-64 is of no payload.
    assert importers_of("fastcrc", paths) == {"payload.py", "lmdb_wire.py", "weights.py"}


# ---- pieces

DATA = bytes(random.Random(1).randbytes(1_000))


def pieces(data: bytes, *cuts: int) -> Pieces:
    ends = [*cuts, len(data)]
    return Pieces(
        [memoryview(bytearray(data[a:b])) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    )


def test_every_slice_is_that_of_the_whole() -> None:
    data = DATA[:20]
    whole = pieces(data, 1, 7, 8, 15)
    for start in range(21):
        for stop in range(21):
            part = whole[start:stop]
            assert part.tobytes() == data[start:stop]
            assert len(part) == len(data[start:stop])
    assert whole[:].tobytes() == data
    assert isinstance(whole[1:7], memoryview)
    with pytest.raises(ValueError, match="steps"):
        whole[::2]


def test_nothing_is_copied() -> None:
    whole = pieces(DATA, 500)
    part = whole[400:600]
    assert isinstance(part, Pieces)
    part.views[1][0] = DATA[500] ^ 1
    assert whole.tobytes()[500] == DATA[500] ^ 1
    assert not whole.readonly
    assert Pieces([memoryview(b"a")]).readonly


@pytest.mark.parametrize("source", [DATA, memoryview(DATA), pieces(DATA, 1, 2, 333)], ids=type)
@pytest.mark.parametrize("cuts", [(), (100,), tuple(range(1, 999))])
def test_copies_and_checksums_cross_every_seam(source: object, cuts: tuple[int, ...]) -> None:
    for copying in (copy, copy_crc32c):
        target = pieces(bytes(1_000), *cuts)
        result = copying(target, source)  # type: ignore[arg-type, operator]
        assert target.tobytes() == DATA
        assert result in (None, crc32c(DATA))
    assert crc32c_of(target) == crc32c(DATA)
    flat = bytearray(1_000)
    copy(memoryview(flat), target)
    assert flat == DATA


def test_another_length_is_refused_before_anything_is_copied() -> None:
    target = pieces(bytes(10), 5)
    for source in (DATA[:9], pieces(DATA[:11], 5)):
        with pytest.raises(ValueError, match="do not fill"):
            copy(target, source)
    assert target.tobytes() == bytes(10)


def test_views_are_those_it_is_made_of() -> None:
    whole = pieces(DATA, 5)
    assert views_of(whole) == whole.views
    flat = memoryview(DATA)
    assert list(views_of(flat)) == [flat]
    assert list(pairs(flat, flat)) == [(flat, flat)]
    copy(memoryview(bytearray()), b"")


# ---- copies, on both sides of the size from which the GIL is released

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
    pythonapi_flag = 0x4  # set on functions that ctypes calls with the GIL held
    assert not ctypes.memmove._flags_ & pythonapi_flag  # type: ignore[attr-defined]
    moved: list[int] = []
    memmove = ctypes.memmove

    def counted(to: int, at: int, length_bytes: int) -> None:
        moved.append(length_bytes)
        memmove(to, at, length_bytes)

    monkeypatch.setattr(payload.ctypes, "memmove", counted)
    monkeypatch.setattr(payload, "native", None)  # which releases it by itself
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
