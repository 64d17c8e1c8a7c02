"""Staging memory in the client: its slots, and the messages that say what lies in them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from prefixd.client.local import staging
from prefixd.client.local.staging import StagingMemory
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.framed_calls import FramedCalls
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import (
    DeadlineExceeded,
    LimitReached,
    PrefixdError,
    UnknownSession,
)
from prefixd.proto.payload import Pieces, crc32c
from tests.support.columns import parts_of

SLOT = 4096
HEADER = pb.SaveHeader(tier=pb.TIER_RAM)
RESULT = pb.SaveResult(status=pb.SAVE_STATUS_SAVED)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> StagingMemory:
    """Two slots of 4 KiB."""
    monkeypatch.setattr(staging, "SLOT_BYTES", SLOT)
    return of_size(2 * SLOT + 100)


def of_size(size_bytes: int) -> StagingMemory:
    fd = os.memfd_create("staging")
    try:
        os.ftruncate(fd, size_bytes)
        return StagingMemory(fd, size_bytes)
    finally:
        os.close(fd)


def free(memory: StagingMemory) -> list[int]:
    """The free slots: takes all of them and gives them back."""
    slots: list[int] = []
    try:
        while True:
            slots.append(memory.take(Deadline(0)))
    except DeadlineExceeded:
        for slot in slots:
            memory.give(slot)
    return sorted(slots)


class Daemon:
    """Answers a save as the daemon would, or as the test wants.

    `answer` gets each request and returns the responses to it.
    """

    def __init__(self, memory: StagingMemory, answer: Answer | None = None) -> None:
        self._memory = memory
        self._answer = answer or self.copy
        self.requests: list[pb.SaveStagedRequest] = []
        #: The item and the bytes of each part, as copied.
        self.copied: list[tuple[int, bytes]] = []
        self.crcs: dict[int, int] = {}
        self._responses: deque[pb.SaveStagedResponse | PrefixdError] = deque()

    def copy(self, request: pb.SaveStagedRequest) -> list[pb.SaveStagedResponse | PrefixdError]:
        for part in parts_of(request):
            place = self._memory.room(part.staging_offset_bytes, part.length_bytes)
            self.copied.append((part.item, bytes(place)))
            if part.last:
                self.crcs[part.item] = part.payload_crc32c
        responses = []
        if request.items and not request.quiet:
            responses.append(pb.SaveStagedResponse(parts_copied=len(request.items)))
        if request.last:
            responses.append(pb.SaveStagedResponse(results=[RESULT]))
        return [*responses]

    # ---- as FramedCalls and FramedConnection

    @contextmanager
    def connection(self, _timeout_s: float) -> Iterator[Daemon]:
        yield self

    def begin(self, request: pb.FramedRequest, _timeout_s: float) -> None:
        self.requests.append(request.save_staged)
        self._responses.extend(self._answer(request.save_staged))

    def response(self) -> pb.FramedResponse:
        if not self._responses:
            raise DeadlineExceeded("nothing came")
        response = self._responses.popleft()
        if isinstance(response, PrefixdError):
            raise response
        return pb.FramedResponse(save_staged=response)


Answer = Callable[[pb.SaveStagedRequest], "list[pb.SaveStagedResponse | PrefixdError]"]


def save(
    daemon: Daemon, memory: StagingMemory, *payloads: bytes, deadline_ms: int = 60_000
) -> list[pb.SaveResult]:
    views = [memoryview(payload) for payload in payloads]
    calls = cast(FramedCalls, daemon)
    opening = pb.SaveStagedRequest(header=HEADER)
    return staging.save_staged(memory, calls, opening, views, Deadline(deadline_ms))


# ---- slots


def test_slots_are_whole_and_apart(memory: StagingMemory) -> None:
    assert memory.slot_bytes == SLOT
    assert free(memory) == [0, SLOT]


def test_memory_smaller_than_a_slot_is_one() -> None:
    memory = of_size(1000)
    assert memory.slot_bytes == 1000
    assert free(memory) == [0]


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


# ---- saves


def test_small_payloads_share_a_slot(memory: StagingMemory) -> None:
    payloads = [b"a" * 10, b"b" * 20, b"c" * 1000]
    daemon = Daemon(memory)
    assert save(daemon, memory, *payloads) == [RESULT]
    (request,) = daemon.requests
    assert request.header == HEADER
    assert request.last
    assert all(request.last_parts)
    assert daemon.copied == list(enumerate(payloads))
    assert daemon.crcs == {number: crc32c(data) for number, data in enumerate(payloads)}
    assert free(memory) == [0, SLOT]


def test_a_payload_may_lie_in_several_slots(memory: StagingMemory) -> None:
    """They are filled again as the daemon empties them."""
    payloads = [b"before", os.urandom(5 * SLOT + 7), b"after"]
    daemon = Daemon(memory)
    assert save(daemon, memory, *payloads) == [RESULT]
    arrived = [b"".join(data for item, data in daemon.copied if item == n) for n in range(3)]
    assert arrived == payloads
    assert daemon.crcs == {number: crc32c(data) for number, data in enumerate(payloads)}
    flags = [(request.HasField("header"), request.last) for request in daemon.requests]
    assert flags == [(True, False), *[(False, False)] * 4, (False, True)]
    assert free(memory) == [0, SLOT]


def test_a_payload_that_fills_its_slot_exactly(memory: StagingMemory) -> None:
    daemon = Daemon(memory)
    save(daemon, memory, bytes(SLOT), bytes(SLOT))
    assert [(len(r.items), r.last) for r in daemon.requests] == [(1, False), (1, True)]


def test_the_next_slot_is_filled_before_the_first_is_empty(memory: StagingMemory) -> None:
    """Here the daemon does not answer before it has two requests."""
    held: list[pb.SaveStagedResponse | PrefixdError] = []

    def answer(request: pb.SaveStagedRequest) -> list[pb.SaveStagedResponse | PrefixdError]:
        held.extend(daemon.copy(request))
        if len(daemon.requests) < 2:
            return []
        responses, held[:] = [*held], []
        return responses

    daemon = Daemon(memory, answer)
    assert save(daemon, memory, bytes(3 * SLOT)) == [RESULT]
    assert free(memory) == [0, SLOT]


def test_who_has_slots_for_all_of_it_is_told_of_none() -> None:
    """Each response would take the processor from the daemon. No save gets more than half of the
    slots at once."""
    memory = of_size(4 * staging.SLOT_BYTES)
    slot = memory.slot_bytes
    for slots, told in ((2, False), (3, True)):
        daemon = Daemon(memory)
        assert save(daemon, memory, bytes(slots * slot)) == [RESULT]
        assert any(request.items and not request.quiet for request in daemon.requests) is told
        assert len(daemon.copied) == slots
        assert len(free(memory)) == 4


def test_slots_that_a_save_did_not_use_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT_BYTES", SLOT)
    memory = of_size(8 * SLOT)
    refusal = LimitReached("no")
    with pytest.raises(LimitReached):
        save(Daemon(memory, lambda _: [refusal]), memory, bytes(4 * SLOT))
    assert sorted(free(memory)) == [number * SLOT for number in range(8)]


def silent(_request: pb.SaveStagedRequest) -> list[pb.SaveStagedResponse | PrefixdError]:
    return []


def test_a_daemon_that_never_answers(memory: StagingMemory) -> None:
    daemon = Daemon(memory, silent)
    with pytest.raises(DeadlineExceeded):
        save(daemon, memory, bytes(3 * SLOT))
    assert len(daemon.requests) == 2, "all slots are taken"
    assert free(memory) == [0, SLOT]


def test_without_a_slot_in_time_nothing_is_asked(memory: StagingMemory) -> None:
    slots = [memory.take(Deadline(0)) for _ in range(2)]
    daemon = Daemon(memory)
    with pytest.raises(DeadlineExceeded):
        save(daemon, memory, b"some", deadline_ms=1)
    assert daemon.requests == []
    for slot in slots:
        memory.give(slot)


def test_a_refusal_gives_every_slot_back(memory: StagingMemory) -> None:
    refusal = UnknownSession("it ended")
    with pytest.raises(UnknownSession):
        save(Daemon(memory, lambda _: [refusal]), memory, bytes(10 * SLOT))
    assert free(memory) == [0, SLOT]


def test_a_payload_that_cannot_be_read_gives_its_slot_back(
    memory: StagingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: object) -> int:
        raise BufferError

    monkeypatch.setattr(staging, "copy_crc32c", copy)
    monkeypatch.setattr(StagingMemory, "gather", copy)
    for payload in (b"some", bytes(SLOT + 1)):  # as a whole, and in pieces
        with pytest.raises(BufferError):
            save(Daemon(memory), memory, payload)
        assert free(memory) == [0, SLOT]


@pytest.mark.parametrize("form", ["native", "pure"])
def test_payloads_are_gathered_with_their_checksums(
    memory: StagingMemory, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "pure":
        monkeypatch.setattr(staging, "native", None)
    pieces = Pieces([memoryview(b"in "), memoryview(b"pieces")])
    assert memory.gather([3, 20], [memoryview(b"flat"), pieces]) == [
        crc32c(b"flat"),
        crc32c(b"in pieces"),
    ]
    assert bytes(memory.room(0, 29)) == bytes(3) + b"flat" + bytes(13) + b"in pieces"
