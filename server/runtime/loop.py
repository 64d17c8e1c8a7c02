"""The one event loop: applies events to `MetaState` and carries out its effects.

Everything here runs on the loop's thread, except calls that are handed to an executor or a
committer; their results come back as events through `post_threadsafe`. The state alone decides.

A failure here makes the daemon unhealthy, which the health service shows, and never ends the loop:
if one effect can't be carried out, the others are. The daemon stops (`broken`) only if an event
left the accounting of the state wrong: no bytes are better than wrong bytes.

Nothing here takes long: work that the state leaves for later (`MetaState.busy`) goes on in the next
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
from ..core.entries import EntryState
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
    TierChanged,
    WorkLeft,
    WriteBegan,
    WriteStopped,
)
from ..core.state import MetaState
from .changes import ChangeLog
from .clock import Clock, LoopLag
from .committer import CommitResult, Committers
from .devices import Devices
from .gate import Gate, stopping
from .index import IndexWriter
from .limited_log import LimitedLog
from .listeners import EntryListener, Listener, Tracing
from .process_memory import Freezer
from .reindexing import Reindexing, change
from .rounds import recount
from .supervision import Health, Supervisor, ended_within
from .verification import Verifications
from .writes import Write, end

log = structlog.get_logger("prefixd.loop")
_damage_log = LimitedLog("prefixd.loop")

A = TypeVar("A", bound=Answer)

#: How often usage is recorded in the stores: after a crash the eviction order is almost complete.
FLUSH_INTERVAL_S: Final = 1.0

#: How long a stop waits for threads to end.
CLOSED_WITHIN_S: Final = 3.0

#: Saves that one `Committed` event reports at most.
_COMMITTED_AT_ONCE: Final = 512


class Core:
    """The running state: `MetaState`, its stores, its index and its clock.

    Belongs to the event loop. The caller closes `stores`; `close` closes the index.
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
        self.devices = Devices(self.stores, executor, clock, self.health, self._tier_changed)
        self.verifications = Verifications(self.stores, self.devices, self.health, self.damaged)
        self.supervisor = Supervisor(self.health, self.give_up)
        self.gate = Gate()
        #: set when the daemon has to stop; `broken_why` is the reason
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
        #: Watchers need one with room.
        self.change_log = ChangeLog(0)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self.committers = Committers(
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
        """A new number for a question."""
        self._last_request += 1
        return self._last_request

    async def ask(self, question: Question, expect: type[A]) -> A:
        """Apply a question and wait for its answer. Raises the error if the state refuses it."""
        reply = self._ask(question)
        try:
            # Shielded: what is granted while the caller is being cancelled has to be undone.
            answer = reply.result() if reply.done() else await asyncio.shield(reply)
        except asyncio.CancelledError:
            if self._replies.pop(question.request, None) is None:
                self._undo(question, reply.result())
            else:
                self.post(RequestDropped(question.request, self.clock.now_ns()))
            raise
        return _answer_of(answer, expect)

    def ask_now(self, question: Question, expect: type[A]) -> A:
        """`ask` for a question that waits for nothing; not while another event is applied."""
        return _answer_of(self._ask(question).result(), expect)

    def _ask(self, question: Question) -> asyncio.Future[Answer]:
        if self._closed:
            raise stopping()
        self.gate.check(question)
        reply: asyncio.Future[Answer] = self._loop.create_future()
        self._replies[question.request] = reply
        self.post(question)
        return reply

    def _undo(self, question: Question, answer: Answer) -> None:
        """Give back what was granted: the caller is gone, and will never use it."""
        now_ns = self.clock.now_ns()
        match question, answer:
            case ClaimAsked(), ClaimAnswer() if answer.claim:
                claims = (answer.claim,)
                self.post(ReleaseAsked(self.next_request(), question.session, claims, now_ns))
            case ReserveAsked(), ReserveAnswer():
                orders = [r for r in answer.results if isinstance(r, WriteOrder)]
                tokens = tuple(order.token for order in orders)
                # A write ends once its writer has stopped.
                self.post(CancelAsked(self.next_request(), question.session, tokens, now_ns))
            case WriteBegan(), WriteOrder():
                tokens = (answer.token,)
                self.post(CancelAsked(self.next_request(), question.session, tokens, now_ns))

    def post(self, event: Event) -> None:
        """Apply an event, and the events that its effects post, in order."""
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
        """A bug. Its effects are lost, perhaps a deletion from the index among them, so the index
        is revoked. If a recount finds the accounting right, the daemon goes on."""
        kind = type(event).__name__
        what = f"{kind} failed: {problem!r}"
        log.critical("event_failed", event_kind=kind, exc_info=problem)
        self.health.fault("state", what)
        self._reindexing.revoke(self.index, what, replace=False)
        self.change_log.lost()
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
        """Have the daemon stop, because it can't go on."""
        self.gate.stopping = True
        self.broken_why = self.broken_why or why
        self.broken.set()

    def _committer_died(self, tier: Tier, problem: BaseException) -> None:
        """On its thread. Vital: saves would wait for it for ever."""
        self.supervisor.died_threadsafe(f"{tier.label} committer", problem, vital=True)

    def post_threadsafe(self, event: Event) -> None:
        """`post`, from any thread. Does nothing once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.post, event)
        except RuntimeError:
            log.debug("event_after_close", kind=type(event).__name__)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around calls that move bytes: `drain` waits for them."""
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
        """End the streams of sessions that were lost because their heartbeats stopped."""
        for session in self._listeners.keys() - self.state.tables.sessions.keys():
            why = "the heartbeats stopped for too long; open a new session"
            self._listeners[session].ended(UnknownSession(why))

    # ---- writes

    def begin_write(self, order: WriteOrder) -> Write:
        """Open the store's writer for a reservation. If the reservation was lost since it was
        granted, the returned write has ended."""
        token = order.token
        write = Write(order, self.stores[order.entry.tier])
        if token in self.state.tables.reservations:
            self.writes[token] = write
        else:
            # Its room may be reused by now: nothing more is written there.
            write.stopping = True
            why = "the reservation was lost before its bytes came"
            end((write,), SaveEnded((token,), SaveStatus.LOST, why))
        return write

    def stop_write(self, write: Write, outcome: SaveStatus, why: str) -> None:
        """End a write whose bytes are incomplete or wrong."""
        if write.ended is None:
            self.post(WriteStopped(write.token, outcome, why, self.clock.now_ns()))

    # ---- out

    def _carry_out(self, effects: list[Effect]) -> None:
        """Changes of the index come first: a row is gone before its room is reused, and an entry
        is listed before any client learns of it."""
        self._change_index(effects)
        for effect in effects:
            if type(effect) is IndexPut or type(effect) is IndexDelete:
                continue
            try:
                self._do(effect)
            except Exception as problem:
                log.critical("effect_failed", effect=type(effect).__name__, exc_info=problem)
                self.health.fault("effects", f"{type(effect).__name__} failed: {problem!r}")
        listener = self.entry_listener
        if listener is not None:
            for effect in effects:
                if type(effect) is IndexPut:
                    listener.published(effect.entries)

    def _change_index(self, effects: list[Effect]) -> None:
        index = self.index
        try:
            if not index.revoked:  # readers ignore a revoked one
                change(index, effects)
        except Exception as problem:
            # A row that should be gone may still be listed.
            log.critical("index_failed", exc_info=problem)
            why = f"a change of it failed: {problem!r}"
            self._reindexing.revoke(index, why, replace=not self.gate.recounting)
        else:
            self._reindexing.follow(effects)
        self.change_log.follow(effects)

    def _reindexed(self, index: IndexWriter) -> None:
        self.index.close()
        self.index = index
        index.set_hanging(self.devices.hung)

    def index_holds(self, entries: int) -> None:
        """Replace the index by a larger one, unless this one has room for so many entries."""
        if self.index.make_larger(entries):
            why = "a tier is larger than it was known to be"
            self._reindexing.revoke(self.index, why, replace=not self.gate.recounting)

    def _tier_changed(self, event: TierChanged) -> None:
        self.index.set_hanging(self.devices.hung)
        self.post(event)

    def _do(self, effect: Effect) -> None:
        match effect:
            case SaveEnded():
                began = [self.writes.pop(token, None) for token in effect.tokens]
                end([write for write in began if write is not None], effect)
            case IndexPut() | IndexDelete():
                pass
            case Reply():
                reply = self._replies.pop(effect.request, None)
                if reply is not None and not reply.done():
                    reply.set_result(effect.answer)
            case Erase():
                self.committers.forget(effect.tier, effect.entries)
            case Commit():
                writes = [(token, self.writes[token].writer) for token in effect.tokens]
                self.committers.commit(effect.tier, writes)
            case StopWriting():
                write = self.writes.get(effect.token)
                if write is not None:
                    write.stopping = True
                if write is None or not write.busy:
                    # Nothing is being written now.
                    why = "the reservation was lost"
                    now_ns = self.clock.now_ns()
                    self.post(WriteStopped(effect.token, SaveStatus.LOST, why, now_ns))
            case Verify():
                self.verifications.request(effect.entry)
            case RecordUsage():
                self.committers.record_usage(effect.tier, effect.usages)
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

    def damaged(self, entry: EntryState, why: str) -> None:
        """Drop an entry whose bytes are not those that were saved."""
        _damage_log.error("entry_damaged", key=entry.key.hex(), tier=entry.tier.label, why=why)
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
        """What does not work, and why; empty when everything works. On any thread."""
        return self.health.unhealthy() | self.committers.unhealthy()

    def notices(self) -> dict[str, str]:
        """What is less than it could be while the daemon serves. On any thread."""
        return self.committers.notices() | self.health.notices.copy()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse questions, and wait for calls that move bytes. False: some did not end."""
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
        """Commit what is pending and end the threads; no questions after this. False: some threads
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
        closings = (*self.committers.closings(), self.verifications.close, self.devices.close)
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
