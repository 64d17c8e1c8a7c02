"""The rpcs of workers, over a real server: every mistake is answered, and nothing is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.runtime.rounds import Rounds
from tests.contract.faulty import Fault, FaultyStore
from tests.proto.test_contract import METHODS, can_be_wrong, comment_of
from tests.support import bad_input
from tests.support.bad_input import DATA, FLAGS, PUBLISHED, mistakes
from tests.support.columns import Item
from tests.support.event_loop import in_loop
from tests.support.running import (
    OpenSession,
    Refused,
    Running,
    answer,
    item,
    key,
    part,
    payload,
    rest_of,
    running,
    stream,
)

PRESENT, ABSENT, IN_FLIGHT = pb.PRESENCE_PRESENT, pb.PRESENCE_ABSENT, pb.PRESENCE_IN_FLIGHT
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.label)


# ---- mistakes


def test_the_table_names_each_mistake_once(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [mistake.id for mistake in mistakes()]
    assert len(ids) == len(set(ids))
    assert {mistake.error for mistake in mistakes()} == bad_input.ERRORS.keys()
    bad_input.main()
    printed = capsys.readouterr().out
    assert all(mistake.description in printed for mistake in mistakes())


def documented(name: str) -> set[str]:
    """The status codes that the contract names for an rpc."""
    (method,) = [method for method in METHODS if method.name == name]
    errors = comment_of(method).partition("Errors: ")[2]
    codes = set(re.findall(r"\b[A-Z]{2,}(?:_[A-Z]+)+\b", errors))
    for others in re.findall(r"those of (\w+)(?: and (\w+))?", errors):
        codes.update(*(documented(other) for other in others if other))
    return codes


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_table_has_every_error_of_every_rpc(method: MethodDescriptor) -> None:
    tried = {mistake.code.name for mistake in mistakes() if mistake.rpc == method.name}
    assert bool(tried) == can_be_wrong(method.input_type)
    assert documented(method.name) <= tried


@pytest.mark.parametrize("rpc", sorted({mistake.rpc for mistake in mistakes()}))
@in_loop
async def test_a_mistake_is_an_answer(tmp_path: Path, rpc: str) -> None:
    """Each mistake in a session of its own, on one daemon, which must keep nothing of it."""
    async with running(tmp_path, *FLAGS) as daemon:
        for mistake in mistakes():
            if mistake.rpc != rpc:
                continue
            session = await daemon.open()
            await session.save({PUBLISHED: DATA})
            try:
                await mistake.attempt(daemon, session)
                pytest.fail(f"{mistake.id}: it was done")
            except Refused as refused:
                said = refused
            assert (said.code, said.name) == (mistake.code, mistake.error), mistake.id
            assert said.retry == ("1" if mistake.retry else "0"), mistake.id
            assert len(said.sentence.split()) >= 4, "a sentence says what was wrong"
            assert await daemon.presence(PUBLISHED) == [PRESENT], "whoever made it may go on"
            await daemon.assert_sound()
            session.call.cancel()
            await daemon.until(lambda: not daemon.tables.sessions)
            await daemon.admin.Evict(pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers))
            assert not daemon.tables.entries


@in_loop
async def test_a_message_above_the_limit_is_refused_by_the_transport(tmp_path: Path) -> None:
    """gRPC refuses it before it reaches the daemon's code: a code, a sentence, no metadata."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        large = bytes(limits.MAX_MESSAGE_BYTES + 1)
        with pytest.raises(Refused) as refused:
            await session.save({key(1): large})
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(limits.MAX_MESSAGE_BYTES) in refused.value.sentence
        assert refused.value.name is None
        await daemon.assert_idle()


# ---- results inside a batch


async def fewer(session: OpenSession) -> pb.SaveResult:
    return await saved(session, part(0, DATA[:-1], payload_crc32c=0))


async def none_at_all(session: OpenSession) -> pb.SaveResult:
    return await saved(session)


async def never_the_last(session: OpenSession) -> pb.SaveResult:
    return await saved(session, part(0, DATA, last=False))


async def more(session: OpenSession) -> pb.SaveResult:
    return await saved(session, part(0, DATA + b"!"))


async def other_bytes(session: OpenSession) -> pb.SaveResult:
    return await saved(
        session, part(0, b"?" + DATA[1:], payload_crc32c=part(0, DATA).payload_crc32c)
    )


async def too_large(session: OpenSession) -> pb.SaveResult:
    return await saved(session, of=item(key(1), bytes(2**20 + 1)))


async def there_already(session: OpenSession) -> pb.SaveResult:
    await session.save({key(1): DATA})
    return await saved(session, part(0, DATA))


async def in_flight(session: OpenSession) -> pb.SaveResult:
    await session.granted([item(key(1), DATA)])
    return await saved(session, part(0, DATA))


async def no_room(session: OpenSession) -> pb.SaveResult:
    await session.granted([item(key(9), bytes(2**20 - 4096))])
    return await saved(session, part(0, DATA))


async def expired(session: OpenSession) -> pb.SaveResult:
    (token,) = await session.granted([item(key(1), DATA)], ttl_ms=1_000)
    session.daemon.forward(1.0)
    return await written(session, token)


async def cancelled(session: OpenSession) -> pb.SaveResult:
    (token,) = await session.granted([item(key(1), DATA)])
    request = pb.CancelRequest(session=session.ref, tokens=[token, token, 99])
    gone = await answer(session.daemon.cache.Cancel(request))
    assert list(gone.cancelled) == [True, False, False]
    return await written(session, token)


async def never_was(session: OpenSession) -> pb.SaveResult:
    return await written(session, 99)


async def anothers(session: OpenSession) -> pb.SaveResult:
    other = await session.daemon.open()
    (token,) = await other.granted([item(key(1), DATA)])
    result = await written(session, token)
    await other.close()
    return result


async def written_twice(session: OpenSession) -> pb.SaveResult:
    (token,) = await session.granted([item(key(1), DATA)])
    first = await written(session, token)
    assert first.status == pb.SAVE_STATUS_SAVED
    return await written(session, token)


async def saved(
    session: OpenSession, *parts: pb.WritePart, of: Item | None = None
) -> pb.SaveResult:
    header = session.header([of or item(key(1), DATA)])
    first = pb.SaveRequest(header=header, parts=parts)
    (result,) = (await answer(session.daemon.cache.Save(stream([first])))).results
    return result


async def written(session: OpenSession, token: int) -> pb.SaveResult:
    return await session.write(token, part(0, DATA))


#: The ways in which a single save can end, and what its message has to contain.
ENDS: list[tuple[Callable[[OpenSession], Any], int, str]] = [
    (fewer, pb.SAVE_STATUS_LENGTH_MISMATCH, "4999 bytes came, 5000 were reserved"),
    (none_at_all, pb.SAVE_STATUS_LENGTH_MISMATCH, "before all bytes had come"),
    (never_the_last, pb.SAVE_STATUS_LENGTH_MISMATCH, "before all bytes had come"),
    (more, pb.SAVE_STATUS_LENGTH_MISMATCH, "more than the 5000 bytes reserved"),
    (other_bytes, pb.SAVE_STATUS_CRC_MISMATCH, "was sent; send it again"),
    (too_large, pb.SAVE_STATUS_TOO_LARGE, "retrying can't help"),
    (there_already, pb.SAVE_STATUS_PRESENT, "it is published already"),
    (in_flight, pb.SAVE_STATUS_IN_FLIGHT, "tester (pid 1 on here) is saving it; waiting"),
    (no_room, pb.SAVE_STATUS_NO_ROOM, "retrying may help"),
    (expired, pb.SAVE_STATUS_LOST, "expired, was cancelled or never was; reserve again"),
    (cancelled, pb.SAVE_STATUS_LOST, "reserve again"),
    (never_was, pb.SAVE_STATUS_LOST, "reserve again"),
    (anothers, pb.SAVE_STATUS_LOST, "reserve again"),
    (written_twice, pb.SAVE_STATUS_LOST, "reserve again"),
]


@pytest.mark.parametrize(
    ("attempt", "status", "sentence"), ENDS, ids=lambda value: getattr(value, "__name__", "")
)
@in_loop
async def test_a_save_that_comes_to_nothing_says_why(
    tmp_path: Path, attempt: Callable[[OpenSession], Any], status: int, sentence: str
) -> None:
    async with running(tmp_path, tiers=[Tier.RAM]) as daemon:
        session = await daemon.open()
        before = await daemon.presence(key(1))
        result = await attempt(session)
        assert result.status == status
        assert sentence in result.message
        assert before == [ABSENT]
        await daemon.assert_sound()
        await session.close()
        await daemon.assert_idle()


def test_every_status_of_a_save_is_among_them() -> None:
    elsewhere = {
        pb.SAVE_STATUS_UNSPECIFIED,
        pb.SAVE_STATUS_SAVED,
        pb.SAVE_STATUS_DEVICE_FULL,  # test_server_committer.py
        pb.SAVE_STATUS_FAILED,
        # Of clients only.
        pb.SAVE_STATUS_DROPPED,
        pb.SAVE_STATUS_UNAVAILABLE,
        pb.SAVE_STATUS_DEADLINE,
    }
    assert {status for _, status, _ in ENDS} | elsewhere == set(pb.SaveStatus.values())


@in_loop
async def test_a_bad_item_takes_no_other_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        items = [item(key(number), DATA) for number in range(4)]
        parts = [part(0, DATA), part(1, b"?" + DATA[1:], payload_crc32c=1), part(3, DATA)]
        for tier in Tier:
            first = pb.SaveRequest(header=session.header(items, tier), parts=parts)
            results = (await answer(daemon.cache.Save(stream([first])))).results
            assert [result.status for result in results] == [
                pb.SAVE_STATUS_SAVED,
                pb.SAVE_STATUS_CRC_MISMATCH,
                pb.SAVE_STATUS_LENGTH_MISMATCH,
                pb.SAVE_STATUS_SAVED,
            ]
            assert await daemon.presence(*map(key, range(4))) == [PRESENT, ABSENT, ABSENT, PRESENT]
            assert await session.restore(key(3)) == DATA
            await daemon.admin.Evict(pb.EvictRequest(free_bytes=2**40, tiers=daemon.tiers))
        await daemon.assert_idle()


@in_loop
async def test_releases_are_idempotent_and_a_loss_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        other = await daemon.open()
        await session.save({PUBLISHED: DATA})
        nothing = await session.claim([key(5), PUBLISHED])
        assert nothing.claim_id == 0
        assert [result.presence for result in nothing.results] == [ABSENT]
        one = (await session.claim([PUBLISHED])).claim_id
        two = (await session.claim([PUBLISHED], lease_ms=1_000)).claim_id
        assert await session.release(one, one, 0, 99) == [
            pb.RELEASE_STATUS_RELEASED,
            pb.RELEASE_STATUS_ALREADY,
            pb.RELEASE_STATUS_UNKNOWN,
            pb.RELEASE_STATUS_UNKNOWN,
        ]
        assert await session.release(one) == [pb.RELEASE_STATUS_ALREADY]
        assert await other.release(two) == [pb.RELEASE_STATUS_UNKNOWN], "it is not this one's"
        daemon.forward(1.0)
        told = await session.event()
        assert told.claim_lost.claim_id == two
        assert "lease" in told.claim_lost.why
        assert await session.release(two) == [pb.RELEASE_STATUS_LOST]
        await daemon.assert_idle()


# ---- reading


@TIERS
@in_loop
async def test_ranges_are_read_exactly(tmp_path: Path, tier: Tier) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        data, ids = payload(3, 300_000), payload(4, 400)
        first = pb.SaveRequest(
            header=session.header([item(key(1), data, token_ids=ids)], tier),
            parts=[part(0, data)],
        )
        await answer(daemon.cache.Save(stream([first])))
        await session.save({key(2): DATA}, tier)
        claim = (await session.claim([key(1), key(2)])).claim_id
        found = await session.read(
            claim,
            pb.ReadRange(index=0),
            pb.ReadRange(index=1, offset_bytes=10, length_bytes=20),
            pb.ReadRange(index=0, offset_bytes=299_999),
            pb.ReadRange(index=0, offset_bytes=300_000),
            pb.ReadRange(index=0, token_ids=True),
            pb.ReadRange(index=0, token_ids=True, offset_bytes=4, length_bytes=8),
        )
        assert found == [data, DATA[10:30], data[-1:], b"", ids, ids[4:12]]
        assert await session.release(claim) == [pb.RELEASE_STATUS_RELEASED]
        await daemon.assert_idle()


@in_loop
async def test_a_claim_that_is_lost_while_it_is_read_ends_the_read(tmp_path: Path) -> None:
    """The bytes that arrived may be another entry's: the reader is told to throw them away."""
    async with running(tmp_path, "--ram.budget=8MiB") as daemon:
        session = await daemon.open()
        await session.save({key(1): bytes(3 * limits.CHUNK_BYTES)})
        claim = (await session.claim([key(1)], lease_ms=1_000)).claim_id
        request = pb.ReadRequest(session=session.ref, claim_id=claim, ranges=[pb.ReadRange()])
        reading = daemon.cache.Read(request)
        await reading.read()
        daemon.forward(1.0)
        with pytest.raises(Refused) as refused:
            await rest_of(reading)
        assert refused.value.name == "claim_lost"
        assert "lease" in refused.value.sentence
        await daemon.assert_idle()


@TIERS
@in_loop
async def test_an_entry_that_cannot_be_read_is_named_and_stays(tmp_path: Path, tier: Tier) -> None:
    faulty: list[FaultyStore] = []

    def wrap(store: Any) -> FaultyStore:
        faulty.append(FaultyStore(store))
        return faulty[-1]

    async with running(tmp_path, wrap={tier: wrap}) as daemon:
        session = await daemon.open()
        await session.save({key(1): DATA, key(2): DATA}, tier)
        claim = (await session.claim([key(1), key(2)])).claim_id
        faulty = daemon.core.stores[tier]
        assert isinstance(faulty, FaultyStore)
        faulty.arm(Fault.READ_ERROR)
        ranges = [pb.ReadRange(index=0), pb.ReadRange(index=1)]
        request = pb.ReadRequest(session=session.ref, claim_id=claim, ranges=ranges)
        (response,) = await answer(daemon.cache.Read(request))
        unreadable, good = response.parts
        assert (unreadable.range, unreadable.status) == (0, pb.READ_STATUS_UNREADABLE)
        assert (good.range, good.status, good.data) == (1, pb.READ_STATUS_OK, DATA)
        assert await session.read(claim, *ranges) == [DATA, DATA], "the claim is held"
        assert daemon.tables.tier_counters[tier].corrupt == 0
        await daemon.assert_sound()


# ---- one writer for each key


@in_loop
async def test_of_two_savers_one_writes_and_the_other_is_told_by_whom(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        writer, other = await daemon.open("writer"), await daemon.open("other")
        (token,) = await writer.granted([item(key(1), DATA)])
        daemon.forward(1.5)
        (told,) = await other.reserve([item(key(1), DATA)])
        assert told.status == pb.RESERVE_STATUS_IN_FLIGHT
        assert told.in_flight.owner == "writer (pid 1 on here)"
        assert told.in_flight.age_ms == 1500
        assert await daemon.presence(key(1)) == [IN_FLIGHT]

        waiting = asyncio.ensure_future(other.reserve([item(key(1), DATA)], wait_ms=60_000))
        claiming = asyncio.ensure_future(other.claim([key(1)], wait_ms=60_000))
        looking = asyncio.ensure_future(daemon.lookup(key(1), wait_ms=60_000))
        await daemon.until(lambda: len(daemon.tables.waiting) == 3)
        assert (await written(writer, token)).status == pb.SAVE_STATUS_SAVED

        (present,) = await waiting
        assert present.status == pb.RESERVE_STATUS_PRESENT
        assert (await claiming).results[0].claimed
        assert (await looking)[0].presence == PRESENT
        await daemon.assert_idle()


@in_loop
async def test_a_save_over_grpc_waits_for_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes many of them anyway: beside others that wait for theirs it would stay behind."""

    async def for_ever(_: Rounds) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Rounds, "begin", for_ever)
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        assert await session.save({key(1): DATA}) == [pb.SAVE_STATUS_SAVED]
        (token,) = await session.granted([item(key(2), DATA)])
        assert (await written(session, token)).status == pb.SAVE_STATUS_SAVED


@in_loop
async def test_a_waiting_saver_takes_over_when_the_first_gives_up(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        writer, other = await daemon.open("writer"), await daemon.open("other")
        (token,) = await writer.granted([item(key(1), DATA)])
        waiting = asyncio.ensure_future(other.save({key(1): DATA}, wait_ms=60_000))
        await daemon.until(lambda: daemon.tables.waiting)
        await daemon.cache.Cancel(pb.CancelRequest(session=writer.ref, tokens=[token]))
        assert await waiting == [pb.SAVE_STATUS_SAVED]
        await daemon.assert_idle()


@in_loop
async def test_a_wait_ends_when_its_time_is_over(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        writer, other = await daemon.open("writer"), await daemon.open("other")
        await writer.granted([item(key(1), DATA)])
        waiting = asyncio.ensure_future(other.reserve([item(key(1), DATA)], wait_ms=500))
        await daemon.until(lambda: daemon.tables.waiting)
        daemon.forward(0.499)
        assert daemon.tables.waiting
        daemon.forward(0.001)
        (told,) = await waiting
        assert told.status == pb.RESERVE_STATUS_IN_FLIGHT
        await daemon.assert_sound()


@TIERS
@in_loop
async def test_four_workers_compute_a_block_once(tmp_path: Path, tier: Tier) -> None:
    """Reserve before computing, and wait if another client computes: single-flight prefill."""
    computed: list[int] = []

    async def worker(daemon: Running, name: str) -> None:
        session = await daemon.open(name)
        for number in range(20):
            (mine,) = await session.reserve([item(key(number), DATA)], tier, wait_ms=60_000)
            if mine.status == pb.RESERVE_STATUS_GRANTED:
                computed.append(number)
                assert (await written(session, mine.token)).status == pb.SAVE_STATUS_SAVED
            else:
                assert mine.status == pb.RESERVE_STATUS_PRESENT
                assert await session.restore(key(number)) == DATA
        await session.close()

    async with running(tmp_path) as daemon:
        await asyncio.gather(*(worker(daemon, f"worker {number}") for number in range(4)))
        assert sorted(computed) == list(range(20))
        await daemon.assert_idle()
