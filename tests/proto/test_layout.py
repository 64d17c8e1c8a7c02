"""What a payload may look like, its layers, its token ids and its checksum."""

import ast
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.errors import InvalidSize
from prefixd.proto.keys import Namespace, block_keys, prefix_key, token_bytes
from prefixd.proto.layout import crc32c, layer_slice, verify_token_ids
from prefixd.proto.limits import MAX_LAYERS

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
    # Nobody is asked to give the interpreter away, so that the main thread gets as far as
    # stop.set() only if a checksum does so by itself.
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
    paths = [
        p
        for d in ("proto", "tiers", "server", "client", "connectors")
        for p in (root / d).rglob("*.py")
    ]
    # The process of the LMDB rows imports nothing of ours, for its memory and its start.
    assert importers_of("fastcrc", paths) == {"layout.py", "lmdb_wire.py"}
