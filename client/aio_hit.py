"""What the asyncio client gives back: hits and reservations with coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from ..proto.errors import CallerError, ClientClosed, InvalidSize
from ..proto.keys import Key
from .hits import Hit
from .owner import Owner
from .results import Entry, MissReason, ReserveStatus, RestoreResult, SaveOutcome
from .saves import Reservation
from .threads import Threads
from .wire.transport import ReserveItem

if TYPE_CHECKING:
    from .buffers import Payload

P = ParamSpec("P")
T = TypeVar("T")

#: Calls that wait, for saves in flight or for their own, have threads apart from the others, and
#: so many at most: beyond, they wait their turn.
MAX_WAITING_CALLS: Final = 64


class Runner:
    """Runs blocking calls in threads: those that may wait long in some, the others in others.

    A call whose awaiting task is cancelled goes on to its end if it has begun, and what it claims
    or reserves is given back then; if it has not begun, it is not done.
    """

    def __init__(self, max_concurrency: int, deadline_ms: int, owner: Owner) -> None:
        """`deadline_ms` is that of calls which have none of their own."""
        if max_concurrency < 1:
            raise InvalidSize(f"max_concurrency is at least 1, not {max_concurrency}")
        self._deadline_ms = deadline_ms
        self._owner = owner
        self._calls = Threads("prefixd-aio", max_concurrency)
        self._waiting_calls = Threads("prefixd-aio-wait", MAX_WAITING_CALLS)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`call(...)` in a thread; with a `wait_ms` it is one that waits. Its `deadline_ms`, where
        it has one, counts from now and not from when a thread is free. Raises ClientClosed."""
        threads = self._waiting_calls if kwargs.get("wait_ms") else self._calls
        return await self._run(threads, partial(call, *args, **kwargs))

    async def run_waiting(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for a call that waits for something else than its own answer."""
        return await self._run(self._waiting_calls, partial(call, *args, **kwargs))

    async def _run(self, threads: Threads, call: partial[T]) -> T:
        self._owner.check()  # a fork has none of the threads
        given = call.keywords.get("deadline_ms")
        within_ms = given if isinstance(given, int) else self._deadline_ms
        since_s = monotonic()
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if "deadline_ms" in call.keywords:
                waited_ms = round((monotonic() - since_s) * 1e3)
                call.keywords["deadline_ms"] = within_ms - waited_ms
            try:
                future.set_result(call())
            except BaseException as problem:
                future.set_exception(problem)

        if not threads.submit(work):
            raise ClientClosed("this client is closed")
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # In a thread, whether the call has ended or not: giving back may block.
            future.add_done_callback(lambda done: self._calls.submit(partial(_give_back, done)))
            raise

    def close(self, within_s: float) -> None:
        """Take no more calls, and wait for those that are under way. Not in the loop's thread."""
        until_s = monotonic() + within_s
        for threads in (self._calls, self._waiting_calls):
            threads.close()
        for threads in (self._calls, self._waiting_calls):
            threads.join(max(0.0, until_s - monotonic()))


def _give_back(future: Future[T]) -> None:
    """The result of this call is not wanted any more."""
    if future.cancelled() or future.exception() is not None:
        return
    result = future.result()
    try:
        if isinstance(result, Hit):
            result.release()
        elif isinstance(result, list):
            for each in result:
                if isinstance(each, Reservation):
                    each.cancel()
    except CallerError:
        pass  # the client was closed meanwhile, which gave everything back


class AsyncHit:
    """`hit.Hit` with coroutines. Release it with `async with`, or with `release`."""

    def __init__(self, hit: Hit, runner: Runner) -> None:
        """Made by the client."""
        self.hit = hit
        self._runner = runner

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.hit.entries

    @property
    def positions(self) -> tuple[int, ...]:
        return self.hit.positions

    @property
    def token_counts(self) -> tuple[int, ...]:
        return self.hit.token_counts

    @property
    def miss(self) -> MissReason | None:
        return self.hit.miss

    @property
    def keys(self) -> list[Key]:
        return self.hit.keys

    @property
    def token_count(self) -> int:
        return self.hit.token_count

    @property
    def payload_bytes(self) -> int:
        return self.hit.payload_bytes

    @property
    def claimed(self) -> bool:
        return self.hit.claimed

    @property
    def lost(self) -> bool:
        return self.hit.lost

    @property
    def released(self) -> bool:
        return self.hit.released

    @property
    def buffers(self) -> list[memoryview] | None:
        return self.hit.buffers

    def __len__(self) -> int:
        return len(self.hit)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.hit)

    def __bool__(self) -> bool:
        return bool(self.hit)

    def __repr__(self) -> str:
        return f"<Async{repr(self.hit)[1:]}"

    async def restore_into(
        self,
        buffers: Sequence[Payload],
        *,
        indices: Sequence[int] | None = None,
        deadline_ms: int | None = None,
    ) -> RestoreResult:
        """`Hit.restore_into`. When it is cancelled, it may go on writing into the buffers until
        its deadline."""
        return await self._runner.run(
            self.hit.restore_into, buffers, indices=indices, deadline_ms=deadline_ms
        )

    async def read(self, index: int, *, deadline_ms: int | None = None) -> bytes | None:
        """`Hit.read`."""
        return await self._runner.run(self.hit.read, index, deadline_ms=deadline_ms)

    async def views(self, index: int) -> list[memoryview] | None:
        """`Hit.views`."""
        return await self._runner.run(self.hit.views, index)

    async def layer(
        self, index: int, layer: int, *, deadline_ms: int | None = None
    ) -> bytes | None:
        """`Hit.layer`."""
        return await self._runner.run(self.hit.layer, index, layer, deadline_ms=deadline_ms)

    async def token_ids(self, index: int, *, deadline_ms: int | None = None) -> bytes | None:
        """`Hit.token_ids`."""
        return await self._runner.run(self.hit.token_ids, index, deadline_ms=deadline_ms)

    async def release_some(self, indices: Sequence[int], *, deadline_ms: int | None = None) -> bool:
        """`Hit.release_some`."""
        return await self._runner.run(self.hit.release_some, indices, deadline_ms=deadline_ms)

    async def release(self, *, deadline_ms: int | None = None) -> bool:
        """`Hit.release`."""
        return await self._runner.run(self.hit.release, deadline_ms=deadline_ms)

    async def __aenter__(self) -> AsyncHit:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.release()


class AsyncReservation:
    """`writing.Reservation` with coroutines; cancelled by the end of an `async with`."""

    def __init__(self, reservation: Reservation, runner: Runner) -> None:
        """Made by the client."""
        self.reservation = reservation
        self._runner = runner

    @property
    def item(self) -> ReserveItem:
        return self.reservation.item

    @property
    def key(self) -> Key:
        return self.reservation.key

    @property
    def status(self) -> ReserveStatus:
        return self.reservation.status

    @property
    def owner(self) -> str:
        return self.reservation.owner

    @property
    def age_ms(self) -> int:
        return self.reservation.age_ms

    @property
    def message(self) -> str:
        return self.reservation.message

    @property
    def granted(self) -> bool:
        return self.reservation.granted

    @property
    def lost(self) -> bool:
        return self.reservation.lost

    def __repr__(self) -> str:
        return f"<Async{repr(self.reservation)[1:]}"

    async def write(self, payload: Payload, *, deadline_ms: int | None = None) -> SaveOutcome:
        """`Reservation.write`."""
        return await self._runner.run(self.reservation.write, payload, deadline_ms=deadline_ms)

    async def cancel(self, *, deadline_ms: int | None = None) -> bool:
        """`Reservation.cancel`."""
        return await self._runner.run(self.reservation.cancel, deadline_ms=deadline_ms)

    async def __aenter__(self) -> AsyncReservation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cancel()
