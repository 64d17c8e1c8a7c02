"""Synchronous and queued saves: every failure is an outcome, never an exception."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.client import Client, ReserveItem, SaveItem, SaveReason, SaveStatus, Tier
from prefixd.client.results import ReserveStatus
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import (
    CallerError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidKey,
    InvalidSize,
    InvalidTokens,
    LimitReached,
    UnknownReason,
    UnknownTier,
)
from prefixd.proto.keys import Key
from prefixd.proto.limits import MAX_BATCH_KEYS, MAX_TOKEN_IDS_BYTES, MAX_WAIT_MS
from prefixd.proto.tokens import token_bytes
from tests.support.fake_clients import ALL, ONE, THREE, TWO, fake_daemon, saves_of, saving_client
from tests.support.fakes import PATIENCE_S, FakeDaemon, keys, payloads

daemon = pytest.fixture(fake_daemon)
client = pytest.fixture(saving_client)


# ---- synchronous saves


@pytest.mark.parametrize("reason", SaveReason)
def test_a_synchronous_save_is_published_when_it_returns(
    daemon: FakeDaemon, client: Client, reason: SaveReason
) -> None:
    outcome = client.save(
        ONE,
        np.arange(6, dtype=np.uint16),
        tier=Tier.DISK,
        reason=reason,
        token_count=9,
        layer_count=3,
        token_ids=[1, 2],
    )
    assert not isinstance(outcome, Future)
    assert (outcome.key, outcome.status) == (ONE, SaveStatus.SAVED)
    entry = daemon.entries[ONE]
    assert entry.payload == np.arange(6, dtype=np.uint16).tobytes()
    assert (entry.tier, entry.reason) == (Tier.DISK, reason)
    assert (entry.item.token_count, entry.item.layer_count) == (9, 3)
    assert entry.item.token_ids == token_bytes([1, 2])
    assert client.counters["saved_bytes"] == 12


def test_many_are_saved_in_one_rpc(daemon: FakeDaemon, client: Client) -> None:
    data = payloads([3_000_000, 10, 2_000_000])
    outcomes = client.save_many(
        [SaveItem(key, payload) for key, payload in zip(ALL, data, strict=True)],
        tier=Tier.RAM,
        reason=SaveReason.EVICT,
        ancestors=[Key(b"a" * 32)],
    )
    assert [outcome.status for outcome in outcomes] == [SaveStatus.SAVED] * 3
    assert [daemon.entries[key].payload for key in ALL] == data
    assert daemon.rpcs["Save"] == 1
    assert list(daemon.saves[0].ancestors) == [b"a" * 32]


def test_each_item_has_its_own_outcome(daemon: FakeDaemon, client: Client) -> None:
    daemon.put(ONE, b"there")
    daemon.max_payload_bytes = 100
    outcomes = client.save_many(
        [SaveItem(ONE, b"there"), SaveItem(TWO, bytes(101)), SaveItem(THREE, b"new")],
        tier=Tier.RAM,
        reason=SaveReason.EVICT,
    )
    assert [outcome.status for outcome in outcomes] == [
        SaveStatus.PRESENT,
        SaveStatus.TOO_LARGE,
        SaveStatus.SAVED,
    ]
    assert saves_of(client) == {"present": 1, "too_large": 1, "saved": 1}
    assert client.counters["saved_bytes"] == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DaemonUnavailable("gone"), SaveStatus.UNAVAILABLE),
        (DeadlineExceeded("late"), SaveStatus.DEADLINE),
        (LimitReached("full"), SaveStatus.FAILED),
    ],
)
def test_a_save_that_fails_is_an_outcome(
    daemon: FakeDaemon, client: Client, error: Any, status: SaveStatus
) -> None:
    daemon.fail("Save", error)
    outcome = client.save(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT)
    assert (outcome.status, outcome.message) == (status, str(error))
    assert saves_of(client) == {status.label: 1}


def test_a_synchronous_save_blocks_no_longer_than_it_may(daemon: FakeDaemon) -> None:
    daemon.hold("Save")
    with Client(daemon.address, local=False, save_timeout_ms=20) as client:
        outcome = client.save(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT)
        assert outcome.status is SaveStatus.DEADLINE


def test_without_a_daemon_a_save_is_an_outcome_at_once(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/nobody.sock") as client:
        outcome = client.save(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.SHUTDOWN)
        assert outcome.status is SaveStatus.UNAVAILABLE
        future = client.save_async(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.FINISH)
        assert future.result(PATIENCE_S).status is SaveStatus.UNAVAILABLE


# ---- asynchronous saves


@pytest.mark.parametrize("reason", SaveReason)
def test_an_asynchronous_save_is_a_future(
    daemon: FakeDaemon, client: Client, reason: SaveReason
) -> None:
    gate = daemon.hold("Save")
    future = client.save_async(ONE, b"abc", tier=Tier.RAM, reason=reason)
    assert isinstance(future, Future)
    assert not future.done()
    assert not client.flush(deadline_ms=1)
    gate.set()
    assert future.result(PATIENCE_S).status is SaveStatus.SAVED
    assert client.flush()
    assert daemon.entries[ONE].reason == reason


def test_asynchronous_saves_that_do_not_fit_are_dropped(daemon: FakeDaemon, client: Client) -> None:
    gate = daemon.hold("Save")
    futures = [client.save_async(Key(key), b"abc", tier=Tier.RAM) for key in keys(5)]
    assert [future.done() for future in futures] == [False, False, False, True, True]
    assert futures[3].result().status is SaveStatus.DROPPED
    assert (
        not client.save_many_async(
            [SaveItem(ONE, b"abc"), SaveItem(TWO, b"abc")], tier=Tier.RAM, reason=SaveReason.COLD
        )
        .result(0)[1]
        .ok
    )
    assert saves_of(client) == {"dropped": 4}
    gate.set()
    assert [future.result(PATIENCE_S).status for future in futures[:3]] == [SaveStatus.SAVED] * 3
    assert list(daemon.entries) == keys(3)


def test_payloads_are_made_when_their_turn_has_come(daemon: FakeDaemon, client: Client) -> None:
    """The items of the earlier bunches are ancestors of the later ones, and the memory of a bunch
    may be used again for the next."""
    gate = daemon.hold("Save")
    names = [Key(key) for key in keys(3)]
    memory, made = bytearray(3), []

    def bunches() -> Iterator[list[SaveItem]]:
        for key, text in zip(names, (b"abc", b"def", b"ghi"), strict=True):
            memory[:] = text
            made.append(key)
            yield [SaveItem(key, memory)]

    terms: dict[str, Any] = {"payload_bytes": 9, "tier": Tier.RAM, "ancestors": [Key(b"r" * 32)]}
    first = client.save_async(ONE, b"abc", tier=Tier.RAM)
    future = client.save_made_async(names, bunches, **terms)
    assert not made
    assert client.pending_save_bytes == 12
    gate.set()
    assert first.result(PATIENCE_S).ok
    assert [each.key for each in future.result(PATIENCE_S) if each.ok] == names
    assert [daemon.entries[key].payload for key in names] == [b"abc", b"def", b"ghi"]
    assert [list(save.ancestors) for save in daemon.saves[1:]] == [
        [b"r" * 32, *names[:count]] for count in range(3)
    ]


def test_what_can_not_be_made_is_an_outcome(daemon: FakeDaemon, client: Client) -> None:
    def bunches() -> Iterator[list[SaveItem]]:
        yield [SaveItem(ONE, b"abc")]
        raise RuntimeError("the device is gone")

    terms: dict[str, Any] = {"payload_bytes": 6, "tier": Tier.RAM}
    first, second = client.save_made_async([ONE, TWO], bunches, **terms).result(PATIENCE_S)
    assert (first.status, second.key, second.status) == (SaveStatus.SAVED, TWO, SaveStatus.FAILED)
    assert second.message == "the device is gone"
    gate = daemon.hold("Save")
    waiting = [client.save_async(Key(key), b"abc", tier=Tier.RAM) for key in keys(3)]
    dropped = client.save_made_async([ONE, TWO], bunches, **terms).result(0)
    assert [each.status for each in dropped] == [SaveStatus.DROPPED] * 2
    assert saves_of(client) == {"saved": 1, "failed": 1, "dropped": 2}
    gate.set()
    assert all(future.result(PATIENCE_S) for future in waiting)


def test_what_would_be_dropped_is_told_before(daemon: FakeDaemon) -> None:
    gate = daemon.hold("Save")
    with Client(daemon.address, local=False, max_pending_bytes=10) as client:
        assert not client.would_drop(1_000)
        future = client.save_async(ONE, b"abcdef", tier=Tier.RAM)
        assert (client.pending_saves, client.pending_save_bytes) == (1, 6)
        assert (client.would_drop(4), client.would_drop(5)) == (False, True)
        dropped = client.save_async(TWO, b"abcde", tier=Tier.RAM)
        assert dropped.result(0).status is SaveStatus.DROPPED
        gate.set()
        assert future.result(PATIENCE_S).ok
        assert client.flush()
        assert (client.pending_saves, client.pending_save_bytes) == (0, 0)


def test_a_synchronous_save_does_not_wait_for_the_asynchronous(
    daemon: FakeDaemon, client: Client
) -> None:
    gate = daemon.hold("Save")
    future = client.save_async(ONE, b"abc", tier=Tier.RAM, reason=SaveReason.COLD)
    daemon.wait_until(lambda: daemon.rpcs["Save"])
    daemon.hold("Save").set()
    assert client.save(TWO, b"abc", tier=Tier.RAM, reason=SaveReason.EVICT).ok
    assert not future.done()
    gate.set()
    assert future.result(PATIENCE_S).ok


def test_closing_finishes_what_is_pending(daemon: FakeDaemon) -> None:
    with Client(daemon.address, local=False) as client:
        futures = [client.save_async(Key(key), b"abc", tier=Tier.RAM) for key in keys(10)]
    assert all(future.result(0).ok for future in futures)
    assert len(daemon.entries) == 10


def test_closing_waits_no_longer_than_it_may(daemon: FakeDaemon) -> None:
    client = Client(daemon.address, local=False)
    daemon.hold("Save")
    futures = [client.save_async(Key(key), b"abc", tier=Tier.RAM) for key in keys(3)]
    daemon.wait_until(lambda: daemon.rpcs["Save"])
    client.close(deadline_ms=5)
    statuses = [future.result(PATIENCE_S).status for future in futures]
    assert statuses == [SaveStatus.UNAVAILABLE, SaveStatus.DROPPED, SaveStatus.DROPPED]
    for thread in threading.enumerate():
        if thread.name.startswith("prefixd-"):
            thread.join(PATIENCE_S)  # it has nothing left to wait for
            assert not thread.is_alive()


def test_what_only_the_daemon_knows_is_an_outcome(daemon: FakeDaemon, client: Client) -> None:
    daemon.fail("Save", UnknownTier("there is no shm tier here"), UnknownTier("still not"))
    future = client.save_async(ONE, b"abc", tier=Tier.SHM, reason=SaveReason.COLD)
    queued = future.result(PATIENCE_S)
    waited_for = client.save(ONE, b"abc", tier=Tier.SHM, reason=SaveReason.EVICT)
    assert [outcome.status for outcome in (queued, waited_for)] == [SaveStatus.FAILED] * 2
    assert (queued.message, waited_for.message) == ("there is no shm tier here", "still not")


# ---- the caller's own mistakes


@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"key": b"short"}, InvalidKey),
        ({"payload": b""}, InvalidSize),
        ({"payload": "text"}, CallerError),
        ({"payload": np.zeros(8)[::2]}, InvalidSize),
        ({"payload": []}, InvalidSize),
        ({"payload": [b"abc", 5]}, CallerError),
        ({"token_count": -1}, InvalidSize),
        ({"token_count": 0}, InvalidSize),
        ({"token_count": 2**32}, InvalidSize),
        ({"layer_count": 2}, InvalidSize),
        ({"layer_count": -1}, InvalidSize),
        ({"token_ids": [-1]}, InvalidTokens),
        ({"token_ids": b"abc"}, InvalidSize),
        ({"token_ids": bytes(MAX_TOKEN_IDS_BYTES + 4)}, InvalidSize),
        ({"tier": 1}, UnknownTier),
        ({"tier": "ram"}, UnknownTier),
        ({"reason": 1}, UnknownReason),
        ({"ancestors": [b"short"]}, InvalidKey),
        ({"wait_ms": MAX_WAIT_MS + 1}, InvalidSize),
    ],
)
def test_mistakes_raise_at_once(
    daemon: FakeDaemon,
    client: Client,
    how: str,
    changed: dict[str, Any],
    error: type[CallerError],
) -> None:
    right: dict[str, Any] = {"key": ONE, "payload": b"abc", "tier": Tier.RAM}
    with pytest.raises(error):
        getattr(client, how)(**{**right, **changed})
    assert not daemon.rpcs["Save"]


def test_nothing_to_save_is_saved_at_once(daemon: FakeDaemon, client: Client) -> None:
    queued = client.save_many_async([], tier=Tier.RAM, reason=SaveReason.COLD)
    assert queued.result(PATIENCE_S) == []
    assert client.save_many([], tier=Tier.RAM, reason=SaveReason.EVICT) == []
    assert client.reserve([], tier=Tier.RAM, reason=SaveReason.COLD) == []
    assert client.write([]) == client.cancel([]) == []
    assert not set(daemon.rpcs) - {"Session"}


def test_more_than_a_call_takes_goes_in_several(daemon: FakeDaemon, client: Client) -> None:
    """The items of the earlier calls are ancestors of the later ones."""
    names = [Key(key) for key in keys(MAX_BATCH_KEYS + 2)]
    items = [SaveItem(key, b"a") for key in names]
    terms: dict[str, Any] = {"tier": Tier.RAM, "reason": SaveReason.EVICT}
    within: dict[str, Any] = {"deadline_ms": 60_000}
    outcomes = client.save_many(items, ancestors=[Key(b"r" * 32)], **terms, **within)
    assert [outcome.key for outcome in outcomes] == names
    assert {outcome.status for outcome in outcomes} == {SaveStatus.SAVED}
    first, second = daemon.saves
    assert list(first.ancestors) == [b"r" * 32]
    assert list(second.ancestors) == names[:MAX_BATCH_KEYS]
    reserved = client.reserve([ReserveItem(key, 1) for key in names], **terms, **within)
    assert {each.status for each in reserved} == {ReserveStatus.PRESENT}


def test_more_token_ids_than_a_message_takes_go_in_several(
    daemon: FakeDaemon, client: Client
) -> None:
    ids = bytes(MAX_TOKEN_IDS_BYTES)
    items = [SaveItem(key, b"a", token_ids=ids) for key in ALL]
    outcomes = client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
    assert all(outcome.ok for outcome in outcomes)
    assert [len(header.keys) for header in daemon.saves] == [2, 1]


def test_more_than_a_session_may_reserve_goes_in_several_calls(daemon: FakeDaemon) -> None:
    """By the daemon's limits: stored bytes in whole slabs, including token ids."""
    limits = pb.TierLimits(tier=pb.TIER_RAM, max_reserved_bytes=3 * 4096, slab_bytes=4096)
    evict = SaveReason.EVICT

    def say(event: pb.SessionEvent) -> pb.SessionEvent:
        event.welcome.tiers.append(limits)
        return event

    daemon.mangle("Session", say)
    sizes = (1, 4096, 4095, 4096, 5 * 4096, 1, 1)
    items = [
        SaveItem(Key(key), payload)
        for key, payload in zip(keys(len(sizes)), payloads(sizes), strict=True)
    ]
    items[3] = SaveItem(items[3].key, items[3].payload, 1, token_ids=[7])
    with Client(daemon.address, local=False) as client:
        # Also as the first call, which has to wait for the session to know its limits.
        outcomes = client.save_many(items, tier=Tier.RAM, reason=evict, deadline_ms=60_000)
        assert {outcome.status for outcome in outcomes} == {SaveStatus.SAVED}
        assert [len(header.keys) for header in daemon.saves] == [3, 1, 1, 2]
        assert [len(header.ancestors) for header in daemon.saves] == [0, 3, 4, 5]
        # Nothing is split without limits, or of reservations, which are held together.
        client.save_many(items[:4], tier=Tier.SHM, reason=evict, deadline_ms=60_000)
        wanted = [ReserveItem(Key(key), 4096) for key in keys(5, start=100)]
        reserved = client.reserve(wanted, tier=Tier.RAM, reason=evict)
        assert all(each.granted for each in reserved)
        client.cancel(reserved)
        assert [len(header.keys) for header in daemon.saves[4:]] == [4, 5]


def test_a_key_named_twice_is_saved_once(client: Client) -> None:
    items = [SaveItem(ONE, b"a"), SaveItem(TWO, b"b"), SaveItem(ONE, b"a")]
    outcomes = client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
    saved, present = SaveStatus.SAVED, SaveStatus.PRESENT
    assert [outcome.status for outcome in outcomes] == [saved, saved, present]


@pytest.mark.parametrize("make", [tuple, np.array, lambda ids: array("I", ids)])
def test_token_ids_are_any_sequence_of_ints(daemon: FakeDaemon, client: Client, make: Any) -> None:
    ids = make([3, 2, 1])
    assert client.save(ONE, b"a", tier=Tier.RAM, reason=SaveReason.EVICT, token_ids=ids).ok
    assert daemon.entries[ONE].item.token_ids == token_bytes([3, 2, 1])


def test_padded_token_ids_are_given_as_bytes(daemon: FakeDaemon, client: Client) -> None:
    padded = array("i", [5, 6, -1, -1]).tobytes()
    assert client.save(ONE, b"a", tier=Tier.RAM, reason=SaveReason.EVICT, token_ids=padded).ok
    assert daemon.entries[ONE].item.token_ids == padded
