"""Restores: parts put into buffers, verified and timed, and what is left of a failed read."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client import restores
from prefixd.client.context import Failures
from prefixd.client.policy import LoadSpeeds
from prefixd.client.restores import Copier, Restore, Verify
from prefixd.client.results import Entries, Entry, RestoreResult, restore_result
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.transport import Copied
from prefixd.proto.entry import Content
from prefixd.proto.errors import PrefixdError
from prefixd.proto.keys import Key
from prefixd.proto.payload import FlatBytes, crc32c
from prefixd.proto.vocabulary import MissReason, SaveReason, Tier
from tests.support.fakes import PATIENCE_S, keys, payloads


def entry(number: int, payload: bytes, tier: Tier = Tier.RAM) -> Entry:
    key = Key(keys(1, number)[0])
    return Entry(key, tier, Content(len(payload), 10), crc32c(payload), 1, SaveReason.COLD)


class Restoring:
    """A restore of payloads into new buffers."""

    def __init__(
        self, data: list[bytes], verify: Verify = "always", tiers: tuple[Tier, ...] = ()
    ) -> None:
        tiers = tiers or (Tier.RAM,) * len(data)
        self.data = data
        self.entries = [
            entry(number, payload, tier)
            for number, (payload, tier) in enumerate(zip(data, tiers, strict=True))
        ]
        self.buffers = [bytearray(len(payload)) for payload in data]
        seconds = count()
        self.restore = Restore(
            Entries(self.entries),
            [memoryview(b) for b in self.buffers],
            verify,
            lambda: next(seconds),
        )

    def result(self, token_counts: list[int], stopped: MissReason | None) -> RestoreResult:
        return restore_result(Entries(self.entries), token_counts, self.restore.misses(stopped))

    def send(self, number: int, chunk_bytes: int = 1 << 20) -> None:
        for offset in range(0, len(self.data[number]), chunk_bytes):
            self.restore(number, offset, self.data[number][offset : offset + chunk_bytes])


@given(st.lists(st.integers(1, 2_000), min_size=1, max_size=6), st.integers(1, 700))
def test_parts_of_any_size_make_the_payloads(sizes_bytes: list[int], chunk_bytes: int) -> None:
    restoring = Restoring(payloads(sizes_bytes))
    for number in range(len(sizes_bytes)):
        restoring.send(number, chunk_bytes)
    result = restoring.result([10] * len(sizes_bytes), None)
    assert result
    assert [bytes(buffer) for buffer in restoring.buffers] == restoring.data
    assert list(restoring.restore.whole_by_path[-1][1]) == restoring.entries
    assert (result.run, result.token_count) == (len(sizes_bytes), 10 * len(sizes_bytes))
    assert result.payload_bytes == sum(sizes_bytes)


def test_a_wrong_checksum_is_a_miss_of_that_buffer() -> None:
    restoring = Restoring(payloads([100, 100, 100]))
    restoring.data[1] = b"\xff" + restoring.data[1][1:]
    for number in range(3):
        restoring.send(number)
    result = restoring.result([10, 20, 30], None)
    assert result.restored == (True, False, True)
    assert (result.run, result.token_count, result.payload_bytes) == (1, 10, 100)
    assert result.miss is MissReason.CORRUPT
    assert restoring.restore.corrupt == [restoring.entries[1].key]


@pytest.mark.parametrize(
    ("verify", "noticed"),
    [("always", [True, True]), ("disk", [False, True]), ("never", [False, False])],
)
def test_what_is_verified_is_a_choice(verify: Verify, noticed: list[bool]) -> None:
    restoring = Restoring(payloads([100, 100]), verify, (Tier.SHM, Tier.DISK))
    for number in range(2):
        restoring.data[number] = bytes(100)
        restoring.send(number)
    result = restoring.result([10, 10], None)
    assert [not restored for restored in result.restored] == noticed


def test_a_read_that_stops_keeps_what_it_had() -> None:
    restoring = Restoring(payloads([100, 100, 100]))
    restoring.send(0)
    restoring.restore(1, 0, restoring.data[1][:40])
    result = restoring.result([10, 10, 10], MissReason.UNAVAILABLE)
    assert result.restored == (True, False, False)
    assert result.miss is MissReason.UNAVAILABLE


def test_a_read_that_ends_early_without_saying_why_is_a_miss_too() -> None:
    restoring = Restoring(payloads([100]))
    assert restoring.result([10], None).miss is MissReason.UNREADABLE


def test_what_the_daemon_cannot_read_is_told_per_entry() -> None:
    restoring = Restoring(payloads([100, 100]))
    restoring.restore(0, 0, None)
    restoring.send(1)
    result = restoring.result([10, 10], None)
    assert result.restored == (False, True)
    assert (result.run, result.miss) == (0, MissReason.UNREADABLE)


@pytest.mark.parametrize(("offset", "length"), [(1, 10), (0, 101), (50, 10)])
def test_bytes_in_the_wrong_place_break_the_read(offset: int, length: int) -> None:
    restoring = Restoring(payloads([100]))
    with pytest.raises(PrefixdError, match="not the next ones"):
        restoring.restore(0, offset, bytes(length))
    assert restoring.buffers[0] == bytes(100)


def restored(restoring: Restoring) -> tuple[bool, ...]:
    return restoring.result([10] * len(restoring.data), MissReason.LOST).restored


@pytest.mark.parametrize(
    ("lost", "verify", "counted"),
    [
        (False, "always", (True, True, False)),
        (False, "never", (True, False, False)),
        (True, "always", (True, False, False)),
        (True, "never", (True, False, False)),
    ],
)
def test_of_a_read_that_failed_counts_what_is_known_to_be_right(
    lost: bool, verify: Verify, counted: tuple[bool, ...]
) -> None:
    """Entries validated in place count, and those that match their checksum if the claim held."""
    restoring = Restoring(payloads([100, 100, 100]), verify)
    assert restoring.restore.copied([Copied.WHOLE, Copied.GONE, Copied.GONE]) == [1, 2]
    restoring.send(1)
    restoring.restore(2, 0, restoring.data[2][:40])
    assert restored(restoring) == (True, True, False)
    restoring.restore.read_failed(lost=lost)
    assert restored(restoring) == counted


def test_what_is_copied_in_place_is_not_read_again() -> None:
    """Nor are damaged entries: those are a miss, and reported."""
    restoring = Restoring(payloads([100, 100, 100]))
    assert restoring.restore.copied([Copied.WHOLE, Copied.CORRUPT, Copied.GONE]) == [2]
    restoring.send(2)
    assert restored(restoring) == (True, False, True)
    assert restoring.restore.corrupt == [restoring.entries[1].key]


def test_loading_is_timed_from_the_entry_before() -> None:
    restoring = Restoring(payloads([300, 100, 100]), tiers=(Tier.RAM, Tier.DISK, Tier.DISK))
    for number in range(3):
        restoring.send(number)  # the clock ticks a second at each end
    speeds = LoadSpeeds()
    restoring.restore.measure(speeds)
    assert speeds.snapshot() == pytest.approx({"ram": 300, "disk": 100})


# ---- copies in place


class InPlace:
    """A transport's `copy`, of payloads in this process."""

    def __init__(self, data: list[bytes]) -> None:
        self.data = {entry(number, payload).key: payload for number, payload in enumerate(data)}
        self.threads: set[int] = set()
        self.calls: list[int] = []

    def copy(
        self,
        entries: Sequence[Entry],
        targets: Sequence[FlatBytes],
        _check: Sequence[bool],
        _deadline: Deadline,
    ) -> list[Copied]:
        self.threads.add(threading.get_ident())
        self.calls.append(len(entries))
        for each, target in zip(entries, targets, strict=True):
            target[:] = self.data[each.key]
        return [Copied.WHOLE] * len(entries)


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ([10, 10, 10, 10], [2, 2]),
        ([60, 40], [1, 1]),
        ([30, 5, 5], [1, 2]),
        ([5, 5, 30], [1, 2]),
        ([100], [1]),
        ([20, 19], [2]),
    ],
)
def test_a_large_copy_is_shared_by_bytes(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], calls: list[int]
) -> None:
    monkeypatch.setattr(restores, "SHARED_BYTES", 40)
    monkeypatch.setattr(restores, "CPUS", 2)
    restoring = Restoring(payloads(sizes))
    in_place = InPlace(restoring.data)
    copier = Copier(in_place.copy, Failures())
    assert copier.copy(restoring.restore, Deadline(60_000)) == []
    assert [bytes(buffer) for buffer in restoring.buffers] == restoring.data
    assert len(in_place.threads) == len(calls)
    assert sorted(in_place.calls) == calls
    copier.close()
    assert copier.copy(restoring.restore, Deadline(60_000)) == []  # by this thread alone
    assert restoring.result([1] * len(sizes), None).run == len(sizes)


def test_a_process_that_is_kept_to_one_processor_has_one() -> None:
    """Whatever the machine has: two threads on one processor would only take turns."""
    kept = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from prefixd.client.restores import CPUS\n"
        "print(CPUS)"
    )
    said = subprocess.run([sys.executable, "-c", kept], check=True, capture_output=True, text=True)
    assert said.stdout == "1\n"


@pytest.mark.parametrize("broken", [0, 1])
def test_what_a_copy_that_fails_was_to_copy_is_read(
    monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """In either thread, for any exception; the copy of the other thread counts."""
    monkeypatch.setattr(restores, "SHARED_BYTES", 1)
    monkeypatch.setattr(restores, "CPUS", 2)
    restoring = Restoring(payloads([10, 10]))
    in_place = InPlace(restoring.data)
    in_place.data.pop(restoring.entries[broken].key)
    copier = Copier(in_place.copy, Failures())
    assert copier.copy(restoring.restore, Deadline(60_000)) == [broken]
    copier.close()
    assert copier._second.join(PATIENCE_S)


def test_an_interrupt_while_the_other_half_is_handed_over_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C before the second thread has anything to do: nothing will ever end it."""
    monkeypatch.setattr(restores, "SHARED_BYTES", 1)
    monkeypatch.setattr(restores, "CPUS", 2)
    restoring = Restoring(payloads([10, 10]))
    copier = Copier(InPlace(restoring.data).copy, Failures())

    def interrupted(_work: object) -> bool:
        raise KeyboardInterrupt

    def waited(_futures: object) -> None:
        raise AssertionError("it waits for what was never begun")

    monkeypatch.setattr(copier._second, "submit", interrupted)
    monkeypatch.setattr(restores, "_await_end", lambda each: each.done() or waited(each))
    with pytest.raises(KeyboardInterrupt):
        copier.copy(restoring.restore, Deadline(60_000))
    copier.close()


def test_an_interrupt_does_not_leave_the_second_thread_with_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C, twice, while the caller waits for the other half of its copies."""
    monkeypatch.setattr(restores, "SHARED_BYTES", 1)
    monkeypatch.setattr(restores, "CPUS", 2)
    restoring = Restoring(payloads([10, 10]))
    in_place = InPlace(restoring.data)
    may_write = threading.Event()
    real = restores.wait
    waits = count()

    def copy(
        entries: Sequence[Entry],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[Copied]:
        if threading.current_thread() is not threading.main_thread():
            assert may_write.wait(PATIENCE_S)
        return in_place.copy(entries, targets, check, deadline)

    def interrupted(futures: Sequence[Future[object]]) -> object:
        if next(waits) < 2:
            raise KeyboardInterrupt
        may_write.set()
        return real(futures)

    monkeypatch.setattr(restores, "wait", interrupted)
    copier = Copier(copy, Failures())
    with pytest.raises(KeyboardInterrupt):
        copier.copy(restoring.restore, Deadline(60_000))
    assert [bytes(buffer) for buffer in restoring.buffers] == restoring.data, "it has ended"
    copier.close()
    assert copier._second.join(PATIENCE_S)
