"""Whatever an operator changes leaves a line in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.api.admin import audit
from prefixd.server.api.calls import Process
from tests.support.running import Refused, answer, in_loop, key, payload, running


@in_loop
async def test_what_an_operator_changes_is_logged(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in range(1, 4)}, Tier.RAM)
        with capture_logs() as logs:
            await answer(daemon.admin.Stats(pb.StatsRequest()))
            await answer(daemon.admin.Evict(pb.EvictRequest(free_bytes=1, tiers=[pb.TIER_RAM])))
            await answer(daemon.admin.Gc(pb.GcRequest()))
            async for _ in daemon.admin.Verify(pb.VerifyRequest(tiers=[pb.TIER_RAM])):
                pass
        actions = [line for line in logs if line["event"] == "admin_action"]
        assert [line["action"] for line in actions] == ["evict", "gc", "verify"]
        assert {line["who"] for line in actions} == {"an operator on the admin socket"}
        assert (actions[0]["entries"], actions[0]["tiers"]) == (1, ["ram"])
        assert actions[2]["entries"] == 2
        await daemon.assert_sound()


@in_loop
async def test_an_operator_deletes_what_nobody_holds(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        await session.save({key(n): payload(n) for n in (1, 2)}, Tier.RAM)
        await session.claim([key(2)])
        with capture_logs() as logs:
            request = pb.DropRequest(keys=[key(1), key(2), key(3)])
            dropped = await answer(daemon.admin.Drop(request))
        assert list(dropped.results) == [
            pb.DELETE_STATUS_DELETED,
            pb.DELETE_STATUS_PINNED,
            pb.DELETE_STATUS_ABSENT,
        ]
        (line,) = (line for line in logs if line["event"] == "admin_action")
        assert (line["action"], line["keys"], line["deleted"]) == ("delete", 3, 1)
        await daemon.assert_sound()


@in_loop
async def test_an_operator_ends_a_session(tmp_path: Path) -> None:
    async with running(tmp_path) as daemon:
        kicked, other = await daemon.open("kicked"), await daemon.open("other")
        await kicked.save({key(1): payload(1)}, Tier.RAM)
        await kicked.claim([key(1)])
        with capture_logs() as logs:
            await answer(daemon.admin.Kick(pb.KickRequest(session_id=kicked.number)))
            await daemon.until(lambda: not daemon.tables.claims)
        assert list(daemon.tables.sessions) == [other.number]
        (line,) = (line for line in logs if line["event"] == "admin_action")
        assert (line["action"], line["session"]) == ("kick", kicked.number)
        assert line["owner"].startswith("kicked")
        with pytest.raises(Refused, match="unknown_session"):
            await answer(daemon.admin.Kick(pb.KickRequest(session_id=kicked.number)))


def test_the_process_is_named_where_the_kernel_tells_it() -> None:
    class Known:
        process = Process(pid=7, uid=1000)
        access = None

    caller: Any = Known()
    with capture_logs() as logs:
        audit(caller, "evict")
    assert logs[0]["who"] == "pid 7, uid 1000"
