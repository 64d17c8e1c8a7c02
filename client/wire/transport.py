"""The interface between the client library and the ways to a daemon, with its values.

A transport moves requests and bytes. It makes no decisions: it raises what goes wrong, and the
library turns that into misses (`context.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from ...proto.entry import Content, content_bytes
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, DeleteStatus, SaveReason, Tier
from ..results import Entries, Entry, Found, ReserveStatus, SaveOutcome
from .deadline import Deadline

#: A restore from another machine is divided over at most so many connections.
MAX_STREAMS: Final = 4


class Holding:
    """A claim or a reservation: valid until it is given back, lost, or its session ends."""

    __slots__ = ("__weakref__", "entries", "in_place", "link", "number", "why_lost")

    def __init__(self, link: Any, number: int, why_lost: str | None) -> None:
        #: The session that holds it (`link.Link`).
        self.link = link
        #: The claim id, or the token of the reservation.
        self.number = number
        #: Why it was lost, as a sentence; None while it is held.
        self.why_lost = why_lost
        #: The entries that a claim pins.
        self.entries: Sequence[Entry] = ()
        #: What validates a claim that was made or viewed in place; see `local.node.InPlace`.
        self.in_place: object | None = None


class Claimed(NamedTuple):
    """What a claim got; `positions[i]` is the position of `entries[i]` among the requested keys."""

    #: None: there was nothing to claim.
    holding: Holding | None
    positions: Sequence[int]
    entries: Entries
    #: Whether one of the absent keys is being saved at this moment.
    in_flight: bool


class Range(NamedTuple):
    """Bytes to read of a claimed entry: of its payload, or of its token ids."""

    entry: Entry
    #: Position among the claimed entries, from 0.
    place: int
    offset_bytes: int
    length_bytes: int
    token_ids: bool = False


class Item(NamedTuple):
    """An entry to reserve room for. `content.token_ids_bytes` is the length of `token_ids`."""

    key: Key
    content: Content
    token_ids: bytes = b""


class Saving(NamedTuple):
    """An entry with its payload as flat bytes, in one piece or several."""

    item: Item
    payload: FlatBytes


class Copied(Enum):
    """The outcome of copying an entry in place."""

    #: The target holds the payload.
    WHOLE = 1
    #: The entry has gone, or can't be read in place.
    GONE = 2
    #: The entry is there, but its bytes are not those that were saved.
    CORRUPT = 3
    #: Its device does not answer at this moment, so the daemon could not read it either.
    UNREADABLE = 4


#: In place of the number of a tier: the key is published, and the daemon did not say where.
SOME_TIER: Final = -1


class Looked(NamedTuple):
    """What a search in place found."""

    #: Positions of the entries among the keys.
    positions: Sequence[int]
    entries: Entries


class SaveTerms(NamedTuple):
    """What the items of one save or reservation have in common."""

    tier: Tier
    reason: SaveReason
    #: The blocks before the first item, root first.
    ancestors: Sequence[Key] = ()
    #: How long to wait for the same keys in flight.
    wait_ms: int = 0
    #: How long a reservation lasts; 0: the daemon's default.
    ttl_ms: int = 0
    #: Reads in place that were not reported yet. The daemon counts them before it makes room.
    touched: Sequence[Key] = ()


class SessionShare(NamedTuple):
    """How much a session may have reserved in a tier at once. A single entry may be larger."""

    stored_bytes: int
    slab_bytes: int

    def stored_bytes_of(self, content: Content) -> int:
        """How much of it an entry takes."""
        size_bytes = content_bytes(content.payload_bytes, content.token_ids_bytes)
        return -(-size_bytes // self.slab_bytes) * self.slab_bytes


class Granted(NamedTuple):
    """The result of one reservation. `owner` and `age_ms` are those of a save in flight."""

    status: ReserveStatus
    holding: Holding | None = None
    owner: str = ""
    age_ms: int = 0
    message: str = ""


class Sink(ABC):
    """Takes the bytes of a read as they arrive. Transports that can, receive them directly into its
    memory."""

    @abstractmethod
    def __call__(self, number: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        """Take bytes of range `number`, at an offset from its start. None in place of the bytes:
        the daemon could not read that entry."""

    @abstractmethod
    def room(self, number: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        """The memory for these bytes of a range. Raises PrefixdError unless they are the next
        ones."""

    @abstractmethod
    def filled(self, number: int, length_bytes: int) -> None:
        """The next `length_bytes` of the memory that `room` returned last for this range are
        there."""


class Renumbered(Sink):
    """Hands on range `i` as range `numbers[i]` of `sink`."""

    def __init__(self, sink: Sink, numbers: Sequence[int]) -> None:
        self._sink = sink
        self._numbers = numbers

    def __call__(self, number: int, offset_bytes: int, data: bytes | memoryview | None) -> None:
        self._sink(self._numbers[number], offset_bytes, data)

    def room(self, number: int, offset_bytes: int, length_bytes: int) -> FlatBytes:
        return self._sink.room(self._numbers[number], offset_bytes, length_bytes)

    def filled(self, number: int, length_bytes: int) -> None:
        self._sink.filled(self._numbers[number], length_bytes)


class Transport(Protocol):
    """What the client needs of a transport. Thread-safe; every call ends by its deadline.

    The library checks arguments before. Calls raise PrefixdError, and any other exception when a
    response makes no sense. Results for single keys come in the order of the keys. Unless a method
    says otherwise it takes any number of keys, also none. What is done "in place" reads the
    daemon's memory without a call; methods for that have a body here for transports that can't.
    """

    @property
    def max_batch_keys(self) -> int:
        """Most keys in one claim, reservation or save, and most ranges in one read."""

    @property
    def connected(self) -> bool:
        """Whether there is a session at this moment."""

    @property
    def under_pressure(self) -> bool:
        """Whether the daemon said last that memory is short there. False without a session."""

    def wait(self, deadline: Deadline) -> bool:
        """Wait for a session. False: the transport is closed. Raises DeadlineExceeded."""

    def share(self, tier: Tier, deadline: Deadline) -> SessionShare | None:
        """How much this session may reserve; None: the daemon does not say. Waits for a session."""

    # ---- in place

    def find(self, keys: Iterable[Key], mode: ClaimMode, deadline: Deadline) -> Looked | None:
        """Find the keys that a claim of this mode would get, without pinning them. Consumes only as
        many keys as it needs. None: not possible in place."""
        return None

    def copy(
        self,
        entries: Entries,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[Copied]:
        """Copy whole payloads, claimed or not, into `targets`, each as long as its payload. What is
        not there until the deadline is GONE, and nothing writes into its target later.

        `check`: whether to compare the CRC32C, for each entry. Entries that a search in place found
        know where they lie. Never raises PrefixdError.
        """
        return [Copied.GONE] * len(entries)

    def views(self, claim: Holding, entries: Entries) -> list[list[memoryview]] | None:
        """Claimed payloads where they lie; None: not all of them can be reached."""
        return None

    def touch(self, keys: Sequence[Key]) -> None:
        """Report that these entries were read in place, once each, in this order. Soon, not now."""

    def refused(self) -> dict[str, str]:
        """What can't be done in place, each with the reason."""
        return {"everything": "this connection is gRPC only"}

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> Sequence[int]:
        """The number of the tier in which each key is published: 0 if it is not, `SOME_TIER` if the
        daemon does not say. In place if possible, else with a call."""

    def peek(self, keys: Sequence[Key]) -> Sequence[int] | None:
        """`exist` in place. None: not possible at this moment."""
        return None

    def peek_one(self, key: Key) -> int | None:
        """`peek` for one key, at a fraction of the cost."""
        return None

    def leading_run(self, keys: Sequence[Key], deadline: Deadline) -> Sequence[int]:
        """The tiers of the keys before the first that is not published, as in `exist`. In place if
        possible, else with a call."""

    # ---- with a call

    def lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        """Look up each key."""

    def claim(
        self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, lease_ms: int, deadline: Deadline
    ) -> Claimed:
        """Pin those of the keys that `mode` asks for."""

    def streams(self, payload_bytes: int) -> int:  # not where all reads are alike
        """How many reads at the same time best share so many bytes."""
        return 1

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        """Hand the bytes of `ranges` to `sink`, each range in order and without gaps.

        Raises ClaimLost if the claim, or an entry that it pins, was lost before the last byte was
        handed over. After an exception, bytes that `sink` got may be those of another entry.
        """

    def fetch(self, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> bool:
        """Read unclaimed entries, one range each, in one call; the daemon claims them meanwhile.

        False: not possible with this transport, or for all of these entries. Then `sink` got
        nothing, and the caller has to claim and read.
        """
        return False

    def fetch_found(
        self,
        keys: Sequence[Key],
        mode: ClaimMode,
        room_bytes: Sequence[int],
        begin: Callable[[Claimed], Sink],
        deadline: Deadline,
    ) -> bool:
        """Claim, read and release in one call; at most `max_batch_keys` keys.

        Reads the payloads that are exactly as long as the room for their key. `begin` gets what was
        claimed and returns the sink, with a range for each entry. False: not possible, and `begin`
        was not called. Raises as `read` does.
        """
        return False

    def release(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """Release claims. True: the claim was held until now, and this call released it."""

    def forget(self, claim: Holding) -> None:
        """Release a claim soon, without waiting. Callable from a finalizer."""

    def forget_reservation(self, reservation: Holding) -> None:
        """Give a reservation back soon, without waiting. Callable from a finalizer."""

    def delete(self, keys: Sequence[Key], deadline: Deadline) -> list[DeleteStatus]:
        """Delete entries; at most `max_batch_keys`."""

    @property
    def shares(self) -> bool:
        """Whether the daemon shares entries with other nodes, so that `pull` may fetch some."""

    def pull(self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, deadline: Deadline) -> int:
        """Have the daemon fetch keys from other nodes, a run of them or the first; at most
        `max_batch_keys`. Returns how many arrived."""

    def announce(self, digest: bytes, engine: str, words: str) -> None:
        """Tell operators what keys of a namespace depend on, in this session and in later ones."""

    def suspect(self, keys: Sequence[Key]) -> None:
        """Report entries whose bytes did not match their checksum. Does not wait."""

    def reserve(self, items: Sequence[Item], terms: SaveTerms, deadline: Deadline) -> list[Granted]:
        """Ask for the exclusive right to save keys, and for the room."""

    def cancel(self, reservations: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """Give reservations back. True: the daemon still had it."""

    def write(
        self,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        """Send the payloads of granted reservations."""

    def save(
        self, items: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        """Reserve and write in one call."""

    def close(self, within_s: float) -> None:
        """Give everything back; calls in progress fail. Idempotent."""
