"""Restores and views in place are right or a miss, whatever happens meanwhile to the entries or the
claim; and the daemon learns of the reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from prefixd.client import Client, Hit, Key, MissReason, SaveReason, Tier
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local import arenas
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.restores import Verify
from tests.support.daemon import eventually, private_daemon
from tests.support.entries import key_of, payload_of, restore, rpcs, save
from tests.support.lengths import pairs
from tests.support.moments import MOMENTS, disrupt

BUDGET_BYTES = 2 * 2**20
BUDGETS = dict.fromkeys(("ram", "shm", "disk"), "2MiB")
PAYLOAD_BYTES = 300_000
#: With and without checksums. Without, only the validation finds out.
CHOICES: tuple[Verify, ...] = ("always", "never")
LAST = MOMENTS[-1]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each payload be read in two pieces."""
    monkeypatch.setattr(arenas, "_PIECE_BYTES", 2**18)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    """A daemon whose tiers hold 2 MiB."""
    with private_daemon(**BUDGETS) as running:
        yield running


@dataclass
class Disruptor:
    """What another client, and an operator, may do at the worst moment."""

    client: Client
    admin: AdminConnection
    tier: Tier
    keys: list[Key]
    #: How many of the keys can't be evicted.
    pinned: int = 0

    def evict(self) -> None:
        self.admin.evict(BUDGET_BYTES, [self.tier])

    def fill(self) -> None:
        """Overwrite the whole tier with other entries."""
        self.evict()
        count = BUDGET_BYTES // PAYLOAD_BYTES - 1 - self.pinned
        for n in range(count):  # together they are more than one client's share
            save(self.client, [f"{self.tier} {n}"], PAYLOAD_BYTES, self.tier)

    def replace(self) -> None:
        """Save the same keys with other bytes, in the same places and in others."""
        self.evict()
        for key in reversed(self.keys):
            other = payload_of(key_of("other"), PAYLOAD_BYTES)
            self.client.save(key, other, tier=self.tier, reason=SaveReason.EVICT)

    def repeat(self) -> None:
        """Save the same keys with the same bytes again, in other places."""
        self.fill()
        self.evict()
        save(self.client, [f"before {self.tier}"], PAYLOAD_BYTES // 2, self.tier)
        for key in self.keys:
            payload = payload_of(key, PAYLOAD_BYTES)
            self.client.save(key, payload, tier=self.tier, reason=SaveReason.EVICT)

    def nothing(self) -> None:
        pass


@pytest.fixture
def disruptor(daemon: PrivateDaemon, tier: Tier) -> Iterator[Disruptor]:
    """One that has saved two entries to an empty tier."""
    with Client(daemon.address, local=False) as other, daemon.admin() as admin:
        admin.evict(BUDGET_BYTES, [tier])
        keys = save(other, [f"{tier} one", f"{tier} two"], PAYLOAD_BYTES, tier)
        yield Disruptor(other, admin, tier, keys)


def right(keys: list[Key]) -> list[bytes]:
    return [payload_of(key, PAYLOAD_BYTES) for key in keys]


# ---- without a claim


@pytest.mark.parametrize(
    ("tier", "change", "moment", "verify"),
    pairs(Tier, ["evict", "fill", "replace", "repeat"], MOMENTS, CHOICES),
)
def test_a_restore_without_a_claim_is_right_or_a_miss(
    daemon: PrivateDaemon, disruptor: Disruptor, change: str, moment: str, verify: Verify
) -> None:
    keys = disruptor.keys
    with Client(daemon.address, verify=verify) as client:
        hit = client.longest_run(keys, claim=False)
        assert len(hit) == 2
        with pytest.MonkeyPatch.context() as patch:
            disrupt(patch, moment, getattr(disruptor, change))
            result, payloads = restore(hit)
        asked = rpcs(client)
    if change == "repeat" or moment == LAST:
        assert result
        assert payloads == right(keys)
    else:
        assert result.miss is MissReason.ABSENT
        assert result.restored == (False, False)
    # For an entry that has left the index, no call is made.
    again = change in {"replace", "repeat"} and moment != LAST
    assert ("Claim" in asked) == again


@pytest.mark.parametrize("tier", [Tier.RAM])
def test_the_room_is_really_used_again(daemon: PrivateDaemon, disruptor: Disruptor) -> None:
    """Shows that the test above can fail: a view without a claim would be wrong."""
    with Client(daemon.address) as client:
        with client.claim(disruptor.keys) as hit:
            kept = hit.buffers or []
            assert [bytes(view) for view in kept] == right(disruptor.keys)
        disruptor.fill()
        assert [bytes(view) for view in kept] != right(disruptor.keys)


# ---- with a claim that holds


@pytest.mark.parametrize(("tier", "moment", "verify"), pairs(Tier, MOMENTS, CHOICES))
def test_nothing_happens_to_what_is_claimed(
    daemon: PrivateDaemon, disruptor: Disruptor, moment: str, verify: Verify
) -> None:
    disruptor.pinned = 2
    with Client(daemon.address, verify=verify) as client:
        hit = client.claim(disruptor.keys)
        with pytest.MonkeyPatch.context() as patch:
            disrupt(patch, moment, disruptor.fill)
            result, payloads = restore(hit)
        assert result
        assert payloads == right(disruptor.keys)
        assert rpcs(client) == {"Claim": 1}
        assert hit.release()


# ---- with a claim that is lost


def by_the_daemon(client: Client, hit: Hit) -> None:
    """The daemon drops the claim, and the client does not hear of it."""
    transport = transport_of(client)
    assert transport._node is not None
    numbers = [claim.number for claim in hit._pins.claims]
    transport._node.calls.give_back(transport._node.ref, numbers)


def with_its_session(client: Client, _hit: Hit) -> None:
    """The connection breaks."""
    link = transport_of(client)._link
    assert link is not None
    link._events.cancel()


def transport_of(client: Client) -> LocalTransport:
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    return transport


Loss = Callable[[Client, Hit], None]
LOSSES: dict[str, Loss] = {
    "by the daemon": by_the_daemon,
    "with its session": with_its_session,
}


def lose(disruptor: Disruptor, client: Client, hit: Hit, loss: Loss) -> None:
    loss(client, hit)
    eventually(lambda: disruptor.admin.stats().claims == 0)


@pytest.mark.parametrize(
    ("tier", "loss", "change_and_verify", "moment"),
    pairs(Tier, LOSSES, [("fill", "always"), ("fill", "never"), ("repeat", "never")], MOMENTS),
)
def test_a_restore_whose_claim_is_lost_is_right_or_a_miss(
    daemon: PrivateDaemon,
    disruptor: Disruptor,
    loss: str,
    change_and_verify: tuple[str, Verify],
    moment: str,
) -> None:
    change, verify = change_and_verify

    def happen() -> None:
        lose(disruptor, client, hit, LOSSES[loss])
        getattr(disruptor, change)()

    with Client(daemon.address, verify=verify) as client:
        hit = client.claim(disruptor.keys)
        with pytest.MonkeyPatch.context() as patch:
            disrupt(patch, moment, happen)
            result, payloads = restore(hit)
        if moment == LAST:
            assert result
            assert payloads == right(disruptor.keys)
        else:
            assert result.restored == (False, False)
            assert result.miss in {MissReason.LOST, MissReason.UNAVAILABLE}
        assert not hit.release(), "other bytes may be there by now"


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SHM])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("change", ["nothing", "evict", "fill", "replace", "repeat"])
def test_the_release_of_a_view_says_whether_its_bytes_are_still_the_entrys(
    daemon: PrivateDaemon, disruptor: Disruptor, loss: str, change: str
) -> None:
    """A claim that is known to be lost is not trusted, whatever became of its entries."""
    with Client(daemon.address) as client:
        hit = client.claim(disruptor.keys)
        views = hit.buffers
        assert views is not None
        lose(disruptor, client, hit, LOSSES[loss])
        known = hit.lost
        getattr(disruptor, change)()
        seen = [bytes(view) for view in views]
        held = hit.release()
        assert held == (change == "nothing" and not known)
        assert hit.lost == (not held)
        if change == "nothing":
            assert seen == right(disruptor.keys)


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("verify", CHOICES)
def test_heartbeats_that_stop_in_the_middle_of_a_restore(tier: Tier, verify: Verify) -> None:
    go_on = threading.Event()
    with (
        private_daemon("--sessions.heartbeat=500ms", **BUDGETS) as daemon,
        Client(daemon.address, local=False) as other,
        Client(daemon.address, verify=verify) as client,
        daemon.admin() as admin,
    ):
        keys = save(other, ["one", "two"], PAYLOAD_BYTES, tier)
        disruptor = Disruptor(other, admin, tier, keys)
        hit = client.claim(keys)

        def stop_heartbeats(client: Client, _hit: Hit) -> None:
            link = transport_of(client)._link
            assert link is not None
            link.before_heartbeat = go_on.wait  # type: ignore[assignment]  # its answer is not used

        def happen() -> None:
            lose(disruptor, client, hit, stop_heartbeats)
            disruptor.fill()

        try:
            with pytest.MonkeyPatch.context() as patch:
                disrupt(patch, "in the middle of a copy", happen)
                result, _ = restore(hit)
        finally:
            go_on.set()
        assert result.restored == (False, False)
        assert not hit.release()


# ---- reads are reported


def test_reads_in_place_count_in_the_order_of_eviction(daemon: PrivateDaemon) -> None:
    """With the next save the read entries become the most recent, the root more than the leaf."""
    with Client(daemon.address) as client, daemon.admin() as admin:
        admin.evict(BUDGET_BYTES, [Tier.RAM])
        keys = save(client, ["root", "middle", "leaf"], 1_000, Tier.RAM)
        others = save(client, ["other"], 1_000, Tier.RAM)
        hits = admin.stats().tiers[0].hits
        assert restore(client.longest_run(keys, claim=False))[0]
        (last,) = save(client, ["last"], 1_000, Tier.RAM)
        order = [bytes(entry.key) for entry in admin.next_victims(Tier.RAM, 1_000)]
        assert order == [*others, *reversed(keys), last]
        assert admin.stats().tiers[0].hits == hits + 3


def test_reads_in_place_are_told_with_a_heartbeat_if_nothing_is_saved() -> None:
    with (
        private_daemon("--sessions.heartbeat=300ms") as daemon,
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
