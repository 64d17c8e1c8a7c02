"""One message holds the event loop for a moment only, however many elements it names: they are
counted before any of them is looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import InvalidBatch, InvalidSize, MalformedMessage
from prefixd.server.api import lent_saves
from prefixd.server.api.calls import PlainCaller
from prefixd.server.api.data_calls import DataCalls
from tests.server.api.test_hand_over import handed_over
from tests.support.running import Refused, answer, in_loop, item, key, payload, running, stream
from tests.support.unseen import Unseen

DATA = payload(1)
BATCH = limits.MAX_BATCH_KEYS


@pytest.mark.parametrize("rpc", ["Save", "SaveWhole", "Write"])
@in_loop
async def test_a_message_with_too_many_parts_is_refused(tmp_path: Path, rpc: str) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        header = session.header([item(key(1), DATA)])

        def call(count: int) -> Any:
            parts = [pb.WritePart()] * count
            match rpc:
                case "Save":
                    return daemon.cache.Save(stream([pb.SaveRequest(header=header, parts=parts)]))
                case "SaveWhole":
                    return daemon.cache.SaveWhole(pb.SaveWholeRequest(header=header, parts=parts))
            request = pb.WriteRequest(session=session.ref, parts=parts)
            return daemon.cache.Write(stream([request]))

        with pytest.raises(Refused, match=r"invalid_batch.*4097 parts in one message"):
            await answer(call(BATCH + 1))
        assert len((await answer(call(BATCH))).results) == 1
        await daemon.assert_idle()


@in_loop
async def test_a_hand_over_of_too_many_names_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        request = pb.HandOverRequest(session=session.ref, wanted=["news"] * 64)
        async with handed_over(daemon, request) as (response, fds):
            assert not response.refused, "a newer client may know what this daemon does not"
            assert not fds
        request.wanted.append("news")
        with pytest.raises(Refused, match=r"invalid_batch.*65 names are wanted"):
            async with handed_over(daemon, request):
                pass


def test_too_many_lent_pieces_are_not_looked_at() -> None:
    lent: Any = SimpleNamespace(token=bytes(limits.LENT_TOKEN_BYTES))
    lent.addresses = lent.lengths_bytes = Unseen(limits.MAX_LENT_PIECES + 1)
    lent.pieces = Unseen(1)
    with pytest.raises(InvalidBatch, match="16385 pieces of 1 payloads"):
        lent_saves._payloads(lent)
    lent.addresses, lent.pieces = Unseen(1), [1]
    with pytest.raises(MalformedMessage, match="each lent piece has an address"):
        lent_saves._payloads(lent)


@in_loop
async def test_too_many_budgets_of_a_curve_are_not_looked_at(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        asked: Any = SimpleNamespace(tier=pb.TIER_RAM, budget_bytes=Unseen(BATCH + 1))
        with pytest.raises(InvalidSize, match="at most 4096 budgets"):
            await daemon.front.admin.curve(asked, PlainCaller(None))


@in_loop
async def test_too_many_keys_of_a_fetch_are_not_looked_at(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        calls = DataCalls(daemon.core, daemon.front.service, daemon.front.saves)
        asked: Any = SimpleNamespace(session=session.ref, mode=pb.CLAIM_MODE_RUN, generations=[])
        asked.keys = asked.room_bytes = Unseen(BATCH + 1)
        with pytest.raises(InvalidBatch, match="keys has 4097 elements"):
            await calls.fetch(asked, PlainCaller(None), None)  # type: ignore[arg-type]
