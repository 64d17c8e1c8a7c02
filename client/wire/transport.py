"""The one interface between the client and the daemon.

A transport moves requests and bytes and has no opinion: what goes wrong it raises, and the
library makes misses of it (`failures.py`), whatever it is. `remote.RemoteTransport` is gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from ...proto.entry import content_bytes
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, DeleteStatus, SaveReason, Tier
from ..results import Entry, Found, ReserveStatus, SaveOutcome
from .deadline import Deadline
from .link import Holding
from .sinks import Sink as Sink


class Claimed(NamedTuple):
    """What a claim got; `positions[i]` is where `entries[i]` stood among the keys asked for."""

    #: None: nothing was there to claim.
    holding: Holding | None
    positions: Sequence[int]
    entries: list[Entry]
    #: Is one of the keys that are not there being saved?
    in_flight: bool


class Range(NamedTuple):
    """Bytes to read of one entry of a claim: of its payload, or of its token ids."""

    entry: Entry
    #: Among the entries that the claim got, counted from 0.
    place: int
    offset_bytes: int
    length_bytes: int
    token_ids: bool = False


class ReserveItem(NamedTuple):
    """One key for which room is wanted.

    `token_count`: at least 1; None: not known. `layer_count`: 0, or a divisor of
    `payload_bytes`, for readers that take single layers. `token_ids`: optional, u32 little-endian
    (`keys.token_bytes`), for verifying reads.
    """

    key: Key
    payload_bytes: int
    token_count: int | None = None
    layer_count: int = 0
    token_ids: bytes = b""


class Saving(NamedTuple):
    """One key with its payload as flat bytes, in one piece or several."""

    item: ReserveItem
    payload: FlatBytes


class Copied(Enum):
    """What became of the copy of an entry that was not asked for."""

    #: The target holds the entry's payload.
    WHOLE = 1
    #: The entry is not there any more, or can't be read in place.
    GONE = 2
    #: The entry is there, and its bytes are not those that were saved.
    CORRUPT = 3


class Looked(NamedTuple):
    """What was found without asking: positions among the keys, entries, and where they lie, for
    `Transport.copy`."""

    positions: Sequence[int]
    entries: list[Entry]
    in_place: object | None


class SaveTerms(NamedTuple):
    """What the items of one save or reservation have in common."""

    tier: Tier
    reason: SaveReason
    #: The blocks before the first item, root first.
    ancestors: Sequence[Key] = ()
    #: How long to wait for the same keys in flight.
    wait_ms: int = 0
    #: How long a reservation lasts; 0: the daemon's own.
    ttl_ms: int = 0
    #: What was read in place and not told yet, to count before the save makes room.
    touched: Sequence[Key] = ()


class Share(NamedTuple):
    """What a session may have reserved in a tier at once. A single entry may be larger."""

    stored_bytes: int
    slab_bytes: int

    def stored_bytes_of(self, item: ReserveItem) -> int:
        """What an entry takes of it."""
        content = content_bytes(item.payload_bytes, len(item.token_ids))
        return -(-content // self.slab_bytes) * self.slab_bytes


class Granted(NamedTuple):
    """The answer to one reservation. `owner` and `age_ms` are those of a save in flight."""

    status: ReserveStatus
    holding: Holding | None = None
    owner: str = ""
    age_ms: int = 0
    message: str = ""


class Transport(Protocol):
    """What the client needs. Thread-safe; every call ends by its deadline.

    Arguments were checked before. Calls raise PrefixdError, and anything else where an answer
    makes no sense; what is said of single keys comes back in the order in which they were given.
    Where nothing else is said a call takes any number of keys, also none.
    """

    @property
    def max_batch_keys(self) -> int:
        """Keys that one claim, reservation or save takes, or one read ranges."""

    @property
    def connected(self) -> bool:
        """Is there a session at this moment?"""

    @property
    def under_pressure(self) -> bool:
        """Is memory short on the daemon's node, as it last said? False without a session."""

    def wait(self, deadline: Deadline) -> bool:
        """Wait for a session. False: closed. Raises DeadlineExceeded."""

    def share(self, tier: Tier, deadline: Deadline) -> Share | None:
        """What this session may reserve; None: the daemon does not say. Waits for a session."""

    # ---- in place: without asking the daemon, where that is possible

    def find(self, keys: Iterable[Key], mode: ClaimMode, deadline: Deadline) -> Looked | None:
        """What `mode` wants of the keys, not pinned; None: this can't be said without
        asking. Takes no more keys than it needs."""

    def copy(
        self,
        entries: Sequence[Entry],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        in_place: object | None = None,
    ) -> list[Copied]:
        """Copy whole payloads, claimed or not, into `targets`, each as long as its payload.
        `check`: whose CRC32C is compared. `in_place`: where they lie, if that is known. Never
        raises PrefixdError."""

    def views(self, claim: Holding, entries: Sequence[Entry]) -> list[list[memoryview]] | None:
        """Claimed payloads where they lie; None: not all of them can be reached."""

    def touch(self, keys: Sequence[Key]) -> None:
        """Entries were read in place: one access each, in this order, told some time soon."""

    def refused(self) -> dict[str, str]:
        """What can't be done in place, with the reasons."""

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> list[bool]:
        """Which keys are published. In place if possible, else by asking."""

    def peek(self, keys: Sequence[Key]) -> list[bool] | None:
        """Which keys are published, in place and at once; None: that needs more than a look."""

    def peek_one(self, key: Key) -> bool | None:
        """The same of one key, at a fraction of the cost."""

    def leading_run(self, keys: Sequence[Key], deadline: Deadline) -> int:
        """How many keys from the first on are published. In place if possible, else by asking."""

    # ---- by asking

    def lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        """What is known of each key."""

    def claim(
        self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, lease_ms: int, deadline: Deadline
    ) -> Claimed:
        """Pin what `mode` wants of the keys."""

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        """Hand the bytes of `ranges` to `sink`, each range in order and without gaps.

        Raises ClaimLost if the claim, or an entry that it pins, was lost before the last byte was
        handed over. After an exception what `sink` got may be other bytes than the entry's.
        """

    def fetch(self, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> bool:
        """`read` of entries that are not claimed, each in one range, under a claim while it lasts:
        all in one trip. False: that can't be done here, or not of all of these entries, and
        nothing was handed over; claim and read them."""

    def fetch_found(
        self,
        keys: Sequence[Key],
        mode: ClaimMode,
        room_bytes: Sequence[int],
        begin: Callable[[Claimed], Sink],
        deadline: Deadline,
    ) -> bool:
        """Claim what `mode` wants of the keys, read the payloads of those that are as long as the
        room for their key, and release, all in one trip; at most `max_batch_keys`. `begin` is told
        what was claimed, and says what takes it, a range for each entry. False: that can't be done
        here, `begin` was not called. Raises as `read` does."""

    def release(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """Give claims back. True: this call did, and the claim was held until now."""

    def forget(self, claim: Holding) -> None:
        """Give a claim back some time soon, without waiting. Callable from a finalizer."""

    def delete(self, keys: Sequence[Key], deadline: Deadline) -> list[DeleteStatus]:
        """Drop entries; at most `max_batch_keys`."""

    @property
    def shares(self) -> bool:
        """Does the daemon share entries with other nodes, so that `pull` may bring some?"""

    def pull(self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, deadline: Deadline) -> int:
        """Bring what other nodes have of the keys, a run of them or the first; how many came. At
        most `max_batch_keys`."""

    def suspect(self, keys: Sequence[Key]) -> None:
        """Tell the daemon of bytes that did not match their checksum, without waiting."""

    def reserve(
        self, items: Sequence[ReserveItem], terms: SaveTerms, deadline: Deadline
    ) -> list[Granted]:
        """Ask for the exclusive right to save keys, and for their room."""

    def cancel(self, reservations: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """Give reservations back. True: there was something left to give back."""

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
        """Reserve and write in one."""

    def close(self, within_s: float) -> None:
        """Give everything back; calls under way fail. Idempotent."""
