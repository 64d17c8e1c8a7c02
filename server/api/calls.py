"""What every transport has in common: who calls, how a call is ended from outside, and what a
caller is told of a failure."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.errors import DeviceFull, LimitReached, MalformedMessage, PrefixdError, StoreFailed
from ...tiers.store import StoreError, StoreFull
from .access import Access

log = structlog.get_logger("prefixd.calls")

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Process(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel names it to the daemon. A
    process of a PID namespace that the daemon does not see has the number 0."""

    pid: int
    uid: int

    @classmethod
    def behind(cls, sock: socket.socket) -> Process:
        """The one that connected. Raises OSError."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return cls(pid, uid)


class Caller(Protocol):
    """The one who makes a call, as far as the transport knows. Lives as long as the call."""

    @property
    def process(self) -> Process | None:
        """None: the transport does not say."""

    @property
    def access(self) -> Access | None:
        """What the token of the call gives, or that of the session that its connection belongs to;
        None: no token is asked for, for the file system decided."""

    def proved(self, session: int) -> None:
        """The call has shown that it acts for this session."""

    def when_done(self, callback: Callable[[bool], None]) -> None:
        """Have it called once the answer is sent (False), or once it is known that the client
        is gone and will never read it (True)."""


class Connected(Protocol):
    """A connection, which belongs to one session at most."""

    process: Process | None
    #: what the token gives that its session was opened with
    access: Access | None

    def attach(self, session: int) -> None:
        """The connection belongs to that session from now on."""


class ConnectionCall:
    """The caller of one request on a connection (`Caller`)."""

    __slots__ = ("_connection", "_when_done", "traceparent")

    def __init__(self, connection: Connected) -> None:
        self._connection = connection
        self._when_done: list[Callable[[bool], None]] = []
        #: which span asks, as the client says
        self.traceparent = b""

    @property
    def process(self) -> Process | None:
        return self._connection.process

    @property
    def access(self) -> Access | None:
        return self._connection.access

    def proved(self, session: int) -> None:
        self._connection.attach(session)

    def when_done(self, callback: Callable[[bool], None]) -> None:
        self._when_done.append(callback)

    def done(self, *, gone: bool) -> None:
        """The client has read the answer, or (`gone`) never will."""
        for callback in self._when_done:
            callback(gone)
        self._when_done.clear()


class PlainCaller:
    """A caller that is granted nothing which would have to be given back."""

    process: Final[Process | None] = None

    def __init__(self, access: Access | None = None) -> None:
        self.access: Final = access

    def proved(self, session: int) -> None:
        """Nothing to do."""

    def when_done(self, callback: Callable[[bool], None]) -> None:
        """Never called: there is nothing to give back."""


class CallerGone(Exception):  # no failure: the client may leave
    """The connection of a stream of requests ended in its middle. There is nobody to answer."""


def cut_off(task: asyncio.Task[Any], error: PrefixdError) -> None:
    """End the call that `task` serves, from outside and at once: also where it waits for a client
    that reads nothing. The transport tells the client `error` when it reads again."""
    task.cancel(error)


def cut_off_with(cancelled: asyncio.CancelledError) -> PrefixdError:
    """What `cut_off` was given. Raises `cancelled` itself if the transport ended the call."""
    error = cancelled.args[0] if cancelled.args else None
    if not isinstance(error, PrefixdError):
        raise cancelled
    return error


@contextmanager
def taken_within(
    stall_s: float, what: str, when_slow: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Around the sending of a response: a client that takes nothing of it in time is cut off.
    `what`: of what. `when_slow`: called then."""
    task = asyncio.current_task()
    assert task is not None

    def slow() -> None:
        when_slow()
        cut_off(task, LimitReached(f"the client took nothing of {what} for {stall_s:g} s"))

    timer = asyncio.get_running_loop().call_later(stall_s, slow)
    try:
        yield
    finally:
        timer.cancel()


def remove_leftover(path: Path) -> None:
    """What a daemon that was killed left at the path of its socket. Raises FileExistsError for
    anything but a socket."""
    if path.is_socket():
        path.unlink()
    elif path.exists():
        raise FileExistsError(f"{path} is there and is no socket; it is not replaced")


def failure_message(error: PrefixdError) -> pb.Failure:
    """An error as the sockets tell it."""
    return pb.Failure(error=error.name, message=str(error), retry=error.retryable)


def failure_of(name: str, problem: Exception) -> pb.LocalResponse:
    """`error_of` in the words of the local socket."""
    error = error_of(name, problem)
    return pb.LocalResponse(failure=failure_message(error))


def staged_of(request: pb.LocalRequest) -> pb.SaveStagedRequest:
    """The next part of a staged save. Raises MalformedMessage for anything else."""
    if request.WhichOneof("kind") != "save_staged":
        raise MalformedMessage("another request came before the end of a staged save")
    return request.save_staged


def error_of(name: str, problem: Exception) -> PrefixdError:
    """What the caller is told of what the method `name` raised."""
    match problem:
        case PrefixdError():
            return problem
        case StoreFull():
            return DeviceFull(str(problem))
        case StoreError():
            return StoreFailed(str(problem))
        case _:
            log.error("call_failed", method=name, exc_info=problem)
            return PrefixdError(f"the daemon failed in {name}: {type(problem).__name__}")
