"""A hit: its bytes, its claim, and every way in which it ends."""

from __future__ import annotations

import gc
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.client import Client, Hit, MissReason
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import CallerError, ClaimLost, DaemonUnavailable, InvalidSize, StoreFailed
from prefixd.proto.keys import Key
from prefixd.proto.tokens import token_bytes
from tests.support.fakes import FakeDaemon, keys, payloads

ONE, TWO, THREE = ALL = [Key(key) for key in keys(3)]
DATA = payloads([3_000, 2_000, 1_000])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        for key, payload in zip(ALL, DATA, strict=True):
            daemon.put(key, payload, token_count=100)
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.address, local=False, verify="always") as client:
        yield client


@pytest.fixture
def hit(client: Client) -> Iterator[Hit]:
    with client.claim(ALL) as hit:
        yield hit


def buffers() -> list[bytearray]:
    return [bytearray(len(payload)) for payload in DATA]


def misses(client: Client) -> dict[str, int]:
    counted = client.counters["failures"]
    assert isinstance(counted, dict)
    return {reason: number for reason, number in counted.items() if number}


# ---- bytes


def test_a_hit_says_what_it_is(hit: Hit) -> None:
    assert hit
    assert len(hit) == 3
    assert hit.keys == ALL
    assert hit.token_counts == (100, 100, 100)
    assert hit.token_count == 300
    assert hit.payload_bytes == 6_000
    assert hit.claimed
    assert not hit.lost
    assert hit.miss is None
    assert repr(hit) == "<Hit: 3 entries, 300 tokens, claimed>"


def test_one_read_fills_every_buffer(daemon: FakeDaemon, client: Client, hit: Hit) -> None:
    targets = buffers()
    result = hit.restore_into(targets)
    assert result
    assert targets == DATA
    assert daemon.rpcs["Read"] == 1
    assert client.counters["restored_bytes"] == 6_000
    assert client.speeds.snapshot().keys() == {"ram"}


def test_any_writable_buffer_will_do(hit: Hit) -> None:
    targets: list[Any] = [
        np.zeros((30, 50), np.float16),
        array("I", bytes(2_000)),
        bytearray(1_000),
    ]
    assert hit.restore_into(targets)
    assert [bytes(target) for target in targets] == DATA


def test_fewer_buffers_take_the_first_entries(daemon: FakeDaemon, hit: Hit) -> None:
    targets = buffers()[:2]
    assert hit.restore_into(targets).token_count == 200
    assert targets == DATA[:2]
    assert len(daemon.read_ranges) == 2
    nothing = hit.restore_into([])
    assert (bool(nothing), nothing.miss) == (False, None), (
        "nothing was wanted, and nothing restored"
    )
    assert daemon.rpcs["Read"] == 1


@pytest.mark.parametrize("size", [2_999, 3_001])
def test_a_buffer_of_another_size_is_a_miss_of_its_entry_alone(
    daemon: FakeDaemon, client: Client, hit: Hit, size: int
) -> None:
    buffers = [bytearray(3_000), bytearray(size), bytearray(hit.entries[2].payload_bytes)]
    result = hit.restore_into(buffers)
    assert result.misses == (None, MissReason.WRONG_SIZE, None)
    assert (result.run, result.miss) == (1, MissReason.WRONG_SIZE)
    assert not any(buffers[1])
    assert daemon.rpcs["Read"] == 1
    counted = client.counters["failures"]
    assert isinstance(counted, dict)
    assert counted["wrong_size"] == 1


@pytest.mark.parametrize(
    "targets",
    [
        [bytes(3_000)],
        [bytearray(3_000)] * 4,
        [np.zeros(6_000, np.uint8)[::2]],
    ],
    ids=["read-only", "too many", "with gaps"],
)
def test_wrong_buffers_are_the_callers_mistake(
    daemon: FakeDaemon, hit: Hit, targets: list[Any]
) -> None:
    with pytest.raises(InvalidSize):
        hit.restore_into(targets)
    assert daemon.rpcs["Read"] == 0


def test_damaged_bytes_are_a_miss_and_the_daemon_is_told(
    daemon: FakeDaemon, client: Client, hit: Hit
) -> None:
    daemon.damage(TWO)
    result = hit.restore_into(buffers())
    assert (result.restored, result.run) == ((True, False, True), 1)
    assert result.miss is MissReason.CORRUPT
    assert misses(client) == {"corrupt": 1}
    daemon.wait_until(lambda: daemon.suspects)
    assert daemon.suspects == [TWO]
    assert hit.read(1) is None
    assert hit.read(0) == DATA[0]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DaemonUnavailable("gone"), MissReason.UNAVAILABLE),
        (ClaimLost("revoked"), MissReason.LOST),
        (StoreFailed("no"), MissReason.UNREADABLE),
    ],
)
def test_a_read_that_fails_is_a_miss(
    daemon: FakeDaemon, client: Client, hit: Hit, error: Any, reason: MissReason
) -> None:
    daemon.fail("Read", error)
    assert hit.restore_into(buffers()).miss is reason
    assert misses(client) == {reason.value: 1}


def test_a_read_ends_by_its_deadline(daemon: FakeDaemon, hit: Hit) -> None:
    daemon.hold("Read")
    assert hit.restore_into(buffers(), deadline_ms=20).miss is MissReason.DEADLINE
    # The daemon counts as gone until its next heartbeat arrives.
    again = hit.restore_into(buffers(), deadline_ms=0).miss
    assert again in {MissReason.DEADLINE, MissReason.UNAVAILABLE}


def test_a_daemon_that_dies_in_the_middle_is_a_miss(daemon: FakeDaemon, hit: Hit) -> None:
    daemon.chunk_bytes = 100
    sent = []

    def die(part: Any) -> Any:
        sent.append(part)
        if len(sent) == 35:
            daemon.end_sessions()
            daemon.wait_until(lambda: len(daemon.hellos) > 1)
        return part

    daemon.mangle("Read", die)
    targets = buffers()
    result = hit.restore_into(targets)
    assert not result
    # Bytes that have arrived may be lost with the connection or not; those that count are right.
    assert all(targets[index] == DATA[index] for index, good in enumerate(result.restored) if good)
    assert result.restored[1:] == (False, False)
    assert result.miss in (MissReason.UNAVAILABLE, MissReason.LOST)
    assert hit.lost


def test_parts_that_make_no_sense_are_a_miss(daemon: FakeDaemon, hit: Hit) -> None:
    daemon.mangle("Read", lambda _: pb.ReadResponse(parts=[pb.ReadPart(offset_bytes=5)]))
    assert hit.restore_into(buffers()).miss is MissReason.UNEXPECTED
    daemon.mangle("Read", lambda _: pb.ReadResponse(parts=[pb.ReadPart(range=9)]))
    assert hit.restore_into(buffers()).miss is MissReason.UNEXPECTED


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_entries_are_counted_from_0(hit: Hit, index: int) -> None:
    for use in (hit.read, hit.views, hit.token_ids, lambda i: hit.layer(i, 0)):
        with pytest.raises(InvalidSize, match=f"no entry {index}"):
            use(index)


def test_a_claim_lost_after_the_last_byte_is_a_miss_of_everything(
    daemon: FakeDaemon, client: Client, hit: Hit
) -> None:
    def lose(part: Any) -> Any:
        daemon.lose_claims()
        daemon.wait_until(lambda: client.counters["lost_claims"])
        return part

    daemon.chunk_bytes = 10**6
    daemon.mangle("Read", lose)
    result = hit.restore_into(buffers()[:1])
    assert (result.restored, result.run, result.token_count) == ((False,), 0, 0)
    assert result.miss is MissReason.LOST
    assert hit.lost
    assert not hit.release()


def test_a_probed_hit_whose_claim_did_not_last_is_a_miss(
    daemon: FakeDaemon, client: Client
) -> None:
    """A read claims it, and counts only if the release says that the claim was held."""
    for key, payload in zip(ALL, DATA, strict=True):
        daemon.put(key, payload)
    probed = client.longest_run(ALL, claim=False)
    daemon.mangle("Release", lambda _: pb.ReleaseResponse(results=[pb.RELEASE_STATUS_LOST]))
    result = probed.restore_into(buffers())
    assert result.miss is MissReason.LOST
    assert not any(result.restored)


@pytest.mark.parametrize("status", ["LOST", "ALREADY", "UNSPECIFIED"])
def test_only_a_release_that_released_is_one(daemon: FakeDaemon, hit: Hit, status: str) -> None:
    told = pb.ReleaseStatus.Value(f"RELEASE_STATUS_{status}")
    daemon.mangle("Release", lambda _: pb.ReleaseResponse(results=[told]))
    assert not hit.release()
    assert not hit.release()
    assert hit.lost


def test_layers_and_token_ids_are_read_alone(daemon: FakeDaemon, client: Client) -> None:
    tokens = list(range(7))
    daemon.put(ONE, DATA[0], layer_count=3, token_ids=bytes(token_bytes(tokens)))
    with client.claim([ONE, TWO]) as hit:
        assert hit.layer(0, 1) == DATA[0][1_000:2_000]
        assert [(r.offset_bytes, r.length_bytes) for r in daemon.read_ranges] == [(1_000, 1_000)]
        assert hit.token_ids(0) == token_bytes(tokens)
        assert hit.token_ids(1) == b""
        assert daemon.rpcs["Read"] == 2
        for index, layer in ((0, 3), (0, -1), (1, 0)):
            with pytest.raises(InvalidSize, match="layer"):
                hit.layer(index, layer)


def test_a_layer_that_cannot_be_read_is_a_miss(daemon: FakeDaemon, client: Client) -> None:
    daemon.put(ONE, DATA[0], layer_count=3, token_ids=b"\0" * 4)
    with client.claim([ONE]) as hit:
        daemon.fail("Read", DaemonUnavailable("gone"))
        assert hit.layer(0, 0) is None
        daemon.mangle("Read", lambda _: pb.ReadResponse(parts=[pb.ReadPart(data=b"short")]))
        assert hit.layer(0, 0) is None
        unreadable = pb.ReadPart(status=pb.READ_STATUS_UNREADABLE)
        daemon.mangle("Read", lambda _: pb.ReadResponse(parts=[unreadable]))
        assert hit.token_ids(0) is None
    assert misses(client) == {"unavailable": 1, "unreadable": 2}


# ---- probed hits


def test_a_probed_hit_is_claimed_for_the_read_alone(daemon: FakeDaemon, client: Client) -> None:
    hit = client.longest_run(ALL, claim=False)
    assert repr(hit).endswith("probed>")
    assert not hit.claimed
    assert not daemon.claims
    targets = buffers()
    assert hit.restore_into(targets)
    assert targets == DATA
    assert (daemon.rpcs["Claim"], daemon.rpcs["Read"], daemon.rpcs["Release"]) == (1, 1, 1)
    assert not daemon.claims
    assert hit.release()
    assert daemon.rpcs["Release"] == 1


def test_a_probed_hit_may_be_gone_or_replaced(daemon: FakeDaemon, client: Client) -> None:
    hit = client.longest_run(ALL, claim=False)
    daemon.put(TWO, bytes(2_000), token_count=100)
    assert hit.restore_into(buffers()).miss is MissReason.ABSENT
    daemon.entries.clear()
    assert hit.restore_into(buffers()).miss is MissReason.ABSENT
    daemon.wait_until(lambda: not daemon.claims)


# ---- the end


def test_release_is_one_rpc_however_often(daemon: FakeDaemon, client: Client) -> None:
    hit = client.claim(ALL)
    assert hit.release()
    assert hit.release()
    with hit:
        pass
    assert daemon.rpcs["Release"] == 1
    assert not daemon.claims
    assert hit.released
    assert not hit.claimed
    assert not hit.lost
    assert repr(hit).endswith("released>")


def test_a_released_hit_is_not_read(client: Client) -> None:
    with client.claim(ALL) as hit:
        pass
    for use in (lambda: hit.restore_into(buffers()), lambda: hit.read(0), lambda: hit.views(0)):
        with pytest.raises(CallerError, match="released"):
            use()


def test_a_claim_that_is_lost_shows_at_once_and_at_release(
    daemon: FakeDaemon, client: Client
) -> None:
    hit = client.claim(ALL)
    daemon.lose_claims("it was revoked")
    # Events come in order: the session's end follows the loss.
    daemon.end_sessions()
    daemon.wait_until(lambda: len(daemon.hellos) > 1)
    assert hit.lost
    assert repr(hit).endswith("lost>")
    assert hit.restore_into(buffers()).miss is MissReason.LOST
    assert not hit.release()
    assert hit.lost
    assert client.counters["lost_claims"] == 1
    assert daemon.rpcs["Read"] == daemon.rpcs["Release"] == 0


def test_a_loss_that_only_the_release_tells(daemon: FakeDaemon, client: Client) -> None:
    hit = client.claim(ALL)
    assert hit.restore_into(buffers())
    for claim in daemon.claims.values():
        claim.lost = "the lease ran out"
    assert not hit.lost
    assert not hit.release()
    assert hit.lost


def test_a_release_that_cannot_be_asked_for_counts_as_lost(
    daemon: FakeDaemon, client: Client
) -> None:
    hit = client.claim(ALL)
    daemon.fail("Release", DaemonUnavailable("gone"))
    assert not hit.release()
    assert hit.lost


def test_a_dropped_hit_is_given_back_with_a_warning(daemon: FakeDaemon, client: Client) -> None:
    hit = client.claim(ALL)
    (number,) = daemon.claims
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del hit
        gc.collect()
    assert "3 entries, 300 tokens, claimed> was never released" in str(warned[0].message)
    daemon.wait_until(lambda: daemon.given_back == [number])
    assert not daemon.claims


def test_an_empty_hit_needs_no_release(daemon: FakeDaemon, client: Client) -> None:
    hit = client.claim([Key(b"x" * 32)])
    assert not hit
    assert hit.miss is MissReason.ABSENT
    assert repr(hit) == "<Hit: none, absent>"
    assert hit.restore_into([]).miss is MissReason.ABSENT
    assert hit.release()
    del hit
    gc.collect()
    assert daemon.rpcs["Release"] == 0


def test_many_hits_are_released_in_one_rpc(daemon: FakeDaemon, client: Client) -> None:
    hits = [client.claim([key]) for key in ALL]
    hits[0].release()
    lost = next(iter(daemon.claims.values()))
    lost.lost = "revoked"
    assert client.release_many(hits) == [True, False, True]
    assert daemon.rpcs["Release"] == 2
    assert client.release_many(hits) == [True, False, True]
    assert daemon.rpcs["Release"] == 2


def test_a_client_that_is_closed_loses_its_hits(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, local=False)
    hit = client.claim(ALL)
    client.close()
    daemon.wait_until(lambda: not daemon.claims)
    assert hit.lost
    assert hit.restore_into(buffers()).miss is MissReason.LOST
    assert not hit.release()


def test_views_need_a_claim_and_the_same_host(client: Client, hit: Hit) -> None:
    assert hit.views(0) is None
    assert hit.buffers is None
    with pytest.raises(CallerError, match="claim"):
        client.longest_run(ALL, claim=False).views(0)
