"""The contract of shared stores: a cache of entries of other machines, behind a network.

It is a hint that may be gone at any moment. Any failure there (a node that is dead, cut off, slow,
full, or lies) is a miss within the deadline of the call, never an exception and never wrong bytes:
received bytes are checked against the key, the length and the CRC32C of their record.

Deadlines are absolute, in seconds of `time.monotonic()`. Calls block, so they must not be made on
an event loop; any number of threads may make them. A call uses its buffers until it returns, and
never after that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ...proto.entry import Content, HasContent
from ...proto.keys import Key
from ...proto.vocabulary import Labelled
from .delete_log import Logged


class Outcome(Enum):
    """The result of one key of a call."""

    DONE = "done"
    ABSENT = "absent"
    """The engine answered that it has no such entry."""
    UNAVAILABLE = "unavailable"
    """No answer within the deadline, or none about the entry."""
    DAMAGED = "damaged"
    """The bytes are not those that were put. The entry was dropped from the engine."""
    REFUSED = "refused"
    """The engine does not accept the entry: it is full, or does not allow it."""


@dataclass(frozen=True, slots=True)
class SharedEntry(HasContent):
    """An entry in the engine, as far as room for it requires."""

    key: Key
    #: Without token ids: nodes don't share those.
    content: Content
    payload_crc32c: int
    #: The deletes that the node had done which vouches for the entry, see `delete_log`.
    stamp: int = 0
    #: The nodes that have the payload, `host:port`, separated by blanks; empty: the engine itself.
    location: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An entry that was found, and the buffer for its payload."""

    entry: SharedEntry
    #: Writable, `payload_bytes` long. It has the payload only if the outcome is DONE.
    room: memoryview


@dataclass(frozen=True, slots=True)
class Offer:
    """An entry to be stored."""

    entry: SharedEntry
    #: The payload, in order.
    pieces: Sequence[memoryview]
    #: Wall clock, ms since 1970. The engine may drop the entry earlier, but not later.
    expires_at_ms: int


class NodeState(Labelled):
    """Whether calls use a node of an engine. The numbers are those of the wire."""

    SERVING = 1
    RESTING = 2
    """The node missed deadlines, and is not used for a while."""
    UNREACHABLE = 3


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node of an engine, as this node sees it."""

    name: str
    state: NodeState
    #: Why it is not serving, or what it has refused within a minute.
    why: str = ""
    #: Since the start; then those without an answer, and those that were answered with an error.
    requests: int = 0
    unanswered: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class LogPage:
    """A part of the fleet's log of deletes, in its order."""

    records: list[Logged]
    #: Whether the engine has dropped earlier records since the log began.
    trimmed: bool = False


class SharedStore(ABC):
    """An engine that several nodes use."""

    #: False: offers may have no pieces.
    needs_payloads: bool = True
    #: How often a node reads the log of deletes. Within this time it learns of a delete.
    log_every_s: float = 1.0
    #: Whether an entry with this stamp may be used (`DeleteLog.allows`). Called on any thread.
    allows: Callable[[Key, int], bool] = staticmethod(lambda _key, _stamp: True)

    #: Whether another store is asked for what this one does not deliver: then it is better to end
    #: early. Called on any thread.
    followed: Callable[[], bool] = staticmethod(lambda: False)
    #: Whether entries may be there after the log of deletes is lost. Then the log always has a
    #: record, so that every stamp is of one log (`Deletes`).
    outlives_log: ClassVar[bool] = False

    @abstractmethod
    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        """Look keys up. None: the engine has no entry, or did not answer in time."""

    @abstractmethod
    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        """Read payloads into their buffers, and check them. Never REFUSED."""

    def trip_s(self, found_s: float) -> float | None:
        """How long a trip to the engine takes, as the latest look-up found it, which took `found_s`
        in all. None: it did not. Never blocks."""
        return found_s

    @abstractmethod
    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        """Store entries for other nodes. DONE, UNAVAILABLE or REFUSED each."""

    def takes_payload(self, _key: Key) -> bool:
        """Whether an offer of this key needs its pieces, or has a use for them. Never blocks."""
        return self.needs_payloads

    def keeps(self, _entry: SharedEntry) -> bool:
        """Whether the engine still has an entry that was received: then this node need not offer
        it. Never blocks."""
        return True

    @abstractmethod
    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        """Set the expiries of entries (wall clock, ms since 1970) if they are later than before.
        Returns the keys that the engine says it does not have."""

    @abstractmethod
    def drop(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        """Remove entries. Returns the keys that the engine may still have, because it did not
        answer in time or refused."""

    def drop_damaged(
        self, wanted: Sequence[Wanted], outcomes: Sequence[Outcome], deadline_s: float
    ) -> None:
        """Remove the entries that turned out to be damaged."""
        pairs = zip(wanted, outcomes, strict=True)
        damaged = [want.entry.key for want, outcome in pairs if outcome is Outcome.DAMAGED]
        if damaged:
            self.drop(damaged, deadline_s)

    @abstractmethod
    def log(self, records: Sequence[bytes], deadline_s: float) -> int:
        """Append records to the log of deletes, in this order, until one fails. Returns how many
        are there for sure; of one more it is not known."""

    @abstractmethod
    def read_log(self, place: bytes, deadline_s: float) -> LogPage | None:
        """Some records of the log, at least one if there is any: from the one at `place` on, or if
        that is gone from the next; from the beginning, if `place` is empty. None: no answer."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Settings that make the engine a bad cache, a sentence each. Blocks for a few seconds at
        most; called once a minute."""

    @abstractmethod
    def health(self) -> dict[str, str]:
        """Nodes that are not used now or refuse requests, and why. Never blocks."""

    def counts(self) -> dict[str, int]:
        """Further counters, since the start. Never blocks."""
        return {
            "second_asked": 0,
            "second_came": 0,
            "bucket_fetched": 0,
            "bucket_offered": 0,
            "bucket_missed": 0,
        }

    def statuses(self) -> list[NodeStatus]:
        """Every known node, by name. Never blocks."""
        return [
            NodeStatus(name, NodeState.UNREACHABLE, why)
            for name, why in sorted(self.health().items())
        ]

    def node_of(self, entry: SharedEntry) -> str:
        """The node of its payload; empty: it is not known. Never blocks."""
        return entry.location

    @abstractmethod
    def close(self) -> None:
        """End connections and threads. Running calls return UNAVAILABLE."""
