"""How calls over gRPC end where the client is not told.

If the daemon ends a call while `grpc.aio`'s client still has messages for it, the sending of the
next one may fail before the status is read. The client then ends the call with INTERNAL and words
of its own, and the status is lost. `python -m tests.support.grpc_alone` shows it without the
daemon. What the daemon answered is then known to the daemon only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, Final, TypeAlias
from unittest import mock

import grpc
from google.protobuf.descriptor import MethodDescriptor

from prefixd.proto.errors import PrefixdError
from prefixd.server.api import grpc_adapter
from tests.support.running import Refused

Call: TypeAlias = Callable[..., Awaitable[Any]]

_GRPCS_WORDS: Final = "Internal error from Core"


def is_unsent(method: MethodDescriptor, messages: int, refused: Refused) -> bool:
    """Is it that? Only a client with another message to send can be told so."""
    return (
        method.client_streaming
        and messages > 1
        and (refused.code, refused.name) == (grpc.StatusCode.INTERNAL, None)
        and refused.sentence == _GRPCS_WORDS
    )


class Ends:
    """Notes how the calls of daemons that start in this process end. Close it."""

    def __init__(self) -> None:
        #: names of errors, and "" for each that was answered
        self.noted: list[str] = []
        self._patches = ExitStack()
        for name in ("_answering", "_streaming"):
            self._replace(name, self._noting_answers(getattr(grpc_adapter, name)))
        self._replace("_abort", self._noting_errors(grpc_adapter._abort))

    def _replace(self, name: str, made: Call) -> None:
        self._patches.enter_context(mock.patch.object(grpc_adapter, name, made))

    def _noting_answers(self, call: Call) -> Call:
        async def noted(*args: Any) -> Any:
            response = await call(*args)
            self.noted.append("")
            return response

        return noted

    def _noting_errors(self, abort: Call) -> Call:
        async def noted(context: Any, error: PrefixdError) -> None:
            self.noted.append(error.name)
            await abort(context, error)

        return noted

    def close(self) -> None:
        self._patches.close()
