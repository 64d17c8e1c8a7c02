"""What every transport has in common: who calls, how a call is ended from outside, and what a
caller is told of a failure."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.errors import DeviceFull, LimitReached, PrefixdError, StoreFailed
from ...tiers.store import StoreError, StoreFull
from ..core.shares import HOST
from ..runtime.limited_log import LimitedLog
from .access import Access

log = LimitedLog("prefixd.calls")
_audit_log = structlog.get_logger("prefixd.audit")

T = TypeVar("T")

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Process(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel names it to the daemon. Its pid
    is 0 when it runs in a PID namespace that the daemon does not see."""

    pid: int
    uid: int

    @classmethod
    def behind(cls, sock: socket.socket) -> Process:
        """The process that connected. Raises OSError."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return cls(pid, uid)


class Caller:
    """The client of one call, as far as the transport knows it. Lives as long as the call.

    The methods do nothing here: a caller of this class itself is granted nothing that would have to
    be given back."""

    __slots__ = ("access", "process", "tenant")

    def __init__(
        self,
        access: Access | None = None,
        tenant: str = HOST,
        process: Process | None = None,
    ) -> None:
        #: What the token of the call grants, or that of the session that its connection belongs to.
        #: None where no token is asked for, because the file system decided.
        self.access: Final = access
        #: Whose share of everything the call counts to (`core.shares`).
        self.tenant: Final = tenant
        #: None when the transport does not tell.
        self.process: Final = process

    def proved(self, session: int) -> None:
        """The call has proved that it acts for this session."""

    def lasts(self) -> None:
        """The call is a session or a watcher from now on, which have bounds of their own: it takes
        no place among the calls any more."""

    def when_done(self, callback: Callable[[bool], None]) -> None:
        """Have `callback` called with False once the answer is sent, or with True once the client
        is known to be gone and will never read it."""


def audit(caller: Caller, action: str, **details: object) -> None:
    """Log what an operator changes. gRPC does not tell the process at the other end: without a
    token it is one that may open the operators' socket, of the daemon's user or of root."""
    process, access = caller.process, caller.access
    who = "an operator on the admin socket"
    if access is not None:
        who = f"the token {access.token!r} over TCP"
    elif process is not None:
        who = f"pid {process.pid}, uid {process.uid}"
    _audit_log.info("admin_action", action=action, who=who, **details)


class CallerGone(Exception):  # no failure: the client may leave
    """The client closed a stream of requests in its middle, and reads no answer."""


def cut_off(task: asyncio.Task[Any], error: PrefixdError) -> None:
    """End the call that `task` serves, from outside and at once, even while it waits for a client
    that reads nothing. The transport tells the client `error` when it reads again."""
    task.cancel(error)


def cut_off_with(cancelled: asyncio.CancelledError) -> PrefixdError:
    """The error that `cut_off` was given. Raises `cancelled` itself if the transport ended the
    call."""
    error = cancelled.args[0] if cancelled.args else None
    if not isinstance(error, PrefixdError):
        raise cancelled
    return error


@contextmanager
def taken_within(
    stall_s: float, what: str, when_slow: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Around the sending of a response: cuts off a client that takes nothing of it in time, and
    calls `when_slow` then. `what` names in the error what the client did not take."""
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


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for the work of a thread, however often the call is cancelled meanwhile: the thread
    uses memory or a stream that must not go away under it."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as again:
            cancelled = again
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # marks it as seen: the cancelled call has no use for it
        raise cancelled
    return future.result()


def error_of(name: str, problem: Exception) -> PrefixdError:
    """What the caller is told of an exception of the method `name`."""
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


def failure_of(name: str, problem: Exception) -> pb.Failure:
    """`error_of` as the local and the data socket send it."""
    error = error_of(name, problem)
    return pb.Failure(error=error.name, message=str(error), retry=error.retryable)
