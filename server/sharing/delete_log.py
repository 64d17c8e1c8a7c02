"""The deletes of a fleet, in the one order that its engine gave them.

The engine keeps a log: a record for each delete of some keys, or of all keys of a namespace. Every
node reads it, deletes what it has under these keys, and remembers the order. A node that offers an
entry vouches for it with a stamp: the last record whose deletes are durably done there. So a value
that was put by a node which had not done the delete of its key yet is told from one that was saved
after it, whatever becomes of the writer, and without comparing clocks.

The engine may lose the log, or its end, as it may lose anything. The nodes put back what they
remember, in an order that may be another one. Until a record is back, nothing is fetched of what it
deletes.

A record in the engine:

| offset | bytes | what |
|---:|---:|---|
| 0 | 4 | `pxd1` |
| 4 | 16 | id, random |
| 20 | 1 | length of the namespace's name |
| 21 | | that name; empty: the record has keys |
| | 32 each | keys |
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Final, TypeVar

from ...proto.errors import LimitReached
from ...proto.keys import Key
from ...proto.limits import KEY_BYTES
from ...proto.namespaces import TAG_BYTES, tag_of
from ..core.shares import HOST

T = TypeVar("T", bytes, Key)

_MAGIC: Final = b"pxd1"
_HEAD: Final = struct.Struct("<4s16sB")
_STAMP_BYTES: Final = 4
#: Keys of one record.
KEYS_A_RECORD: Final = 32
#: Records that an engine keeps, and a node remembers: 18 MB of both if each has 32 keys.
MAX_RECORDS: Final = 16_384
#: One tenant of a node fills the log in no less than this time: what was offered before its first
#: record is not used any more, whoever's it is, and a node that was away for longer drops
#: everything.
_FILLED_IN_S: Final = 3_600
#: A tenant may log this part (1/n) of it at once.
_BURST_PART: Final = 16
#: Tenants whose pace is remembered before those are forgotten that have paid.
_PACED_TENANTS: Final = 1_024
#: Of a log that the engine lost, as many are put back: the latest ones. Several nodes may put back
#: the same one.
MAX_PUT_BACK: Final = 2_048
#: The stamp of a node that has done no delete of the log.
NO_STAMP: Final = 0


@dataclass(frozen=True, slots=True)
class FleetDelete:
    """One record: the keys that it deletes, or the namespace."""

    id: bytes
    keys: tuple[Key, ...] = ()
    namespace: str = ""

    def encode(self) -> bytes:
        name = self.namespace.encode()
        return _HEAD.pack(_MAGIC, self.id, len(name)) + name + b"".join(self.keys)

    @classmethod
    def decode(cls, record: bytes) -> FleetDelete | None:
        """None: it is of no format that this version knows."""
        if len(record) < _HEAD.size or not record.startswith(_MAGIC):
            return None
        _, id_, length = _HEAD.unpack_from(record)
        end = _HEAD.size + length
        name, keys = record[_HEAD.size : end], record[end:]
        if len(name) < length or len(keys) % KEY_BYTES or not name.isascii():
            return None
        cut = range(0, len(keys), KEY_BYTES)
        return cls(id_, tuple(Key(keys[at : at + KEY_BYTES]) for at in cut), name.decode())


@dataclass(frozen=True, slots=True)
class Logged:
    """A record, and where the engine has put it. Later records have other places."""

    place: bytes
    record: bytes

    @property
    def stamp(self) -> int:
        """32 bits, so a stamp that is of no record is taken for one of `MAX_RECORDS` at most once
        in 260,000 times."""
        digest = sha256(self.place + b"\0" + self.record).digest()
        return int.from_bytes(digest[:_STAMP_BYTES], "little") or 1

    @property
    def mark(self) -> bytes:
        """Stamp and place, by which a node finds the record again after a restart."""
        return self.stamp.to_bytes(_STAMP_BYTES, "little") + self.place


class DeleteLog:
    """What a node knows of the log. Belongs to the event loop; does no I/O."""

    def __init__(self, most_records: int = MAX_RECORDS) -> None:
        self._most_records: Final = most_records
        #: Whether it begins with the first delete that this fleet ever logged.
        self.complete = True
        #: The number of the first record in `_records`.
        self._first = 0
        self._records: deque[tuple[Logged, FleetDelete | None]] = deque()
        #: By stamp: the number of the record.
        self._numbers: dict[int, int] = {}
        #: By key, and tag of a namespace, which is shorter: the number of the last record.
        self._deleted: dict[bytes, int] = {}
        #: Known records that the log does not have, or not yet, by id.
        self._missing: dict[bytes, FleetDelete] = {}
        #: In how many of them each key, and tag of a namespace, is.
        self._missing_names: dict[bytes, int] = {}
        #: Ids of the records above.
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        """How many records were read since it began."""
        return self._first + len(self._records)

    @property
    def forgotten(self) -> int:
        """How many of them this node does not remember any more."""
        return self._first

    @property
    def last(self) -> Logged | None:
        """The last record that was read."""
        return self._records[-1][0] if self._records else None

    @property
    def missing(self) -> list[FleetDelete]:
        """Known records that the log does not have, or not yet."""
        return list(self._missing.values())

    @property
    def missing_count(self) -> int:
        """How many those are. On any thread."""
        return len(self._missing)

    def at(self, number: int) -> Logged | None:
        """The record of this number. None: it is forgotten, or not there."""
        at = number - self._first
        return self._records[at][0] if 0 <= at < len(self._records) else None

    def stamp_of(self, count: int) -> int:
        """The stamp of a node that has done the first `count` records."""
        logged = self.at(count - 1)
        return NO_STAMP if logged is None else logged.stamp

    def count_to(self, mark: bytes) -> int | None:
        """How many records there are up to the one with this mark (`Logged.mark`). None: the log
        does not have it."""
        number = self._numbers.get(int.from_bytes(mark[:_STAMP_BYTES], "little"))
        logged = None if number is None else self.at(number)
        if number is None or logged is None or logged.mark != mark:
            return None
        return number + 1

    def expect(self, record: FleetDelete) -> None:
        """This node is about to log a delete, which it has done."""
        self._known.add(record.id)
        self._miss(record)

    def add(self, logged: Logged) -> FleetDelete | None:
        """Read the next record. Returns what is to be deleted; None: this node knows it."""
        record = FleetDelete.decode(logged.record)
        number = len(self)
        self._records.append((logged, record))
        # Of two equal stamps the earlier one counts, so that no delete is taken for done.
        self._numbers.setdefault(logged.stamp, number)
        fresh = None
        if record is not None:
            self._deleted.update(dict.fromkeys(_names(record), number))
            if self._missing.pop(record.id, None) is not None:
                _count(self._missing_names, _names(record), -1)
            fresh = None if record.id in self._known else record
            self._known.add(record.id)
        if len(self._records) > self._most_records:
            self._forget_first()
        return fresh

    def begin_again(self, first: Logged | None, *, complete: bool) -> bool:
        """The engine has another log now, which begins with `first`. What this node knows from
        there on, `MAX_PUT_BACK` at most, is missing until it is read again. False: there may have
        been records before `first` that this node has not read."""
        since = 0
        if not complete:
            places = (at for at, (logged, _) in enumerate(self._records) if logged == first)
            since = next(places, len(self._records))
        continues = complete or since < len(self._records)
        since = max(since, len(self._records) - MAX_PUT_BACK)
        known = [record for _, record in islice(self._records, since, None) if record is not None]
        self._records.clear()
        self._numbers.clear()
        self._deleted.clear()
        self._first, self.complete = 0, complete
        for record in known:
            self._miss(record)
        if len(self._known) > 4 * self._most_records:
            self._known = set(self._missing)
        return continues

    def allows(self, key: Key, stamp: int) -> bool:
        """Whether a value of `key` was vouched for after the last delete of it that is known."""
        tag = key[-TAG_BYTES:]
        if key in self._missing_names or tag in self._missing_names:
            return False
        number = self._numbers.get(stamp)
        if number is None:
            if stamp != NO_STAMP or not self.complete:
                return False
            number = -1
        return number >= max(self._deleted.get(key, -1), self._deleted.get(tag, -1))

    def knows(self, stamp: int) -> bool:
        """Whether the log has this stamp, as far as it was read."""
        return stamp == NO_STAMP or stamp in self._numbers

    def _miss(self, record: FleetDelete) -> None:
        if record.id not in self._missing:
            self._missing[record.id] = record
            _count(self._missing_names, _names(record), 1)

    def _forget_first(self) -> None:
        """Values that were vouched for before the next record can't be judged any more: they are
        not used."""
        logged, record = self._records.popleft()
        number, self._first = self._first, self._first + 1
        self.complete = False
        if self._numbers.get(logged.stamp) == number:
            del self._numbers[logged.stamp]
        if record is None:
            return
        for name in _names(record):
            if self._deleted.get(name) == number:
                del self._deleted[name]
        self._known.discard(record.id)


class LogPace:
    """How many deletes each tenant may log. Pure; not thread-safe."""

    def __init__(self, most_records: int = MAX_RECORDS) -> None:
        self._each_s: Final = _FILLED_IN_S / most_records
        self._burst_s: Final = _FILLED_IN_S / _BURST_PART
        #: By tenant, the time at which its records so far would be paid for, each with `_each_s`.
        self._paid_until_s: dict[str, float] = {}

    def take(self, tenant: str, keys: int, now_s: float) -> None:
        """A tenant is about to delete so many keys. The clients on this host are not bounded.
        Raises LimitReached."""
        if tenant == HOST:
            return
        paid_until_s = max(self._paid_until_s.get(tenant, 0.0), now_s)
        paid_until_s += -(-keys // KEYS_A_RECORD) * self._each_s
        late_s = paid_until_s - now_s - self._burst_s
        if late_s > 0:
            raise LimitReached(
                f"you delete more than the fleet's log of deletes takes of one tenant; again in "
                f"{late_s:.1f} s"
            )
        if len(self._paid_until_s) >= _PACED_TENANTS:
            paid = self._paid_until_s.items()
            self._paid_until_s = {each: until_s for each, until_s in paid if until_s > now_s}
        self._paid_until_s[tenant] = paid_until_s


def records_of(keys: Sequence[Key], new_id: Iterable[bytes]) -> list[FleetDelete]:
    """The records of a delete of these keys. `new_id` yields ids."""
    starts = range(0, len(keys), KEYS_A_RECORD)
    return [
        FleetDelete(id_, tuple(keys[at : at + KEYS_A_RECORD]))
        for at, id_ in zip(starts, new_id, strict=False)
    ]


def _names(record: FleetDelete) -> Sequence[bytes]:
    """The keys that a record deletes, and the tag of the namespace that it clears."""
    return (*record.keys, tag_of(record.namespace)) if record.namespace else record.keys


def _count(counts: dict[bytes, int], names: Iterable[bytes], by: int) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + by
        if not counts[name]:
            del counts[name]
