"""The keys and the bytes of a live replay's blocks."""

from __future__ import annotations

import hashlib
import struct

import pytest

from prefixd.client.lab.blocks import TILE_BYTES, BlockPayloads, keys_of_ids, replay_namespace
from prefixd.proto.errors import CallerError

SIZES = [1, 7, 8, 100, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 3 * TILE_BYTES, 50_000]


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_keys_are_what_the_documentation_says() -> None:
    """From hashlib alone."""

    def parameter(name: bytes, number: bytes) -> bytes:
        return struct.pack("<I", len(name)) + name + b"i" + struct.pack("<I", len(number)) + number

    context = sha256(
        b"prefixd/context/v1\0",
        parameter(b"block_bytes", b"4096"),
        parameter(b"block_tokens", b"512"),
    )
    root = sha256(sha256(b"prefixd/replay/v1"), bytes(8), context)
    namespace = replay_namespace(4096, 512)
    assert namespace.root == root
    expected = [sha256(root, struct.pack("<Q", block_id)) for block_id in (0, 1, 2**64 - 1)]
    assert keys_of_ids(namespace.root, [0, 1, 2**64 - 1]) == expected


def test_replays_that_differ_share_no_key() -> None:
    roots = {
        replay_namespace(*what).root
        for what in ((4096, 512), (4096, 256), (8192, 512), (4096, 512, "a"), (4096, 512, "b"))
    }
    assert len(roots) == 5


@pytest.mark.parametrize("block_id", [-1, 2**64])
def test_an_id_that_is_no_block_id_is_refused(block_id: int) -> None:
    with pytest.raises(CallerError, match=str(block_id)):
        keys_of_ids(replay_namespace(4096, 512).root, [0, block_id])


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_payload_has_its_size_and_is_the_same_every_time(size_bytes: int) -> None:
    first, second = BlockPayloads(size_bytes), BlockPayloads(size_bytes)
    payload = first.payload(7)
    assert len(payload) == size_bytes
    assert payload == second.payload(7)
    assert second.matches(7, bytes(payload))
    assert second.matches(7, memoryview(payload))


def test_a_payload_is_what_the_documentation_says() -> None:
    size_bytes = 2 * TILE_BYTES + 100
    seed = b"prefixd/replay/v1" + struct.pack("<QQ", 9, size_bytes)
    tile = hashlib.shake_128(seed).digest(TILE_BYTES)
    tiles = [tile] + [struct.pack("<I", number) + tile[4:] for number in (1, 2)]
    assert BlockPayloads(size_bytes).payload(9) == b"".join(tiles)[:size_bytes]


@pytest.mark.parametrize("size_bytes", [size for size in SIZES if size > 1])
def test_any_changed_byte_is_found(size_bytes: int) -> None:
    payloads = BlockPayloads(size_bytes)
    for position in {0, 1, size_bytes // 2, size_bytes - 2, size_bytes - 1}:
        payload = payloads.payload(3)
        payload[position] ^= 1
        assert not payloads.matches(3, payload), position


def test_another_block_a_shift_a_swap_and_a_cut_are_found() -> None:
    payloads = BlockPayloads(4 * TILE_BYTES)
    payload = payloads.payload(3)
    tiles = [payload[at : at + TILE_BYTES] for at in range(0, len(payload), TILE_BYTES)]
    assert not payloads.matches(4, payload)
    assert not payloads.matches(3, payload[1:] + payload[:1])
    assert not payloads.matches(3, payload[TILE_BYTES:] + payload[:TILE_BYTES])
    assert not payloads.matches(3, tiles[0] + tiles[2] + tiles[1] + tiles[3])
    assert not payloads.matches(3, tiles[0] + tiles[1] + tiles[1] + tiles[3])
    assert not payloads.matches(3, payload[:-1])
    assert not payloads.matches(3, payload + b"\0")
    assert not payloads.matches(3, bytes(len(payload)))


def test_blocks_of_two_sizes_share_nothing() -> None:
    small, large = BlockPayloads(TILE_BYTES).payload(1), BlockPayloads(2 * TILE_BYTES).payload(1)
    assert large[:TILE_BYTES] != small


@pytest.mark.parametrize("size_bytes", [0, -1, 2**41])
def test_a_size_that_no_block_has_is_refused(size_bytes: int) -> None:
    with pytest.raises(CallerError, match="bytes"):
        BlockPayloads(size_bytes)
