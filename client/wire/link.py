"""One session on one connection, from the daemon's welcome to its end, and what is held in it.

gRPC pulls what is to be sent out of an iterator, from a thread of its own; that iterator waits
for whatever comes first, something to say or the next heartbeat, so the heartbeats need no
timer. It also notices a daemon that has stopped answering.

A call that got no answer in its time makes the link suspect: a heartbeat goes out at once, and
until it is answered every call fails at once. A daemon that hangs costs one call its deadline, a
slow one costs the others a round trip.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Final
from weakref import WeakValueDictionary

import grpc

from ...proto import prefixd_pb2 as pb
from ...proto.errors import DaemonUnavailable, from_grpc
from ...proto.limits import MAX_MESSAGE_BYTES, SESSION_LOST_AFTER_INTERVALS
from ..counters import Counters, Report
from ..results import Entry
from .connection import Calls, Connection
from .data_line import DataCalls

#: Heartbeats sent per interval that is due, so that one late heartbeat loses no session.
BEATS_PER_INTERVAL: Final = 2
#: Heartbeats without an answer after which the daemon counts as gone.
MAX_UNANSWERED: Final = SESSION_LOST_AFTER_INTERVALS * BEATS_PER_INTERVAL
#: In the outbox: send a heartbeat now.
_BEAT: Final = pb.SessionRequest(heartbeat=pb.Heartbeat())
#: The same: the last one.
_FAREWELL: Final = pb.SessionRequest(heartbeat=pb.Heartbeat())


class Holding:
    """A claim or a reservation: valid until it is given back, lost, or its session ends."""

    __slots__ = ("__weakref__", "entries", "in_place", "link", "number", "why_lost")

    def __init__(self, link: Link, number: int, why_lost: str | None) -> None:
        self.link = link
        #: The daemon's number for it: a claim id or a reservation token.
        self.number = number
        #: What took it away, as a sentence; None while it is held.
        self.why_lost = why_lost
        #: What a claim pins.
        self.entries: Sequence[Entry] = ()
        #: What a claim made or viewed in place is validated with; see `local.node.InPlace`.
        self.in_place: object | None = None


class Holdings:
    """Those of one kind that are still referred to. Thread-safe."""

    def __init__(self) -> None:
        # Re-entrant: a finalizer that closes a forgotten client may run while it is held.
        self._lock = threading.RLock()
        self._held: WeakValueDictionary[int, Holding] = WeakValueDictionary()
        self._why_ended: str | None = None

    def hold(self, link: Link, number: int) -> Holding:
        """What the daemon granted; lost already if the session ended meanwhile."""
        with self._lock:
            holding = Holding(link, number, self._why_ended)
            self._held[number] = holding
            return holding

    def lose(self, number: int, why: str) -> bool:
        """The daemon took it away. False: it is not held here."""
        with self._lock:
            holding = self._held.pop(number, None)
            if holding is None:
                return False
            holding.why_lost = why
            return True

    def end(self, why: str) -> None:
        """The session is over, and with it everything that it held."""
        with self._lock:
            self._why_ended = why
            for holding in self._held.values():
                holding.why_lost = holding.why_lost or why


class Link:
    """A session and the connection that it is on. Thread-safe."""

    def __init__(
        self,
        connection: Connection,
        hello: pb.Hello,
        welcome_within_s: float,
        counters: Counters | None = None,
    ) -> None:
        """Says hello at once; `open` waits for the welcome. What `counters` have to report goes
        with the heartbeats."""
        self.connection = connection
        #: The small calls: over gRPC, until something faster is there.
        self.calls: Calls = connection
        #: What the daemon said of itself and its limits.
        self.welcome = pb.Welcome()
        self.ref = pb.SessionRef()
        self.draining = False
        #: Memory is short on the daemon's node, as it said with its last answer to a heartbeat.
        self.under_pressure = False
        self.claims = Holdings()
        self.reservations = Holdings()
        #: Called before each heartbeat, in gRPC's thread, to `send` what has waited for one.
        self.before_heartbeat: Callable[[], None] | None = None
        #: Called when the session has ended, in any thread, to make the calls fail that are under
        #: way on other connections than this.
        self.on_end: list[Callable[[], None]] = []
        #: The data socket of a daemon elsewhere, if it has one.
        self.data: DataCalls | None = None
        #: Why the session ended; empty while it lasts.
        self.why_ended = ""
        #: A call got no answer: is the daemon there? Whatever answers that ends it.
        self.suspect = False
        #: Did the daemon stop answering, rather than go away?
        self.silent = False
        # Finalizers use it too, which run at any moment in any thread: SimpleQueue may be.
        self._outbox: SimpleQueue[pb.SessionRequest | None] = SimpleQueue()
        self._welcomed = threading.Event()
        self._unanswered = 0
        self._sequence = 0
        #: The heartbeat whose answer proves that the daemon is alive again.
        self._proof = 0
        self._suspecting = threading.Lock()
        self._counters = counters
        #: A report that was sent and not answered, and the heartbeat that it went with.
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
        """What the daemon says, until the session ends."""
        try:
            for event in self._events:
                if event.WhichOneof("kind") == "heartbeat_ack":
                    self.under_pressure = event.heartbeat_ack.under_pressure
                    self._answered(event.heartbeat_ack.sequence)
                yield event
            self.close("the daemon ended the session")
        except grpc.RpcError as problem:
            self.close(str(from_grpc(problem)))

    def send(self, request: pb.SessionRequest) -> None:
        """Say something on the session stream, soon. Callable from a finalizer."""
        self._outbox.put(request)

    def call_timed_out(self) -> None:
        """A call got no answer in its time. Ask for a sign of life, at once."""
        with self._suspecting:
            if self.suspect or self.why_ended:
                return
            # Not one that was sent before: its answer may have been on its way already.
            self._proof = self._sequence + 1
            self.suspect = True
        self._outbox.put(_BEAT)

    def _answered(self, sequence: int) -> None:
        with self._suspecting:
            self._unanswered = 0
            if sequence >= self._proof:
                self.suspect = False
            if self._report is not None and sequence >= self._report[0]:
                self._report = None

    def leave(self, why: str) -> None:
        """Tell the daemon what waits to be told, and that this was all. It ends the session, and
        with it the events."""
        if not self.why_ended:
            self._outbox.put(_FAREWELL)
        self._ended(why)
        self._outbox.put(None)
        self._welcomed.set()

    def close(self, why: str) -> None:
        """End session and connection: the daemon releases what was held, calls under way fail.

        Idempotent; the first reason stays.
        """
        self._ended(why)
        self._outbox.put(None)
        self._welcomed.set()
        self._events.cancel()
        self.connection.close()
        self._end_calls()
        self._take_report_back()

    def _ended(self, why: str) -> None:
        self.why_ended = self.why_ended or why
        self.claims.end(self.why_ended)
        self.reservations.end(self.why_ended)

    def _end_calls(self) -> None:
        on_end, self.on_end = self.on_end, []
        for end in on_end:
            end()

    def _requests(self, hello: pb.Hello, welcome_within_s: float) -> Iterator[pb.SessionRequest]:
        """What gRPC sends, in its own thread."""
        yield pb.SessionRequest(hello=hello)
        if not self._welcomed.wait(welcome_within_s):
            self._give_up("the daemon did not answer in time")
            return
        interval_s = max(self.welcome.heartbeat_interval_ms, 1) / 1e3 / BEATS_PER_INTERVAL
        due_s = time.monotonic()
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
                # Asked for besides those that are due.
            elif self._unanswered >= MAX_UNANSWERED:
                self.silent = True
                self._give_up("the daemon stopped answering")
                return
            else:
                self._unanswered += 1
                due_s = time.monotonic() + interval_s
                if self.before_heartbeat is not None:
                    self.before_heartbeat()
            yield pb.SessionRequest(heartbeat=self._beat())

    def _beat(self, *, last: bool = False) -> pb.Heartbeat:
        """The next heartbeat, with what there is to report. One report is under way at a time,
        but for that of the last heartbeat."""
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
        """The session is over and a report was not answered: the next session has it."""
        with self._suspecting:
            report, self._report = self._report, None
        if report is not None and self._counters is not None:
            self._counters.give_back(report[1])

    def _give_up(self, why: str) -> None:
        """From gRPC's thread: the thread that reads the events does the rest."""
        self._ended(why)
        self._events.cancel()
        self._end_calls()
