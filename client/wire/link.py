"""One session on one connection, from the daemon's welcome to its end, and what the client holds in
it.

gRPC pulls the outgoing messages from an iterator, in a thread of its own. That iterator waits for
the next message or the next heartbeat, whichever comes first, so heartbeats need no timer. It also
notices when the daemon has stopped answering.

An idle client sends a heartbeat only now and then: one that holds nothing, makes no call, has
nothing to report, and has its last heartbeat answered. The daemon has as much more patience with
it. So thousands of idle clients cost the daemon little, and nothing is held any longer by a client
that is gone.

A call that got no answer in time makes the link suspect: a heartbeat goes out at once, and until it
is answered, every other call fails at once. So a daemon that hangs costs one call its deadline, and
a slow one costs the others a round trip.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final
from weakref import WeakValueDictionary

import grpc

from ...proto import prefixd_pb2 as pb
from ...proto.errors import DaemonUnavailable, from_grpc
from ...proto.limits import MAX_MESSAGE_BYTES, SESSION_LOST_AFTER_INTERVALS
from ..counters import ClientCounters, Report
from .framed_calls import FramedCalls
from .grpc_connection import Calls, GrpcConnection
from .transport import Holding

#: Heartbeats sent per interval of the daemon, so that one late heartbeat loses no session.
BEATS_PER_INTERVAL: Final = 2
#: Heartbeats without an answer after which the daemon counts as gone.
MAX_UNANSWERED: Final = SESSION_LOST_AFTER_INTERVALS * BEATS_PER_INTERVAL
#: Messages in the outbox above which nothing is taken that may as well be dropped.
_MAX_OFFERED: Final = 64
#: Marks in the outbox: send a heartbeat now, and send the last one.
_BEAT: Final = pb.SessionRequest(heartbeat=pb.Heartbeat())
_FAREWELL: Final = pb.SessionRequest(heartbeat=pb.Heartbeat())


class Holdings:
    """The claims or reservations of a session that are still referenced. Thread-safe."""

    def __init__(self) -> None:
        # Re-entrant: the finalizer of a forgotten client may run while this thread holds it.
        self._lock = threading.RLock()
        self._held: WeakValueDictionary[int, Holding] = WeakValueDictionary()
        self._why_ended: str | None = None

    def hold(self, link: object, number: int) -> Holding:
        """Record what the daemon granted. It is lost already if the session has ended meanwhile."""
        with self._lock:
            holding = Holding(link, number, self._why_ended)
            self._held[number] = holding
            return holding

    def lose(self, number: int, why: str) -> bool:
        """The daemon took it back. False: it is not held here."""
        with self._lock:
            holding = self._held.pop(number, None)
            if holding is None:
                return False
            holding.why_lost = why
            return True

    def __bool__(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def end(self, why: str) -> None:
        """The session has ended: everything in it is lost."""
        with self._lock:
            self._why_ended = why
            for holding in self._held.values():
                holding.why_lost = holding.why_lost or why


class Link:
    """A session and the connection that it is on. Thread-safe."""

    def __init__(
        self,
        connection: GrpcConnection,
        hello: pb.Hello,
        welcome_within_s: float,
        counters: ClientCounters | None = None,
    ) -> None:
        """Says hello at once; `open` waits for the welcome. Heartbeats carry the reports of
        `counters`."""
        self.connection = connection
        #: Makes the small calls: over gRPC, unless `framed` makes them.
        self.calls: Calls = connection
        #: The daemon's description of itself and its limits.
        self.welcome = pb.Welcome()
        self.ref = pb.SessionRef()
        self.draining = False
        #: Whether memory is short on the daemon's node, as of its last answer to a heartbeat.
        self.under_pressure = False
        self.claims = Holdings()
        self.reservations = Holdings()
        #: Called before each heartbeat, in gRPC's thread, to `send` what waits for one.
        self.before_heartbeat: Callable[[], None] | None = None
        #: Called when the session has ended, in any thread, to make calls in progress on other
        #: connections fail.
        self.on_end: list[Callable[[], None]] = []
        #: The daemon's local or data socket, if this client uses one.
        self.framed: FramedCalls | None = None
        #: Why the session ended; empty while it lasts.
        self.why_ended = ""
        #: A call got no answer, and the heartbeat sent then has none yet.
        self.suspect = False
        #: The session ended because the daemon stopped answering, not because it went away.
        self.silent = False
        # A SimpleQueue, because finalizers use it too, at any moment in any thread.
        self._outbox: SimpleQueue[pb.SessionRequest | None] = SimpleQueue()
        self._welcomed = threading.Event()
        self._unanswered = 0
        #: An entry for each call in progress.
        self._calling: deque[None] = deque()
        #: Something was called or granted since the last look.
        self._active = False
        #: As the daemon last said: it holds something for the session.
        self._holds = False
        self._sequence = 0
        #: The heartbeat whose answer proves that the daemon is alive again.
        self._proof = 0
        self._suspecting = threading.Lock()
        self._counters = counters
        if counters is not None:
            counters.when_many = self._report_soon
        #: The report that was sent and not answered yet, and the number of its heartbeat.
        self._report: tuple[int, Report] | None = None
        self._events = connection.stub.Session(self._requests(hello, welcome_within_s))

    @property
    def max_message_bytes(self) -> int:
        return self.welcome.max_message_bytes or MAX_MESSAGE_BYTES

    def open(self) -> None:
        """Wait for the daemon's welcome. Raises PrefixdError."""
        try:
            first = next(self._events)
        except StopIteration:
            raise DaemonUnavailable("the session ended before it began") from None
        except grpc.RpcError as problem:
            if self.why_ended:
                raise DaemonUnavailable(self.why_ended) from None
            raise from_grpc(problem) from None
        if first.WhichOneof("kind") != "welcome":
            raise DaemonUnavailable("the answer did not begin with a welcome")
        self.welcome = first.welcome
        self.ref = pb.SessionRef(
            incarnation=first.welcome.incarnation,
            session_id=first.welcome.session_id,
            secret=first.welcome.session_secret,
        )
        self._welcomed.set()

    def events(self) -> Iterator[pb.SessionEvent]:
        """The daemon's messages, until the session ends."""
        try:
            for event in self._events:
                if event.WhichOneof("kind") == "heartbeat_ack":
                    self.under_pressure = event.heartbeat_ack.under_pressure
                    self._answered(event.heartbeat_ack.sequence, event.heartbeat_ack.holds)
                yield event
            self.close("the daemon ended the session")
        except grpc.RpcError as problem:
            self.close(str(from_grpc(problem)))

    def go_over(self, framed: FramedCalls) -> None:
        """Make small calls and move payloads over these connections from now on."""
        self.framed = self.calls = framed
        self.on_end.append(framed.hang_up)

    def send(self, request: pb.SessionRequest) -> None:
        """Send a message on the session stream, soon. Callable from a finalizer."""
        self._outbox.put(request)

    def offer(self, request: pb.SessionRequest) -> bool:
        """`send`, unless the daemon is behind with what was sent before, or gone. Returns whether
        it was sent."""
        if self.why_ended or self._outbox.qsize() >= _MAX_OFFERED:
            return False
        self._outbox.put(request)
        return True

    def call_timed_out(self) -> None:
        """A call got no answer in time: send a heartbeat at once, to test the daemon."""
        with self._suspecting:
            if self.suspect or self.why_ended:
                return
            # Not an earlier one, whose answer may have been on its way before the daemon hung.
            self._proof = self._sequence + 1
            self.suspect = True
        self._outbox.put(_BEAT)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around each call that may begin to hold something: the link is not idle meanwhile."""
        self._active = True
        self._calling.append(None)
        try:
            yield
        finally:
            self._calling.pop()
            self._active = True  # what was granted is only now entered into `claims`

    def _idle(self) -> bool:
        """Whether no heartbeat is needed for a while. Called once an interval."""
        active, self._active = self._active, False
        counters = self._counters
        return not (
            active
            or self._calling
            or self._unanswered
            or self.suspect
            or self._holds
            or self.claims
            or self.reservations
            or (counters is not None and counters.to_report)
        )

    def _answered(self, sequence: int, holds: bool) -> None:
        again = False
        with self._suspecting:
            self._unanswered = 0
            if sequence:
                self._holds = holds
            if sequence >= self._proof:
                self.suspect = False
            if self._report is not None and sequence >= self._report[0]:
                self._report = None
                again = self._counters is not None and self._counters.many
        if again:
            self._report_soon()

    def _report_soon(self) -> None:
        """Send a report at once, because the next one has little room left."""
        if not self.why_ended:
            self._outbox.put(_BEAT)

    def leave(self, why: str) -> None:
        """Send the last report and close the stream. The daemon then ends the session, which ends
        `events`."""
        if not self.why_ended:
            self._outbox.put(_FAREWELL)
        self._ended(why)

    def close(self, why: str) -> None:
        """End session and connection: the daemon releases what was held, calls in progress fail.

        Idempotent; the first reason stays.
        """
        self._ended(why)
        self._events.cancel()
        self.connection.close()
        self._end_calls()
        self._take_report_back()

    def _ended(self, why: str) -> None:
        self.why_ended = self.why_ended or why
        self.claims.end(self.why_ended)
        self.reservations.end(self.why_ended)
        self._outbox.put(None)
        self._welcomed.set()

    def _end_calls(self) -> None:
        on_end, self.on_end = self.on_end, []
        for end in on_end:
            end()

    def _requests(self, hello: pb.Hello, welcome_within_s: float) -> Iterator[pb.SessionRequest]:
        """The messages that gRPC sends; it runs this in its own thread."""
        yield pb.SessionRequest(hello=hello)
        if not self._welcomed.wait(welcome_within_s):
            self._give_up("the daemon did not answer in time")
            return
        interval_s = max(self.welcome.heartbeat_interval_ms, 1) / 1e3 / BEATS_PER_INTERVAL
        idle_s = self.welcome.idle_heartbeat_interval_ms / 1e3 / BEATS_PER_INTERVAL
        due_s = time.monotonic()
        beat_s = -math.inf  # when the last heartbeat was sent
        while True:
            left_s = due_s - time.monotonic()
            if left_s > 0:
                try:
                    request = self._outbox.get(timeout=left_s)
                except Empty:
                    continue
                if request is None:
                    return
                if request is _FAREWELL:
                    if (last := self._beat(last=True)).HasField("usage"):
                        yield pb.SessionRequest(heartbeat=last)
                    continue
                if request is not _BEAT:
                    yield request
                    continue
                # A heartbeat out of turn.
            elif self._unanswered >= MAX_UNANSWERED:
                self.silent = True
                self._give_up("the daemon stopped answering")
                return
            else:
                now_s = time.monotonic()
                due_s = now_s + interval_s
                if self.before_heartbeat is not None:
                    self.before_heartbeat()
                if self._idle() and due_s < beat_s + idle_s:
                    continue
                self._unanswered += 1
                beat_s = now_s
            yield pb.SessionRequest(heartbeat=self._beat())

    def _beat(self, *, last: bool = False) -> pb.Heartbeat:
        """The next heartbeat, with a report if there is one. While a report waits for its answer,
        only the last heartbeat carries another one."""
        with self._suspecting:
            self._sequence += 1
            beat = pb.Heartbeat(sequence=self._sequence)
            if self._counters is not None and (last or self._report is None):
                report = self._counters.take_report()
                if report.amounts:
                    beat.usage.CopyFrom(report.message())
                    self._report = self._sequence, report
            return beat

    def _take_report_back(self) -> None:
        """The session has ended: leave a report that was not answered to the next session."""
        with self._suspecting:
            report, self._report = self._report, None
        if report is not None and self._counters is not None:
            self._counters.give_back(report[1])

    def _give_up(self, why: str) -> None:
        """Called in gRPC's thread. The thread that reads the events does the rest."""
        self._ended(why)
        self._events.cancel()
        self._end_calls()
