"""What was handed over: an index, arenas and a disk tier, made here as the daemon makes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import lmdb
import pytest

from prefixd.client.connection import Calls
from prefixd.client.local.calls import LocalCalls
from prefixd.client.local.node import LocalNode
from prefixd.proto import disk, local
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import RecordError
from prefixd.proto.index import INCARNATION_ROW, IndexRow, pack_row
from prefixd.proto.keys import Key
from prefixd.proto.record import head_bytes_for
from prefixd.proto.vocabulary import SaveReason, Tier

REF = pb.SessionRef(incarnation=b"i" * 16, session_id=7)
CALLS = LocalCalls("/nowhere", cast(Calls, None))
KEYS = [Key(bytes([number]) * 32) for number in range(6)]
ARENA = bytes(range(256)) * 32


def row_of(
    location: tuple[int, ...], *, tier: Tier = Tier.RAM, generation: int = 1, ids_bytes: int = 0
) -> IndexRow:
    payload_bytes = sum(location[1::2])
    return IndexRow(
        tier, SaveReason.COLD, 0, 512, 0, ids_bytes, generation, payload_bytes, location
    )


def write_index(directory: Path, incarnation: bytes = REF.incarnation) -> None:
    """Rows for the first three keys, and for the fifth."""
    rows = {
        key: pack_row(row_of((100 * n, 50), generation=n + 1))
        for n, key in enumerate(KEYS)
        if n in {0, 1, 2, 4}
    }
    directory.mkdir(exist_ok=True)
    with lmdb.open(str(directory)) as index, index.begin(write=True) as txn:
        for key, row in {**rows, INCARNATION_ROW: incarnation}.items():
            txn.put(key, row)


def write_disk(directory: Path, chunks: dict[tuple[Key, int], bytes]) -> None:
    directory.mkdir()
    with lmdb.open(str(directory), max_dbs=disk.TABLES, map_size=2**26) as environment:
        table = environment.open_db(disk.CHUNKS)
        with environment.begin(db=table, write=True) as txn:
            for (key, number), data in chunks.items():
                txn.put(disk.chunk_key(key, number), data)


def memory(data: bytes) -> int:
    fd = os.memfd_create("arena")
    os.write(fd, data)
    return fd


def descriptors() -> set[str]:
    return {fd.name for fd in Path("/proc/self/fd").iterdir()}


def directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    write_index(tmp_path / "index")
    fds = {
        local.INDEX: directory(tmp_path / "index"),
        local.RAM: memory(ARENA),
        local.SHM: memory(ARENA[::-1]),
    }
    response = pb.HandOverResponse(
        descriptors=fds,
        ram_arena_bytes=len(ARENA),
        shm_arena_bytes=len(ARENA),
        refused={local.DISK: "switched off"},
    )
    made = LocalNode(response, fds, REF, CALLS)
    yield made
    made.close()


def test_what_is_there_and_what_is_not(node: LocalNode) -> None:
    assert node.ref == REF
    assert node.indexed
    assert [node.readable(tier) for tier in Tier] == [True, True, False]
    assert node.staging is None
    assert node.refused == {local.DISK: "switched off"}


# ---- looking up


def test_rows_of_keys(node: LocalNode) -> None:
    assert [row and row.generation for row in node.rows(KEYS)] == [1, 2, 3, None, 5, None]
    assert [data is not None for data in node.get(KEYS)] == [True, True, True, False, True, False]
    assert node.get([]) == []


def test_a_run_ends_with_the_first_gap_and_takes_no_key_beyond(node: LocalNode) -> None:
    keys = iter(KEYS)
    assert [key for key, _ in node.get_run(keys)] == KEYS[:3]
    assert list(keys) == KEYS[4:]
    assert node.get_run(KEYS[3:]) == []


def test_the_first_that_is_there(node: LocalNode) -> None:
    keys = iter(KEYS[3:])
    first = node.get_first(keys)
    assert first is not None
    assert first[:2] == (1, KEYS[4])
    assert list(keys) == KEYS[5:]
    assert node.get_first([KEYS[3], KEYS[5]]) is None


@pytest.mark.parametrize("incarnation", [b"j" * 16, bytes(16), b""])
def test_an_index_of_another_start_is_not_believed(tmp_path: Path, incarnation: bytes) -> None:
    """Nor one that its daemon has revoked: not even that something is missing."""
    write_index(tmp_path / "index", incarnation)
    fds = {local.INDEX: directory(tmp_path / "index")}
    node = LocalNode(pb.HandOverResponse(descriptors=fds), fds, REF, CALLS)
    for ask in (node.get, node.get_run, node.get_first, node.rows):
        with pytest.raises(RecordError, match="not that of this session"):
            ask(KEYS)
    node.close()


# ---- reading


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SHM])
def test_any_range_of_a_payload_in_pieces(node: LocalNode, tier: Tier) -> None:
    """Without the head of the record, which in shm comes first."""
    location = (300, 70, 10, 1, 5000, 200, 900, 40)
    row = row_of(location, tier=tier, ids_bytes=8)
    arena = ARENA if tier is Tier.RAM else ARENA[::-1]
    whole = b"".join(
        arena[start : start + length]
        for start, length in zip(location[::2], location[1::2], strict=True)
    )
    payload = whole[head_bytes_for(8) if tier is Tier.SHM else 0 :]
    for offset in (0, 1, 69, 70, 71, 72, 150):
        for length in (0, 1, 2, 70, len(payload) - offset):
            views = node.views(row, offset, length)
            assert b"".join(views) == payload[offset : offset + length]
            assert all(len(view) for view in views)
            assert all(view.readonly for view in views)


CHUNK = disk.CHUNK_BYTES


@pytest.fixture
def disk_node(tmp_path: Path) -> Iterator[LocalNode]:
    """A payload of three chunks, of another the first only."""
    chunks = {(KEYS[0], number): bytes([number]) * CHUNK for number in range(2)}
    chunks[KEYS[0], 2] = b"the end"
    chunks[KEYS[1], 0] = bytes(CHUNK)
    write_disk(tmp_path / "disk", chunks)
    fds = {local.DISK: directory(tmp_path / "disk")}
    made = LocalNode(pb.HandOverResponse(descriptors=fds), fds, REF, CALLS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 2 * CHUNK + 7), (CHUNK - 1, 2), (2 * CHUNK, 7), (5, CHUNK), (CHUNK, 0), (CHUNK + 1, 1)],
)
def test_any_range_of_a_payload_on_disk(disk_node: LocalNode, offset: int, length: int) -> None:
    assert [disk_node.readable(tier) for tier in Tier] == [False, False, True]
    assert not disk_node.indexed
    payload = bytes(CHUNK) + b"\1" * CHUNK + b"the end"
    arrived = b""
    for done_bytes, chunk in disk_node.disk_chunks(KEYS[0], offset, length):
        assert done_bytes == len(arrived)
        arrived += chunk
    assert arrived == payload[offset : offset + length]


@pytest.mark.parametrize("key", [KEYS[1], KEYS[2]])
def test_a_chunk_that_is_missing(disk_node: LocalNode, key: Key) -> None:
    with pytest.raises(RecordError, match="is not there"):
        list(disk_node.disk_chunks(key, 0, CHUNK + 1))


def test_a_chunk_that_is_too_short(disk_node: LocalNode) -> None:
    with pytest.raises(RecordError, match="chunk 2"):
        list(disk_node.disk_chunks(KEYS[0], 2 * CHUNK, 8))


# ---- the end


def test_closed_while_somebody_reads(node: LocalNode) -> None:
    assert node.enter()
    assert node.enter()
    node.close()
    node.close()
    assert not node.enter(), "nobody comes in any more"
    assert node.get(KEYS[:1]) != [None]
    node.leave()
    assert node.views(row_of((0, 10)), 0, 10) == [ARENA[:10]]
    node.leave()
    assert not node.indexed
    assert node.arenas == {}


def test_views_outlive_the_node(node: LocalNode) -> None:
    (view,) = node.views(row_of((300, 70)), 0, 70)
    node.close()
    assert view == ARENA[300:370]


# ---- what can't be used


def test_what_cannot_be_opened_is_refused_with_the_reason(tmp_path: Path) -> None:
    """And the others are there."""
    (tmp_path / "empty").mkdir()
    write_disk(tmp_path / "disk", {})
    before = descriptors()
    fds = {
        local.INDEX: directory(tmp_path / "empty"),
        local.DISK: directory(tmp_path / "disk"),
        local.RAM: memory(ARENA),
        local.SHM: memory(ARENA),
        local.STAGING: os.open("/dev/null", os.O_RDONLY),
        "of a later version": directory(tmp_path),
    }
    sizes = {
        "ram_arena_bytes": len(ARENA) + 1,
        "shm_arena_bytes": len(ARENA),
        "staging_bytes": 4096,
    }
    node = LocalNode(pb.HandOverResponse(descriptors=fds, **sizes), fds, REF, CALLS)
    assert set(node.refused) == {local.INDEX, local.RAM, local.STAGING}
    assert all(node.refused.values())
    assert [node.readable(tier) for tier in Tier] == [False, True, True]
    node.close()
    assert descriptors() == before
