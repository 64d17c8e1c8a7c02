"""Large restores over a long way: divided over several connections, with the results of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest

from prefixd.client import ClaimMode, Client, Key, MissReason, SaveItem, SaveReason, Tier
from prefixd.client.counters import ClientCounters
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.restores import Streams
from prefixd.client.wire import framed_calls
from prefixd.client.wire.framed_calls import FramedCalls
from prefixd.client.wire.framed_connection import FramedConnection
from prefixd.client.wire.remote_transport import RemoteTransport
from tests.support.daemon import tcp_address, tcp_daemon
from tests.support.fakes import PATIENCE_S, keys, payloads

BLOCK_BYTES = 32 * 2**10
BLOCKS = 11


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with tcp_daemon(ram="16MiB") as daemon:
        yield daemon


@pytest.fixture
def far(daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client whose connections seem to be slow, and that divides small restores."""
    monkeypatch.setattr(FramedConnection, "round_trip_s", framed_calls.STREAMS_FROM_S)
    monkeypatch.setattr(framed_calls, "STREAM_BYTES", 2 * BLOCK_BYTES)
    transport = RemoteTransport(tcp_address(daemon), counters=(counters := ClientCounters()))
    with Client(transport=transport, counters=counters) as client:
        assert client.wait_connected()
        yield client


def framed_of(client: Client) -> FramedCalls:
    transport = client._transport
    assert isinstance(transport, RemoteTransport)
    assert transport.current is not None
    assert transport.current.framed is not None
    return transport.current.framed


def saved(client: Client, first: int, count: int = BLOCKS) -> tuple[list[Key], list[bytes]]:
    names, data = [Key(each) for each in keys(count, first)], payloads([BLOCK_BYTES] * count, first)
    items = [SaveItem(key, payload, 10) for key, payload in zip(names, data, strict=True)]
    assert all(client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT))
    return names, data


def rooms(count: int = BLOCKS) -> list[bytearray]:
    return [bytearray(BLOCK_BYTES) for _ in range(count)]


def test_how_many_connections(far: Client) -> None:
    framed = framed_of(far)
    assert framed.streams(100 * BLOCK_BYTES) == 1, "nothing is known of a place without connection"
    far.exists([Key(bytes(32))])
    assert [framed.streams(blocks * BLOCK_BYTES) for blocks in (1, 3, 4, 6, 8, 100)] == [
        1, 1, 2, 3, 4, 4,
    ]  # fmt: skip


def test_the_kernel_knows_the_round_trip(daemon: PrivateDaemon) -> None:
    transport = RemoteTransport(tcp_address(daemon), counters=(counters := ClientCounters()))
    with Client(transport=transport, counters=counters) as client:
        assert client.wait_connected()
        client.exists([Key(bytes(32))])
        framed = framed_of(client)
        assert 0 < framed._idle[-1].round_trip_s < 1
        assert framed.streams(2**40) == (4 if framed._idle[-1].round_trip_s >= 0.002 else 1)


@pytest.mark.parametrize("claim", [True, False])
def test_a_hit_comes_over_several(far: Client, claim: bool) -> None:
    names, data = saved(far, 1_000 + 100 * claim)
    with far.longest_run(names, claim=claim) as hit:
        buffers = rooms()
        assert hit.restore_into(buffers).run == BLOCKS
        assert buffers == data
    assert far.counters["rpcs"]["Read" if claim else "Fetch"] == 4


@pytest.mark.parametrize("mode", [ClaimMode.RUN, ClaimMode.ANY])
def test_keys_come_over_several(far: Client, mode: ClaimMode) -> None:
    names, data = saved(far, 2_000 + 100 * mode)
    absent = Key(keys(1, 2_099)[0])
    buffers = rooms(BLOCKS + 1)
    result = far.restore_keys([*names, absent], buffers, mode=mode)
    assert result.run == BLOCKS
    assert result.misses == (None,) * BLOCKS + (MissReason.ABSENT,)
    assert buffers == [*data, bytearray(BLOCK_BYTES)]
    assert far.counters["rpcs"]["Read"] == 4


def test_what_is_gone_is_a_miss_by_itself(far: Client) -> None:
    names, data = saved(far, 3_000)
    hit = far.longest_run(names, claim=False)
    far.delete([names[5]])
    buffers = rooms()
    result = hit.restore_into(buffers)
    assert result.misses == (None,) * 5 + (MissReason.ABSENT,) + (None,) * (BLOCKS - 6)
    assert buffers[:5] + buffers[6:] == data[:5] + data[6:]


# ---- `Streams`


@pytest.fixture
def streams() -> Iterator[Streams]:
    with closing(Streams()) as made:
        yield made


def test_reads_go_on_at_the_same_time(streams: Streams) -> None:
    together = threading.Barrier(4)

    def read(number: int) -> int:
        together.wait(PATIENCE_S)
        return number

    reads = [partial(read, number) for number in range(4)]
    assert streams.all_of(reads, at_once=True) == [0, 1, 2, 3]


def test_or_one_after_the_other_in_this_thread(streams: Streams) -> None:
    here = [threading.current_thread] * 5
    assert set(streams.all_of(here, at_once=False)) == {threading.current_thread()}
    assert streams.all_of(here[:1], at_once=True) == [threading.current_thread()]
    assert streams.all_of([], at_once=True) == []


def test_more_reads_than_threads(streams: Streams) -> None:
    reads: list[Callable[[], int]] = [partial(int, number) for number in range(50)]
    assert streams.all_of(reads, at_once=True) == list(range(50))
    streams.close()
    assert streams.all_of(reads, at_once=True) == list(range(50)), "without threads, too"


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_is_raised_when_every_read_has_ended(streams: Streams, failing: int) -> None:
    begun, ended = threading.Barrier(3), []

    def read(number: int) -> None:
        begun.wait(PATIENCE_S)
        if number == failing:
            raise ValueError(number)
        ended.append(number)

    with pytest.raises(ValueError, match=str(failing)):
        streams.all_of([partial(read, number) for number in range(3)], at_once=True)
    assert sorted(ended) == [number for number in range(3) if number != failing]
