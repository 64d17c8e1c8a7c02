"""Reads published entries back and compares their checksums. On worker threads."""

from __future__ import annotations

from ..proto.record import RecordHead, crc32c
from ..tiers.store import Store, StoreError
from .tables import Entry


def head_of(entry: Entry) -> RecordHead:
    """What a store needs to know of an entry in order to read it."""
    return RecordHead(
        key=entry.key,
        generation=entry.generation,
        payload_bytes=entry.payload_bytes,
        token_count=entry.token_count,
        layer_count=entry.layer_count,
        reason=entry.reason,
        tier=entry.tier,
        created_ns=entry.generation,
        # A store finds the payload behind them by their length alone.
        token_ids=bytes(entry.token_ids_bytes),
    )


def read_problem(store: Store, entry: Entry) -> str:
    """What is wrong with the stored bytes of an entry; empty when they are what was saved.

    Of an entry that was evicted meanwhile it says nothing: its room may be another's by now.
    """
    crc = 0
    try:
        for view in store.read(head_of(entry), entry.location, 0, entry.payload_bytes):
            crc = crc32c(view, crc)
    except StoreError as problem:
        return str(problem)
    if crc == entry.payload_crc32c:
        return ""
    return f"the stored bytes have CRC32C {crc:08x}, {entry.payload_crc32c:08x} was saved"
