"""How a status that gRPC's client lost is recognized, and where the daemon's own is noted."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import grpc
import pytest

from prefixd.proto.vocabulary import Tier
from tests.proto.test_contract import METHODS
from tests.server.api.test_grpc_adapter import raw_call
from tests.support.event_loop import in_loop
from tests.support.running import Refused, answer, key, running

from .ends import Ends, is_unsent

SAVE, LOOKUP = (next(m for m in METHODS if m.name == name) for name in ("Save", "Lookup"))


class ClientError(Refused):
    """An error that gRPC's client reports itself."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
        Exception.__init__(self, message)
        self.sentence, self.code, self.name, self.retry = message, code, None, None


def test_only_a_call_with_a_message_left_is_ended_by_its_client() -> None:
    its_own = ClientError("Internal error from Core")
    assert is_unsent(SAVE, 2, its_own)
    assert not is_unsent(SAVE, 1, its_own), "all messages were sent"
    assert not is_unsent(LOOKUP, 2, its_own), "a lookup has only one message"
    assert not is_unsent(SAVE, 2, ClientError("the daemon failed"))
    assert not is_unsent(SAVE, 2, ClientError("Internal error from Core", grpc.StatusCode.UNKNOWN))


@in_loop
async def test_the_daemons_own_end_of_a_call_is_noted(tmp_path: Path) -> None:
    with closing(Ends()) as ends:
        async with running(tmp_path, tiers=(Tier.RAM,)) as daemon:
            await daemon.lookup(key(1))
            with pytest.raises(Refused, match="malformed_message"):
                await answer(raw_call(daemon.channel, SAVE, [b"\xff"]))
            assert ends.noted == ["", "malformed_message"]
