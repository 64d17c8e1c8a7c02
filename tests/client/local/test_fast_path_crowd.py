"""Many clients in one process and in several, on tiers that are far too small for them."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from prefixd.client import Client, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import ClientClosed
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.entries import payload_of, restore, save
from tests.support.lengths import times
from tests.support.warm import WARM

PAYLOAD_BYTES = 300_000
PROCESSES = 4


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as running:
        yield running


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("tier", Tier)
def test_clients_of_one_process_leave_in_any_order(
    daemon: PrivateDaemon, order: tuple[int, ...], tier: Tier
) -> None:
    """Closing one does not close what the others use."""
    clients = [Client(daemon.address) for _ in range(3)]
    assert all(client.wait_connected(deadline_ms=60_000) for client in clients)
    keys = save(clients[0], [f"{tier}"], PAYLOAD_BYTES, tier)
    payloads = [payload_of(key, PAYLOAD_BYTES) for key in keys]
    for leaving in order:
        for number in order[order.index(leaving) :]:
            assert clients[number]._transport.refused() == {}
            assert restore(clients[number].longest_run(keys, claim=False))[1] == payloads
        clients[leaving].close()
    with Client(daemon.address) as another:
        assert restore(another.longest_run(keys, claim=False))[1] == payloads


@pytest.mark.parametrize("tier", Tier)
def test_a_client_that_is_closed_while_others_restore(daemon: PrivateDaemon, tier: Tier) -> None:
    """A copy in progress finishes; its memory is not unmapped under it."""
    payload_bytes = 2**21 + 5
    with ExitStack() as stack:
        first = stack.enter_context(Client(daemon.address))
        keys = save(first, [f"closed {tier}"], payload_bytes, tier)
        payload = payload_of(keys[0], payload_bytes)
        for _ in range(10):
            client = Client(daemon.address)
            reading, restored = threading.Event(), []

            def read(client: Client = client, reading: threading.Event = reading) -> None:
                try:
                    while True:
                        hit = client.longest_run(keys, claim=False)
                        if hit:
                            result, (arrived,) = restore(hit)
                            restored.append(not result or arrived == payload)  # noqa: B023
                            reading.set()
                except ClientClosed:
                    pass

            threads = [threading.Thread(target=read) for _ in range(3)]
            for thread in threads:
                thread.start()
            assert reading.wait(60)
            client.close()
            for thread in threads:
                thread.join()
            assert restored
            assert all(restored)
        assert restore(first.longest_run(keys, claim=False))[1] == [payload]


#: Restores, and saves what it does not find, over and over; prints how often each happened.
WORKER = """
import random, sys
from tests.support.entries import *
address, seed, verify = sys.argv[1], int(sys.argv[2]), sys.argv[3]
random_ = random.Random(seed)
good = wrong = missed = lost = 0
with Client(address, verify=verify, deadline_ms=60_000, save_timeout_ms=60_000) as client:
    while good < int(sys.argv[4]):
        tier = random_.choice(list(Tier))
        run = random_.randrange(12)
        names = [f"{tier} {run} {n}" for n in range(random_.randint(1, 4))]
        items = items_of(names, 50_000 + 37_000 * run)
        keys = [item.key for item in items]
        hit = client.longest_run(keys, claim=random_.random() < 0.3)
        if random_.random() < 0.3 and hit.claimed and hit.buffers is not None:
            arrived = [b"".join(hit.views(i)) for i in range(len(hit))]
            held = hit.release()
            if held:
                good += len(hit)
                wrong += sum(a != i.payload for a, i in zip(arrived, items))
            else:
                lost += 1
        elif hit:
            result, payloads = restore(hit)
            good += sum(result.restored)
            missed += len(hit) - sum(result.restored)
            came = zip(result.restored, payloads, items)
            wrong += sum(ok and arrived != item.payload for ok, arrived, item in came)
        hit.release()
        if len(hit) < len(items):
            client.save_many(items[len(hit):], tier=tier, reason=SaveReason.EVICT)
print(good, wrong, missed, lost)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("verify", ["never", "always"])
def test_processes_that_evict_each_others_entries_all_the_time(verify: str) -> None:
    """No restore has a wrong byte, not even without checksums."""
    restores = times(40, 600)
    with private_daemon(ram="3MiB", shm="3MiB", disk="3MiB") as daemon:
        with ExitStack() as stack:
            workers = [
                stack.enter_context(
                    subprocess.Popen(
                        [*WARM, "-c", WORKER, daemon.address, str(seed), verify, str(restores)],
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for seed in range(PROCESSES)
            ]
            said = [worker.communicate()[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * PROCESSES
        totals = [sum(column) for column in zip(*(map(int, s.split()) for s in said), strict=True)]
        good, wrong, _, lost = totals
        assert good >= PROCESSES * restores
        assert wrong == 0
        assert lost == 0, "no claim is lost here"
        with daemon.admin() as admin:
            eventually(lambda: admin.stats().sessions == 0)
            assert all(tier.evictions > 50 for tier in admin.stats().tiers)
            assert problems_of(admin) == []
