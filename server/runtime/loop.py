"""The one event loop: applies events to `MetaState` and carries out its effects.

Everything here runs on the loop's thread, except what is handed to an executor or a committer;
their results come back as events through `post_threadsafe`. Nothing here decides anything.

What fails here makes the daemon unhealthy, which the health service shows, and never ends the
loop: an effect that can't be carried out does not take the others with it. Only where an event
left the accounting of the state wrong does the daemon stop (`broken`): better nothing than wrong
bytes.

Nothing takes long either: what the state leaves for later (`MetaState.busy`) goes on in the next
round of the loop, and everything that walks over the tables does so in `Slices`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Final, TypeVar, assert_never

import structlog

from ...proto.errors import PrefixdError, UnknownSession
from ...proto.vocabulary import SaveStatus, Tier
from ...tiers.store import Store, StoreFull
from ..core.effects import (
    Answer,
    ClaimAnswer,
    Commit,
    Effect,
    Erase,
    IndexDelete,
    IndexPut,
    RecordUsage,
    Refused,
    Reply,
    ReserveAnswer,
    SaveEnded,
    StopWriting,
    TellClaimLost,
    TellReservationLost,
    Verify,
    WriteOrder,
)
from ..core.entries import Entry
from ..core.events import (
    CancelAsked,
    ClaimAsked,
    CommitFailed,
    Committed,
    EntryDamaged,
    Event,
    Question,
    ReleaseAsked,
    RequestDropped,
    ReserveAsked,
    Tick,
    WorkLeft,
    WriteBegan,
    WriteStopped,
)
from ..core.state import MetaState
from .clock import Clock
from .collector import Freezer
from .committer import CommitResult
from .devices import Devices
from .gate import Gate, stopping
from .health import Health
from .index import IndexWriter
from .lag import LoopLag
from .listeners import ChangeListener, EntryListener, Listener, tell_published
from .recounting import recount
from .reindexing import Reindexing, change
from .store_commands import StoreOrders
from .supervision import Supervisor
from .threads import ended_within
from .tracing import Tracing
from .verification import Verifications
from .writes import Write

log = structlog.get_logger("prefixd.loop")

A = TypeVar("A", bound=Answer)

#: How often use counts are handed to the stores, so that an order survives a crash almost whole.
FLUSH_INTERVAL_S: Final = 1.0

#: How long a stop waits for the threads that write.
CLOSED_WITHIN_S: Final = 3.0

#: Saves that one `Committed` tells of at most.
_COMMITTED_AT_ONCE: Final = 512


class Core:
    """The running state: `MetaState`, its stores, its index and its clock.

    Owned by the event loop. `stores` are closed by whoever made them, the index with the core.
    """

    def __init__(
        self,
        state: MetaState,
        stores: Mapping[Tier, Store],
        index: IndexWriter,
        executor: Executor,
        clock: Clock,
    ) -> None:
        self.state = state
        self.tracing: Tracing | None = None
        self.stores = dict(stores)
        self.index = index
        self.executor = executor
        self.clock = clock
        self.writes: dict[int, Write] = {}
        self.health = Health(clock)
        self.devices = Devices(self.stores, executor, clock, self.health, self.post)
        self.verifications = Verifications(self.stores, self.devices, self.health, self.damaged)
        self.supervisor = Supervisor(self.health, self.give_up)
        self.gate = Gate()
        #: set when the daemon has to stop, and why
        self.broken = asyncio.Event()
        self.broken_why = ""
        self._closed = False
        #: calls that move bytes at this moment
        self.calls_working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._applying = False
        self._replies: dict[int, asyncio.Future[Answer]] = {}
        self._last_request = 0
        self._listeners: dict[int, Listener] = {}
        self.entry_listener: EntryListener | None = None
        self.change_listener = ChangeListener()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self.orders = StoreOrders(
            self.stores, self._commit_done, self.devices.under_way, self._committer_died, clock
        )
        self.freezer = Freezer()
        self.lag = LoopLag(clock)
        self._going_on = False
        self._recount: asyncio.Task[None] | None = None
        self._reindexing = Reindexing(state.tables.entries, self.health, self._reindexed)
        self._flusher = self._loop.call_later(FLUSH_INTERVAL_S, self._flush)

    # ---- in

    def next_request(self) -> int:
        """A number for a question."""
        self._last_request += 1
        return self._last_request

    async def ask(self, question: Question, expect: type[A]) -> A:
        """Apply a question and wait for its answer. Raises what the state refuses it with."""
        reply = self._ask(question)
        try:
            # Shielded: what is granted while the asker is being cancelled has to be known here.
            answer = reply.result() if reply.done() else await asyncio.shield(reply)
        except asyncio.CancelledError:
            if self._replies.pop(question.request, None) is None:
                self._undo(question, reply.result())
            else:
                self.post(RequestDropped(question.request, self.clock.now_ns()))
            raise
        return _answer_of(answer, expect)

    def ask_now(self, question: Question, expect: type[A]) -> A:
        """The same, of a question that waits for nothing; not from within another event."""
        return _answer_of(self._ask(question).result(), expect)

    def _ask(self, question: Question) -> asyncio.Future[Answer]:
        if self._closed:
            raise stopping()
        if not self.gate.open:
            self.gate.check(question)
        reply: asyncio.Future[Answer] = self._loop.create_future()
        self._replies[question.request] = reply
        self.post(question)
        return reply

    def _undo(self, question: Question, answer: Answer) -> None:
        """Whoever asked is gone, and will never use what was granted."""
        now_ns = self.clock.now_ns()
        match question, answer:
            case ClaimAsked(), ClaimAnswer() if answer.claim:
                claims = (answer.claim,)
                self.post(ReleaseAsked(self.next_request(), question.session, claims, now_ns))
            case ReserveAsked(), ReserveAnswer():
                orders = [r for r in answer.results if isinstance(r, WriteOrder)]
                tokens = tuple(order.token for order in orders)
                # What is being written ends when its writer is known to have stopped.
                self.post(CancelAsked(self.next_request(), question.session, tokens, now_ns))
            case WriteBegan(), WriteOrder():
                tokens = (answer.token,)
                self.post(CancelAsked(self.next_request(), question.session, tokens, now_ns))

    def post(self, event: Event) -> None:
        """Apply an event, and whatever events its effects bring about, in order."""
        if self._closed:
            return
        self._events.append(event)
        if self._applying:
            return
        self._applying = True
        try:
            while self._events and not self._closed:
                self._apply(self._events.popleft())
        finally:
            self._applying = False
        self._arm()
        if self.state.busy and not self._going_on:
            self._going_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self.post(WorkLeft(self.clock.now_ns()))

    def _apply(self, event: Event) -> None:
        try:
            effects = self.state.apply(event)
        except Exception as problem:
            self._event_failed(event, problem)
            return
        self._carry_out(effects)

    def _event_failed(self, event: Event, problem: Exception) -> None:
        """A bug. Its effects are lost, a deletion from the index perhaps among them; if the
        accounting still balances, that is all: the index is revoked."""
        kind = type(event).__name__
        what = f"{kind} failed: {problem!r}"
        log.critical("event_failed", event_kind=kind, exc_info=problem)
        self.health.fault("state", what)
        self._reindexing.revoke(self.index, what, replace=False)
        self.change_listener.lost()
        request = getattr(event, "request", None)
        if request in self._replies:
            self._replies.pop(request).set_result(Refused(PrefixdError(what)))
        if not self.gate.recounting:
            self.gate.recounting = True
            work = self._recount_after_failure()
            self._recount = self.supervisor.task("recount", work, vital=True)

    async def _recount_after_failure(self) -> None:
        problems, _ = await recount(self.state)
        self.gate.recounting = False
        if problems:
            log.critical("state_broken", problems=problems[:10])
            self._closed = True
            self.give_up(f"the state does not add up: {self.unhealthy()['state']}")
        else:
            self._reindexing.start(self.index)

    def give_up(self, why: str) -> None:
        """The daemon can't go on, and stops."""
        self.gate.stopping = True
        self.broken_why = self.broken_why or why
        self.broken.set()

    def _committer_died(self, tier: Tier, problem: BaseException) -> None:
        """On its thread. Saves would wait for it for ever."""
        self.supervisor.died_threadsafe(f"{tier.label} committer", problem, vital=True)

    def post_threadsafe(self, event: Event) -> None:
        """`post`, from any thread; nothing happens any more once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.post, event)
        except RuntimeError:
            log.debug("event_after_close", kind=type(event).__name__)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Something is moving bytes: a stop waits for it, as long as it is willing to wait."""
        self.calls_working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.calls_working -= 1
            if not self.calls_working:
                self._idle.set()

    # ---- sessions

    def subscribe(self, session: int, listener: Listener) -> None:
        self._listeners[session] = listener

    def unsubscribe(self, session: int) -> None:
        self._listeners.pop(session, None)

    def listener(self, session: int) -> Listener | None:
        return self._listeners.get(session)

    def end_sessions(self) -> None:
        """Tell every client that the daemon stops, and end its session."""
        for listener in list(self._listeners.values()):
            listener.ended(None)

    def _end_lost_sessions(self) -> None:
        """A client that fell silent keeps its stream open: its session is over all the same."""
        for session in self._listeners.keys() - self.state.tables.sessions.keys():
            why = "the heartbeats stopped for too long; open a new session"
            self._listeners[session].ended(UnknownSession(why))

    # ---- writes

    def begin_write(self, order: WriteOrder) -> Write:
        """Open the store's writer for a reservation that is being written from now on.

        If it was lost since it was granted, the write has ended already.
        """
        write = Write(order, self.stores[order.entry.tier])
        if order.token in self.state.tables.reservations:
            self.writes[order.token] = write
        else:
            # Its room may be somebody else's by now: what still comes is not written there.
            write.stopping = True
            why = "the reservation was lost before its bytes came"
            write.end(SaveEnded((order.token,), SaveStatus.LOST, why))
        return write

    def stop_write(self, write: Write, outcome: SaveStatus, why: str) -> None:
        """The bytes will not be complete, or are wrong."""
        if write.ended is None:
            self.post(WriteStopped(write.token, outcome, why, self.clock.now_ns()))

    # ---- out

    def _carry_out(self, effects: list[Effect]) -> None:
        """Every change of the index first: a row is gone before anything else happens to its
        room, and an entry is there before any client is told so."""
        self._change_index(effects)
        for effect in effects:
            if type(effect) is IndexPut or type(effect) is IndexDelete:
                continue
            try:
                self._do(effect)
            except Exception as problem:
                log.critical("effect_failed", effect=type(effect).__name__, exc_info=problem)
                self.health.fault("effects", f"{type(effect).__name__} failed: {problem!r}")
        tell_published(self.entry_listener, effects)

    def _change_index(self, effects: list[Effect]) -> None:
        index = self.index
        try:
            if not index.revoked:  # of one that was nobody believes anything
                change(index, effects)
        except Exception as problem:
            # A row that should be gone may stand.
            log.critical("index_failed", exc_info=problem)
            why = f"a change of it failed: {problem!r}"
            self._reindexing.revoke(index, why, replace=not self.gate.recounting)
        else:
            self._reindexing.follow(effects)
        self.change_listener.follow(effects)

    def _reindexed(self, index: IndexWriter) -> None:
        self.index.close()
        self.index = index

    def _do(self, effect: Effect) -> None:
        match effect:
            case SaveEnded():
                for token in effect.tokens:
                    if (ended := self.writes.pop(token, None)) is not None:
                        ended.end(effect)
            case IndexPut() | IndexDelete():
                pass
            case Reply():
                reply = self._replies.pop(effect.request, None)
                if reply is not None and not reply.done():
                    reply.set_result(effect.answer)
            case Erase():
                self.orders.forget(effect.tier, effect.entries)
            case Commit():
                writes = [(token, self.writes[token].writer) for token in effect.tokens]
                self.orders.commit(effect.tier, writes)
            case StopWriting():
                write = self.writes.get(effect.token)
                if write is not None:
                    write.stopping = True
                if write is None or not write.busy:
                    # Nothing is being written at this moment, or ever was.
                    why = "the reservation was lost"
                    now_ns = self.clock.now_ns()
                    self.post(WriteStopped(effect.token, SaveStatus.LOST, why, now_ns))
            case Verify():
                self.verifications.request(effect.entry)
            case RecordUsage():
                self.orders.record_usage(effect.tier, effect.usages)
                if self.entry_listener is not None:
                    self.entry_listener.used(effect.usages)
            case TellClaimLost() | TellReservationLost():
                listener = self._listeners.get(effect.session)
                if listener is not None:
                    listener.told(effect)
            case _:
                assert_never(effect)

    def _commit_done(self, result: CommitResult) -> None:
        """On a committer's thread."""
        now_ns = self.clock.now_ns()
        for start in range(0, len(result.tokens), _COMMITTED_AT_ONCE):
            tokens = result.tokens[start : start + _COMMITTED_AT_ONCE]
            if result.error is None:
                self.post_threadsafe(Committed(tokens, now_ns))
            else:
                full = isinstance(result.error, StoreFull)
                self.post_threadsafe(CommitFailed(tokens, full, str(result.error), now_ns))

    def damaged(self, entry: Entry, why: str) -> None:
        """The bytes of an entry are not those that were saved: it can't be found any more."""
        log.error("entry_damaged", key=entry.key.hex(), tier=entry.tier.label, why=why)
        self.post(EntryDamaged(entry.key, entry.generation, why, self.clock.now_ns()))

    # ---- time

    def _flush(self) -> None:
        if self._closed:
            return
        self._flusher = self._loop.call_later(FLUSH_INTERVAL_S, self._flush)
        self.freezer.published(self.state.tables.tier_counters.values())
        self._tick(flush=True)
        self._end_lost_sessions()

    def _tick(self, *, flush: bool = False) -> None:
        self.post(Tick(self.clock.now_ns(), flush, self.lag.take_late_ns()))

    def _arm(self) -> None:
        """Set the timer to the state's next deadline."""
        due_ns = self.state.next_deadline_ns()
        if due_ns == self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_ns = None, due_ns
        if due_ns is not None:
            delay_s = max(0, due_ns - self.clock.now_ns()) / 1e9
            self._timer = self._loop.call_later(delay_s, self._due)

    def _due(self) -> None:
        self._timer, self._timer_ns = None, None
        self._tick()

    def unhealthy(self) -> dict[str, str]:
        """What does not work, with the reason; empty when everything does. On any thread."""
        return self.health.unhealthy() | self.orders.unhealthy()

    def notices(self) -> dict[str, str]:
        """What is less than it could be while the daemon serves. On any thread."""
        return self.orders.notices() | self.health.notices.copy()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more questions and let what moves bytes finish. False: some did not."""
        self.gate.stopping = True
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("drain_timed_out", still_working=self.calls_working)
            return False
        return True

    async def close(self, within_s: float = CLOSED_WITHIN_S) -> bool:
        """Hand everything durable over and end the threads; no questions after this. False: some
        are stuck in I/O, and what they use must stay open until the process ends."""
        self.gate.stopping = True
        self._flusher.cancel()
        self.lag.close()
        self.devices.stop()
        self._tick(flush=True)
        while self.state.busy and not self._closed:
            self._go_on()
        if self._recount is not None:
            self._recount.cancel()
        self._reindexing.abandon()
        closings = (*self.orders.closings(), self.verifications.close, self.devices.close)
        ended = await ended_within(within_s, closings)
        self._closed = True
        self.index.close()
        if self._timer is not None:
            self._timer.cancel()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(Refused(stopping()))
        return ended


def _answer_of(answer: Answer, expect: type[A]) -> A:
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, expect)
    return answer
