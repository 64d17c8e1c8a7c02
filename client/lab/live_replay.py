"""Replays a trace through a running daemon: real bytes, every one of them verified.

The requests are dealt in order to worker processes, each with a client of its own (`Replayer`).
The parent never touches a payload. Every worker has its own pipe, so that a worker that dies loses
only the requests that it had.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any, Final

from ...proto.errors import CallerError
from ..client import Client
from .histogram import LogHistogram
from .replayer import STEPS, LiveOptions, ReplayCounts, Replayer, RequestOutcome
from .trace import Request

#: Mismatches that are described; the others are only counted.
MAX_DESCRIBED: Final = 10


@dataclass(slots=True)
class Totals(ReplayCounts):
    """The sum of outcomes."""

    requests: int = 0
    requests_with_hit: int = 0
    unavailable_requests: int = 0
    mismatches: int = 0
    described: list[str] = field(default_factory=list)
    #: Step -> durations in nanoseconds.
    latencies: dict[str, LogHistogram] = field(
        default_factory=lambda: {step: LogHistogram() for step in STEPS}
    )
    wall_seconds: float = 0.0
    #: Calls of all workers, by the name of the rpc.
    rpcs: Counter[str] = field(default_factory=Counter)
    #: Sessions that were opened after an earlier one had ended.
    reconnects: int = 0
    #: Blocks that were hit and that no earlier request of this replay had: an earlier replay of the
    #: same trace saved them. (One worker may have saved what another is about to find.)
    earlier_blocks: int = 0
    #: Workers that ended early and lost their requests.
    workers_lost: int = 0
    #: Stopped before the end of the trace, by the user or because the daemon was away too long.
    interrupted: bool = False
    gave_up: bool = False

    def add(self, outcome: RequestOutcome) -> None:
        """Add one request."""
        self.requests += 1
        self.requests_with_hit += outcome.hit_tokens > 0
        self.unavailable_requests += outcome.unavailable
        for count in fields(ReplayCounts):
            setattr(self, count.name, getattr(self, count.name) + getattr(outcome, count.name))
        self.mismatches += len(outcome.mismatches)
        self.described += outcome.mismatches[: MAX_DESCRIBED - len(self.described)]
        for step, duration_ns in outcome.durations_ns.items():
            self.latencies[step].add(duration_ns)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were hits, 0 to 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def request_hit_rate(self) -> float:
        """Share of requests with any hit, 0 to 1."""
        return self.requests_with_hit / self.requests if self.requests else 0.0

    @property
    def good(self) -> bool:
        """Whether every byte was right and every worker finished."""
        return not (self.mismatches or self.workers_lost or self.gave_up)

    def as_dict(self) -> dict[str, Any]:
        """For JSON. The names are stable and include the units."""
        return {
            "requests": self.requests,
            "requests_with_hit": self.requests_with_hit,
            "unavailable_requests": self.unavailable_requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate_tokens": self.hit_rate,
            "hit_rate_requests": self.request_hit_rate,
            "blocks": self.blocks,
            "hit_blocks": self.hit_blocks,
            "lost_blocks": self.lost_blocks,
            "verified_bytes": self.verified_bytes,
            "mismatches": self.mismatches,
            "mismatches_described": self.described,
            "saves": dict(sorted(self.saves.items())),
            "saved_bytes": self.saved_bytes,
            "latency_ms": {step: _quantiles(self.latencies[step]) for step in STEPS},
            "wall_seconds": self.wall_seconds,
            "rpcs": dict(sorted(self.rpcs.items())),
            "reconnects": self.reconnects,
            "earlier_blocks": self.earlier_blocks,
            "workers_lost": self.workers_lost,
            "interrupted": self.interrupted,
            "gave_up": self.gave_up,
        }


def _quantiles(latencies: LogHistogram) -> dict[str, float | int | None]:
    p50, p99 = (latencies.quantile(share) / 1e6 for share in (0.5, 0.99))
    some = latencies.count > 0
    return {"count": latencies.count, "p50": p50 if some else None, "p99": p99 if some else None}


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker can take requests."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last message of a worker."""

    rpcs: dict[str, int] = field(default_factory=dict)
    #: Sessions opened after the first.
    reconnects: int = 0
    #: The daemon was away for longer than the worker may wait.
    gave_up: bool = False


def work(pipe: Connection, options: LiveOptions, number: int) -> None:
    """The worker process: replays requests from `pipe` until None, and answers with a
    `RequestOutcome` each."""
    # Ctrl-C reaches all processes on the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gave_up = False
    name = f"replay-{number}"
    with suppress(EOFError, BrokenPipeError):  # the parent is gone
        with Client(options.address, name=name, local=options.in_place) as client:
            replayer = Replayer(client, options)
            # So that connecting does not count as a part of the first request. If the daemon is
            # away, that request reports it.
            client.wait_connected()
            pipe.send(Ready())
            while not gave_up and (request := pipe.recv()) is not None:
                try:
                    outcome = replayer.replay(request)
                except CallerError as problem:
                    pipe.send(problem)
                    break
                pipe.send(outcome)
                gave_up = outcome.unavailable and not replayer.wait_for_daemon()
            counted = client.counters
        pipe.send(Finished(counted["rpcs"], max(0, counted["sessions"] - 1), gave_up))


#: How often the parent checks for signals and reports progress while no worker answers.
_TURN_S: Final = 0.2


#: Requests that a worker has at once: one in work and the next one.
_DEALT_AHEAD: Final = 2


_STOP_WITHIN_S: Final = 30.0


@dataclass(slots=True, eq=False)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    #: Requests dealt to it and not answered yet.
    dealt: int = 0
    finished: bool = False
    #: Of each of these, how many of its first blocks an earlier request of the replay had.
    known_runs: deque[int] = field(default_factory=deque)


class LiveReplay:
    """One replay. `totals` may be read while it runs, from `on_progress`."""

    def __init__(
        self,
        requests: Iterable[Request],
        options: LiveOptions,
        on_progress: Callable[[Totals], None] = lambda _: None,
    ) -> None:
        """`on_progress` is called after every request and at least five times a second."""
        self.options = options
        self.totals = Totals()
        self._requests = iter(requests)
        self._next: Request | None = None
        self._known: set[int] = set()
        self._on_progress = on_progress
        self._workers: list[_Worker] = []
        self._stopping = False
        self._started_s = 0.0
        self._first_timestamp_ms: float | None = None

    def run(self) -> Totals:
        """Replay until the end, a Ctrl-C, or the daemon is away for too long.

        A first Ctrl-C finishes the requests under way; a second one raises KeyboardInterrupt.
        Raises what reading the requests raises. No process outlives the call.
        """
        with self._interruptible():
            try:
                self._start()
                self._deal_all()
                self._finish()
            finally:
                for worker in self._workers:
                    worker.pipe.close()
                    worker.process.kill()
                    worker.process.join()
                    worker.process.close()
        return self.totals

    def stop(self) -> None:
        """Deal no more requests. Callable from a signal handler or another thread."""
        self._stopping = True

    # ---- the workers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for number in range(self.options.workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work,
                args=(theirs, self.options, number),
                name=f"replay-{number}",
                daemon=True,
            )
            process.start()
            # Only the worker keeps its end, so that the pipe closes when the worker dies.
            theirs.close()
            self._workers.append(_Worker(process, ours, dealt=1))
        # Wait, because their start does not count as a part of the replay.
        while any(worker.dealt for worker in self._workers) and not self._stopping:
            self._take(_TURN_S)
        self._started_s = time.monotonic()

    def _deal_all(self) -> None:
        ahead = 1 if self.options.speed else _DEALT_AHEAD
        more = True
        while not self._stopping:
            delay_s = 0.0
            for worker in self._idle(ahead):
                more = self._fetch()
                delay_s = self._due_in_s()
                if not more or delay_s > 0:
                    break
                self._deal(worker)
            if not more:
                break
            self._take(min(delay_s, _TURN_S) if delay_s > 0 else _TURN_S)
            if all(worker.finished for worker in self._workers):
                break

    def _idle(self, ahead: int) -> Iterator[_Worker]:
        """The workers that can take another request, the least busy first."""
        for dealt in range(ahead):
            for worker in list(self._workers):
                if worker.dealt == dealt and not worker.finished:
                    yield worker

    def _fetch(self) -> bool:
        """Read the next request into `_next` if that is empty. False at the end of the trace."""
        if self._next is None:
            self._next = next(self._requests, None)
        return self._next is not None

    def _due_in_s(self) -> float:
        """Seconds until the arrival of `_next`; 0 or less if it is due."""
        if self._next is None or not self.options.speed:
            return 0.0
        if self._first_timestamp_ms is None:
            self._first_timestamp_ms = self._next.timestamp_ms
        arrival_s = (self._next.timestamp_ms - self._first_timestamp_ms) / 1e3
        return arrival_s / self.options.speed - (time.monotonic() - self._started_s)

    def _deal(self, worker: _Worker) -> None:
        try:
            worker.pipe.send(self._next)
        except OSError:
            self._lose(worker)
            return
        assert self._next is not None
        ids = self._next.hash_ids
        known = self._known
        worker.known_runs.append(next((n for n, i in enumerate(ids) if i not in known), len(ids)))
        known.update(ids)
        self._next = None
        worker.dealt += 1

    def _take(self, timeout_s: float) -> None:
        """Handle the messages of the workers; wait at most `timeout_s` for the first one."""
        by_pipe = {worker.pipe: worker for worker in self._workers if not worker.finished}
        for pipe in wait(list(by_pipe), timeout_s):
            worker = by_pipe[pipe]  # type: ignore[index]  # wait() gives back what it was given
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                self._lose(worker)
                continue
            self._handle(worker, message)
        if self._started_s:
            self.totals.wall_seconds = time.monotonic() - self._started_s
        self._on_progress(self.totals)

    def _handle(
        self, worker: _Worker, message: Ready | RequestOutcome | CallerError | Finished
    ) -> None:
        match message:
            case Ready():
                worker.dealt -= 1
            case RequestOutcome():
                worker.dealt -= 1
                known = worker.known_runs.popleft()
                self.totals.earlier_blocks += max(0, message.hit_blocks - known)
                self.totals.add(message)
            case CallerError():  # a request that cannot be replayed
                raise message
            case Finished():
                worker.finished = True
                self.totals.rpcs.update(message.rpcs)
                self.totals.reconnects += message.reconnects
                if message.gave_up:
                    self.totals.gave_up = True
                    self._stopping = True

    def _lose(self, worker: _Worker) -> None:
        self.totals.workers_lost += 1
        worker.finished = True
        worker.dealt = 0

    def _finish(self) -> None:
        """Let every worker finish its requests and report."""
        self.totals.interrupted = self._stopping and not self.totals.gave_up
        for worker in self._workers:
            if not worker.finished:
                try:
                    worker.pipe.send(None)
                except OSError:
                    self._lose(worker)
        deadline_s = time.monotonic() + _STOP_WITHIN_S + self.options.reconnect_wait_s
        while any(not worker.finished for worker in self._workers):
            if time.monotonic() > deadline_s:
                break
            self._take(_TURN_S)
        for worker in self._workers:
            if not worker.finished:
                self._lose(worker)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C stops the dealing instead of interrupting a message."""

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self._stopping:
                signal.default_int_handler(number, frame)
            self.stop()

        try:
            before = signal.signal(signal.SIGINT, on_interrupt)
        except ValueError:  # outside the main thread the caller uses stop() instead
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
