"""A daemon that is killed while clients read its memory: a read brings the right bytes or is a
miss, a release tells whether a view was good until then, and the next daemon has all its room."""

from __future__ import annotations

import pytest

from prefixd.client import Client, Hit, MissReason, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.restores import Verify
from prefixd.proto.limits import MAX_WAIT_MS
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.entries import payload_of, restore, save
from tests.support.moments import disrupt

PAYLOAD_BYTES = 1_000_000
#: Enough entries to fill a tier of 8 MiB.
NAMES = [f"entry {number}" for number in range(8)]
BUDGET_BYTES = 8 * 2**20


def fill(daemon: PrivateDaemon, tier: Tier) -> None:
    """Fill the tier with other entries, which take all the room of the earlier ones."""
    with daemon.admin() as admin, Client(daemon.address) as other:
        admin.evict(BUDGET_BYTES, [tier])
        for name in NAMES:  # one by one, since all at once exceed one client's share
            save(other, [f"other {name}"], PAYLOAD_BYTES, tier)


def viewed(hit: Hit) -> bytes:
    views = hit.buffers
    assert views is not None
    return b"".join(views)


def test_a_view_of_shm_is_good_until_the_next_daemon_takes_the_arena() -> None:
    with private_daemon() as daemon, Client(daemon.address) as client:
        keys = save(client, NAMES[:2], PAYLOAD_BYTES, Tier.SHM)
        right = b"".join(payload_of(key, PAYLOAD_BYTES) for key in keys)
        early, untouched, overwritten = (client.claim(keys) for _ in range(3))
        for hit in (early, untouched, overwritten):
            assert viewed(hit) == right
        views = overwritten.buffers or []

        daemon.kill()
        eventually(lambda: early.lost)
        assert b"".join(views) == right, "no daemon has written there since"
        assert not early.release()
        daemon.start()
        assert not untouched.release(), "the new daemon may have written there"
        fill(daemon, Tier.SHM)
        assert b"".join(views) != right
        assert not overwritten.release()
        assert (early.lost, untouched.lost, overwritten.lost) == (True, True, True)
        with daemon.admin() as admin:
            assert problems_of(admin) == []


def test_a_view_of_ram_is_good_as_long_as_it_is_looked_at() -> None:
    """The memory of a killed daemon exists as long as a client maps it. The client itself goes on
    with the next daemon."""
    with private_daemon() as daemon, Client(daemon.address) as client:
        keys = save(client, NAMES[:2], PAYLOAD_BYTES, Tier.RAM)
        right = b"".join(payload_of(key, PAYLOAD_BYTES) for key in keys)
        hit, read_later = client.claim(keys), client.claim(keys)
        looked = client.longest_run(keys, claim=False)
        assert viewed(hit) == right
        views = hit.buffers or []

        daemon.kill()
        daemon.start()
        assert client.wait_connected(deadline_ms=MAX_WAIT_MS)
        eventually(lambda: read_later.lost)
        fill(daemon, Tier.RAM)

        assert client.exists(keys) == [False, False]
        assert restore(looked)[0].miss is MissReason.ABSENT
        assert restore(read_later)[0].miss is MissReason.LOST
        assert b"".join(views) == right
        assert not hit.release()
        with client.claim(save(client, NAMES[:2], PAYLOAD_BYTES, Tier.RAM)) as again:
            assert viewed(again) == right
        assert not again.lost


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("claimed", [True, False], ids=["claimed", "looked"])
def test_a_daemon_that_is_killed_and_replaced_in_the_middle_of_a_restore(
    tier: Tier, claimed: bool
) -> None:
    """The next daemon overwrites the files while the client copies the rest. The mapped RAM still
    belongs to the killed daemon."""
    choices: tuple[Verify, ...] = ("always", "never")
    with private_daemon() as daemon:
        for verify in choices:
            with Client(daemon.address, verify=verify) as client:
                keys = save(client, NAMES[:2], PAYLOAD_BYTES, tier)
                hit = client.longest_run(keys, claim=claimed)

                def replace_daemon() -> None:
                    daemon.kill()
                    daemon.start()
                    fill(daemon, tier)

                with pytest.MonkeyPatch.context() as patch:
                    disrupt(patch, "in the middle of a copy", replace_daemon)
                    result, payloads = restore(hit)
                if tier is Tier.RAM and result:  # else its client has let go of that memory
                    assert payloads == [payload_of(key, PAYLOAD_BYTES) for key in keys]
                else:
                    assert result.restored == (False, False)
                    assert result.miss in {
                        MissReason.ABSENT,
                        MissReason.LOST,
                        MissReason.UNAVAILABLE,
                    }
                if claimed:
                    assert not hit.release()


@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK])
def test_a_recovered_entry_is_read_through_newly_handed_over_files(tier: Tier) -> None:
    with private_daemon() as daemon, Client(daemon.address) as client:
        keys = save(client, NAMES[:3], PAYLOAD_BYTES, tier)
        looked = client.longest_run(keys, claim=False)
        daemon.kill()
        daemon.start()
        assert client.wait_connected(deadline_ms=MAX_WAIT_MS)
        eventually(lambda: client.exists(keys) == [True] * 3)
        result, payloads = restore(looked)
        assert result
        assert payloads == [payload_of(key, PAYLOAD_BYTES) for key in keys]
        assert client._transport.refused() == {}
