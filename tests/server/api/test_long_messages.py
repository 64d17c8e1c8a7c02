"""One message holds the event loop for a moment only, however much of something it names: that is
counted before any of it is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from tests.support.running import Refused, answer, in_loop, item, key, payload, running, stream

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
