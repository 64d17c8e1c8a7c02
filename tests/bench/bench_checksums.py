#!/usr/bin/env python3
"""Compares CRC32C libraries: alone, after a copy, and in pieces of a large copy.

    python tests/bench/bench_checksums.py     # fastcrc; crc32c and awscrt where installed

The libraries take turns on one thread. Prints one JSON object per line, with medians. `us` is the
time for one payload. `after_copy_us` is the additional time right after a copy, which leaves the
bytes in the cache. `pieces` is the speed of copying and checking a payload of 5 MiB piece by piece,
where one memcpy of it is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Final

from prefixd.client.bench.transfers import Buffers
from prefixd.proto.payload import address_of, crc32c

KIB: Final = 2**10
LARGE_BYTES: Final = 5 * 2**20
SIZES: Final = (64, 4 * KIB, 64 * KIB, 192 * KIB, 2**20, LARGE_BYTES)
PIECES: Final = (256 * KIB, 512 * KIB, 2**20, LARGE_BYTES)
OTHERS: Final = (("crc32c", "crc32c"), ("awscrt", "awscrt.checksums"))

#: The most payloads of each size.
MOST: Final = 1_000

Checksum = Callable[[memoryview], int]


def libraries() -> dict[str, Checksum]:
    found: dict[str, Checksum] = {"fastcrc": crc32c}
    for name, module in OTHERS:
        try:
            found[name] = import_module(module).crc32c
        except ImportError:
            print(json.dumps({"library": name, "skipped": "not installed"}))
    return found


def by_turns(actions: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The median seconds of each action."""
    taken_s: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(turns):
        for name, action in actions.items():
            start_s = time.perf_counter()
            action()
            taken_s[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(each) for name, each in taken_s.items()}


def checked(checksum: Checksum, payloads: list[memoryview]) -> Callable[[], None]:
    def act() -> None:
        for payload in payloads:
            checksum(payload)

    return act


def copied(
    checksum: Checksum | None, rooms: list[memoryview], payloads: list[memoryview]
) -> Callable[[], None]:
    def act() -> None:
        for room, payload in zip(rooms, payloads, strict=True):
            room[:] = payload
            if checksum is not None:
                checksum(room)

    return act


def in_pieces(
    piece_bytes: int | None, rooms: list[memoryview], payloads: list[memoryview]
) -> Callable[[], None]:
    """Copy and check payloads in pieces. None: copy each at once, without a check."""

    def act() -> None:
        for room, payload in zip(rooms, payloads, strict=True):
            with address_of(room, writable=True) as to, address_of(payload) as at:
                if piece_bytes is None:
                    ctypes.memmove(to, at, len(payload))
                    continue
                crc = 0
                for start in range(0, len(payload), piece_bytes):
                    piece = room[start : start + piece_bytes]
                    ctypes.memmove(to + start, at + start, len(piece))
                    crc = crc32c(piece, crc)

    return act


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=10, help="total MiB of payloads of each size")
    parser.add_argument("--large", type=int, default=48, help="number of payloads of 5 MiB")
    parser.add_argument("--turns", type=int, default=11)
    args = parser.parse_args()
    known = libraries()
    for size in SIZES:
        count = min(max(1, args.mib * 2**20 // size), MOST)
        buffers = Buffers(count, size)
        rooms, payloads = buffers.rooms(count), buffers.sources(count)
        assert len({checksum(payloads[0]) for checksum in known.values()}) == 1
        actions = {name: checked(checksum, payloads) for name, checksum in known.items()}
        actions |= {f"copy {n}": copied(each, rooms, payloads) for n, each in known.items()}
        median_s = by_turns(actions | {"copy": copied(None, rooms, payloads)}, args.turns)
        for name in known:
            us = median_s[name] / count * 1e6
            after_us = (median_s[f"copy {name}"] - median_s["copy"]) / count * 1e6
            row = {"library": name, "payload_bytes": size, "us": round(us, 3)}
            print(json.dumps(row | {"after_copy_us": round(after_us, 3)}), flush=True)
    buffers = Buffers(args.large, LARGE_BYTES)
    rooms, payloads = buffers.rooms(args.large), buffers.sources(args.large)
    pieces = {size: in_pieces(size, rooms, payloads) for size in (None, *PIECES)}
    median_s = by_turns({str(size): action for size, action in pieces.items()}, args.turns)
    for size in PIECES:
        of_memcpy = round(median_s[str(None)] / median_s[str(size)], 2)
        print(json.dumps({"pieces": size, "of_memcpy": of_memcpy}), flush=True)


if __name__ == "__main__":
    main()
