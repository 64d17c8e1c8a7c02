"""What the number of entries costs, end to end: a client here, daemons in processes of their own.

    python tests/bench/bench_entries.py     # 10,000 against 1,000,000 entries: minutes, 6 GiB

Two daemons with nothing but a RAM tier are filled through the client; then they take turns, so
that both are measured under the same conditions. A batch is 48 keys:

- `claim`: of keys that were saved together, as the blocks of a prompt are; from the call to its
  answer. `claim scattered`: of keys that were not, the worst case. `release`: and a question
  after it, for a release is not answered.
- `save`: of new keys into free room. `save evicting`: each of them evicts one.

An entry's memory is what the second daemon grew by on its way from the first number of entries to
the last, for each of them. `heap` is `RssAnon` of /proc/<pid>/status: the tables, and whatever
else the process allocates. `index` is its memory file, of which every process maps the same
pages. What else is in `RssShmem` is the arena.
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
#: Saved at once while filling. More would be faster, and would leave free pages in the index: it
#: keeps what one transaction changed until the next but one.
FILL_KEYS: Final = 512


class Side:
    """One daemon, and the client that fills it and measures."""

    def __init__(self, daemon: PrivateDaemon, admin: AdminConnection, client: Client) -> None:
        self.daemon = daemon
        self.admin = admin
        self.client = client
        self.keys: list[Key] = []
        self.hit: Hit | None = None
        self.wanted: Sequence[Key] = ()
        self.random = random.Random(1)

    def fill(self, entries: int) -> None:
        """Save up to so many entries."""
        while len(self.keys) < entries:
            keys = new_keys(min(FILL_KEYS, entries - len(self.keys)))
            self.save(keys)
            self.keys += keys

    def save(self, keys: Sequence[Key]) -> None:
        items = [SaveItem(key, key, TOKENS) for key in keys]
        outcomes = self.client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
        assert all(one.status is SaveStatus.SAVED for one in outcomes), outcomes[0]

    def save_wanted(self) -> None:
        self.save(self.wanted)

    def claim(self) -> None:
        self.hit = self.client.claim(self.wanted)
        assert len(self.hit) == BATCH_KEYS

    def release(self) -> None:
        """Returns when the daemon has done it."""
        if self.hit is not None:
            assert self.hit.release()
            self.client.probe(new_keys(1), wait_ms=1)
            self.hit = None

    def together(self) -> None:
        self.release()
        start = self.random.randrange(len(self.keys) // BATCH_KEYS) * BATCH_KEYS
        self.wanted = self.keys[start : start + BATCH_KEYS]

    def scattered(self) -> None:
        self.release()
        self.wanted = self.random.sample(self.keys, BATCH_KEYS)

    def claimed(self) -> None:
        self.together()
        self.claim()

    def new(self) -> None:
        self.wanted = new_keys(BATCH_KEYS)

    def new_and_room(self) -> None:
        self.new()
        self.admin.evict(BATCH_KEYS * SLAB_BYTES, [Tier.RAM])

    def anon_bytes(self) -> int:
        status = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def index_bytes(self) -> int:
        """Of its sealed memory file, which only the daemon's descriptors lead to."""
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
    """A daemon with room for so many entries and one batch."""
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
    """For each operation its microseconds on each side."""

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
    times("save", Side.new_and_room, Side.save_wanted)
    times("save evicting", Side.new, Side.save_wanted)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--few", type=int, default=10_000)
    parser.add_argument("--many", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
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
