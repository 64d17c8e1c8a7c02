"""Measures searches while the daemon is stopped or gone, and the first save of a client.

    python tests/bench/bench_client.py                # 20 s, 2 GiB of memory

One JSON object per line.

- `search`: `longest_prefix` of 30,000 tokens that were never saved, in turns with hashing its keys,
  at the lengths that the save policy cuts at, or at every length (`stride_tokens` 1).
  The daemon serves, is stopped (SIGSTOP) or was killed (SIGKILL). `first_ms` is the first search
  after that, which may wait for its deadline; only the later ones count. In place (`local`) and
  over gRPC (`grpc`).
- `first save`: the first `save_many` of a client, in GB/s, and the median of its later ones. Each
  saves 16 MiB in blocks of 1 MiB, with many clients: at once, or half a second after connecting.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from prefixd.client.bench.run import wait_until_secured
from prefixd.client.chains import boundaries
from prefixd.client.client import Client
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.saves import SaveItem
from prefixd.proto.keys import Key, Namespace, prefix_keys
from prefixd.proto.limits import DEFAULT_BOUNDARY_ALIGN_TOKENS
from prefixd.proto.vocabulary import SaveReason, SaveStatus, Tier

TOKENS: Final = 30_000
BLOCK_BYTES: Final = 2**20
_DEADLINE_MS: Final = 50
#: A client that first loads a model gives its staging memory this time to be prepared.
_PREPARING_S: Final = 0.5


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def searches(rounds: int) -> None:
    for stride_tokens in (DEFAULT_BOUNDARY_ALIGN_TOKENS, 1):
        for how in ("local", "grpc"):
            for state in ("serving", "stopped", "gone"):
                if stride_tokens > 1 or state == "serving":
                    search(how, state, stride_tokens, rounds)


def search(how: str, state: str, stride_tokens: int, rounds: int) -> None:
    # At every length the rpcs alone take longer than a usual deadline.
    deadline_ms = _DEADLINE_MS if stride_tokens > 1 else 1_000
    namespace = Namespace(bytes(32), "", bytes(32))
    chosen = random.Random(1)
    tokens = array("I", (chosen.randrange(128_000) for _ in range(TOKENS)))
    with ExitStack() as stack:
        directories = stack.enter_context(temporary_directories("client"))
        flags = ("--ram.budget=16MiB", "--shm.budget=0", "--disk.budget=0")
        daemon = stack.enter_context(PrivateDaemon(*directories, flags))
        client = stack.enter_context(
            Client(daemon.address, local=how == "local", deadline_ms=deadline_ms)
        )
        assert client.wait_connected(deadline_ms=10_000)
        lengths = boundaries(TOKENS, stride_tokens)

        def walk() -> object:
            return client.longest_prefix(
                namespace, tokens, stride_tokens=stride_tokens, claim=False
            )

        def hash_all() -> object:
            return prefix_keys(namespace, tokens, lengths)

        assert not walk()
        if state == "stopped":
            os.kill(daemon.pid, signal.SIGSTOP)
            stack.callback(os.kill, daemon.pid, signal.SIGCONT)
        elif state == "gone":
            daemon.kill()
        first_s = seconds_of(walk)
        walks, hashings = [], []
        for _ in range(rounds):
            hashings.append(seconds_of(hash_all))
            walks.append(seconds_of(walk))
    hashing_us, walk_us = (1e6 * statistics.median(times) for times in (hashings, walks))
    show(
        what="search",
        how=how,
        daemon=state,
        stride_tokens=stride_tokens,
        first_ms=1e3 * first_s,
        hashing_us=hashing_us,
        search_us=walk_us,
        longest_us=1e6 * max(walks),
        x_hashing=walk_us / hashing_us,
    )


def saves(clients: int, blocks: int) -> None:
    """A client that saves at once takes turns with one that waits first."""
    later = 4
    budget_bytes = (blocks + 1) * BLOCK_BYTES
    flags = (f"--ram.budget={budget_bytes}", "--shm.budget=0", "--disk.budget=0")
    bytes_of_one = memoryview(os.urandom(BLOCK_BYTES))
    taken: dict[str, dict[str, list[float]]] = {
        how: {"first": [], "later": []} for how in ("at once", "later")
    }
    with (
        temporary_directories("client") as directories,
        PrivateDaemon(*directories, flags) as daemon,
        daemon.admin() as admin,
    ):
        wait_until_secured(admin)
        for turn in range(2 * clients):
            how = "later" if turn % 2 else "at once"
            with Client(daemon.address) as client:
                assert client.wait_connected(deadline_ms=10_000)
                if how == "later":
                    threading.Event().wait(_PREPARING_S)
                for number in range(1 + later):
                    items = [SaveItem(Key(os.urandom(32)), bytes_of_one) for _ in range(blocks)]

                    def save(items: list[SaveItem] = items, client: Client = client) -> None:
                        found = client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
                        assert all(one.status is SaveStatus.SAVED for one in found), found[0]

                    taken[how]["later" if number else "first"].append(seconds_of(save))
    size_bytes = blocks * BLOCK_BYTES
    for how, seconds in taken.items():
        first, rest = (size_bytes / statistics.median(s) / 1e9 for s in seconds.values())
        show(what="first save", how=how, first_gb=first, later_gb=rest, x_later=first / rest)


def show(**fields: object) -> None:
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=16)
    options = parser.parse_args()
    searches(options.rounds)
    saves(options.clients, options.blocks)


if __name__ == "__main__":
    main()
