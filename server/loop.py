"""The one event loop: applies events to `MetaState` and carries out its effects.

Everything here runs on the loop's thread, except what is handed to an executor or a committer;
their results come back as events through `post_threadsafe`. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar, assert_never

import structlog

from ..proto.errors import Draining, PrefixdError
from ..proto.keys import Key
from ..proto.record import RecordHead, crc32c
from ..proto.vocabulary import Tier
from ..tiers.store import EntryWriter, Store, StoreError, StoreFull
from .answers import Answer, ClaimAnswer, Refused, ReserveAnswer, WriteOrder
from .clock import Clock
from .committer import CommitResult, Committer
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
from .index import Index, IndexChange, IndexFailed
from .staging import Staging
from .state import MetaState
from .tables import Entry

log = structlog.get_logger("prefixd.loop")

A = TypeVar("A", bound=Answer)

#: How often use counts are handed to the stores, so that an order survives a crash almost whole.
FLUSH_INTERVAL_S = 1.0

SessionNote = TellClaimLost | TellReservationLost


class Write:
    """The bytes of one reservation on their way into a store.

    `busy` says that another thread is copying into its room: a lost reservation then keeps
    its room until that ended.
    """

    __slots__ = ("busy", "ended", "order", "stopping", "writer")

    def __init__(self, order: WriteOrder, writer: EntryWriter, ended: asyncio.Future[SaveEnded]):
        self.order = order
        self.writer = writer
        self.ended = ended
        self.busy = False
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
        #: background tasks that are ill, with the reason; empty is healthy
        self.illnesses: dict[str, str] = {}
        self.draining = False
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._applying = False
        self._replies: dict[int, asyncio.Future[Answer]] = {}
        self._last_request = 0
        self._notes: dict[int, Callable[[SessionNote | None], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns: int | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._committers = {
            tier: Committer(store, self._commit_done)
            for tier, store in stores.items()
            if store.blocking
        }
        self._freezer = Freezer()
        self._flusher = self._loop.call_later(FLUSH_INTERVAL_S, self._flush)

    # ---- in

    def next_request(self) -> int:
        """A number for a question."""
        self._last_request += 1
        return self._last_request

    async def ask(self, question: Question, expect: type[A]) -> A:
        """Apply a question and wait for its answer. Raises what the state refuses it with."""
        if self.draining:
            raise Draining("the daemon is stopping; try again when it is back")
        reply: asyncio.Future[Answer] = self._loop.create_future()
        self._replies[question.request] = reply
        self.post(question)
        try:
            answer = await reply
        except asyncio.CancelledError:
            self._replies.pop(question.request, None)
            self.post(RequestDropped(question.request, self.clock.now_ns()))
            if reply.done() and not reply.cancelled():
                self._undo(question, reply.result())
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
        self._events.append(event)
        if self._applying:
            return
        self._applying = True
        try:
            while self._events:
                self._carry_out(self.state.apply(self._events.popleft()))
        finally:
            self._applying = False
        self._arm()

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

    def subscribe(self, session: int, notify: Callable[[SessionNote | None], None]) -> None:
        self._notes[session] = notify

    def unsubscribe(self, session: int) -> None:
        self._notes.pop(session, None)
        staging = self.stagings.pop(session, None)
        if staging is not None:
            staging.close()

    def end_sessions(self) -> None:
        """Tell every client that the daemon stops, and end its session."""
        for notify in list(self._notes.values()):
            notify(None)

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
            self._change_index(changes)
        for effect in effects:
            self._do(effect)

    def _change_index(self, changes: list[IndexChange]) -> None:
        try:
            self.index.apply(changes)
        except IndexFailed as problem:
            self.illnesses["index"] = str(problem)
            log.error("index_failed", error=str(problem), changes=len(changes))

    def _do(self, effect: Effect) -> None:
        match effect:
            case IndexPut() | IndexDelete() | IndexClaim():
                pass
            case Reply():
                reply = self._replies.pop(effect.request, None)
                if reply is not None and not reply.done():
                    reply.set_result(effect.answer)
            case Erase():
                self.erase(effect.tier, effect.keys)
            case Commit():
                writes = [(token, self.writes[token].writer) for token in effect.tokens]
                self._committers[effect.tier].commit(writes)
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
                self._spawn(self._verify(effect.entry))
            case RecordUsage():
                committer = self._committers.get(effect.tier)
                if committer is not None:
                    committer.record_usage(effect.usages)
                else:
                    self.stores[effect.tier].record_usage(effect.usages)
            case TellClaimLost() | TellReservationLost():
                notify = self._notes.get(effect.session)
                if notify is not None:
                    notify(effect)
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

    def erase(self, tier: Tier, keys: tuple[Key, ...]) -> None:
        """Let a store forget keys that nobody can find any more."""
        committer = self._committers.get(tier)
        if committer is not None:
            committer.erase(keys)
        else:
            self.stores[tier].apply((), keys)

    # ---- verification

    async def read_problem(self, entry: Entry) -> str:
        """Read a whole entry and compare its checksum; empty when it is what was saved."""
        return await self._loop.run_in_executor(self.executor, self._read_problem, entry)

    def _read_problem(self, entry: Entry) -> str:
        head = head_of(entry)
        try:
            crc = 0
            for view in self.stores[entry.tier].read(head, entry.location, 0, entry.payload_bytes):
                crc = crc32c(view, crc)
        except StoreError as problem:
            return str(problem)
        if crc == entry.payload_crc32c:
            return ""
        return f"the stored bytes have CRC32C {crc:08x}, {entry.payload_crc32c:08x} was saved"

    async def _verify(self, entry: Entry) -> None:
        problem = await self.read_problem(entry)
        if problem:
            log.error("entry_damaged", key=entry.key.hex(), tier=entry.tier.label, why=problem)
            self.post(EntryDamaged(entry.key, entry.generation, problem, self.clock.now_ns()))

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
        counters = self.state.tables.tier_counters.values()
        self._freezer.published(sum(c.saves + c.recovered_entries for c in counters))
        self.post(Tick(self.clock.now_ns(), flush=True))
        self._flusher = self._loop.call_later(FLUSH_INTERVAL_S, self._flush)

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
        ill = dict(self.illnesses)
        for tier, committer in self._committers.items():
            if committer.failure is not None:
                ill[f"{tier.label} commit"] = committer.failure
        return ill

    # ---- end

    async def drain(self, timeout_s: float) -> bool:
        """Take no more questions and let what moves bytes finish. False: some did not."""
        self.draining = True
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
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        for committer in self._committers.values():
            await self._loop.run_in_executor(None, committer.close)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(Refused(_stopping()))


def _stopping() -> PrefixdError:
    return Draining("the daemon is stopping; try again when it is back")


def head_of(entry: Entry) -> RecordHead:
    """What a store needs to know of an entry in order to read it."""
    return RecordHead(
        key=entry.key,
        generation=entry.generation,
        payload_bytes=entry.payload_bytes,
        token_count=entry.token_count,
        layer_count=entry.layer_count,
        reason=entry.reason,
        tier=entry.tier,
        created_ns=entry.generation,
        # A store finds the payload behind them by their length alone.
        token_ids=bytes(entry.token_ids_bytes),
    )
