"""Memory of another process: read in pieces, only while it is lent, and never beyond it."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from pathlib import Path

import pytest

from prefixd.proto.errors import UnreadableMemory
from prefixd.proto.payload import address_of, crc32c
from prefixd.proto.vocabulary import Tier
from prefixd.server.runtime import lent_memory
from prefixd.server.runtime.lent_memory import LentMemory, LentPayload, LentTurn, turns_of
from prefixd.server.runtime.writes import Write
from tests.support.event_loop import in_loop
from tests.support.incoming import begin
from tests.support.running import Running, payload, running

TOKEN = secrets.token_bytes(16)


class Lender:
    """A buffer of this process, with a token in it."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.token = bytearray(TOKEN)
        with address_of(self.data) as at, address_of(self.token) as token_at:
            self.address = at
            self.memory = LentMemory(os.getpid(), TOKEN, token_at)

    def payload(self, *ranges: tuple[int, int]) -> LentPayload:
        """The ranges are of `data`: offset and length."""
        return LentPayload([self.address + at for at, _ in ranges], [size for _, size in ranges])


def taken(lender: Lender, payload: LentPayload, *most: int) -> list[bytes]:
    came = []
    for most_bytes in most:
        addresses, lengths = payload.take(most_bytes)
        room = bytearray(sum(lengths))
        lender.memory.read(memoryview(room), addresses, lengths)
        came.append(bytes(room))
    return came


def test_a_payload_is_read_over_the_seams_of_its_ranges() -> None:
    lender = Lender(bytes(range(100)))
    payload = lender.payload((10, 5), (50, 1), (20, 10))
    assert payload.length_bytes == payload.left_bytes == 16
    whole = [*range(10, 15), 50, *range(20, 30)]
    assert taken(lender, payload, 3, 4, 100, 1) == [
        bytes(whole[:3]),
        bytes(whole[3:7]),
        bytes(whole[7:]),
        b"",
    ]
    assert payload.left_bytes == 0


def test_more_ranges_than_one_call_takes_come_in_several() -> None:
    lender = Lender(bytes(range(250)) * 20)
    payload = lender.payload(*((2 * number, 1) for number in range(2_500)))
    first, second, third = taken(lender, payload, 5_000, 5_000, 5_000)
    assert [len(first), len(second), len(third)] == [1024, 1024, 452]
    assert first + second + third == bytes(lender.data[:5_000:2])


def test_memory_is_proved_by_its_token_only() -> None:
    lender = Lender(b"")
    lender.memory.prove()
    lender.token[3] ^= 1
    with pytest.raises(UnreadableMemory, match="not lent any more"):
        lender.memory.prove()


def test_what_is_not_mapped_is_not_read() -> None:
    mapping = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(address + mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    room = memoryview(bytearray(10))
    memory = LentMemory(os.getpid(), TOKEN, address + mmap.PAGESIZE)
    with pytest.raises(UnreadableMemory, match="nothing that could be read"):
        memory.prove()
    with pytest.raises(UnreadableMemory, match="5 of 10 bytes"):
        memory.read(room, [address, address + mmap.PAGESIZE], [5, 5])


def test_a_process_that_is_gone_lends_nothing() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(UnreadableMemory, match="not there"):
        LentMemory(pid, TOKEN, 4096).prove()


def test_turns_are_of_about_so_many_bytes() -> None:
    lender = Lender(bytes(100))
    payloads = [lender.payload((0, size)) for size in (10, 10, 50, 1, 1, 1)]
    writes = [object()] * len(payloads)
    turns = turns_of(lender.memory, None, writes, payloads, 20)  # type: ignore[arg-type]
    assert [len(turn.writes) for turn in turns] == [2, 1, 3]


# ---- turns


class Fickle(LentMemory):
    """Is lent for `proofs` calls of `prove`."""

    def __init__(self, of: Lender, proofs: int) -> None:
        super().__init__(os.getpid(), TOKEN, of.memory.token_address)
        self.proofs = proofs

    def prove(self) -> None:
        self.proofs -= 1
        if self.proofs < 0:
            raise UnreadableMemory("the memory is not lent any more")
        super().prove()


async def reserved(daemon: Running, data: bytes, tier: Tier) -> Write:
    """The write of a payload of this size that has no bytes yet."""
    incoming = await begin(daemon, await daemon.open(), data, tier=tier)
    return incoming.write_of(0)


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
@in_loop
async def test_a_turn_copies_and_seals_what_was_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: Tier
) -> None:
    monkeypatch.setattr(lent_memory, "_PIECE_BYTES", 7_000)
    async with running(tmp_path) as daemon:
        data = payload(1, 100_000)
        lender = Lender(data)
        write = await reserved(daemon, data, tier)
        lent = lender.payload((0, 1_000), (1_000, len(data) - 1_000))
        turn = LentTurn(lender.memory, daemon.core.devices, [write], [lent])
        assert turn.take() is None
        assert write.complete
        assert write.crc32c == write.expected_crc32c == crc32c(data)


@pytest.mark.parametrize("proofs", [0, 1])
@in_loop
async def test_nothing_is_sealed_of_memory_that_was_taken_back(tmp_path: Path, proofs: int) -> None:
    """Before the first copy, or between it and the end."""
    async with running(tmp_path) as daemon:
        lender = Lender(payload(1))
        write = await reserved(daemon, bytes(lender.data), Tier.RAM)
        memory = Fickle(lender, proofs)
        lent = lender.payload((0, len(lender.data)))
        turn = LentTurn(memory, daemon.core.devices, [write], [lent])
        assert isinstance(turn.take(), UnreadableMemory)
        assert not write.complete
        assert write.crc32c is None
        assert write.writer.written_bytes == (len(lender.data) if proofs else 0)


@in_loop
async def test_another_length_than_was_reserved_is_no_payload(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        lender = Lender(payload(1))
        write = await reserved(daemon, bytes(lender.data), Tier.RAM)
        turn = LentTurn(lender.memory, daemon.core.devices, [write], [lender.payload((0, 10))])
        assert turn.take() is None
        assert write.problem is not None
        assert "10 bytes came" in write.problem[1]
        assert not write.complete
