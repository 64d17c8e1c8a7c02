"""What operators ask of a running daemon, and that it then happens so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.writing import SaveItem
from prefixd.proto.keys import Key
from prefixd.server.admin import AdminService

from .daemon import eventually, private_daemon

BLOCK = 4096


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="64KiB", shm="64KiB", disk="1MiB") as running:
        yield running


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address) as connected, daemon.admin() as admin:
        yield connected
        # A release is told on the session, some time soon.
        eventually(lambda: not admin.claims().claims)
        admin.evict(2**40, [])


def keys(name: str, count: int) -> list[Key]:
    return [Key(hashlib.sha256(f"{name} {i}".encode()).digest()) for i in range(count)]


def save(client: Client, saved: list[Key], tier: Tier = Tier.RAM) -> None:
    items = [SaveItem(key, bytes(BLOCK), token_count=16) for key in saved]
    outcomes = client.save_many(items, tier=tier, reason=SaveReason.EVICT)
    assert all(outcome.status == 1 for outcome in outcomes)


def test_every_rpc_of_the_contract_is_served() -> None:
    from prefixd.proto import prefixd_pb2 as pb

    methods = pb.DESCRIPTOR.services_by_name["Admin"].methods_by_name
    assert all(name in vars(AdminService) for name in methods)


def test_a_preview_says_what_a_save_then_evicts(daemon: PrivateDaemon, client: Client) -> None:
    old = keys("old", 14)
    save(client, old)
    with daemon.admin() as admin:
        preview = admin.preview(Tier.RAM, BLOCK, 5)
        assert preview.admissible
        assert [bytes(victim.key) for victim in preview.victims] == old[:-4:-1]  # leaf first
        save(client, keys("new", 5))
        assert client.exists(old) == [True] * 11 + [False] * 3
        # As large as the tier: everything has to go, and can.
        assert admin.preview(Tier.RAM, 64 * 2**10, 1).evicted_bytes == 64 * 2**10
        too_large = admin.preview(Tier.RAM, 65 * 2**10, 1)
        assert not too_large.admissible
        assert not too_large.retryable
        with client.claim(old[:11]):
            pinned = admin.preview(Tier.RAM, 64 * 2**10, 1)
            assert not pinned.admissible
            assert pinned.retryable


def test_an_eviction_frees_what_is_asked_and_nothing_claimed(
    daemon: PrivateDaemon, client: Client
) -> None:
    saved = keys("evict", 16)
    save(client, saved)
    with daemon.admin() as admin, client.claim(saved[:2]):
        (result,) = admin.evict(3 * BLOCK - 1, [Tier.RAM]).results
        assert (result.entries, result.freed_bytes) == (3, 3 * BLOCK)
        assert client.exists(saved) == [True] * 13 + [False] * 3
        (rest,) = admin.evict(2**40, [Tier.RAM]).results
        assert rest.entries == 11
        assert client.exists(saved[:2]) == [True, True]


def test_a_check_adds_up_and_reads_everything(daemon: PrivateDaemon, client: Client) -> None:
    for tier in Tier:
        save(client, keys(f"check {tier}", 5), tier)
    with daemon.admin() as admin:
        found = admin.check(deep=True)
        assert list(found.problems) == []
        assert (found.entries, found.payloads_verified) == (15, 15)
        assert found.payload_bytes_verified == 15 * BLOCK
