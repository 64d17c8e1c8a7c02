"""Packing payloads into messages, and the queue of saves that wait."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.saving import SaveQueue, pack
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.record import crc32c

from .fakes import PATIENCE_S, payloads

# ---- packing


def packed(
    sizes_bytes: list[int], chunk_bytes: int, max_message_bytes: int, opening: pb.SaveRequest
) -> tuple[list[bytes], list[bytes]]:
    data = payloads(sizes_bytes)
    labels = [pb.WritePart(item=item) for item in range(len(data))]
    messages = pack(
        opening.SerializeToString(),
        labels,
        [memoryview(payload) for payload in data],
        chunk_bytes=chunk_bytes,
        max_message_bytes=max_message_bytes,
    )
    return data, list(messages)


@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=12),
    st.integers(1, 3_000),
    st.integers(300, 4_000),
)
def test_protobuf_reads_what_was_packed(
    sizes_bytes: list[int], chunk_bytes: int, max_message_bytes: int
) -> None:
    opening = pb.SaveRequest(header=pb.SaveHeader(tier=pb.TIER_SHM, wait_ms=5))
    data, messages = packed(sizes_bytes, chunk_bytes, max_message_bytes, opening)
    assert all(len(message) <= max_message_bytes for message in messages)
    requests = [pb.SaveRequest.FromString(message) for message in messages]
    assert requests[0].header == opening.header
    assert not any(request.HasField("header") for request in requests[1:])
    received = dict.fromkeys(range(len(data)), b"")
    last: dict[int, int] = {}
    for part in (part for request in requests for part in request.parts):
        assert part.item not in last, "nothing comes after the last part"
        assert part.offset_bytes == len(received[part.item])
        assert 0 < len(part.data) <= chunk_bytes
        received[part.item] += part.data
        if part.last:
            last[part.item] = part.payload_crc32c
    assert list(received.values()) == data
    assert last == {item: crc32c(payload) for item, payload in enumerate(data)}


def test_small_payloads_share_a_message() -> None:
    _, messages = packed([100] * 64, 1 << 20, 16 << 20, pb.SaveRequest(header=pb.SaveHeader()))
    assert len(messages) == 1


def test_a_message_holds_about_a_chunk() -> None:
    _, messages = packed([10_000] * 5, 4_000, 1 << 20, pb.SaveRequest(header=pb.SaveHeader()))
    sizes = [len(pb.SaveRequest.FromString(message).parts) for message in messages]
    # 4,000 + 4,000 + 2,000 of each: the short rest takes the beginning of the next along.
    assert sum(sizes) == 15
    assert max(len(message) for message in messages) < 4_000 + 4_000


def test_a_large_opening_goes_alone() -> None:
    opening = pb.SaveRequest(header=pb.SaveHeader(items=[pb.SaveItem(token_ids=bytes(5_000))]))
    _, messages = packed([100], 1_000, 6_000, opening)
    first, second = (pb.SaveRequest.FromString(message) for message in messages)
    assert first == opening
    assert len(second.parts) == 1


def test_write_streams_are_packed_alike() -> None:
    opening = pb.WriteRequest(session=pb.SessionRef(session_id=4)).SerializeToString()
    (message,) = pack(
        opening,
        [pb.WritePart(token=77)],
        [memoryview(b"abc")],
        chunk_bytes=1 << 20,
        max_message_bytes=16 << 20,
    )
    request = pb.WriteRequest.FromString(message)
    assert request.session.session_id == 4
    assert request.parts == [
        pb.WritePart(token=77, data=b"abc", last=True, payload_crc32c=crc32c(b"abc"))
    ]


# ---- the queue


class Saves:
    """Saves that wait to be let go; each returns its number, or is dropped."""

    def __init__(self, queue: SaveQueue) -> None:
        self.queue = queue
        self.let_go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.order: list[int] = []

    def submit(self, number: int) -> Future[str]:
        def save() -> str:
            self.begun.release()
            assert self.let_go.wait(PATIENCE_S)
            self.order.append(number)
            return f"saved {number}"

        return self.queue.submit(save, lambda: f"dropped {number}")


@pytest.fixture
def saves() -> Saves:
    return Saves(SaveQueue(3))


def test_saves_are_done_in_order_and_dropped_when_too_many_wait(saves: Saves) -> None:
    futures = [saves.submit(number) for number in range(5)]
    assert [future.done() for future in futures] == [False, False, False, True, True]
    assert futures[3].result() == "dropped 3"
    saves.let_go.set()
    assert [future.result(PATIENCE_S) for future in futures[:3]] == [
        "saved 0",
        "saved 1",
        "saved 2",
    ]
    assert saves.order == [0, 1, 2]
    assert saves.queue.flush(PATIENCE_S)
    assert saves.submit(6).result(PATIENCE_S) == "saved 6"
    saves.queue.close()


def test_flush_waits_only_so_long(saves: Saves) -> None:
    saves.submit(0)
    assert not saves.queue.flush(0.001)
    saves.let_go.set()
    assert saves.queue.flush(PATIENCE_S)
    saves.queue.close()


def test_pending_saves_can_be_dropped(saves: Saves) -> None:
    futures = [saves.submit(number) for number in range(3)]
    assert saves.begun.acquire(timeout=PATIENCE_S)
    saves.queue.drop_pending()
    assert saves.submit(3).result(0) == "dropped 3"
    saves.let_go.set()
    assert [future.result(PATIENCE_S) for future in futures] == [
        "saved 0",
        "dropped 1",
        "dropped 2",
    ]
    saves.queue.close()


def test_a_save_that_is_cancelled_in_time_is_not_done(saves: Saves) -> None:
    first, second = saves.submit(0), saves.submit(1)
    assert saves.begun.acquire(timeout=PATIENCE_S)
    assert second.cancel()
    assert not first.cancel()
    saves.let_go.set()
    assert saves.queue.flush(PATIENCE_S)
    assert saves.order == [0]
    with pytest.raises(CancelledError):
        second.result()
    saves.queue.close()


def test_what_a_save_raises_is_the_futures(saves: Saves) -> None:
    def fail() -> str:
        raise ValueError("broken")

    future = saves.queue.submit(fail, lambda: "dropped")
    with pytest.raises(ValueError, match="broken"):
        future.result(PATIENCE_S)
    saves.let_go.set()
    assert saves.submit(1).result(PATIENCE_S) == "saved 1"
    saves.queue.close()


def test_a_queue_may_take_nothing() -> None:
    queue = SaveQueue(0)
    assert queue.submit(lambda: "saved", lambda: "dropped").result(0) == "dropped"
    queue.close()


def test_no_thread_is_left(saves: Saves) -> None:
    saves.let_go.set()
    saves.submit(0).result(PATIENCE_S)
    saves.queue.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("prefixd-saver")]
