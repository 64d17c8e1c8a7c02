"""What the connections of the local socket and of the data socket have in common.

A connection answers its requests in order, one at a time, and belongs to one session at most.
Requests that wait for nothing are answered by the callback that reads them, which spares a task
its wake-up; the rest is answered by the task of the connection. All of it belongs to the event
loop.
"""

from __future__ import annotations

import asyncio
import select
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeAlias, TypeVar

from ...proto import prefixd_pb2 as pb
from ...proto.errors import LimitReached, PrefixdError
from ..core.shares import Holder, Shares
from ..runtime.quota import Quota
from .access import Access
from .calls import Process, failure_of
from .saves import Saves
from .service import CacheService

C = TypeVar("C", bound="Connection")
R = TypeVar("R", pb.LocalResponse, pb.DataResponse)
_Request: TypeAlias = pb.LocalRequest | pb.DataRequest

#: Requests of one connection that are taken before other connections have their turn.
AT_ONCE: Final = 64
#: How often a connection that is not being read is checked for a hang-up.
_HANG_UP_CHECK_S: Final = 1.0


class Connections(Generic[C]):
    """The open connections of a socket, and the methods that answer their requests."""

    def __init__(self, service: CacheService, saves: Saves, max_connections: int) -> None:
        self.config: Final = service.config
        self.max_connections: Final = max_connections
        self.sessions: Final = service.sessions
        #: Answer requests, by kind. May wait.
        self.methods: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
            "lookup": service.lookup,
            "claim": service.claim,
            "reserve": saves.reserve,
            "cancel": saves.cancel,
        }
        #: Answer requests that wait for nothing, by kind.
        self.at_once: Final[dict[str, Callable[..., Any]]] = {
            "claim": service.claim_now,
            "release": service.release_now,
            "give_back": service.release_now,
        }
        self.connections: Final[set[C]] = set()
        #: The connections of each session.
        self.attached: Final[dict[int, set[C]]] = {}
        #: Connections that belong to a session.
        self.places: Final = Shares("connections (max_connections)", max_connections)
        #: Memory for large requests (`proto.frames`): none is received before it has some.
        self.large: Final = Quota(
            "requests", self.config.max_local_bytes, self.config.stall_timeout_s
        )
        #: Connections that were refused.
        self.refusals = 0
        self.sessions.when_closed.append(self._session_ended)

    async def hang_up_all(self) -> None:
        """End all connections, and wait until what they were doing is over."""
        tasks = [connection.hang_up() for connection in list(self.connections)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _session_ended(self, session: int) -> None:
        for connection in list(self.attached.get(session, ())):
            connection.session_ended()


class Connection(ABC):
    """One client's connection."""

    #: The process at the other end, where the transport tells it.
    process: Process | None = None
    #: What the token of its session grants.
    access: Access | None = None
    #: Whose share of everything its requests count to.
    holder = Holder()

    def __init__(self, server: Connections[Any]) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._session: int | None = None
        #: The latest request, as the services see it.
        self._call = ConnectionCall(self)

    @abstractmethod
    def attach(self, session: int) -> None:
        """A request has proved this session. Raises PrefixdError when the connection can't belong
        to it."""

    @abstractmethod
    def session_ended(self) -> None:
        """The session that the connection belongs to has ended."""

    @abstractmethod
    def hang_up(self) -> asyncio.Task[None]:
        """End the connection; what it was doing is over when the task is."""

    def _permit(self, kind: str) -> Access | None:  # noqa: ARG002  # for those that ask for a token
        """What the token grants. Raises NotAuthenticated, NotPermitted."""
        return None

    def _let_go(self, *names: str) -> None:
        """Delete attributes that refer back to this connection, once nothing uses them any more.

        Reference counting then frees it. The cycle collector may never: it does not look at what
        was alive when the daemon hid its entries from it (`runtime.process_memory`).
        """
        for name in ("_call", *names):
            delattr(self, name)

    def _join(self, session: int, access: Access | None) -> None:
        """Belong to this session from now on. Raises LimitReached."""
        others = self._server.attached.get(session, set())
        if len(others) >= self._server.config.max_connections_per_session:
            raise LimitReached(f"this session has {len(others)} connections already")
        holder = self._server.sessions.holder_of(session)
        self._server.places.take(holder)
        self._server.attached.setdefault(session, others).add(self)
        self._session, self.access, self.holder = session, access, holder

    def _leave(self) -> None:
        """Belong to no session from now on. Idempotent."""
        if self._session is None:
            return
        others = self._server.attached[self._session]
        others.discard(self)
        if not others:
            del self._server.attached[self._session]
        self._server.places.give(self.holder)
        self._session, self.access, self.holder = None, None, Holder()

    def _waits_for_nothing(self, request: _Request) -> bool:
        kind = request.WhichOneof("kind")
        if kind not in self._server.at_once:
            return False
        # Only these of them can wait.
        return kind not in ("claim", "lookup") or not getattr(request, kind).wait_ms

    def _begin_call(self, request: _Request) -> ConnectionCall:
        """The caller of a new request. A client that sends one has read the answer before it."""
        self._call.done(gone=False)
        self._call = call = ConnectionCall(self)
        call.traceparent = request.traceparent
        return call

    def _answer_to(self, request: _Request, response: type[R]) -> R | None:
        """The answer to a request that waits for nothing. None: this kind has no answer."""
        kind = request.WhichOneof("kind")
        assert kind is not None
        call = self._begin_call(request)
        try:
            self._permit(kind)
            answer = self._server.at_once[kind](getattr(request, kind), call)
        except Exception as problem:
            if kind != "give_back":
                return response(failure=failure_of(kind, problem))
            if not isinstance(problem, PrefixdError):
                raise
            return None  # the session is over, and its claims were released with it
        return None if kind == "give_back" else response(**{kind: answer})


class ConnectionCall:
    """The caller of one request on a connection (`calls.Caller`)."""

    __slots__ = ("_connection", "_when_done", "traceparent")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._when_done: list[Callable[[bool], None]] = []
        #: The client's trace span.
        self.traceparent = b""

    @property
    def process(self) -> Process | None:
        return self._connection.process

    @property
    def access(self) -> Access | None:
        return self._connection.access

    @property
    def tenant(self) -> str:
        return self._connection.holder.tenant

    def proved(self, session: int) -> None:
        self._connection.attach(session)

    def lasts(self) -> None:
        """Nothing to do: a connection has one call at a time."""

    def when_done(self, callback: Callable[[bool], None]) -> None:
        self._when_done.append(callback)

    def done(self, *, gone: bool) -> None:
        """The client has read the answer, or (`gone`) never will."""
        for callback in self._when_done:
            callback(gone)
        self._when_done.clear()


class Turn:
    """Counts the requests that a connection takes in one turn: a client that sends ahead must not
    keep the loop from other connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop, go_on: Callable[[], None]) -> None:
        """`go_on` takes the rest, after other connections had their turn."""
        self._loop = loop
        self._go_on = go_on
        self._taken = 0
        self._next: asyncio.Handle | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more may be taken until `go_on` is called."""
        return self._next is not None

    def took(self) -> None:
        """One more request was taken."""
        self._taken += 1
        if self._taken >= AT_ONCE and self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def end(self) -> None:
        """There will be no other turn. Idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _begin(self) -> None:
        self._next = None
        self._taken = 0
        self._go_on()


class HangUpWatch:
    """Aborts a transport whose client hung up, between `begin` and `end`. A socket that is not
    being read does not report a hang-up by itself: it has to be polled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, transport: asyncio.Transport) -> None:
        """Idempotent."""
        if self._timer is None:
            self._timer = self._loop.call_later(_HANG_UP_CHECK_S, self._check, transport)

    def end(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.Transport) -> None:
        self._timer = None
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # an error, or both directions closed
            transport.abort()
        else:
            self.begin(transport)
