"""Measures what watching costs the event loop: logging events, and a message with 512 of them.

    python tests/bench/bench_watch.py --rounds 5

For comparison, the same message is built of message objects, as it would be for each watcher. The
cases take turns. Prints medians in µs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import watch_events
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.core.effects import IndexPut
from prefixd.server.core.entries import EntryState
from prefixd.server.runtime.changes import ChangeLog

EVENTS = 512


def entry(number: int) -> EntryState:
    key = Key(sha256(number.to_bytes(8, "big")).digest())
    return EntryState(
        key, 4096, (), Tier.RAM, SaveReason.COLD, 10**18 + number, 0, Content(4096, 16), 0,
        label="model",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    entries = [entry(number) for number in range(EVENTS)]
    effects = [IndexPut([each], [each.key]) for each in entries]
    log, idle = ChangeLog(2**24), ChangeLog(2**24)
    log.begin()

    def objects() -> bytes:
        return pb.WatchResponse(
            incarnation=bytes(16),
            events=[
                pb.WatchEvent(
                    kind=pb.WATCH_KIND_PUBLISHED,
                    tier=pb.TIER_RAM,
                    key=each.key,
                    sequence=1,
                    generation=each.generation,
                    payload_bytes=each.payload_bytes,
                    token_count=each.token_count,
                    reason=pb.SAVE_REASON_COLD,
                    parent=each.key,
                    namespace=each.label,
                )
                for each in entries
            ],
        ).SerializeToString()

    log.follow(effects)
    bodies = log.since(log.sequence - EVENTS, EVENTS)
    measured: dict[str, Callable[[], object]] = {
        f"{EVENTS} events written down": lambda: log.follow(effects),
        "the same while nobody watches": lambda: idle.follow(effects),
        f"a message of {EVENTS}": lambda: watch_events.response(bytes(16), bodies, 1),
        "the same of message objects": objects,
    }
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(rounds):
        for name, work in measured.items():
            start_ns = time.perf_counter_ns()
            work()
            taken[name].append((time.perf_counter_ns() - start_ns) / 1e3)
    for name, times_us in taken.items():
        print(f"{name:36}{statistics.median(times_us):10.1f}")


if __name__ == "__main__":
    main()
