"""The one event loop: applies events to `MetaState` and carries out its effects.

Everything here runs on the loop's thread, except what is handed to an executor or a committer;
their results come back as events through `post_threadsafe`. Nothing here decides anything.

What fails here is an illness, which the health service shows, and never the end of the loop: an
effect that can't be carried out does not take the others with it. Only where an event left the
books of the state wrong does the daemon stop (`broken`): better nothing than wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar, assert_never

import structlog

from ..proto.errors import Draining, PrefixdError, UnknownSession
from ..proto.record import RecordHead
from ..proto.vocabulary import Tier
from ..tiers.store import EntryWriter, Store, StoreFull
from .answers import Answer, ClaimAnswer, Refused, ReserveAnswer, WriteOrder
from .clock import Clock
from .committer import CommitResult
from .effects import (
    Commit,
    Effect,
    Erase,
    IndexClaim,
    IndexDelete,
    IndexPut,
    RecordUsage,
    Reply,
    SaveEnded,
    StopWriting,
    TellClaimLost,
    TellReservationLost,
    Verify,
)
from .events import (
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
    SaveOutcome,
    Tick,
    WriteBegan,
    WriteStopped,
)
from .garbage import Freezer
from .index import Index
from .orders import StoreOrders
from .staging import Staging
from .state import MetaState
from .tables import Entry
from .verifying import read_problem

log = structlog.get_logger("prefixd.loop")

A = TypeVar("A", bound=Answer)

#: How often use counts are handed to the stores, so that an order survives a crash almost whole.
FLUSH_INTERVAL_S: Final = 1.0

SessionNote = TellClaimLost | TellReservationLost

#: What is still asked of a daemon that stops: whatever ends what was begun.
_ENDINGS: Final = (ReleaseAsked, CancelAsked, WriteBegan)


class Listener(Protocol):
    """What the core tells the stream of a session. Neither may raise."""

    def told(self, note: SessionNote) -> None:
        """Something of its session was lost."""

    def ended(self, why: PrefixdError | None) -> None:
        """The session is over, or (None) the daemon stops. Told again until it unsubscribes."""


class Write:
    """The bytes of one reservation on their way into a store.

    `busy` counts the messages that other threads copy into its room, now or soon: a lost
    reservation then keeps its room until that ended.
    """

    __slots__ = ("busy", "ended", "order", "stopping", "writer")

    def __init__(self, order: WriteOrder, writer: EntryWriter, ended: asyncio.Future[SaveEnded]):
        self.order = order
        self.writer = writer
        self.ended = ended
        self.busy = 0
        self.stopping = False


class Core:
    """The running state: `MetaState`, its stores, its index and its clock.

    Owned by the event loop. `stores` and `index` are given, and closed by whoever made them.
    """

    def __init__(
        self,
        state: MetaState,
        stores: Mapping[Tier, Store],
        index: Index,
        executor: Executor,
        clock: Clock,
    ) -> None:
        self.state = state
        self.stores = dict(stores)
        self.index = index
        self.executor = executor
        self.clock = clock
        self.writes: dict[int, Write] = {}
        #: by session: memory that its client writes its saves into
        self.stagings: dict[int, Staging] = {}
        #: what does not work, with the reason, beside what `ill` asks for; empty is healthy
        self.illnesses: dict[str, str] = {}
        self.draining = False
        #: set when the state can't be trusted any more: the daemon has to stop
        self.broken = asyncio.Event()
        self._closed = False
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._applying = False
        self._replies: dict[int, asyncio.Future[Answer]] = {}
        self._last_request = 0
        self._listeners: dict[int, Listener] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        #: by generation: entries that are being read back
        self._verifying: set[int] = set()
        self.orders = StoreOrders(self.stores, self._commit_done)
        self._freezer = Freezer()
        self._flusher = self._loop.call_later(FLUSH_INTERVAL_S, self._flush)

    # ---- in

    def next_request(self) -> int:
        """A number for a question."""
        self._last_request += 1
        return self._last_request

    async def ask(self, question: Question, expect: type[A]) -> A:
        """Apply a question and wait for its answer. Raises what the state refuses it with."""
        if self._closed or (self.draining and not isinstance(question, _ENDINGS)):
            raise _stopping()
        reply: asyncio.Future[Answer] = self._loop.create_future()
        self._replies[question.request] = reply
        self.post(question)
        try:
            # Shielded: what is granted while the asker is being cancelled has to be known here.
            answer = reply.result() if reply.done() else await asyncio.shield(reply)
        except asyncio.CancelledError:
            if self._replies.pop(question.request, None) is None:
                self._undo(question, reply.result())
            else:
                self.post(RequestDropped(question.request, self.clock.now_ns()))
            raise
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, expect)
        return answer

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
                # What is being written ends when somebody says that nobody writes it.
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

    def _apply(self, event: Event) -> None:
        try:
            effects = self.state.apply(event)
        except Exception as problem:
            self._event_failed(event, problem)
            return
        self._carry_out(effects)

    def _event_failed(self, event: Event, problem: Exception) -> None:
        """A bug. Its effects are lost, a deletion from the index perhaps among them; if the
        books still balance, that is all, for the index is mended."""
        what = f"{type(event).__name__} failed: {problem!r}"
        log.critical("event_failed", event_kind=type(event).__name__, exc_info=problem)
        self.illnesses["state"] = what
        self.index.distrust(what)
        request = getattr(event, "request", None)
        if request in self._replies:
            self._replies.pop(request).set_result(Refused(PrefixdError(what)))
        troubles = self.state.check()
        if troubles:
            log.critical("state_broken", problems=troubles[:10])
            self.draining = self._closed = True
            self.broken.set()

    def post_threadsafe(self, event: Event) -> None:
        """`post`, from any thread; nothing happens any more once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.post, event)
        except RuntimeError:
            log.debug("event_after_close", kind=type(event).__name__)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Something is moving bytes: a stop waits for it, as long as it is willing to wait."""
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    # ---- sessions

    def subscribe(self, session: int, listener: Listener) -> None:
        self._listeners[session] = listener

    def unsubscribe(self, session: int) -> None:
        self._listeners.pop(session, None)
        staging = self.stagings.pop(session, None)
        if staging is not None:
            staging.close()

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
        ended: asyncio.Future[SaveEnded] = self._loop.create_future()
        head = RecordHead(
            key=order.key,
            generation=order.generation,
            payload_bytes=order.payload_bytes,
            token_count=order.token_count,
            layer_count=order.layer_count,
            reason=order.reason,
            tier=order.tier,
            created_ns=order.generation,
            token_ids=order.token_ids,
        )
        writer = self.stores[order.tier].writer(head, order.location)
        write = Write(order, writer, ended)
        if order.token in self.state.tables.reservations:
            self.writes[order.token] = write
        else:
            why = "the reservation was lost before its bytes came"
            # Its room may be somebody else's by now: what still comes is not written there.
            write.stopping = True
            ended.set_result(SaveEnded(order.token, SaveOutcome.LOST, why))
        return write

    def stop_write(self, write: Write, outcome: SaveOutcome, why: str) -> None:
        """The bytes will not be complete, or are wrong."""
        if not write.ended.done():
            self.post(WriteStopped(write.order.token, outcome, why, self.clock.now_ns()))

    # ---- out

    def _carry_out(self, effects: list[Effect]) -> None:
        """Every change of the index first, in one transaction: a row is gone before anything
        else happens to its room, and an entry is there before anybody is told so."""
        changes = [e for e in effects if isinstance(e, IndexPut | IndexDelete | IndexClaim)]
        if changes:
            self.index.change(changes)
        for effect in effects:
            try:
                self._do(effect)
            except Exception as problem:
                log.critical("effect_failed", effect=type(effect).__name__, exc_info=problem)
                self.illnesses["effects"] = f"{type(effect).__name__} failed: {problem!r}"

    def _do(self, effect: Effect) -> None:
        match effect:
            case IndexPut() | IndexDelete() | IndexClaim():
                pass
            case Reply():
                reply = self._replies.pop(effect.request, None)
                if reply is not None and not reply.done():
                    reply.set_result(effect.answer)
            case Erase():
                self.orders.erase(effect.tier, effect.keys)
            case Commit():
                writes = [(token, self.writes[token].writer) for token in effect.tokens]
                self.orders.commit(effect.tier, writes)
            case StopWriting():
                write = self.writes.get(effect.token)
                if write is not None:
                    write.stopping = True
                if write is None or not write.busy:
                    # Nobody writes at this moment, or ever began to.
                    why = "the reservation was lost"
                    now_ns = self.clock.now_ns()
                    self.post(WriteStopped(effect.token, SaveOutcome.LOST, why, now_ns))
            case SaveEnded():
                ended = self.writes.pop(effect.token, None)
                if ended is not None and not ended.ended.done():
                    ended.ended.set_result(effect)
            case Verify():
                if effect.entry.generation not in self._verifying:
                    self._spawn(self._verify(effect.entry))
            case RecordUsage():
                self.orders.record_usage(effect.tier, effect.usages)
            case TellClaimLost() | TellReservationLost():
                listener = self._listeners.get(effect.session)
                if listener is not None:
                    listener.told(effect)
            case _:
                assert_never(effect)

    def _commit_done(self, result: CommitResult) -> None:
        """On a committer's thread."""
        now_ns = self.clock.now_ns()
        if result.error is None:
            self.post_threadsafe(Committed(result.tokens, now_ns))
        else:
            full = isinstance(result.error, StoreFull)
            self.post_threadsafe(CommitFailed(result.tokens, full, str(result.error), now_ns))

    # ---- verification

    async def read_problem(self, entry: Entry) -> str:
        """Read a whole entry and compare its checksum; empty when it is what was saved."""
        store = self.stores[entry.tier]
        return await self._loop.run_in_executor(self.executor, read_problem, store, entry)

    async def _verify(self, entry: Entry) -> None:
        self._verifying.add(entry.generation)
        try:
            problem = await self.read_problem(entry)
        finally:
            self._verifying.discard(entry.generation)
        if problem and entry.published:
            self.damaged(entry, problem)

    def damaged(self, entry: Entry, why: str) -> None:
        """The bytes of an entry are not those that were saved: nobody finds it any more."""
        log.error("entry_damaged", key=entry.key.hex(), tier=entry.tier.label, why=why)
        self.post(EntryDamaged(entry.key, entry.generation, why, self.clock.now_ns()))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("task_failed", error=repr(problem))

    # ---- time

    def _flush(self) -> None:
        if self._closed:
            return
        self._flusher = self._loop.call_later(FLUSH_INTERVAL_S, self._flush)
        counters = self.state.tables.tier_counters.values()
        self._freezer.published(sum(c.saves + c.recovered_entries for c in counters))
        self.post(Tick(self.clock.now_ns(), flush=True))
        self._end_lost_sessions()
        self.index.forget_dead_readers()
        if self.index.problem is not None:
            self.index.mend(self.state.tables.entries)

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
        self.post(Tick(self.clock.now_ns()))

    def ill(self) -> dict[str, str]:
        """What does not work, by name; empty when everything does."""
        ill = self.illnesses | self.orders.ill()
        if self.index.problem is not None:
            ill["index"] = self.index.problem
        return ill

    # ---- end

    async def drain(self, timeout_s: float) -> bool:
        """Take no more questions and let what moves bytes finish. False: some did not."""
        self.draining = True
        if self._idle.is_set():
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("drain_timed_out", still_working=self._working)
            return False
        return True

    async def close(self) -> None:
        """Hand everything durable over and end the threads. No questions after this."""
        self.draining = True
        self._flusher.cancel()
        self.post(Tick(self.clock.now_ns(), flush=True))
        for task in list(self._tasks):
            task.cancel()
        await self._loop.run_in_executor(None, self.orders.close)
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(Refused(_stopping()))


def _stopping() -> PrefixdError:
    return Draining("the daemon is stopping; try again when it is back")
