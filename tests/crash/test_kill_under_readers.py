"""A daemon that is killed while clients look at its memory: what they see stays what it was."""

from __future__ import annotations

import pytest

from prefixd.client import Client, MissReason, SaveReason, SaveStatus, Tier
from prefixd.proto.limits import MAX_WAIT_MS

from ..daemon import eventually, private_daemon
from ..entries import items_of, payload_of, restore, save

READERS = "readers from before the restart"
PAYLOAD_BYTES = 1_000_000
#: So many fill 8 MiB of shm.
NAMES = [f"entry {number}" for number in range(8)]
BUDGET_BYTES = 8 * 2**20


def test_what_is_viewed_in_shm_is_not_written_over_before_the_lease_has_passed() -> None:
    """Nor can it be evicted; afterwards it is the room of others again."""
    times = ("--sessions.claim_lease=4s", "--sessions.heartbeat=1s")
    with private_daemon(*times) as daemon, Client(daemon.address) as client:
        keys = save(client, NAMES[:2], PAYLOAD_BYTES, Tier.SHM)
        seen = b"".join(payload_of(key, PAYLOAD_BYTES) for key in keys)
        hit = client.claim(keys)
        views = hit.buffers
        assert views is not None
        assert b"".join(views) == seen

        daemon.kill()
        daemon.start()

        with daemon.admin() as admin, Client(daemon.address) as other:

            def held() -> bool:
                return any(claim.owner == READERS for claim in admin.claims().claims)

            def fill(number: int) -> int:
                """Saves what fills the tier; says how many found room."""
                names = [f"other {number} {n}" for n in range(8)]
                items = items_of(names, PAYLOAD_BYTES)
                outcomes = other.save_many(
                    items, tier=Tier.SHM, reason=SaveReason.EVICT, deadline_ms=MAX_WAIT_MS
                )
                statuses = [outcome.status for outcome in outcomes]
                assert set(statuses) <= {SaveStatus.SAVED, SaveStatus.NO_ROOM}
                return statuses.count(SaveStatus.SAVED)

            assert held()
            rounds = 0
            while True:
                admin.evict(BUDGET_BYTES, [Tier.SHM])
                saved = fill(rounds)
                unchanged = b"".join(views) == seen
                if not held():
                    break  # between the save and now, or before
                assert unchanged
                assert saved == 6, "of eight rooms two are still looked at"
                rounds += 1
            assert rounds > 0
            admin.evict(BUDGET_BYTES, [Tier.SHM])
            assert fill(-1) == 8
            assert b"".join(views) != seen, "and nobody has a right to look any more"
            assert admin.check(deep=True).problems == []

        assert not hit.release()
        assert hit.lost


def test_what_is_viewed_in_ram_stays_as_long_as_it_is_looked_at() -> None:
    """The memory of the daemon that was killed belongs to whoever has it mapped. The claim is
    lost all the same, and the client goes on with the new daemon."""
    with private_daemon() as daemon, Client(daemon.address) as client:
        keys = save(client, NAMES[:2], PAYLOAD_BYTES, Tier.RAM)
        hit = client.claim(keys)
        looked = client.longest_run(keys, claim=False)
        views = hit.buffers
        assert views is not None
        seen = b"".join(views)

        daemon.kill()
        daemon.start()
        assert client.wait_connected(deadline_ms=MAX_WAIT_MS)
        eventually(lambda: hit.lost)

        assert b"".join(views) == seen
        assert seen == b"".join(payload_of(key, PAYLOAD_BYTES) for key in keys)
        assert client.exists(keys) == [False, False]
        result, _ = restore(looked)
        assert result.miss is MissReason.ABSENT
        assert restore(hit)[0].miss is MissReason.LOST
        assert hit.buffers is None
        assert not hit.release()

        save(client, NAMES, PAYLOAD_BYTES, Tier.RAM)
        assert b"".join(views) == seen
        with client.claim(keys) as again:
            assert again.buffers is not None
            assert b"".join(again.buffers) == seen


@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK])
def test_an_entry_that_came_back_is_read_through_what_was_handed_over_anew(tier: Tier) -> None:
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
