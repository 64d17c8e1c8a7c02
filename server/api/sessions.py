"""Sessions: what proves one, and the stream that it lives on, from Hello to its end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final, TypeAlias, TypeVar

import structlog

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    InvalidSize,
    LimitReached,
    MalformedMessage,
    PrefixdError,
    StaleIncarnation,
    UnknownSession,
)
from ...proto.keys import Key
from ...proto.namespaces import printable
from ...tiers.ledger import Ledger
from ..core.effects import Opened, TellClaimLost, TellReservationLost
from ..core.events import (
    HeartbeatCame,
    KeysSuspected,
    KeysTouched,
    ReleaseAsked,
    SessionLost,
    SessionOpened,
)
from ..core.reservations import most_reserved_bytes
from ..runtime.clock import Clock
from ..runtime.latencies import Latencies
from ..runtime.listeners import SessionNote
from ..runtime.loop import Core
from . import messages
from .access import Access, Role
from .calls import Caller, CallerGone, Process, cut_off
from .namespaces import Namespaces, check_same
from .usage import LabelUsage, SessionUsage, UsageBook, check_usage

log = structlog.get_logger("prefixd.sessions")

Q = TypeVar("Q")

#: Events that a client may leave unread before its session is ended.
_MAX_UNREAD_EVENTS = 4096
#: A client that opened a session says hello within this time.
_PATIENCE_S = 5.0
#: 128 random bits, which cannot be guessed.
_SECRET_BYTES: Final = 16

#: What waits to be sent; an error or None is the end of the stream.
Events: TypeAlias = "asyncio.Queue[pb.SessionEvent | PrefixdError | None]"


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """What the services tell their clients, and the bounds that they hold them to."""

    incarnation: bytes
    daemon_version: str
    heartbeat_interval_ms: int
    claim_lease_ms: int
    reservation_ttl_ms: int
    local_socket: str = ""
    #: calls over gRPC at once, beside the streams of sessions
    max_rpcs: int = 512
    max_sessions: int = limits.MAX_SESSIONS
    max_connections: int = 4096
    max_connections_per_session: int = 256
    max_local_bytes: int = 256 * 2**20
    max_read_bytes: int = 256 * 2**20
    max_save_bytes: int = 2**30
    staging_bytes: int = 64 * 2**20
    staging_total_bytes: int = 2**30
    #: how long a client may leave a call without progress
    stall_timeout_s: float = 30.0
    #: there is a shared engine, which `CacheService.pull` asks
    shares: bool = False
    #: watchers at once, and what is kept of the past for all of them
    max_watchers: int = 16
    watch_history_bytes: int = 16 * 2**20
    #: read back in the background from each tier that is scrubbed; 0: no tier is
    scrub_bytes_per_second: int = 0


class Membership:
    """One open session, as its calls see it."""

    __slots__ = ("access", "ended", "number", "process", "secret")

    def __init__(self, number: int, access: Access | None = None) -> None:
        self.number = number
        #: what the token gives that it was opened with; None: with none, on a Unix socket
        self.access: Final = access
        #: told to its client only, and never logged
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        #: the process that it belongs to, once that has come over a Unix socket
        self.process: Process | None = None
        #: done when the session is over
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Sessions:
    """The open sessions and their secrets. The event loop's."""

    def __init__(self, incarnation: bytes) -> None:
        self._incarnation = incarnation
        self._open: dict[int, Membership] = {}
        #: translates between the keys of clients and those of the daemon
        self.namespaces: Final = Namespaces()
        #: what their clients count, by label
        self.usage: Final = UsageBook()
        #: how long their calls take
        self.latencies: Final = Latencies(Clock())
        #: the port of the data socket; 0: there is none
        self.data_port = 0
        #: is memory short? Told with each heartbeat's answer; set by the daemon
        self.under_pressure: Callable[[], bool] = lambda: False
        #: called with the number of each session that is over
        self.when_closed: list[Callable[[int], None]] = []

    def open(self, number: int, access: Access | None = None) -> Membership:
        """A session that the state has opened. `access`: what its token gives."""
        membership = self._open[number] = Membership(number, access)
        self.usage.sessions[number] = SessionUsage()
        return membership

    def access_of(self, number: int) -> Access | None:
        """What the token gives that this session was opened with, if one was."""
        membership = self._open.get(number)
        return None if membership is None else membership.access

    def opened_with_others(self, tokens: Container[Access]) -> list[int]:
        """Numbers of the sessions that were opened with a token other than these."""
        return [
            number
            for number, membership in self._open.items()
            if membership.access is not None and membership.access not in tokens
        ]

    def close(self, number: int) -> None:
        """The session has ended: its secret is not accepted any more."""
        membership = self._open.pop(number, None)
        if membership is None:
            return
        del self.usage.sessions[number]
        membership.ended.set_result(None)
        for told in self.when_closed:
            told(number)

    def prove(self, ref: pb.SessionRef, caller: Caller, needed: Role = Role.READ) -> Membership:
        """The session that `caller` acts for, which may do what needs this role. Raises
        StaleIncarnation, UnknownSession: the same for a wrong secret as for a session that there is
        not, so that numbers can't be probed. Raises NotPermitted: a role and a namespace are those
        of the session whatever the transport, and a caller with a token is of the same one."""
        if ref.incarnation != self._incarnation:
            raise StaleIncarnation(
                "this session belongs to another start of the daemon; open a new one and repeat"
            )
        membership = self._open.get(ref.session_id)
        if membership is None or not compare_digest(membership.secret, ref.secret):
            raise UnknownSession(
                f"session {ref.session_id} ended or never was, or this is not its secret; "
                "open a new one"
            )
        process = caller.process
        if process is not None:
            if membership.process is None:
                membership.process = process
            elif membership.process != process:
                raise UnknownSession(
                    f"session {ref.session_id} belongs to another process; open one of your own"
                )
        if membership.access is not None:
            membership.access.check(needed)
        if caller.access is not None:
            check_same(caller.access, membership.access)
        caller.proved(membership.number)
        return membership


class SessionStream:
    """Serves one session. `run` yields what the client is told; when it is closed or fails,
    the session is over and the state was told so."""

    def __init__(
        self,
        core: Core,
        sessions: Sessions,
        config: ServiceConfig,
        access: Access | None = None,
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._config = config
        self._access = access
        self._events: Events = asyncio.Queue(_MAX_UNREAD_EVENTS)
        #: the task that `run` is part of, once there is a session
        self._task: asyncio.Task[object] | None = None
        self._ending = False
        #: the sums that the reports of this client are added to
        self._usage = LabelUsage()

    async def run(
        self, requests: AsyncIterator[pb.SessionRequest]
    ) -> AsyncGenerator[pb.SessionEvent, None]:
        hello = await self._hello(requests)
        label = self._sessions.namespaces.label(self._access, hello.label)
        self._usage = self._sessions.usage.of(label)
        session = await self._open(hello)
        core = self._core
        self._task = asyncio.current_task()
        membership = self._sessions.open(session, self._access)
        core.subscribe(session, self)
        reader = asyncio.ensure_future(self._listen(session, requests))
        why, closed = "its connection broke", False
        try:
            yield pb.SessionEvent(welcome=self._welcome(membership))
            while (event := await self._events.get()) is not None:
                if isinstance(event, PrefixdError):
                    why = str(event)
                    raise event
                yield event
            why, closed = "its client closed it", True
        finally:
            reader.cancel()
            core.unsubscribe(session)
            self._sessions.close(session)
            core.post(SessionLost(session, why, core.clock.now_ns(), closed=closed))
            log.info("session_ended", session=session, why=why)

    async def _hello(self, requests: AsyncIterator[pb.SessionRequest]) -> pb.Hello:
        """What every session begins with, and soon: before it, the client counts for nothing."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                first = await first_message(requests)
        except TimeoutError:
            raise MalformedMessage(f"no Hello came within {_PATIENCE_S:g} s") from None
        if first.WhichOneof("kind") != "hello":
            raise MalformedMessage("the first message of a session has to be Hello")
        return first.hello

    async def _open(self, hello: pb.Hello) -> int:
        for field in ("client_name", "host"):
            if len(getattr(hello, field)) > limits.MAX_CLIENT_NAME_CHARS:
                raise InvalidSize(f"{field} is longer than {limits.MAX_CLIENT_NAME_CHARS}")
        name, host = hello.client_name or "client", hello.host or "this host"
        owner = printable(f"{name} (pid {hello.pid} on {host})")
        core = self._core
        # The label that its traffic is counted under: beyond a bound, that is "other".
        label = self._usage.name
        question = SessionOpened(core.next_request(), owner, core.clock.now_ns(), label)
        session = (await core.ask(question, Opened)).session
        log.info("session_opened", session=session, owner=owner)
        return session

    def _welcome(self, membership: Membership) -> pb.Welcome:
        config = self._config
        return pb.Welcome(
            incarnation=config.incarnation,
            session_id=membership.number,
            session_secret=membership.secret,
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            claim_lease_ms=config.claim_lease_ms,
            reservation_ttl_ms=config.reservation_ttl_ms,
            max_batch_keys=limits.MAX_BATCH_KEYS,
            max_message_bytes=limits.MAX_MESSAGE_BYTES,
            chunk_bytes=limits.CHUNK_BYTES,
            daemon_version=config.daemon_version,
            local_socket=config.local_socket,
            shares=config.shares,
            data_port=self._sessions.data_port,
            tiers=map(self._tier_limits, self._core.state.tables.ledgers.values()),
        )

    def _tier_limits(self, ledger: Ledger) -> pb.TierLimits:
        core = self._core
        share_bytes = most_reserved_bytes(core.state.tables.config, ledger)
        left_bytes = ledger.budget_bytes
        if ledger.shares is not None:
            (key,) = self._keys([bytes(limits.KEY_BYTES)])
            left_bytes = ledger.shares.left_bytes(ledger.shares.number_of(key), left_bytes)
            share_bytes = min(share_bytes, left_bytes)
        return pb.TierLimits(
            tier=ledger.tier.value,  # type: ignore[arg-type]
            budget_bytes=ledger.budget_bytes,
            max_payload_bytes=min(left_bytes, limits.MAX_PAYLOAD_BYTES),
            # The second is for all sessions together: more has no chance.
            max_reserved_bytes=min(share_bytes, ledger.max_reserved_bytes or share_bytes),
            slab_bytes=core.stores[ledger.tier].slab_bytes,
        )

    async def _listen(self, session: int, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Take what the client says until it stops; the end goes into the events."""
        end: PrefixdError | None = None
        try:
            async for request in requests:
                if session not in self._core.state.tables.sessions:
                    raise UnknownSession("the heartbeats stopped for too long; open a new session")
                self._heard(session, request)
        except PrefixdError as error:
            end = error
        except CallerGone:
            pass  # the connection is gone, and with it the generator that reads the events
        except Exception as problem:
            log.error("session_failed", session=session, exc_info=problem)
            end = PrefixdError(f"the daemon failed in this session: {type(problem).__name__}")
        self._end(end)

    # ---- what the core says (loop.Listener)

    def told(self, note: SessionNote) -> None:
        match note:
            case TellClaimLost():
                lost_claim = pb.ClaimLost(claim_id=note.claim, why=note.why)
                event = pb.SessionEvent(claim_lost=lost_claim)
            case TellReservationLost():
                lost = pb.ReservationLost(key=note.key, token=note.token, why=note.why)
                event = pb.SessionEvent(reservation_lost=lost)
        # A client that reads nothing misses it, and learns it with its next call.
        if not self._events.full():
            self._events.put_nowait(event)

    def ended(self, why: PrefixdError | None) -> None:
        if why is None and not self._events.full():
            self._events.put_nowait(pb.SessionEvent(draining=pb.Draining()))
        self._end(why)

    def _end(self, why: PrefixdError | None) -> None:
        """Let `run` come to its end behind what waits to be sent; at once if that is stuck,
        because the client reads nothing, or did not when it was told before."""
        if not self._ending and not self._events.full():
            self._events.put_nowait(why)
        elif self._task is not None:
            cut_off(self._task, why or LimitReached("the client does not read its events"))
        self._ending = True

    def _heard(self, session: int, request: pb.SessionRequest) -> None:
        core = self._core
        now_ns = core.clock.now_ns()
        match request.WhichOneof("kind"):
            case "heartbeat":
                if request.heartbeat.HasField("usage"):
                    usage = check_usage(request.heartbeat.usage)
                    self._sessions.namespaces.hide(self._access, usage.absent)
                    self._usage.add(usage)
                    if session in self._sessions.usage.sessions:
                        self._sessions.usage.sessions[session].add(usage)
                    self._usage.judge(usage.absent, core.state.tables.journal)
                core.post(HeartbeatCame(session, now_ns))
                ack = pb.HeartbeatAck(
                    sequence=request.heartbeat.sequence,
                    under_pressure=self._sessions.under_pressure(),
                )
                _put(self._events, pb.SessionEvent(heartbeat_ack=ack))
            case "touch":
                core.post(KeysTouched(self._keys(request.touch.keys), now_ns))
            case "suspect":
                core.post(KeysSuspected(self._keys(request.suspect.keys), now_ns))
            case "give_back":
                messages.batch_of("claim_ids", request.give_back.claim_ids)
                claims = tuple(request.give_back.claim_ids)
                core.post(ReleaseAsked(core.next_request(), session, claims, now_ns))
            case kind:
                raise MalformedMessage(f"{kind or 'an empty message'} does not belong here")

    def _keys(self, raw: Sequence[bytes]) -> tuple[Key, ...]:
        return self._sessions.namespaces.keys(self._access, messages.keys_of("keys", raw))


async def first_message(requests: AsyncIterator[Q]) -> Q:
    """The first message of a stream. Raises MalformedMessage when there is none."""
    async for request in requests:
        return request
    raise MalformedMessage("the stream ended before its first message")


def _put(
    events: Events,
    event: pb.SessionEvent,
) -> None:
    """Hand an event to the session's stream; a client that never reads them loses its session."""
    try:
        events.put_nowait(event)
    except asyncio.QueueFull:
        raise LimitReached("the client does not read the events of its session") from None
