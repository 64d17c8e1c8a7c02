"""Measures the cost of many entries end to end: a client here, daemons in their own processes.

    python tests/bench/bench_entries.py     # 10,000 against 1,000,000 entries: minutes, 6 GiB

Two daemons with only a RAM tier are filled through the client. Then they take turns, so that both
are measured under the same conditions. A batch is 48 keys:

- `claim`: keys that were saved together, like the blocks of a prompt, from the call to its result.
  `claim scattered`: keys that were not saved together, the worst case. `release`: a release and a
  request after it, because a release has no response.
- `save`: new keys into free memory. `save evicting`: each key evicts one entry.

The memory of an entry is the growth of the second daemon between the two numbers of entries,
divided by their difference. `heap` is `RssAnon` of /proc/<pid>/status: the tables and all other
allocations of the process. `index` is its memory file, whose pages all processes share. The rest of
`RssShmem` is the arena.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from prefixd.client.bench.run import wait_until_secured
from prefixd.client.bench.samples import Case, interleave
from prefixd.client.client import Client
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.client.hits import Hit
from prefixd.client.saves import SaveItem
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, SaveStatus, Tier

BATCH_KEYS: Final = 48
SLAB_BYTES: Final = 4096
TOKENS: Final = 512
#: Keys in one save while filling. More would be faster, but would leave free pages in the index,
#: which keeps the pages changed by a transaction until the next but one.
FILL_KEYS: Final = 512


class Side:
    """One daemon, and the client that fills it and measures it."""

    def __init__(self, daemon: PrivateDaemon, admin: AdminConnection, client: Client) -> None:
        self.daemon = daemon
        self.admin = admin
        self.client = client
        self.keys: list[Key] = []
        self.hit: Hit | None = None
        self.batch: Sequence[Key] = ()
        self.random = random.Random(1)

    def fill(self, entries: int) -> None:
        """Save entries until there are this many."""
        while len(self.keys) < entries:
            keys = new_keys(min(FILL_KEYS, entries - len(self.keys)))
            self.save(keys)
            self.keys += keys

    def save(self, keys: Sequence[Key]) -> None:
        items = [SaveItem(key, key, TOKENS) for key in keys]
        outcomes = self.client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
        assert all(one.status is SaveStatus.SAVED for one in outcomes), outcomes[0]

    def save_batch(self) -> None:
        self.save(self.batch)

    def claim(self) -> None:
        self.hit = self.client.claim(self.batch)
        assert len(self.hit) == BATCH_KEYS

    def release(self) -> None:
        """Release a claim and wait until the daemon has processed it."""
        if self.hit is not None:
            assert self.hit.release()
            self.client.probe(new_keys(1), wait_ms=1)
            self.hit = None

    def together(self) -> None:
        self.release()
        start = self.random.randrange(len(self.keys) // BATCH_KEYS) * BATCH_KEYS
        self.batch = self.keys[start : start + BATCH_KEYS]

    def scattered(self) -> None:
        self.release()
        self.batch = self.random.sample(self.keys, BATCH_KEYS)

    def claimed(self) -> None:
        self.together()
        self.claim()

    def new(self) -> None:
        self.batch = new_keys(BATCH_KEYS)

    def new_and_room(self) -> None:
        self.new()
        self.admin.evict(BATCH_KEYS * SLAB_BYTES, [Tier.RAM])

    def anon_bytes(self) -> int:
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def index_bytes(self) -> int:
        """The size of the sealed memory file, found through the daemon's descriptors."""
        opened = Path(f"/proc/{self.daemon.pid}/fd").iterdir()
        return (
            next(fd for fd in opened if "prefixd-index" in str(fd.readlink())).stat().st_blocks
            * 512
        )


def new_keys(count: int) -> list[Key]:
    raw = os.urandom(32 * count)
    return [Key(raw[i : i + 32]) for i in range(0, len(raw), 32)]


@contextmanager
def side_of(entries: int) -> Iterator[Side]:
    """A daemon with memory for this many entries and one batch."""
    flags = (
        f"--ram.budget={(entries + BATCH_KEYS) * SLAB_BYTES}",
        f"--ram.slab={SLAB_BYTES}",
        "--shm.budget=0",
        "--disk.budget=0",
    )
    with ExitStack() as stack:
        directories = stack.enter_context(temporary_directories("entries"))
        daemon = stack.enter_context(PrivateDaemon(*directories, flags))
        admin = stack.enter_context(daemon.admin())
        wait_until_secured(admin)
        client = stack.enter_context(Client(daemon.address))
        assert client.wait_connected()
        yield Side(daemon, admin, client)


def measure(sides: Sequence[Side], repeats: int) -> dict[str, list[float]]:
    """The microseconds of each operation on each side."""

    def times(op: str, before: Callable[[Side], None], action: Callable[[Side], None]) -> None:
        cases = [
            Case(str(number), op, BATCH_KEYS, partial(action, side), before=partial(before, side))
            for number, side in enumerate(sides)
        ]
        found[op] = [row.p50_ms * 1e3 for row in interleave(cases, repeats)]
        for side in sides:
            side.release()

    found: dict[str, list[float]] = {}
    times("claim", Side.together, Side.claim)
    times("claim scattered", Side.scattered, Side.claim)
    times("release", Side.claimed, Side.release)
    times("save", Side.new_and_room, Side.save_batch)
    times("save evicting", Side.new, Side.save_batch)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--few", type=int, default=10_000)
    parser.add_argument("--many", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    options = parser.parse_args()
    with side_of(options.few) as few, side_of(options.many) as many:
        few.fill(options.few)
        many.fill(options.few)
        before = many.anon_bytes(), many.index_bytes()
        many.fill(options.many)
        added = options.many - options.few
        heap_bytes = (many.anon_bytes() - before[0]) / added
        index_bytes = (many.index_bytes() - before[1]) / added
        found = measure((few, many), options.repeats)
    if options.json:
        print(json.dumps({"us": found, "heap_bytes": heap_bytes, "index_bytes": index_bytes}))
        return
    print(f"{f'{BATCH_KEYS} keys, us':<20}{options.few:>12,}{options.many:>12,}{'ratio':>8}")
    for op, (few_us, many_us) in found.items():
        print(f"{op:<20}{few_us:>12.0f}{many_us:>12.0f}{many_us / few_us:>7.2f}x")
    together = heap_bytes + index_bytes
    print(f"bytes for each entry: {together:.0f}: {heap_bytes:.0f} heap, {index_bytes:.0f} index")


if __name__ == "__main__":
    main()
