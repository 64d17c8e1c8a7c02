"""The call `save_lent`: bytes that are never sent, and that a call that fails leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixd.client.wire.messages import results_of
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import PrefixdError
from prefixd.proto.payload import address_of, addresses_of
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import local_socket
from prefixd.server.runtime.lent_memory import LentMemory, LentTurn
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import OpenSession, Refused, item, key, payload, running

TOKEN = b"sixteen bytes, 1"


@contextmanager
def lent(
    session: OpenSession, payloads: Sequence[bytes], tier: Tier = Tier.RAM
) -> Iterator[pb.SaveLentRequest]:
    """A request that lends payloads, each in one piece, until the context ends."""
    token = bytearray(TOKEN)
    header = session.header([item(key(n), data) for n, data in enumerate(payloads)], tier)
    with addresses_of(payloads) as addresses, address_of(token) as token_address:
        yield pb.SaveLentRequest(
            header=header,
            token=TOKEN,
            token_address=token_address,
            addresses=addresses,
            lengths_bytes=map(len, payloads),
            pieces=[1] * len(payloads),
        )
        token[:] = bytes(16)


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)
@in_loop
async def test_lent_payloads_are_saved(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        payloads = [payload(number, 10_000 + number) for number in range(7)]
        connection = await daemon.connect_locally()
        with lent(session, payloads, tier) as request:
            answer = (await connection.ask(save_lent=request)).save_lent
            assert [r.status for r in results_of(answer)] == [pb.SAVE_STATUS_SAVED] * 7
            again = (await connection.ask(save_lent=request)).save_lent
            assert [r.status for r in results_of(again)] == [pb.SAVE_STATUS_PRESENT] * 7
        for number, data in enumerate(payloads):
            assert await session.restore(key(number)) == data
        assert not daemon.front.local.lent.threads_taken
        await daemon.assert_idle()


@in_loop
async def test_a_large_save_goes_over_two_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread waits for the other: one alone would never finish."""
    monkeypatch.setattr(local_socket, "_TURN_BYTES", 100_000)
    both = threading.Barrier(2, timeout=PATIENCE_S)
    copying: set[int] = set()

    def take(turn: LentTurn) -> PrefixdError | None:
        if threading.get_ident() not in copying:
            copying.add(threading.get_ident())
            both.wait()
        return as_it_was(turn)

    as_it_was = LentTurn.take
    monkeypatch.setattr(LentTurn, "take", take)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        payloads = [payload(number, 60_000) for number in range(4)]
        connection = await daemon.connect_locally()
        with lent(session, payloads) as request:
            answer = (await connection.ask(save_lent=request)).save_lent
        assert [r.status for r in results_of(answer)] == [pb.SAVE_STATUS_SAVED] * 4
        assert len(copying) == 2
        assert [await session.restore(key(n)) for n in range(4)] == payloads
        await daemon.assert_idle()


WRONG = {
    "no token": ("malformed_message", lambda r: r.ClearField("token")),
    "a short token": ("malformed_message", lambda r: setattr(r, "token", b"short")),
    "another token": ("unreadable_memory", lambda r: setattr(r, "token", bytes(16))),
    "a token elsewhere": ("unreadable_memory", lambda r: setattr(r, "token_address", 4096)),
    "a token at the kernel's": (
        "unreadable_memory",
        lambda r: setattr(r, "token_address", 2**64 - 4096),
    ),
    "a payload elsewhere": (
        "unreadable_memory",
        lambda r: r.addresses.__setitem__(0, 4096),
    ),
    "an address too few": ("malformed_message", lambda r: r.addresses.pop()),
    "a length too few": ("malformed_message", lambda r: r.lengths_bytes.pop()),
    "pieces of nothing": ("malformed_message", lambda r: r.pieces.append(1)),
    "a payload too many": ("malformed_message", lambda r: r.pieces.append(0)),
    "an empty piece": ("malformed_message", lambda r: r.lengths_bytes.__setitem__(0, 0)),
    "pieces without number": ("invalid_batch", lambda r: r.pieces.extend([0] * 5_000)),
    "no header": ("malformed_message", lambda r: r.ClearField("header")),
    "no session": ("unknown_session", lambda r: r.header.session.ClearField("session_id")),
    "no secret": ("unknown_session", lambda r: r.header.session.ClearField("secret")),
}


@pytest.mark.parametrize("what", WRONG)
@in_loop
async def test_a_wrong_request_saves_nothing_and_leaves_the_connection(
    tmp_path: Path, what: str
) -> None:
    error, spoil = WRONG[what]
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        connection = await daemon.connect_locally()
        with lent(session, [payload(0), payload(1)]) as request:
            right = pb.SaveLentRequest()
            right.CopyFrom(request)
            spoil(request)
            with pytest.raises(Refused, match=error):
                await connection.ask(save_lent=request)
            assert await daemon.presence(key(0), key(1)) == [pb.PRESENCE_ABSENT] * 2
            answer = (await connection.ask(save_lent=right)).save_lent
            assert [r.status for r in results_of(answer)] == [pb.SAVE_STATUS_SAVED] * 2
        await daemon.assert_idle()


@pytest.mark.parametrize("length", [-1, 1, 2**63])
@in_loop
async def test_another_length_than_was_said_is_told_for_that_payload(
    tmp_path: Path, length: int
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        connection = await daemon.connect_locally()
        with lent(session, [payload(0), payload(1)]) as request:
            request.lengths_bytes[0] += length
            answer = (await connection.ask(save_lent=request)).save_lent
        statuses = [r.status for r in results_of(answer)]
        assert statuses == [pb.SAVE_STATUS_LENGTH_MISMATCH, pb.SAVE_STATUS_SAVED]
        await daemon.assert_idle()


@in_loop
async def test_what_a_client_took_back_while_it_was_copied_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gave up and reuses its buffer: a mixture of bytes must not be published."""
    reading, go_on = threading.Event(), threading.Event()

    def read(memory: LentMemory, room: memoryview, *ranges: Sequence[int]) -> None:
        if len(room) > len(TOKEN):
            reading.set()
            assert go_on.wait(PATIENCE_S)
        as_it_was(memory, room, *ranges)

    as_it_was = LentMemory.read
    monkeypatch.setattr(LentMemory, "read", read)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        connection = await daemon.connect_locally()
        with lent(session, [payload(0)]) as request:
            await connection.send(save_lent=request)
            await asyncio.get_running_loop().run_in_executor(None, reading.wait, PATIENCE_S)
            assert await daemon.presence(key(0)) == [pb.PRESENCE_IN_FLIGHT]
        go_on.set()
        with pytest.raises(Refused, match="not lent any more"):
            await connection.response()
        assert await daemon.presence(key(0)) == [pb.PRESENCE_ABSENT]
        await daemon.assert_idle()


@pytest.mark.parametrize("ends", ["connection", "session"])
@pytest.mark.parametrize("copying", [False, True])
@in_loop
async def test_a_thread_that_its_client_keeps_is_that_clients_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, copying: bool
) -> None:
    """Memory whose pages the client provides when it likes, before anything is reserved or while it
    is copied: other clients look up, save and lend meanwhile."""
    reading, go_on = threading.Semaphore(0), threading.Event()
    held: list[int] = []
    proofs: Counter[int] = Counter()

    def prove(memory: LentMemory) -> None:
        proofs[memory.token_address] += 1
        if memory.token_address in held and proofs[memory.token_address] == 1 + copying:
            reading.release()
            assert go_on.wait(PATIENCE_S)
        as_it_was(memory)

    as_it_was = LentMemory.prove
    monkeypatch.setattr(LentMemory, "prove", prove)
    async with running(tmp_path) as daemon:
        session, other = await daemon.open(), await daemon.open()
        first, second, third = [await daemon.connect_locally(session) for _ in range(3)]
        with lent(session, [payload(0)]) as one, lent(session, [payload(0)]) as two:
            held += [one.token_address, two.token_address]
            two.header.keys[0] = key(20)
            await first.send(save_lent=one)
            await second.send(save_lent=two)
            for _ in range(2):
                await asyncio.get_running_loop().run_in_executor(None, reading.acquire)
            more = pb.SaveLentRequest()
            more.CopyFrom(two)
            more.header.keys[0] = key(21)
            with pytest.raises(Refused, match="limit_reached"):
                await third.ask(save_lent=more)
            with lent(other, [payload(0)]) as its:
                its.header.keys[0] = key(22)
                answer = (await (await daemon.connect_locally()).ask(save_lent=its)).save_lent
                assert [r.status for r in results_of(answer)] == [pb.SAVE_STATUS_SAVED]
            assert await other.save({key(23): payload(1)}) == [pb.SAVE_STATUS_SAVED]
            if ends == "session":
                await session.close()
            else:
                first.close()
                second.close()
            # The copy writes to the place of the entries.
            assert len(daemon.tables.reservations) == 2 * copying
            assert daemon.front.local.lent.threads_taken == 2
            go_on.set()
            await daemon.until(lambda: not daemon.front.local.lent.threads_taken)
        # A client that only hung up has lent the memory until then: the copied bytes are right.
        saved = ends == "connection"
        found = pb.PRESENCE_PRESENT if saved else pb.PRESENCE_ABSENT
        assert await daemon.presence(key(0), key(20)) == [found] * 2
        await daemon.assert_idle()


@in_loop
async def test_who_finds_no_thread_is_refused_and_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        connection = await daemon.connect_locally()
        monkeypatch.setattr(daemon.front.local.lent, "_free", 0)
        with (
            lent(session, [payload(0)]) as request,
            pytest.raises(Refused, match="limit_reached"),
        ):
            await connection.ask(save_lent=request)
        assert daemon.front.in_flight()["lent_save_refusals"] == 1
        await daemon.assert_idle()


@pytest.mark.parametrize("what", ["another token", "a payload elsewhere"])
@in_loop
async def test_what_was_reserved_is_still_reserved_when_it_cant_be_read(
    tmp_path: Path, what: str
) -> None:
    """The client then saves in another way: nothing was begun."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        connection = await daemon.connect_locally()
        data = payload(0)
        (token,) = await session.granted([item(key(0), data)])
        reserved = pb.GrantedReservations(session=session.ref, tokens=[token])
        with lent(session, [data]) as request:
            request.reserved.CopyFrom(reserved)
            wrong = pb.SaveLentRequest()
            wrong.CopyFrom(request)
            WRONG[what][1](wrong)
            with pytest.raises(Refused, match="unreadable_memory"):
                await connection.ask(save_lent=wrong)
            assert await daemon.presence(key(0)) == [pb.PRESENCE_IN_FLIGHT]
            answer = (await connection.ask(save_lent=request)).save_lent
            assert [r.status for r in results_of(answer)] == [pb.SAVE_STATUS_SAVED]
        assert await session.restore(key(0)) == data
        await daemon.assert_idle()
