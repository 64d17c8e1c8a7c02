"""Helpers that prepare and inspect stores, for tests of the code in front of the stores."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason
from prefixd.server.sharing.delete_log import Logged
from prefixd.server.sharing.engine_store import LogPage, NodeState, NodeStatus, SharedStore
from prefixd.tiers.store import EntryWriter, Location, Store


class LogInMemory(SharedStore):
    """The log of a shared engine in this process, for doubles of the rest of it."""

    def __init__(self) -> None:
        self.records: list[Logged] = []

    def log(self, records: Sequence[bytes], _deadline_s: float) -> int:
        self.records += [Logged(b"%d" % n, r) for n, r in enumerate(records, len(self.records))]
        return len(records)

    def read_log(self, place: bytes, _deadline_s: float) -> LogPage | None:
        return LogPage(self.records[int(place or 0) :])

    def statuses(self) -> list[NodeStatus]:
        return [NodeStatus("engine", NodeState.SERVING)]


def make_ready(store: Store) -> None:
    """Set the incarnation and secure the arena, as a start of the daemon does."""
    store.set_incarnation(bytes(16))
    for _ in store.secure_segments():
        pass


def record_of(
    store: Store, of: Key, payload_bytes: int, generation: int, location: Location
) -> EntryRecord:
    """The record of an entry that is to be written to a store."""
    return EntryRecord(
        key=of,
        tier=store.tier,
        reason=SaveReason.COLD,
        generation=generation,
        created_ns=generation,
        content=Content(payload_bytes, 16),
        location=location,
    )


def sealed(store: Store, entry: EntryRecord, data: bytes) -> EntryWriter:
    """A sealed writer with all bytes of an entry. `apply` stores them."""
    writer = store.writer(entry)
    writer.write(data)
    writer.seal()
    return writer


def held(store: Store) -> dict[Key, int]:
    """The generations of the entries in the records of a store, by key. Reads files."""
    return {entry.key: entry.generation for batch in store.scan() for entry in batch}
