"""Whatever an operator changes leaves a line in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.api.admin import audit
from prefixd.server.api.calls import Process
from tests.support.running import answer, in_loop, key, payload, running


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


def test_the_process_is_named_where_the_kernel_tells_it() -> None:
    class Known:
        process = Process(pid=7, uid=1000)

    caller: Any = Known()
    with capture_logs() as logs:
        audit(caller, "evict")
    assert logs[0]["who"] == "pid 7, uid 1000"
