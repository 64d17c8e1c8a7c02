"""A few losses cause no problem, and planted mistakes are found. See also `tests.power`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from prefixd.client import Key

from .device import CHOICES, Device, build
from .losses import Losses, Recorded, check_complete, record
from .recording import Event, Kind, compiler
from .workload import History, _Attempt, key, payload

pytestmark = pytest.mark.skipif(compiler() is None, reason="recording needs a C compiler")

PAGE = 4096
OPERATIONS = 45


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record(random.Random(5), OPERATIONS)


# ---- a daemon


def test_a_loss_anywhere_costs_nothing_that_was_acknowledged(recorded: Recorded) -> None:
    losses = Losses(recorded, random.Random(1))
    losses.by_store(30)
    assert losses.report.problems == []
    counts = losses.report.counts
    assert counts["acknowledged saves"] > OPERATIONS / 2
    assert counts["recovered entries"] > counts["losses"]
    assert counts["changes that a loss could undo"] > counts["losses"]


def test_a_daemon_starts_after_a_loss(recorded: Recorded) -> None:
    losses = Losses(recorded, random.Random(2))
    losses.by_daemon(3, again_each=2)
    assert losses.report.problems == []
    assert losses.report.counts["losses during a recovery"] == 6


@pytest.mark.parametrize("pattern", ["disk/arena", "disk/records-*", "disk", ""])
def test_a_sync_that_is_left_out_is_noticed(recorded: Recorded, pattern: str) -> None:
    """As if the daemon did not sync payloads, records, names of files, or the name of the tier."""
    omitted = {
        event.number
        for event in recorded.events
        if event.kind is Kind.SYNC and fnmatchcase(event.data.decode(), pattern)
    }
    assert omitted
    without = [event for event in recorded.events if event.number not in omitted]
    losses = Losses(Recorded(without, None, recorded.history), random.Random(3))
    losses.by_store(12)
    assert losses.report.problems


def test_the_recording_covers_reused_extents_and_renamed_files(recorded: Recorded) -> None:
    assert any(event.kind is Kind.RENAME for event in recorded.events)
    written = [event for event in recorded.events if event.kind is Kind.WRITE]
    extents = [(event.inode, event.offset_bytes) for event in written]
    assert len(set(extents)) < len(extents)


def test_unrecorded_writes_are_noticed(recorded: Recorded, tmp_path: Path) -> None:
    device = Device()
    for event in recorded.events:
        device.add(event)
    build(device.written(), tmp_path)
    check_complete([], device, tmp_path, "disk")
    with (tmp_path / "disk/arena").open("r+b") as file:
        file.seek(5 * PAGE)
        file.write(b"something else")
    with pytest.raises(AssertionError, match="was not recorded"):
        check_complete([], device, tmp_path, "disk")


# ---- the device


class Calls:
    """Recorded calls on a device."""

    def __init__(self) -> None:
        self.device = Device()
        self._number = 0
        self.file = 7
        self.both(Kind.CREATE, data=b"file")
        self.both(Kind.SYNC, inode=1)

    def begin(
        self, kind: Kind, inode: int = 7, offset: int = 0, data: bytes = b"", length: int = 0
    ) -> int:
        self._number += 1
        self.device.add(Event(kind, self._number, inode, offset, length, data))
        return self._number

    def end(self, number: int, result: int = 0) -> None:
        self.device.add(Event(Kind.END, number, 0, 0, result, b""))

    def both(
        self, kind: Kind, inode: int = 7, offset: int = 0, data: bytes = b"", length: int = 0
    ) -> None:
        number = self.begin(kind, inode, offset, data, length)
        self.end(number, len(data) if kind is Kind.WRITE else 0)

    def left(self, choice: str = "nothing", sector_bytes: int = 512) -> Iterator[bytes]:
        for seed in range(60):
            files = self.device.lost(random.Random(seed), choice, sector_bytes)
            if "file" in files:
                yield files["file"]


def test_synced_bytes_survive_and_others_may_be_torn() -> None:
    calls = Calls()
    calls.both(Kind.WRITE, data=b"a" * 2 * PAGE)
    assert set(calls.left()) == {b""}
    calls.both(Kind.SYNC)
    calls.both(Kind.WRITE, data=b"b" * 2 * PAGE)
    assert set(calls.left()) == {b"a" * 2 * PAGE}
    torn = set(calls.left("some"))
    assert len(torn) > 30
    assert all(
        set(data[at : at + 512]) in ({97}, {98}) for data in torn for at in range(0, 8192, 512)
    )
    assert len(set(calls.left("some", PAGE))) == 4
    assert set(calls.left("everything")) == {b"b" * 2 * PAGE}


def test_a_sector_holds_one_of_its_contents_since_the_sync() -> None:
    calls = Calls()
    for letter in (b"a", b"b", b"c"):
        calls.both(Kind.WRITE, data=letter * 512)
    assert {data[:1] for data in calls.left("some") if data} >= {b"a", b"b", b"c"}


def test_a_sync_covers_only_writes_that_had_ended_before_it() -> None:
    calls = Calls()
    writing = calls.begin(Kind.WRITE, data=b"a" * 512)
    syncing = calls.begin(Kind.SYNC)
    calls.end(writing, 512)
    calls.end(syncing)
    assert set(calls.left()) == {b""}
    calls.end(calls.begin(Kind.SYNC), -1)
    assert set(calls.left()) == {b""}, "the sync failed"
    calls.both(Kind.SYNC)
    assert set(calls.left()) == {b"a" * 512}


def test_lengths_and_holes_are_lost_like_bytes() -> None:
    calls = Calls()
    calls.both(Kind.EXTEND, length=2 * PAGE)
    assert {len(data) for data in calls.left("some")} == {0, 2 * PAGE}
    calls.both(Kind.WRITE, data=b"a" * 2 * PAGE)
    calls.both(Kind.SYNC)
    calls.both(Kind.PUNCH, length=PAGE)
    assert set(calls.left("some", PAGE)) == {b"a" * 2 * PAGE, bytes(PAGE) + b"a" * PAGE}
    calls.both(Kind.SYNC)
    calls.both(Kind.RESIZE, offset=PAGE)
    calls.both(Kind.EXTEND, length=2 * PAGE)
    assert set(calls.left("everything")) == {bytes(2 * PAGE)}


def test_names_hold_once_their_directory_was_synced() -> None:
    calls = Calls()
    calls.both(Kind.WRITE, data=b"old")
    calls.both(Kind.SYNC)
    calls.both(Kind.CREATE, inode=8, data=b"new")
    calls.both(Kind.WRITE, inode=8, data=b"new")
    calls.both(Kind.SYNC, inode=8)
    calls.both(Kind.RENAME, inode=0, data=b"new\0file")
    assert set(calls.left()) == {b"old"}
    assert set(calls.left("some")) == {b"old", b"new"}
    calls.both(Kind.SYNC, inode=1)
    assert set(calls.left()) == {b"new"}


def test_a_name_in_a_directory_that_is_not_safe_is_lost_with_it() -> None:
    calls = Calls()
    calls.both(Kind.MKDIR, inode=0, data=b"tier")
    calls.both(Kind.CREATE, inode=8, data=b"tier/arena")
    calls.both(Kind.SYNC, inode=2, data=b"tier")
    assert set(calls.device.lost(random.Random(0), "nothing", 512)) == {"file"}
    calls.both(Kind.SYNC, inode=1)
    assert set(calls.device.lost(random.Random(0), "nothing", 512)) == {"file", "tier/arena"}


# ---- the verdict


def test_a_history_tells_lost_from_evicted_and_old_from_new() -> None:
    history = History()
    history.attempts[1] = [_Attempt(1, begun=1, acknowledged=2), _Attempt(2, 7, 8)]
    first, second = {key(1): payload(1, 1)}, {key(1): payload(1, 2)}
    assert history.problems({}, 1) == history.problems(first, 1) == []
    assert history.problems({}, 2) == ["entry 1 was acknowledged but is lost"]
    assert history.problems(second, 2), "the second save had not begun"
    history.removed[1] = [5]
    assert history.problems({}, 4)
    assert (
        history.problems({}, 5) == history.problems(first, 6) == history.problems(second, 7) == []
    )
    assert history.problems(first, 8), "older than an acknowledged save"
    assert history.problems({}, 8)
    assert history.problems({Key(bytes(32)): b""}, 0)


def test_every_choice_leaves_different_files() -> None:
    calls = Calls()
    for letter in b"abcdefgh":
        calls.both(Kind.WRITE, data=bytes([letter]) * PAGE, offset=(letter - 97) * PAGE)
    left = {choice: len(set(calls.left(choice, PAGE))) for choice in CHOICES}
    assert left.pop("nothing") == left.pop("everything") == 1
    assert min(left.values()) > 4
