"""Index rows that can be verified by themselves, and processes that read and write an index.

All fields of a row are derived from its key and its generation, so that a reader can tell whether a
row was ever written without knowing what the writer does.

    python tests/support/index_rows.py read FD ROUNDS
    python tests/support/index_rows.py write ENTRIES
"""

from __future__ import annotations

import hashlib
import random
import sys

from prefixd.proto.entry import Content
from prefixd.proto.index import IndexRow, unpack_row
from prefixd.proto.index_reader import IndexReader
from prefixd.proto.keys import Key
from prefixd.server.runtime.index import IndexWriter

INCARNATION = b"an incarnation :"
SLAB_BYTES = 64 * 2**10
#: The keys that `churn` changes, and keys that never change.
CHURNED, STABLE = range(3_000), range(10_000, 10_300)
#: More keys, which are only added, so that chains are divided all the time.
ADDED = range(100_000, 400_000)
BATCH_KEYS = 48


def key_of(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "little")).digest())


def entry_of(key: Key, generation: int, extents: int | None = None) -> IndexRow:
    """The row of a key at a generation. One in four has more than one extent."""
    if extents is None:
        extents = 2 + generation % 31 if generation % 4 == 0 else 1
    seed = int.from_bytes(hashlib.sha256(key + generation.to_bytes(8, "little")).digest()[:8])
    words = ((seed + 7 * i) % 2**44 * SLAB_BYTES % 2**64 for i in range(2 * extents))
    return IndexRow(
        key=key,
        generation=generation,
        content=Content(seed % 2**40, seed % 2**31, seed % 2**22, seed % 2**16),
        payload_crc32c=seed % 2**32,
        tier=1 + seed % 3,
        reason=1 + seed % 5,
        location=tuple(words),
    )


def is_genuine(key: Key, row: bytes) -> bool:
    """Was exactly this row written for that key at some time?"""
    unpacked = unpack_row(row)
    return unpacked == entry_of(key, unpacked.generation)


def churn(writer: IndexWriter, chosen: random.Random, generation: int, times: int) -> int:
    """Put, replace and delete at random; returns the last generation that was used."""
    for _ in range(times):
        key = key_of(chosen.choice(CHURNED))
        if chosen.random() < 0.4:
            writer.delete(key)
        else:
            generation += 1
            writer.put(entry_of(key, generation))
    return generation


def read(reader: IndexReader, rounds: int) -> tuple[int, int]:
    """Look up churned and stable keys. Returns the hits among the churned keys and the misses among
    the stable ones.

    Raises AssertionError for a row that was never written.
    """
    chosen = random.Random(rounds)
    hits = misses = 0
    churned = [key_of(number) for number in CHURNED]
    stable = [key_of(number) for number in STABLE]
    for _ in range(rounds):
        for keys in (chosen.sample(churned, BATCH_KEYS), chosen.sample(stable, BATCH_KEYS)):
            rows = reader.get(keys)
            for key, row in zip(keys, rows, strict=True):
                assert row is None or is_genuine(key, row), row
            found = len(keys) - rows.count(None)
            if keys[0] in stable:
                misses += len(keys) - found
            else:
                hits += found
    return hits, misses


def main() -> None:
    """Run the command of the module docstring."""
    if sys.argv[1] == "read":
        reader = IndexReader.attach(int(sys.argv[2]))
        print("attached", flush=True)
        print(*read(reader, int(sys.argv[3])))
        return
    writer = IndexWriter(INCARNATION, int(sys.argv[2]))
    for number in STABLE:
        writer.put(entry_of(key_of(number), 1))
    print(writer.fd, flush=True)
    chosen, generation = random.Random(1), 1
    while True:
        generation = churn(writer, chosen, generation, 1_000)


if __name__ == "__main__":
    main()
