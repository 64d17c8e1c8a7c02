"""Restores without a claim: whatever happens meanwhile, what comes is right or a miss; and the
daemon learns of the reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from prefixd.client import Client, Key, MissReason, SaveReason, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local.node import LocalNode
from prefixd.client.reading import VERIFY_CHOICES, Reader, Restore

from .daemon import eventually, private_daemon
from .entries import key_of, payload_of, restore, rpcs, save

BUDGET_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    """Its tiers hold 8 MiB."""
    with private_daemon() as running:
        yield running


@dataclass
class Disruptor:
    """Another client, and the operator, at the worst moment."""

    client: Client
    admin: AdminConnection
    tier: Tier
    keys: list[Key]
    payload_bytes: int

    def evict(self) -> None:
        self.admin.evict(BUDGET_BYTES, [self.tier])

    def fill(self) -> None:
        """Something else lies everywhere now."""
        self.evict()
        count = BUDGET_BYTES // self.payload_bytes - 1
        save(self.client, [f"{self.tier} {n}" for n in range(count)], self.payload_bytes, self.tier)

    def replace(self) -> None:
        """The same keys with other bytes, where they lay before and elsewhere."""
        self.evict()
        for key in reversed(self.keys):
            other = payload_of(key_of("other"), self.payload_bytes)
            self.client.save(key, other, tier=self.tier, reason=SaveReason.EVICT)

    def repeat(self) -> None:
        """The same keys with the same bytes, elsewhere: another save."""
        self.fill()
        self.evict()
        save(self.client, [f"before {self.tier}"], self.payload_bytes // 2, self.tier)
        for key in self.keys:
            payload = payload_of(key, self.payload_bytes)
            self.client.save(key, payload, tier=self.tier, reason=SaveReason.EVICT)


def before_call(
    patch: pytest.MonkeyPatch, moment: tuple[type, str, int], do: Callable[[], None]
) -> None:
    """`do` right before that call of a method, counted from now on."""
    owner, name, number = moment
    method = getattr(owner, name)
    calls = itertools.count(1)

    def patched(*args: object) -> object:
        if next(calls) == number:
            do()
        return method(*args)

    patch.setattr(owner, name, patched)


#: When, as the method and the number of its call that it happens right before.
MOMENTS: dict[str, tuple[type, str, int]] = {
    "before the first look": (LocalNode, "rows", 1),
    "before the first byte": (Restore, "__call__", 1),
    "after the first bytes": (Restore, "__call__", 2),
    "before the second look": (LocalNode, "get", 2),
    "after the second look": (Reader, "_account", 1),
}


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("change", ["evict", "fill", "replace", "repeat"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_restore_without_a_claim_is_right_or_a_miss(
    daemon: PrivateDaemon, tier: Tier, change: str, moment: str
) -> None:
    payload_bytes = 1_200_000
    with (
        Client(daemon.address, local=False) as other,
        daemon.admin() as admin,
    ):
        for verify in VERIFY_CHOICES:
            admin.evict(BUDGET_BYTES, [tier])
            keys = save(other, [f"{tier} one", f"{tier} two"], payload_bytes, tier)
            disruptor = Disruptor(other, admin, tier, keys, payload_bytes)
            with (
                Client(daemon.address, verify=verify) as client,
                pytest.MonkeyPatch.context() as patch,
            ):
                hit = client.longest_run(keys, claim=False)
                assert len(hit) == 2
                before_call(patch, MOMENTS[moment], getattr(disruptor, change))
                result, payloads = restore(hit)
                asked = rpcs(client)
            if change == "repeat" or moment == "after the second look":
                assert result
                assert payloads == [payload_of(key, payload_bytes) for key in keys]
            else:
                assert result.miss is MissReason.ABSENT
                assert result.restored == (False, False)
            # What is not in the index any more need not be asked for.
            again = change in {"replace", "repeat"} and moment != "after the second look"
            assert ("Claim" in asked) == again


def test_the_room_is_really_used_again(daemon: PrivateDaemon) -> None:
    """So that the test above has something to find: a view without a claim would be wrong."""
    with Client(daemon.address) as client, daemon.admin() as admin:
        admin.evict(BUDGET_BYTES, list(Tier))
        keys = save(client, ["one", "two"], 1_200_000, Tier.RAM)
        with client.claim(keys) as hit:
            views = [bytes(view) for view in hit.buffers or []]
            kept = hit.buffers or []
        Disruptor(client, admin, Tier.RAM, keys, 1_200_000).fill()
        assert [bytes(view) for view in kept] != views


# ---- reads are told


def test_reads_in_place_count_in_the_order_of_eviction(daemon: PrivateDaemon) -> None:
    """With the next save: what was read is the most recent, its root more than its leaf."""
    with Client(daemon.address) as client, daemon.admin() as admin:
        admin.evict(BUDGET_BYTES, [Tier.RAM])
        keys = save(client, ["root", "middle", "leaf"], 1_000, Tier.RAM)
        others = save(client, ["other"], 1_000, Tier.RAM)
        hits = admin.stats().tiers[0].hits
        assert restore(client.longest_run(keys, claim=False))[0]
        (last,) = save(client, ["last"], 1_000, Tier.RAM)
        order = [bytes(entry.key) for entry in admin.all_entries(Tier.RAM)]
        assert order == [*others, *reversed(keys), last]
        assert admin.stats().tiers[0].hits == hits + 3


def test_reads_in_place_are_told_with_a_heartbeat_if_nothing_is_saved() -> None:
    with (
        private_daemon("--sessions.heartbeat=50ms") as daemon,
        Client(daemon.address) as client,
        daemon.admin() as admin,
    ):
        keys = save(client, ["root", "leaf"], 1_000, Tier.SHM)
        assert restore(client.longest_run(keys, claim=False))[0]
        eventually(lambda: admin.stats().tiers[1].hits == 2)
        assert admin.stats().counters["prefixd_touches_total"] == 2


def test_reads_in_place_are_told_when_the_client_closes(daemon: PrivateDaemon) -> None:
    with daemon.admin() as admin:
        with Client(daemon.address) as client:
            keys = save(client, ["one to read"], 1_000, Tier.SHM)
            hits = admin.stats().tiers[1].hits
            assert restore(client.longest_run(keys, claim=False))[0]
        eventually(lambda: admin.stats().tiers[1].hits == hits + 1)
