"""The contract of every shared store: a cache of other machines' entries, behind a network.

It is a hint that may be gone at any moment. Whatever goes wrong there (a node that is dead, cut
off, slow, full, or lies) is a miss within the deadline of the call, never an exception and never
other bytes: what arrives is held against the key, the length and the CRC32C of its record.

Deadlines are absolute, in seconds of `time.monotonic()`. Threads: every call may be made from any
thread, several at a time; it blocks, so never from an event loop. A call owns the buffers that it
is given until it returns, and touches none of them after that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ...proto.keys import Key


class Outcome(Enum):
    """What became of one key of a call."""

    DONE = "done"
    ABSENT = "absent"
    """The engine answered that it has no such entry."""
    UNAVAILABLE = "unavailable"
    """No answer within the deadline, or none that says anything about the entry."""
    DAMAGED = "damaged"
    """The bytes are not those that were put there. The entry was dropped from the engine."""
    REFUSED = "refused"
    """The engine does not take it: it is full, or does not allow it."""


@dataclass(frozen=True, slots=True)
class SharedEntry:
    """What the engine says of an entry, enough to make room for it."""

    key: Key
    payload_bytes: int
    token_count: int
    #: 0: the payload has no layer table.
    layer_count: int
    payload_crc32c: int
    #: The nodes that have the payload, `host:port`, with a blank between; empty: the engine itself.
    location: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An entry that was found, and where its payload goes."""

    entry: SharedEntry
    #: Writable, `payload_bytes` long. What is in it is the payload only if the outcome is DONE.
    room: memoryview


@dataclass(frozen=True, slots=True)
class Offer:
    """An entry to be kept."""

    entry: SharedEntry
    #: The payload, in order.
    pieces: Sequence[memoryview]
    #: Wall clock, ms since 1970: the engine may drop it before, and does so then at the latest.
    expires_at_ms: int


class NodeState(Enum):
    """Is a node of an engine asked?"""

    SERVING = "serving"
    RESTING = "resting"
    """The node missed deadlines, and is not asked for a while."""
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node of an engine, as it is seen from here."""

    name: str
    state: NodeState
    #: Why it is not serving.
    why: str = ""
    #: Since the start; of them those without an answer, and those answered with an error.
    requests: int = 0
    unanswered: int = 0
    refused: int = 0


class SharedStore(ABC):
    """An engine that other nodes use as well."""

    #: False: it knows which node has a payload, and offers need no pieces.
    holds_payloads: ClassVar[bool] = True

    @abstractmethod
    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        """What the engine has, a key each. None: nothing, or no answer in time."""

    @abstractmethod
    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        """Bring payloads into their rooms, each checked. Never REFUSED."""

    @abstractmethod
    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        """Keep entries for others. DONE, UNAVAILABLE or REFUSED each."""

    @abstractmethod
    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        """Let entries live until then (wall clock, ms since 1970), if that is later than now.
        Returns the keys that the engine says it does not have."""

    @abstractmethod
    def drop(self, keys: Sequence[Key], deadline_s: float) -> None:
        """Take entries out, as far as the engine answers in time."""

    def drop_damaged(
        self, wanted: Sequence[Wanted], outcomes: Sequence[Outcome], deadline_s: float
    ) -> None:
        """Take out what turned out to be damaged."""
        pairs = zip(wanted, outcomes, strict=True)
        damaged = [want.entry.key for want, outcome in pairs if outcome is Outcome.DAMAGED]
        if damaged:
            self.drop(damaged, deadline_s)

    @abstractmethod
    def problems(self) -> list[str]:
        """Settings of the engine that would make it a bad cache, a sentence each. Blocks for a
        few seconds at most; asked once a minute."""

    @abstractmethod
    def health(self) -> dict[str, str]:
        """Nodes that are not used now, and why. Never blocks."""

    def counts(self) -> dict[str, int]:
        """What else is counted, since the start. Never blocks."""
        return {"second_asked": 0, "second_came": 0}

    def statuses(self) -> list[NodeStatus]:
        """Every node that is known, by name. Never blocks."""
        return [
            NodeStatus(name, NodeState.UNREACHABLE, why)
            for name, why in sorted(self.health().items())
        ]

    def node_of(self, entry: SharedEntry) -> str:
        """Where its payload is; empty: that is not known. Never blocks."""
        return entry.location

    @abstractmethod
    def close(self) -> None:
        """End connections and threads. Calls that are under way come back as UNAVAILABLE."""
