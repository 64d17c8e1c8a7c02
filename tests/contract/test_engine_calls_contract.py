"""The calls that engines' connectors need, in place and over gRPC, each on a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from prefixd.client import (
    ClaimMode,
    Client,
    DeleteStatus,
    Hit,
    MissReason,
    ReserveItem,
    SaveItem,
    SaveStatus,
    Tier,
)
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import CallerError
from prefixd.proto.keys import Key
from tests.support.daemon import eventually, private_daemon
from tests.support.engines import fresh_keys, payload_of
from tests.support.fakes import PATIENCE_S

SIZE = 300_000


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon("--sessions.heartbeat=60s", ram="64MiB") as daemon:
        yield daemon


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest, daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, local=request.param == "local") as client:
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        yield client


@pytest.fixture(params=Tier, ids=lambda tier: tier.label)
def tier(request: pytest.FixtureRequest) -> Tier:
    found: Tier = request.param
    return found


def save(client: Client, count: int, tier: Tier = Tier.RAM, size: int = SIZE) -> list[Key]:
    keys = fresh_keys(count)
    items = [SaveItem(key, payload_of(key, size), 5) for key in keys]
    assert {each.status for each in client.save_many(items, tier=tier)} <= {SaveStatus.SAVED}
    return keys


# ---- several buffers


@pytest.mark.parametrize("cuts", [(1,), (7, 8, 200_000), tuple(range(1_000, SIZE, 1_000))])
def test_a_payload_may_lie_in_pieces(client: Client, tier: Tier, cuts: tuple[int, ...]) -> None:
    """Saved in pieces, restored whole, and the other way round."""
    one, two = fresh_keys(2)
    whole = payload_of(one, SIZE)
    pieces = [whole[a:b] for a, b in zip((0, *cuts), (*cuts, SIZE), strict=True)]
    assert client.save(one, pieces, tier=tier).ok
    assert client.save(two, whole, tier=tier).ok
    with client.claim([one, two]) as hit:
        assert hit.entries[0].payload_crc32c == hit.entries[1].payload_crc32c
        target = bytearray(SIZE)
        scattered = [bytearray(len(piece)) for piece in pieces]
        assert hit.restore_into([target, scattered])
        assert target == whole
        assert [bytes(each) for each in scattered] == pieces


def test_a_slice_of_a_larger_array_is_saved_and_restored_where_it_lies(
    client: Client, tier: Tier
) -> None:
    """A block of a `[heads, tokens, width]` layer is one slice of each head."""
    layers = [np.arange(2 * 64 * 16, dtype=np.float32).reshape(2, 64, 16) for _ in range(3)]
    (key,) = fresh_keys(1)
    assert client.save(key, [layer[:, 16:32] for layer in layers], tier=tier).ok
    targets = [np.zeros_like(layer) for layer in layers]
    with client.claim([key]) as hit:
        assert hit.restore_into([[target[:, 16:32] for target in targets]])
    for layer, target in zip(layers, targets, strict=True):
        assert (target[:, 16:32] == layer[:, 16:32]).all()
        assert not target[:, :16].any()
        assert not target[:, 32:].any()


def test_pieces_are_written_to_a_reservation(client: Client, tier: Tier) -> None:
    (key,) = fresh_keys(1)
    with client.reserve([ReserveItem(key, 6)], tier=tier)[0] as reservation:
        assert reservation.write([b"abc", b"def"]).ok
    with client.claim([key]) as hit:
        assert hit.read(0) == b"abcdef"


# ---- some of a hit


def test_some_entries_are_restored_each_with_its_own_result(client: Client, tier: Tier) -> None:
    keys = save(client, 4, tier)
    with client.claim(keys) as hit:
        right, short = bytearray(SIZE), bytearray(SIZE - 1)
        result = hit.restore_into([right, short, bytearray(SIZE)], indices=[3, 0, 1])
        assert result.restored == (True, False, True)
        assert result.misses == (None, MissReason.WRONG_SIZE, None)
        assert (result.run, result.token_count, result.miss) == (1, 5, MissReason.WRONG_SIZE)
        assert right == payload_of(keys[3], SIZE)
        assert short == bytes(SIZE - 1)
        assert not result
        assert hit.restore_into([], indices=[]).restored == ()


def test_some_entries_are_released_and_the_others_stay_pinned(
    daemon: PrivateDaemon, client: Client
) -> None:
    keys = save(client, 3)
    hit = client.claim(keys)
    assert hit.release_some([1])
    with daemon.admin() as admin:
        admin.evict(2**40, [Tier.RAM])
    assert client.exists(keys) == [True, False, True]
    with pytest.raises(CallerError, match="released"):
        hit.read(1)
    assert hit.read(2) == payload_of(keys[2], SIZE)
    assert hit.release_some([0, 1])
    assert client.delete(keys) == [
        DeleteStatus.DELETED,
        DeleteStatus.ABSENT,
        DeleteStatus.PINNED,
    ]
    assert hit.release_some([2])
    assert hit.release()
    eventually(lambda: client.delete(keys[2:]) == [DeleteStatus.DELETED])


def test_a_hit_says_where_its_entries_stood_and_can_be_walked(client: Client) -> None:
    keys = save(client, 2, size=10)
    missing, other = fresh_keys(2)
    with client.claim([missing, keys[0], other, keys[1]]) as hit:
        assert hit.positions == (1, 3)
        assert [entry.key for entry in hit] == keys
    with client.claim([missing, keys[1]], mode=ClaimMode.FIRST) as hit:
        assert hit.positions == (1,)
    assert client.longest_run(keys, claim=False).positions == (0, 1)


# ---- single keys


def test_the_leading_run_and_single_keys(client: Client, tier: Tier) -> None:
    keys = save(client, 5, tier, size=10)
    (missing,) = fresh_keys(1)
    assert client.leading_run([*keys[:3], missing, *keys[3:]]) == 3
    assert client.leading_run(keys) == 5
    assert client.leading_run([missing]) == client.leading_run([]) == 0
    assert client.exists_one(keys[0])
    assert not client.exists_one(missing)


def test_a_lookup_in_place_only_sends_no_rpc(client: Client) -> None:
    keys = save(client, 2, size=10)
    client.exists(keys)
    before = client.counters["rpcs"]
    found = client.in_place
    assert client.exists(keys, in_place_only=True) == [found] * 2
    assert client.exists_one(keys[0], in_place_only=True) == found
    assert client.leading_run(keys, in_place_only=True) == 2 * found
    if found:
        assert client.counters["rpcs"] == before


def test_a_touch_keeps_an_entry(daemon: PrivateDaemon, client: Client) -> None:
    with daemon.admin() as admin:
        admin.evict(2**40, [Tier.RAM])
        keys = save(client, 3, size=10)
        client.touch(keys[:1])
        save(client, 1, size=10)  # carries the pending touch
        (evicted,) = admin.evict(1, [Tier.RAM]).results
        assert evicted.entries == 1
    present = client.exists(keys)
    assert present[0]
    assert present.count(False) == 1


def test_delete_removes_entries_without_claims(client: Client, tier: Tier) -> None:
    free, held = save(client, 2, tier, size=10)
    absent, reserved = fresh_keys(2)
    (reservation,) = client.reserve([ReserveItem(reserved, 3)], tier=tier)
    with client.claim([held]) as hit:
        assert client.delete([free, held, absent, reserved, free]) == [
            DeleteStatus.DELETED,
            DeleteStatus.PINNED,
            DeleteStatus.ABSENT,
            DeleteStatus.IN_FLIGHT,
            DeleteStatus.ABSENT,
        ]
        assert hit.read(0) == payload_of(held, 10)
    assert reservation.write(b"abc").ok
    assert client.exists([free, held, reserved]) == [False, True, True]
    assert client.delete([]) == []
    assert client.save(free, b"again", tier=tier).status is SaveStatus.SAVED


def test_more_keys_than_a_call_takes_are_deleted(client: Client) -> None:
    keys = save(client, 4_200, size=32)
    assert client.leading_run(keys) == len(keys)
    assert set(client.delete(keys)) == {DeleteStatus.DELETED}
    assert client.leading_run(keys) == 0


# ---- futures


def test_claims_and_restores_are_futures(client: Client, tier: Tier) -> None:
    keys = save(client, 2, tier)
    called: list[Future[Hit]] = []
    claiming = client.claim_async(keys)
    claiming.add_done_callback(called.append)
    with claiming.result(PATIENCE_S) as hit:
        assert hit.keys == keys
        target = bytearray(SIZE)
        result = hit.restore_async([target], indices=[1]).result(PATIENCE_S)
        assert result
        assert target == payload_of(keys[1], SIZE)
    assert called == [claiming]
    assert client.claim_async([]).result(PATIENCE_S).keys == []


def test_futures_of_a_client_that_closes_are_misses(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(daemon.address)
    monkeypatch.setattr(client._calls, "_max_pending", 0)
    assert client.claim_async(fresh_keys(1)).result(0).miss is MissReason.DROPPED
    hit = client.claim(save(client, 1, size=10))
    result = hit.restore_async([bytearray(10)]).result(0)
    assert (result.restored, result.miss) == ((False,), MissReason.DROPPED)
    hit.release()
    client.close()


# ---- empty batches


EMPTY: dict[str, Callable[[Client], Any]] = {
    "claim": lambda c: c.claim([]).keys,
    "run": lambda c: c.longest_run([]).keys,
    "probe": lambda c: c.probe([]),
    "exists": lambda c: c.exists([]),
    "save": lambda c: c.save_many([], tier=Tier.RAM),
    "save later": lambda c: c.save_many_async([], tier=Tier.RAM).result(PATIENCE_S),
    "reserve": lambda c: c.reserve([], tier=Tier.RAM),
    "write": lambda c: c.write([]),
    "cancel": lambda c: c.cancel([]),
    "release": lambda c: c.release_many([]),
    "delete": lambda c: c.delete([]),
}


@pytest.mark.parametrize("call", EMPTY)
def test_an_empty_batch_is_legal_and_empty(client: Client, call: str) -> None:
    assert EMPTY[call](client) == []
    client.touch([])
