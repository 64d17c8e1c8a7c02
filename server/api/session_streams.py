"""Sessions: the secret that proves one, and the stream that it lives on, from Hello to its end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Sequence
from contextlib import aclosing
from hmac import compare_digest
from typing import Final, TypeVar

from ... import __version__
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
from ..config.options import Config
from ..core.effects import Opened, TellClaimLost, TellReservationLost
from ..core.events import (
    CancelAsked,
    HeartbeatCame,
    KeysSuspected,
    KeysTouched,
    ReleaseAsked,
    SessionLost,
    SessionOpened,
)
from ..core.reservations import most_reserved_bytes
from ..core.shares import HOST, Holder, Shares
from ..runtime.clock import Clock, Latencies
from ..runtime.limited_log import LimitedLog
from ..runtime.listeners import SessionNote
from ..runtime.loop import Core
from . import messages
from .access import Access, Namespaces, Role, check_same
from .calls import Caller, CallerGone, Process, cut_off
from .identities import Identities
from .recording import EventOf, Recording
from .usage import LabelUsage, ReportPace, SessionUsage, UsageBook, check_usage

log = LimitedLog("prefixd.sessions")

Q = TypeVar("Q")

#: Events that a client may leave unread before its session is ended.
_MAX_UNREAD_EVENTS = 4096
#: A client that opened a session says hello within this time.
_PATIENCE_S = 5.0
#: Sessions that are told something in one turn of the loop: each sends a message then.
_TOLD_AT_ONCE: Final = 16
#: 128 random bits: too many to guess.
_SECRET_BYTES: Final = 16
#: A millisecond, in nanoseconds.
_MS: Final = 1_000_000


class Membership:
    """One open session."""

    __slots__ = (
        "access",
        "client_version",
        "ended",
        "holder",
        "number",
        "process",
        "secret",
        "tell",
    )

    def __init__(self, number: int, access: Access | None = None, tenant: str = HOST) -> None:
        self.number = number
        #: What its client says; for operators.
        self.client_version = ""
        #: Whose share of everything its calls count to.
        self.holder: Final = Holder(tenant, number)
        #: What the token grants that it was opened with. None: no token was asked for.
        self.access: Final = access
        #: Known to its client only, and never logged.
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        #: The process that it belongs to: the first that proved it over a Unix socket.
        self.process: Process | None = None
        #: Done when the session is over.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Sends its client an event, unless that reads none. Set by its stream.
        self.tell: Callable[[pb.SessionEvent], None] = lambda _event: None


class Sessions:
    """The open sessions. The event loop's."""

    def __init__(self, incarnation: bytes, max_sessions: int = limits.MAX_SESSIONS) -> None:
        self.incarnation: Final = incarnation
        #: The streams of sessions, from their Hello on.
        self.places: Final = Shares("sessions (max_sessions)", max_sessions)
        self._open: dict[int, Membership] = {}
        #: Translates the keys that clients name into stored ones.
        self.namespaces: Final = Namespaces()
        #: What their clients report, by label.
        self.usage: Final = UsageBook()
        #: What their clients say that keys depend on.
        self.identities: Final = Identities()
        #: What they look up, while an operator asks for it.
        self.recording: Final = Recording(self._tell_all, lambda: len(self._open))
        #: How long their calls take.
        self.latencies: Final = Latencies(Clock())
        #: The port of the data socket. 0: there is none.
        self.data_port = 0
        #: Whether memory is short. Each answer to a heartbeat says so, and `tell_pressure` when it
        #: changes. Set by the daemon.
        self.under_pressure: Callable[[], bool] = lambda: False
        #: Called with the number of each session that ends.
        self.when_closed: list[Callable[[int], None]] = []

    def open(self, number: int, access: Access | None = None, tenant: str = HOST) -> Membership:
        """Add a session that the core has opened. `access`: what its token grants."""
        membership = self._open[number] = Membership(number, access, tenant)
        self.usage.sessions[number] = SessionUsage()
        return membership

    def client_version(self, number: int) -> str:
        """What the client of this session is, if it says so."""
        membership = self._open.get(number)
        return "" if membership is None else membership.client_version

    def is_open(self, number: int) -> bool:
        """Whether this session is open."""
        return number in self._open

    def opened_with_others(self, tokens: Container[Access]) -> list[int]:
        """The sessions that were opened with a token that is not among these."""
        return [
            number
            for number, membership in self._open.items()
            if membership.access is not None and membership.access not in tokens
        ]

    def close(self, number: int) -> None:
        """Remove a session that has ended: its secret is no longer accepted."""
        membership = self._open.pop(number, None)
        if membership is None:
            return
        del self.usage.sessions[number]
        self.identities.close(number)
        self.recording.left(number)
        membership.ended.set_result(None)
        for callback in self.when_closed:
            callback(number)

    async def tell_pressure(self) -> None:
        """Tell all sessions whether memory is short: idle ones don't ask for a while."""
        event = pb.SessionEvent(heartbeat_ack=pb.HeartbeatAck(under_pressure=self.under_pressure()))
        await self._tell_all(lambda _access: event)

    async def _tell_all(self, event_of: EventOf) -> None:
        for number, membership in enumerate(list(self._open.values())):
            if number % _TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)  # each stream sends it in the next turn of the loop
            membership.tell(event_of(membership.access))

    def prove(self, ref: pb.SessionRef, caller: Caller, needed: Role = Role.READ) -> Membership:
        """The session that `caller` acts for, if it may do what takes the role `needed`.

        Raises StaleIncarnation, and UnknownSession both for a wrong secret and for a session that
        does not exist, so that numbers can't be probed. Raises NotPermitted when the role of the
        session does not suffice, whatever the transport of the call, or when the token of the call
        has another namespace than the session."""
        if ref.incarnation != self.incarnation:
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
    """Serves one session. `run` yields the messages for its client. When it returns, is closed or
    fails, the session is over, and the core has been told."""

    def __init__(
        self,
        core: Core,
        sessions: Sessions,
        config: Config,
        caller: Caller,
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._config = config
        self._caller = caller
        self._access = caller.access
        self._tenant = caller.tenant
        #: What waits to be sent. An error or None ends the stream.
        self._events: asyncio.Queue[pb.SessionEvent | PrefixdError | None]
        self._events = asyncio.Queue(_MAX_UNREAD_EVENTS)
        #: The task that runs `run`, once there is a session.
        self._task: asyncio.Task[object] | None = None
        self._ending = False
        #: The sums that the reports of this client are added to, once its label is known.
        self._usage = LabelUsage()
        self._pace: Final = ReportPace(config.sessions.heartbeat_ns // _MS)

    async def run(
        self, requests: AsyncIterator[pb.SessionRequest]
    ) -> AsyncGenerator[pb.SessionEvent, None]:
        hello = await self._hello(requests)
        holder, places = Holder(self._tenant), self._sessions.places
        places.take(holder)
        try:
            self._caller.lasts()
            label = self._sessions.namespaces.label(self._access, hello.label)
            with self._sessions.usage.session(label, self._tenant) as self._usage:
                async with aclosing(self._serve(hello, requests)) as events:
                    async for event in events:
                        yield event
        finally:
            places.give(holder)

    async def _serve(
        self, hello: pb.Hello, requests: AsyncIterator[pb.SessionRequest]
    ) -> AsyncGenerator[pb.SessionEvent, None]:
        session = await self._open(hello)
        core = self._core
        self._task = asyncio.current_task()
        membership = self._sessions.open(session, self._access, self._tenant)
        membership.tell = self._tell
        membership.client_version = printable(hello.client_version)
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
        """Receive the first message. Before it the client has no session, so it has little time."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                first = await first_message(requests)
        except TimeoutError:
            raise MalformedMessage(f"no Hello came within {_PATIENCE_S:g} s") from None
        if first.WhichOneof("kind") != "hello":
            raise MalformedMessage("the first message of a session has to be Hello")
        return first.hello

    async def _open(self, hello: pb.Hello) -> int:
        for field in ("client_name", "host", "client_version"):
            if len(getattr(hello, field)) > limits.MAX_CLIENT_NAME_CHARS:
                raise InvalidSize(f"{field} is longer than {limits.MAX_CLIENT_NAME_CHARS}")
        name, host = hello.client_name or "client", hello.host or "this host"
        owner = printable(f"{name} (pid {hello.pid} on {host})")
        core = self._core
        # The label that its traffic is counted under: "other" when there are too many labels.
        label = self._usage.name
        question = SessionOpened(
            core.next_request(), owner, core.clock.now_ns(), label, self._tenant
        )
        session = (await core.ask(question, Opened)).session
        log.info("session_opened", session=session, owner=owner)
        return session

    def _welcome(self, membership: Membership) -> pb.Welcome:
        server, sessions = self._config.server, self._config.sessions
        return pb.Welcome(
            incarnation=self._sessions.incarnation,
            session_id=membership.number,
            session_secret=membership.secret,
            heartbeat_interval_ms=sessions.heartbeat_ns // _MS,
            idle_heartbeat_interval_ms=sessions.idle_heartbeat_ns // _MS,
            claim_lease_ms=sessions.claim_lease_ns // _MS,
            reservation_ttl_ms=sessions.reservation_ttl_ns // _MS,
            max_batch_keys=limits.MAX_BATCH_KEYS,
            max_message_bytes=limits.MAX_MESSAGE_BYTES,
            chunk_bytes=limits.CHUNK_BYTES,
            daemon_version=__version__,
            # A client with a token came over TCP: it can read nothing in place.
            local_socket=server.local_socket if self._access is None else "",
            # Whether there is a shared engine, which `CacheService.pull` fetches from.
            shares=bool(self._config.shared.engine),
            data_port=self._sessions.data_port,
            tiers=map(self._tier_limits, self._core.state.tables.ledgers.values()),
            record=self._sessions.recording.asked_of(membership.access),
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
            # The second limit is that of all sessions together.
            max_reserved_bytes=min(share_bytes, ledger.max_reserved_bytes or share_bytes),
            slab_bytes=core.stores[ledger.tier].slab_bytes,
        )

    async def _listen(self, session: int, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Take the messages of the client, and end the stream of events when they end."""
        end: PrefixdError | None = None
        try:
            async for request in requests:
                if session not in self._core.state.tables.sessions:
                    raise UnknownSession("the heartbeats stopped for too long; open a new session")
                wait_ns = self._take(session, request)
                if wait_ns:
                    await asyncio.sleep(wait_ns / 1e9)
        except PrefixdError as error:
            end = error
        except CallerGone:
            pass  # the connection is gone: the transport closes `run`
        except Exception as problem:
            log.error("session_failed", session=session, exc_info=problem)
            end = PrefixdError(f"the daemon failed in this session: {type(problem).__name__}")
        self._end(end)

    # ---- what the core tells (loop.Listener)

    def told(self, note: SessionNote) -> None:
        match note:
            case TellClaimLost():
                lost_claim = pb.ClaimLost(claim_id=note.claim, why=note.why)
                event = pb.SessionEvent(claim_lost=lost_claim)
            case TellReservationLost():
                lost = pb.ReservationLost(key=note.key, token=note.token, why=note.why)
                event = pb.SessionEvent(reservation_lost=lost)
        # A client that reads no events misses this one, and learns of it with its next call.
        self._tell(event)

    def _tell(self, event: pb.SessionEvent) -> None:
        if not self._events.full():
            self._events.put_nowait(event)

    def ended(self, why: PrefixdError | None) -> None:
        if why is None and not self._events.full():
            self._events.put_nowait(pb.SessionEvent(draining=pb.Draining()))
        self._end(why)

    def _end(self, why: PrefixdError | None) -> None:
        """End `run` after what waits to be sent. Cut it off if the client does not read: if the
        events are full, or the session did not end when it was told before."""
        if not self._ending and not self._events.full():
            self._events.put_nowait(why)
        elif self._task is not None:
            cut_off(self._task, why or LimitReached("the client does not read its events"))
        self._ending = True

    def _take(self, session: int, request: pb.SessionRequest) -> int:
        """Returns how long the next message has to wait, in nanoseconds."""
        core = self._core
        now_ns = core.clock.now_ns()
        wait_ns = 0
        match request.WhichOneof("kind"):
            case "heartbeat":
                if request.heartbeat.HasField("usage"):
                    usage = check_usage(request.heartbeat.usage)
                    self._sessions.namespaces.hide(self._access, usage.absent)
                    self._usage.add(usage, core.state.tables.journal, now_ns)
                    if session in self._sessions.usage.sessions:
                        self._sessions.usage.sessions[session].add(usage)
                    wait_ns = self._pace.reported(now_ns)
                core.post(HeartbeatCame(session, now_ns))
                its = core.state.tables.sessions.get(session)
                ack = pb.HeartbeatAck(
                    sequence=request.heartbeat.sequence,
                    under_pressure=self._sessions.under_pressure(),
                    holds=its is not None and its.holds,
                )
                try:
                    self._events.put_nowait(pb.SessionEvent(heartbeat_ack=ack))
                except asyncio.QueueFull:
                    raise LimitReached(
                        "the client does not read the events of its session"
                    ) from None
            case "touch":
                core.post(KeysTouched(self._keys(request.touch.keys), now_ns))
            case "suspect":
                core.post(KeysSuspected(self._keys(request.suspect.keys), now_ns))
            case "give_back":
                claims = tuple(request.give_back.claim_ids)
                tokens = tuple(request.give_back.tokens)
                if claims or not tokens:
                    messages.batch_of("claim_ids", claims)
                    core.post(ReleaseAsked(core.next_request(), session, claims, now_ns))
                if tokens:
                    messages.batch_of("tokens", tokens)
                    core.post(CancelAsked(core.next_request(), session, tokens, now_ns))
            case "identity":
                # A session that is ending takes no more: nothing would remove them.
                if self._sessions.is_open(session):
                    self._sessions.identities.announce(session, request.identity, now_ns)
            case "looked_up":
                holder = Holder(self._tenant, session)
                self._sessions.recording.take(holder, self._usage.name, request.looked_up)
            case kind:
                raise MalformedMessage(f"{kind or 'an empty message'} does not belong here")
        return wait_ns

    def _keys(self, raw: Sequence[bytes]) -> tuple[Key, ...]:
        return self._sessions.namespaces.keys(self._access, messages.keys_of("keys", raw))


async def first_message(requests: AsyncIterator[Q]) -> Q:
    """The first message of a stream. Raises MalformedMessage when there is none."""
    async for request in requests:
        return request
    raise MalformedMessage("the stream ended before its first message")
