#!/usr/bin/env python3
"""Compares large saves with lent and staging memory, and a client's first save with later ones.

    python tests/bench/bench_lending.py

Prints one JSON object per line; only ratios within one run count. `save` saves the same payloads in
both ways in turns, to the ram tier of one daemon, and prints the time lent relative to the time
staged: the median of the turns, and the quartiles of the ratios of single turns. `first` is the
time of a client's first save relative to its later ones: the median of several clients, one after
another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Final

from prefixd.client import Client, Key, SaveItem, SaveReason, Tier
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.local import staging
from prefixd.client.local.local_transport import LocalTransport

KIB: Final = 2**10
MIB: Final = 2**20
#: (number of payloads, bytes of each)
CASES: Final = (
    (48, 64 * KIB),
    (48, 192 * KIB),
    (48, 640 * KIB),
    (48, 2 * MIB),
    (48, 5 * MIB),
    (8, 5 * MIB),
    (1, 5 * MIB),
)
#: A first save that is lent, and one that is staged.
FIRST: Final = ((48, 5 * MIB), (48, 192 * KIB))
LATER: Final = 3
DEADLINE_MS: Final = 60_000


def payloads_of(count: int, payload_bytes: int) -> list[bytes]:
    return [os.urandom(payload_bytes) for _ in range(count)]


def save_s(client: Client, payloads: list[bytes]) -> float:
    """The seconds of a save under new keys."""
    items = [SaveItem(Key(os.urandom(32)), payload, 1) for payload in payloads]
    start_s = time.perf_counter()
    outcomes = client.save_many(
        items, tier=Tier.RAM, reason=SaveReason.EVICT, deadline_ms=DEADLINE_MS
    )
    taken_s = time.perf_counter() - start_s
    assert all(outcome.ok for outcome in outcomes), outcomes
    return taken_s


def way(client: Client, lent: bool) -> None:
    """Set whether a client lends its memory or stages."""
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    node = transport._node
    assert node is not None, "the client does not save in place"
    node.lends = lent
    staging.LEND_BYTES = 1


def beside_staging(client: Client, payloads: list[bytes], rounds: int) -> dict[str, object]:
    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for lent in (turn % 2 == 0, turn % 2 == 1):
            way(client, lent)
            taken[lent].append(save_s(client, payloads))
            assert client._transport._node.lends == lent  # type: ignore[union-attr]
    pairs = [lent / staged for lent, staged in zip(taken[True], taken[False], strict=True)][1:]
    lent_s, staged_s = (statistics.median(taken[lent][1:]) for lent in (True, False))
    quartiles = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return {
        "lent_ms": round(lent_s * 1e3, 2),
        "staged_ms": round(staged_s * 1e3, 2),
        "lent / staged": round(lent_s / staged_s, 2),
        "quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
    }


def first_saves(address: str, payloads: list[bytes], clients: int) -> dict[str, object]:
    ratios = []
    for _ in range(clients):
        with Client(address) as client:
            assert client.wait_connected()
            first_s = save_s(client, payloads)
            later_s = statistics.median(save_s(client, payloads) for _ in range(LATER))
            ratios.append(later_s / first_s)
    return {
        "clients": clients,
        "throughput, first / later": round(statistics.median(ratios), 2),
        "from": round(min(ratios), 2),
        "to": round(max(ratios), 2),
    }


def report(what: str, count: int, payload_bytes: int, found: dict[str, object]) -> None:
    row = {"what": what, "payloads": count, "payload_kib": payload_bytes // KIB}
    print(json.dumps(row | found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each case")
    parser.add_argument(
        "--clients", type=int, default=9, help="number of clients with a first save"
    )
    parser.add_argument("--most-kib", type=int, default=5 * KIB, help="no larger payloads")
    parser.add_argument("--ram", default="512MiB", help="the budget of the tier")
    options = parser.parse_args()
    cases = [case for case in CASES if case[1] <= options.most_kib * KIB]
    flags = (f"--ram.budget={options.ram}", "--shm.budget=0", "--disk.budget=0")
    usual_bytes = staging.LEND_BYTES
    with (
        temporary_directories("bench") as (directory, shm_directory),
        PrivateDaemon(directory, shm_directory, flags) as daemon,
    ):
        with Client(daemon.address) as client:
            assert client.wait_connected()
            # Fill the tier, so that every save evicts.
            filling = payloads_of(*cases[-1])
            with daemon.admin() as admin:
                while not sum(tier.evictions for tier in admin.stats().tiers):
                    save_s(client, filling)
            for count, payload_bytes in cases:
                payloads = payloads_of(count, payload_bytes)
                found = beside_staging(client, payloads, options.rounds)
                report("save", count, payload_bytes, found)
        staging.LEND_BYTES = usual_bytes
        for count, payload_bytes in FIRST:
            if payload_bytes <= options.most_kib * KIB:
                found = first_saves(
                    daemon.address, payloads_of(count, payload_bytes), options.clients
                )
                report("first", count, payload_bytes, found)
        with daemon.admin() as admin:
            refusals = admin.stats().in_flight["lent_save_refusals"]
            assert not refusals, f"{refusals} of the lent saves were staged"


if __name__ == "__main__":
    main()
