"""How the daemon ended a gRPC call whose status the client lost.

If the daemon ends a call while the client of `grpc.aio` still has messages to send, sending the
next one may fail before the client reads the status. The client then reports INTERNAL with a
message of its own. `python -m tests.support.grpc_alone` shows this without the daemon. Only the
daemon knows the real status then, so it is noted there.
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

_GRPC_MESSAGE: Final = "Internal error from Core"


def is_unsent(method: MethodDescriptor, messages: int, refused: Refused) -> bool:
    """Whether the client lost the status. That needs another message to send."""
    return (
        method.client_streaming
        and messages > 1
        and (refused.code, refused.name) == (grpc.StatusCode.INTERNAL, None)
        and refused.sentence == _GRPC_MESSAGE
    )


class Ends:
    """Notes how calls end in all daemons of this process, until it is closed."""

    def __init__(self) -> None:
        #: the names of errors, and "" for each successful call
        self.noted: list[str] = []
        self._patches = ExitStack()
        for name in ("_respond", "_respond_all"):
            self._replace(name, self._noting_answers(getattr(grpc_adapter, name)))
        self._replace("_abort", self._noting_errors(grpc_adapter._abort))

    def _replace(self, name: str, replacement: Call) -> None:
        self._patches.enter_context(mock.patch.object(grpc_adapter, name, replacement))

    def _noting_answers(self, call: Call) -> Call:
        async def noted(*args: Any) -> Any:
            response = await call(*args)
            self.noted.append("")
            return response

        return noted

    def _noting_errors(self, abort: Call) -> Call:
        async def noted(context: Any, error: PrefixdError, *rest: Any) -> None:
            self.noted.append(error.name)
            await abort(context, error, *rest)

        return noted

    def close(self) -> None:
        self._patches.close()
