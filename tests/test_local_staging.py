"""Staging memory on the client's side: slots, and the messages that say what lies in them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from prefixd.client.deadline import Deadline
from prefixd.client.local import staging
from prefixd.client.local.staging import StagedSave, StagingMemory
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import DeadlineExceeded, LimitReached
from prefixd.proto.record import crc32c

SLOT = 4096
HEADER = pb.SaveHeader(tier=pb.TIER_RAM)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[StagingMemory]:
    """Two slots of 4 KiB."""
    monkeypatch.setattr(staging, "SLOT_BYTES", SLOT)
    made = of_size(2 * SLOT + 100)
    yield made
    made.close()


def of_size(size_bytes: int) -> StagingMemory:
    fd = os.memfd_create("staging")
    os.ftruncate(fd, size_bytes)
    return StagingMemory(fd, size_bytes)


def free(memory: StagingMemory) -> list[int]:
    """The free slots, which it takes and gives back."""
    slots: list[int] = []
    try:
        while True:
            slots.append(memory.take(Deadline(0)))
    except DeadlineExceeded:
        for slot in slots:
            memory.give(slot)
    return sorted(slots)


def save_of(memory: StagingMemory, *payloads: bytes, deadline_ms: int = 60_000) -> StagedSave:
    return StagedSave(memory, HEADER, [memoryview(p) for p in payloads], Deadline(deadline_ms))


def read(memory: StagingMemory, request: pb.SaveStagedRequest) -> list[tuple[int, bytes]]:
    """What the daemon would copy: item and bytes of each part."""
    return [
        (part.item, bytes(memory.room(part.staging_offset_bytes, part.length_bytes)))
        for part in request.parts
    ]


# ---- slots


def test_slots_are_whole_and_apart(memory: StagingMemory) -> None:
    assert memory.slot_bytes == SLOT
    assert free(memory) == [0, SLOT]


def test_memory_smaller_than_a_slot_is_one() -> None:
    memory = of_size(1000)
    assert memory.slot_bytes == 1000
    assert free(memory) == [0]
    memory.close()


def test_who_finds_no_slot_waits_for_one(memory: StagingMemory) -> None:
    first, _ = memory.take(Deadline(0)), memory.take(Deadline(0))
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(memory.take(Deadline(60_000))))
    thread.start()
    memory.give(first)
    thread.join()
    assert taken == [first]


def test_the_wait_has_an_end(memory: StagingMemory) -> None:
    memory.take(Deadline(0))
    memory.take(Deadline(0))
    with pytest.raises(DeadlineExceeded):
        memory.take(Deadline(1))


def test_closing_wakes_who_waits(memory: StagingMemory) -> None:
    memory.take(Deadline(0))
    slot = memory.take(Deadline(0))
    problems: list[Exception] = []

    def wait() -> None:
        try:
            memory.take(Deadline(60_000))
        except LimitReached as problem:
            problems.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    memory.close()
    thread.join()
    assert len(problems) == 1
    memory.give(slot)
    with pytest.raises(LimitReached):
        memory.take(Deadline(0))


def test_closed_memory_stays_as_long_as_somebody_copies_into_it(memory: StagingMemory) -> None:
    room = memory.room(0, 10)
    memory.close()
    room[:] = b"0123456789"
    with pytest.raises(LimitReached):
        memory.room(0, 10)


# ---- messages


def test_small_payloads_share_a_slot(memory: StagingMemory) -> None:
    payloads = [b"a" * 10, b"b" * 20, b"c" * 1000]
    (request,) = save_of(memory, *payloads).requests()
    assert request.header == HEADER
    assert read(memory, request) == list(enumerate(payloads))
    assert all(part.last for part in request.parts)
    assert [part.payload_crc32c for part in request.parts] == [crc32c(p) for p in payloads]


def test_a_payload_may_lie_in_several_slots(memory: StagingMemory) -> None:
    """Which are filled again as the daemon empties them."""
    payload = os.urandom(5 * SLOT + 7)
    save = save_of(memory, b"before", payload, b"after")
    arrived: dict[int, bytes] = {0: b"", 1: b"", 2: b""}
    crcs = {}
    for number, request in enumerate(save.requests()):
        assert request.HasField("header") == (number == 0)
        for item, data in read(memory, request):
            arrived[item] += data
        crcs.update({part.item: part.payload_crc32c for part in request.parts if part.last})
        save.answered()
    assert arrived == {0: b"before", 1: payload, 2: b"after"}
    assert crcs == {item: crc32c(data) for item, data in arrived.items()}
    assert free(memory) == [0, SLOT]


def test_a_payload_that_fills_its_slot_exactly(memory: StagingMemory) -> None:
    requests = list(save_of(memory, bytes(SLOT), bytes(SLOT)).requests())
    assert [len(request.parts) for request in requests] == [1, 1]


def test_without_a_slot_in_time_it_ends_and_says_why(memory: StagingMemory) -> None:
    save = save_of(memory, bytes(3 * SLOT), deadline_ms=1)
    assert len(list(save.requests())) == 2, "nobody answered"
    assert isinstance(save.problem, DeadlineExceeded)
    save.abandon()
    assert free(memory) == [0, SLOT]


def test_closed_memory_ends_it_as_well(memory: StagingMemory) -> None:
    save = save_of(memory, bytes(3 * SLOT))
    requests = save.requests()
    next(requests)
    memory.close()
    assert list(requests) == []
    assert isinstance(save.problem, LimitReached)


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_every_slot_comes_back_once_when_the_call_breaks(memory: StagingMemory, sent: int) -> None:
    save = save_of(memory, bytes(10 * SLOT))
    requests = save.requests()
    for _ in range(sent):
        next(requests)
    save.abandon()
    assert free(memory) == [0, SLOT]
    assert list(requests) == [], "and nothing more is sent"
    assert free(memory) == [0, SLOT]


def test_a_slot_that_is_being_filled_is_nobody_elses(
    memory: StagingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call breaks while gRPC's thread copies: the slot is free when that is done."""
    save = save_of(memory, bytes(SLOT), bytes(SLOT))
    copy_crc32c = staging.copy_crc32c
    while_filling: list[list[int]] = []

    def copy(*args: object) -> int:
        save.abandon()
        while_filling.append(free(memory))
        return copy_crc32c(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(staging, "copy_crc32c", copy)
    assert list(save.requests()) == []
    assert while_filling == [[SLOT]]
    assert free(memory) == [0, SLOT]


def test_a_stream_that_is_dropped_gives_its_slot_back(memory: StagingMemory) -> None:
    """As gRPC does when the payload can't be read, or the thread is stopped."""
    save = save_of(memory, b"some", bytes(10))
    requests = save.requests()
    save._payloads = [memoryview(b"some"), None]  # type: ignore[list-item]
    with pytest.raises(TypeError):
        next(requests)
    assert free(memory) == [0, SLOT]
