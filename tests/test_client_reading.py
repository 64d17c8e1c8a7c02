"""Parts become buffers: in place, verified, timed; and what a broken read leaves."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.benefit import LoadSpeeds
from prefixd.client.reading import Collect, Restore, Verify
from prefixd.client.results import Entry, MissReason
from prefixd.proto.errors import PrefixdError
from prefixd.proto.keys import Key
from prefixd.proto.record import crc32c
from prefixd.proto.vocabulary import SaveReason, Tier

from .fakes import keys, payloads


def entry(number: int, payload: bytes, tier: Tier = Tier.RAM) -> Entry:
    key = Key(keys(1, number)[0])
    return Entry(key, tier, len(payload), 10, crc32c(payload), 0, 0, 1, SaveReason.COLD)


class Restoring:
    """A restore of some payloads into buffers of their own."""

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
            self.entries, [memoryview(b) for b in self.buffers], verify, lambda: next(seconds)
        )

    def send(self, number: int, chunk_bytes: int = 1 << 20) -> None:
        for offset in range(0, len(self.data[number]), chunk_bytes):
            self.restore(number, offset, self.data[number][offset : offset + chunk_bytes])


@given(st.lists(st.integers(1, 2_000), min_size=1, max_size=6), st.integers(1, 700))
def test_parts_of_any_size_make_the_payloads(sizes_bytes: list[int], chunk_bytes: int) -> None:
    restoring = Restoring(payloads(sizes_bytes))
    for number in range(len(sizes_bytes)):
        restoring.send(number, chunk_bytes)
    result = restoring.restore.result([10] * len(sizes_bytes), None)
    assert result
    assert [bytes(buffer) for buffer in restoring.buffers] == restoring.data
    assert restoring.restore.whole == restoring.entries
    assert (result.run, result.token_count) == (len(sizes_bytes), 10 * len(sizes_bytes))
    assert result.payload_bytes == sum(sizes_bytes)


def test_a_wrong_checksum_is_a_miss_of_that_buffer() -> None:
    restoring = Restoring(payloads([100, 100, 100]))
    restoring.data[1] = b"\xff" + restoring.data[1][1:]
    for number in range(3):
        restoring.send(number)
    result = restoring.restore.result([10, 20, 30], None)
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
    result = restoring.restore.result([10, 10], None)
    assert [not restored for restored in result.restored] == noticed


def test_a_read_that_stops_keeps_what_it_had() -> None:
    restoring = Restoring(payloads([100, 100, 100]))
    restoring.send(0)
    restoring.restore(1, 0, restoring.data[1][:40])
    result = restoring.restore.result([10, 10, 10], MissReason.UNAVAILABLE)
    assert result.restored == (True, False, False)
    assert result.miss is MissReason.UNAVAILABLE


def test_a_read_that_ends_early_without_saying_why_is_a_miss_too() -> None:
    restoring = Restoring(payloads([100]))
    assert restoring.restore.result([10], None).miss is MissReason.UNREADABLE


def test_what_the_daemon_cannot_read_is_told_per_entry() -> None:
    restoring = Restoring(payloads([100, 100]))
    restoring.restore(0, 0, None)
    restoring.send(1)
    result = restoring.restore.result([10, 10], None)
    assert result.restored == (False, True)
    assert (result.run, result.miss) == (0, MissReason.UNREADABLE)


@pytest.mark.parametrize(("offset", "length"), [(1, 10), (0, 101), (50, 10)])
def test_bytes_in_the_wrong_place_break_the_read(offset: int, length: int) -> None:
    restoring = Restoring(payloads([100]))
    with pytest.raises(PrefixdError, match="not the next ones"):
        restoring.restore(0, offset, bytes(length))
    assert restoring.buffers[0] == bytes(100)


def test_everything_can_come_again() -> None:
    restoring = Restoring(payloads([100, 50]))
    restoring.send(0)
    restoring.restore(1, 0, restoring.data[1][:10])
    restoring.restore.forget()
    for number in range(2):
        restoring.send(number)
    assert restoring.restore.result([10, 10], None)


def test_loading_is_timed_from_the_entry_before() -> None:
    restoring = Restoring(payloads([300, 100, 100]), tiers=(Tier.RAM, Tier.DISK, Tier.DISK))
    for number in range(3):
        restoring.send(number)  # the clock ticks a second at each end
    speeds = LoadSpeeds()
    restoring.restore.measure(speeds)
    assert speeds.snapshot() == pytest.approx({"ram": 300, "disk": 100})


def test_collect_keeps_the_bytes_of_one_range() -> None:
    collect = Collect()
    for part in (b"ab", memoryview(b"cd")):
        collect(0, 0, part)
    assert b"".join(collect.parts) == b"abcd"
    assert not collect.unreadable
    collect(0, 4, None)
    assert collect.unreadable
