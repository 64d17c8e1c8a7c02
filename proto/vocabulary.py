"""The enumerations that every part shares; the numbers are those of the wire and of records."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Tier(IntEnum):
    """The three places where an entry can live."""

    RAM = 1
    SHM = 2
    DISK = 3

    @property
    def label(self) -> str:
        """The name that people write: `ram`, `shm`, `disk`."""
        return self.name.lower()


class SaveReason(IntEnum):
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

    @property
    def label(self) -> str:
        """The name that people write: `cold`, `continued`, ..."""
        return self.name.lower()


class ClaimMode(IntEnum):
    """Which of the keys of a claim are wanted."""

    RUN = 0
    """From the first on, up to the first that is absent: a block chain, root first."""
    FIRST = 1
    """The first that is present: prefix entries, longest first."""
    ANY = 2
    """Every one that is present."""


class SaveStatus(IntEnum):
    """How the save of a key ended. Below 100 the daemon says so; from 100 on the client knows it by
    itself, and the contract does not have it."""

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
    """It took too long; it may still be published."""

    @property
    def label(self) -> str:
        return self.name.lower()


class DeleteStatus(IntEnum):
    """What became of a key that was to be deleted. From 100 on as in `SaveStatus`."""

    DELETED = 1
    """It is not found any more, and its room is free."""
    ABSENT = 2
    """It was not there."""
    PINNED = 3
    """It is being read, maybe by this client; nothing happened."""
    IN_FLIGHT = 4
    """It is being saved; nothing happened."""
    FAILED = 100
    """The daemon could not be asked, or refused the whole call."""


class MissReason(StrEnum):
    """Why something was not served from the cache."""

    ABSENT = "absent"
    """It was never saved, or it was evicted."""
    IN_FLIGHT = "in_flight"
    """It is being saved."""
    UNAVAILABLE = "unavailable"
    """No daemon answers, or it is stopping."""
    DEADLINE = "deadline"
    """The call's time was over."""
    CORRUPT = "corrupt"
    """The bytes that arrived do not match their checksum."""
    DROPPED = "dropped"
    """Too many calls were waiting already, or the client was closed."""
    UNREADABLE = "unreadable"
    """The daemon could not read the bytes."""
    LOST = "lost"
    """The claim ended before the bytes were read."""
    WRONG_SIZE = "wrong_size"
    """The buffer is not as long as the payload: the entry is of another layout."""
    SLOW = "slow"
    """Computing it is estimated to be faster than loading it."""
    REFUSED = "refused"
    """The daemon had a reason of its own, such as a full table or missing rights."""
    UNEXPECTED = "unexpected"
    """The answer does not follow the contract (a daemon of another version), or something failed
    that never should; the log says what."""


class Presence(IntEnum):
    """What a probe says of a key; the numbers are those of the wire."""

    ABSENT = 1
    PRESENT = 2
    IN_FLIGHT = 3
