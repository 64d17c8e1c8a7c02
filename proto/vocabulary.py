"""The enumerations that all parts share. Their numbers are those of the wire and of records."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Labelled(IntEnum):
    """A closed set of the contract. `str` of a member is its label."""

    @property
    def label(self) -> str:
        """The name for people, in lower case: `ram`, `cold`, `too_large`."""
        return self.name.lower()

    def __str__(self) -> str:
        return self.label


def label_of(kind: type[Labelled], number: int) -> str:
    """The label of a number of the contract; of one that is not known here, the number itself."""
    if not number:
        return "unspecified"
    try:
        return kind(number).label
    except ValueError:
        return str(number)


class Tier(Labelled):
    """The three tiers in which an entry can be stored."""

    RAM = 1
    SHM = 2
    DISK = 3


class SaveReason(Labelled):
    """Why a state is saved."""

    COLD = 1
    """The trimmed prompt, right after its prefill."""
    CONTINUED = 2
    """A generation crossed another interval."""
    FINISH = 3
    """The request ended."""
    EVICT = 4
    """The engine is about to drop the state."""
    SHUTDOWN = 5
    """The engine is about to stop."""


class ClaimMode(Labelled):
    """Which keys of a claim to pin."""

    RUN = 1
    """Those before the first absent one: for a block chain, root first."""
    FIRST = 2
    """The first one that is present: for prefix entries, longest first."""
    ANY = 3
    """Each one that is present."""


class SaveStatus(Labelled):
    """How the save of a key ended. The daemon reports values below 100. Values from 100 on are the
    client's own and not part of the contract."""

    SAVED = 1
    PRESENT = 2
    IN_FLIGHT = 3
    TOO_LARGE = 4
    NO_ROOM = 5
    CRC_MISMATCH = 6
    LENGTH_MISMATCH = 7
    LOST = 8
    DEVICE_FULL = 9
    FAILED = 10
    DROPPED = 100
    """Too many saves were waiting already, or the client was closed."""
    UNAVAILABLE = 101
    """No daemon answers, or it is stopping."""
    DEADLINE = 102
    """It took too long. It may still be published."""


class DeleteStatus(Labelled):
    """What became of a key that was to be deleted. Values from 100 on as in `SaveStatus`."""

    DELETED = 1
    """Its entry is gone durably: no crash brings it back."""
    ABSENT = 2
    """It was not there."""
    PINNED = 3
    """A client is reading it, maybe this one. It was not deleted."""
    IN_FLIGHT = 4
    """It is being saved. It was not deleted."""
    ERASING = 5
    """No search finds it any more, but a device or a shared engine that hangs or fails has not
    taken that yet: if the daemon ends before, an entry of this key may come back."""
    FAILED = 100
    """The daemon could not be reached, or refused the whole call."""


class MissReason(StrEnum):
    """Why something was not served from the cache."""

    @property
    def label(self) -> str:
        """The name for people, as of the other enumerations."""
        return self.value

    ABSENT = "absent"
    """It was never saved, or it was evicted."""
    IN_FLIGHT = "in_flight"
    """It is being saved."""
    UNAVAILABLE = "unavailable"
    """No daemon answers, or it is stopping."""
    DEADLINE = "deadline"
    """The call took too long."""
    CORRUPT = "corrupt"
    """The bytes that were read do not match their checksum."""
    DROPPED = "dropped"
    """Too many calls were waiting already, or the client was closed."""
    UNREADABLE = "unreadable"
    """The daemon could not read the bytes."""
    LOST = "lost"
    """The claim ended before the bytes were read."""
    WRONG_SIZE = "wrong_size"
    """The buffer and the payload differ in size: the entry has another layout."""
    SLOW = "slow"
    """Computing it is estimated to be faster than loading it."""
    REFUSED = "refused"
    """The daemon had a reason of its own, such as a full table or missing rights."""
    UNEXPECTED = "unexpected"
    """The answer does not follow the contract (a daemon of another version), or there is a bug. The
    log has the details."""


class Presence(Labelled):
    """The result of a probe for a key. The numbers are those of the wire."""

    ABSENT = 1
    PRESENT = 2
    IN_FLIGHT = 3


#: Why an entry was evicted (`Missed.cause`), for people. Most are evicted for a save.
_CAUSES = {
    "save": "",
    "operator": " by an operator",
    "resize": " by a smaller budget",
    "pressure": " as memory was short",
}
#: Reasons of missed tokens whose names do not say enough.
_REASONS = {
    "absent": "absent",
    "too_old": "gone for too long to say why",
    "before_start": "lost or unknown since the restart",
    "not_told": "not told by the client",
    "partial_block": "less than a block",
    "slow": "slower to load than to compute",
    "deadline": "too slow an answer",
    "unavailable": "no daemon answered",
}


def missed_because(reason: str, tier: int = 0, cause: str = "") -> str:
    """What `Missed` says, for people: `evicted from ram`, `never saved`."""
    words = _REASONS.get(reason, reason.replace("_", " "))
    where = f" from {Tier(tier).label}" if tier in tuple(Tier) else ""
    return f"{words}{where}{_CAUSES.get(cause, '')}"
