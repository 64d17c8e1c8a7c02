"""A replayer in this process, the worker process around it, and the blocks that it replays."""

from __future__ import annotations

import hashlib
import multiprocessing
import struct
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.client import Client
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.live_replay import Finished, Ready, work
from prefixd.client.lab.replayer import (
    TILE_BYTES,
    BlockPayloads,
    LiveOptions,
    Replayer,
    RequestOutcome,
    content_salt,
    keys_of_ids,
    replay_namespace,
)
from prefixd.client.lab.trace import Request
from prefixd.client.lab.trace_file import TraceError
from prefixd.client.results import RestoreResult
from prefixd.client.saves import SaveItem
from prefixd.proto.errors import CallerError
from prefixd.proto.vocabulary import MissReason, SaveReason, Tier
from tests.support.daemon import eventually, private_daemon

BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as running:
        yield running


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address) as connected:
        yield connected
    with daemon.admin() as admin:
        eventually(lambda: not admin.stats().sessions)
        assert list(admin.all_claims()) == []
        admin.evict(2**40, [])


def replayer(daemon: PrivateDaemon, client: Client, **options: Any) -> Replayer:
    return Replayer(client, LiveOptions(daemon.address, **options))


def request(*ids: int, input_length: int | None = None) -> Request:
    return Request(0, 512 * len(ids) if input_length is None else input_length, 1, ids)


# ---- one request


def test_a_request_misses_saves_and_then_hits(daemon: PrivateDaemon, client: Client) -> None:
    worker = replayer(daemon, client)
    first = worker.replay(request(1, 2, 3, input_length=1300))
    assert (first.hit_blocks, first.hit_tokens, dict(first.saves)) == (0, 0, {"saved": 3})
    assert set(first.durations_ns) == {"walk", "claim", "save"}
    second = worker.replay(request(1, 2, 3, 4, input_length=1600))
    assert (second.hit_blocks, second.hit_tokens) == (3, 1536)
    assert second.verified_bytes == 3 * BLOCK_BYTES
    assert dict(second.saves) == {"saved": 1}
    third = worker.replay(request(1, 2, 3, input_length=1300))
    assert (third.hit_tokens, third.saves) == (1300, {})
    assert set(third.durations_ns) == {"walk", "claim", "restore", "release"}


def test_blocks_are_saved_with_the_tokens_that_they_stand_for(
    daemon: PrivateDaemon, client: Client
) -> None:
    """The last block may be partial. Lengths that disagree with the ids give no negative count."""
    worker = replayer(daemon, client)
    worker.replay(request(1, 2, 3, input_length=1100))
    worker.replay(request(11, 12, 13, input_length=600))
    root = replay_namespace(BLOCK_BYTES, 512).root
    found = client.probe(keys_of_ids(root, [1, 2, 3, 11, 12, 13]))
    counts = [one.entry.token_count for one in found if one.entry is not None]
    assert counts == [512, 512, 76, 512, 88, 0]


def test_a_chain_is_evicted_leaf_first(daemon: PrivateDaemon, client: Client) -> None:
    """Blocks that were saved after a hit are evicted before it."""
    worker = replayer(daemon, client)
    worker.replay(request(1, 2))
    worker.replay(request(1, 2, 3, 4))
    keys = keys_of_ids(replay_namespace(BLOCK_BYTES, 512).root, [4, 3, 2, 1])
    with daemon.admin() as admin:
        assert [entry.key for entry in admin.next_victims(Tier.RAM, 1_000)] == keys


# ---- wrong bytes


def test_other_bytes_are_mismatches_and_end_the_hit(daemon: PrivateDaemon, client: Client) -> None:
    keys = keys_of_ids(replay_namespace(BLOCK_BYTES, 512).root, [1, 2, 3])
    payloads = BlockPayloads(BLOCK_BYTES)
    # Block 2 has the bytes of block 3, with a checksum that is right.
    items = [
        SaveItem(key, payloads.payload(block_id), 512)
        for key, block_id in zip(keys, (1, 3, 3), strict=True)
    ]
    client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
    outcome = replayer(daemon, client).replay(request(1, 2, 3))
    assert outcome.mismatches == ["block 2 at 1 has other bytes"]
    assert (outcome.hit_blocks, outcome.hit_tokens) == (1, 512)
    assert outcome.verified_bytes == 2 * BLOCK_BYTES
    assert dict(outcome.saves) == {"present": 2}


class Restoring:
    """A hit whose restore returns a given result."""

    claimed = True

    def __init__(self, blocks: int, result: RestoreResult) -> None:
        self._blocks = blocks
        self._result = result

    def __len__(self) -> int:
        return self._blocks

    def restore_into(self, buffers: Sequence[bytearray]) -> RestoreResult:
        payloads = BlockPayloads(BLOCK_BYTES)
        for block_id, buffer in enumerate(buffers):
            buffer[:] = payloads.payload(block_id)
        return self._result


@pytest.mark.parametrize(
    ("miss", "mismatches", "unavailable"),
    [
        (MissReason.CORRUPT, 1, False),
        (MissReason.UNREADABLE, 0, False),
        (MissReason.LOST, 0, False),
        (MissReason.UNAVAILABLE, 0, True),
        (MissReason.DEADLINE, 0, True),
    ],
)
def test_what_did_not_arrive_is_no_hit_whatever_is_in_the_buffer(
    daemon: PrivateDaemon, client: Client, miss: MissReason, mismatches: int, unavailable: bool
) -> None:
    """Only a wrong checksum is a mismatch; other losses are misses."""
    result = RestoreResult((True, False, True), 1, 512, BLOCK_BYTES, miss)
    outcome = RequestOutcome()
    hit: Any = Restoring(3, result)
    good = replayer(daemon, client)._restore(hit, [0, 1, 2], outcome)
    assert good == 1
    assert len(outcome.mismatches) == mismatches
    assert outcome.unavailable is unavailable
    assert outcome.lost_blocks == 1
    assert outcome.verified_bytes == 2 * BLOCK_BYTES


def test_bytes_that_never_arrive_do_not_look_right(daemon: PrivateDaemon, client: Client) -> None:
    """Buffers of earlier requests are zeroed before they are used again."""

    class Silent(Restoring):
        def restore_into(self, buffers: Sequence[bytearray]) -> RestoreResult:
            return RestoreResult((True,) * len(buffers), len(buffers), 0, 0)

    worker = replayer(daemon, client)
    all_there = RestoreResult((True, True), 2, 1024, 2 * BLOCK_BYTES)
    honest: Any = Restoring(2, all_there)
    assert worker._restore(honest, [0, 1], RequestOutcome()) == 2
    outcome = RequestOutcome()
    silent: Any = Silent(2, all_there)
    assert worker._restore(silent, [0, 1], outcome) == 0
    assert len(outcome.mismatches) == 2


# ---- a daemon that is away


def test_a_daemon_that_is_away_is_a_miss_and_waited_for_with_patience(
    daemon: PrivateDaemon,
) -> None:
    with private_daemon() as doomed, Client(doomed.address) as client:
        worker = replayer(doomed, client, reconnect_wait_s=60.0)
        assert worker.replay(request(1)).saves == {"saved": 1}
        doomed.kill()
        away = worker.replay(request(1))
        assert away.unavailable
        assert away.hit_tokens == 0
        doomed.start()
        assert worker.wait_for_daemon()
        assert not worker.replay(request(1)).unavailable
        doomed.kill()
        impatient = replayer(doomed, client, reconnect_wait_s=0.05)
        assert impatient.replay(request(1)).unavailable
        eventually(lambda: not client.connected)
        assert not impatient.wait_for_daemon()
        assert not impatient.wait_for_daemon(), "its patience is for all of the replay"
    assert daemon.pid


# ---- the process


def start(daemon: PrivateDaemon) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, LiveOptions(daemon.address), 3))
    process.start()
    theirs.close()
    assert ours.recv() == Ready()
    return process, ours


def test_a_worker_answers_each_request_and_says_goodbye(daemon: PrivateDaemon) -> None:
    process, pipe = start(daemon)
    with pipe, daemon.admin() as admin:
        owners = [session.owner for session in admin.sessions().sessions]
        assert any("replay-3" in owner for owner in owners)
        pipe.send(request(71, 72))
        pipe.send(request(71))
        pipe.send(None)
        first, second, last = pipe.recv(), pipe.recv(), pipe.recv()
        assert isinstance(first, RequestOutcome)
        assert isinstance(second, RequestOutcome)
        assert (first.hit_blocks, second.hit_blocks) == (0, 1)
        assert isinstance(last, Finished)
        assert 1 <= last.rpcs["Claim"] <= 2
        assert (last.reconnects, last.gave_up) == (0, False)
    process.join()
    assert process.exitcode == 0


def test_a_worker_refuses_what_is_no_request_of_blocks(daemon: PrivateDaemon) -> None:
    process, pipe = start(daemon)
    with pipe:
        pipe.send(request(-1))
        answer = pipe.recv()
        assert isinstance(answer, CallerError)
        assert "-1" in str(answer)
        assert isinstance(pipe.recv(), Finished)
    process.join()
    assert process.exitcode == 0


def test_a_worker_whose_parent_is_gone_leaves_quietly(daemon: PrivateDaemon) -> None:
    process, pipe = start(daemon)
    pipe.close()
    process.join()
    assert process.exitcode == 0


SIZES = [1, 7, 8, 100, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 3 * TILE_BYTES, 50_000]


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_keys_are_what_the_documentation_says() -> None:
    """Computed with hashlib alone."""

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


def test_the_salt_follows_the_content_of_a_trace(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    one.write_text("a")
    two.write_text("a")
    three.write_text("b")
    assert content_salt(str(one)) == content_salt(str(two)) != content_salt(str(three))
    assert content_salt("-") != content_salt("-")
    with pytest.raises(TraceError, match="cannot be opened"):
        content_salt(str(tmp_path / "absent"))
