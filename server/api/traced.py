"""A span for each call, whatever it comes over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..runtime.listeners import Tracing
from .data_socket import DataServer
from .grpc_adapter import Method, Streaming
from .local_socket import LocalServer

F = TypeVar("F", bound=Callable[..., Any])

#: Not traced: this stream lasts as long as its client.
_STREAM = "Session"
#: They have no answer that a client waits for.
_UNANSWERED = ("give_back",)


def traced_methods(methods: Mapping[str, Method], tracing: Tracing) -> dict[str, Method]:
    """The methods of the `Cache` service over gRPC, traced."""
    traced: dict[str, Method] = {}
    for name, method in methods.items():
        if isinstance(method, Streaming) and name == _STREAM:
            traced[name] = method
        else:
            call: Any = tracing.rpc(name, "grpc", method.call)
            traced[name] = replace(method, call=call)
    return traced


def trace_sockets(local: LocalServer, data: DataServer, tracing: Tracing) -> None:
    """Trace the calls over the local and the data socket from now on."""
    _trace(local.methods, "local", tracing)
    _trace(local.at_once, "local", tracing)
    _trace(data.methods, "data", tracing)
    _trace(data.at_once, "data", tracing)
    _trace(data.moving, "data", tracing)
    local.save_staged = tracing.rpc("SaveStaged", "local", local.save_staged, caller_at=2)


def _trace(methods: dict[str, F], transport: str, tracing: Tracing) -> None:
    for kind, method in methods.items():
        if kind in _UNANSWERED:
            continue
        name = "".join(word.title() for word in kind.split("_"))
        methods[kind] = tracing.rpc(name, transport, method, caller_at=1)
