"""Connections to the daemon on which one call at a time is made, and what makes calls on them.

There are as many connections as there were calls at once. A call that fails on its way closes its
connection, so that no answer is taken for that of another call.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

from ...proto import prefixd_pb2 as pb
from ...proto.limits import MAX_BATCH_KEYS
from .connection import Calls
from .data_wire import NoLine
from .deadline import Deadline

#: A daemon that does not take a connection in this time is asked over gRPC.
CONNECT_S: Final = 0.5


class Closable(Protocol):
    """A connection, for code that makes no calls on it: it can only be ended."""

    def shut_down(self) -> None:
        """Make the call that is under way fail. From another thread."""

    def close(self) -> None: ...


LineT = TypeVar("LineT", bound=Closable)
T = TypeVar("T")


class Lines(ABC, Generic[LineT]):
    """`connection.Calls` over lines, or `instead` of them while none can be had. Thread-safe."""

    def __init__(self, instead: Calls) -> None:
        self._instead = instead
        self._lock = threading.Lock()
        self._idle: list[LineT] = []
        self._busy: set[LineT] = set()
        self._closed = False

    @abstractmethod
    def _connect(self, timeout_s: float) -> LineT:
        """Another line. Raises NoLine."""

    def _refused(self, why: str) -> None:
        """A line turned out to be none before anything was asked."""

    @abstractmethod
    def _send(self, line: LineT, kind: str, request: object, timeout_s: float) -> None:
        """Ask for a call by the name of its request. Raises PrefixdError."""

    @abstractmethod
    def _receive(self, line: LineT, timeout_s: float) -> Any:
        """The answer. Raises PrefixdError, also what the daemon refuses the call with."""

    @contextmanager
    def line(self, timeout_s: float) -> Iterator[LineT]:
        """A line for one call, from its request to its last response. Raises NoLine."""
        line = self._taken(timeout_s)
        try:
            yield line
        except BaseException as problem:
            self._failed(line, problem)
            raise
        self._put_back(line)

    def _taken(self, timeout_s: float) -> LineT:
        """A line that is no other call's. Raises NoLine."""
        with self._lock:
            if self._closed:
                raise NoLine("these connections were closed")
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
        line = self._connect(timeout_s)
        with self._lock:
            if not self._closed:
                self._busy.add(line)
                return line
        line.close()
        raise NoLine("these connections were closed")

    def _failed(self, line: LineT, problem: BaseException) -> None:
        """Its call failed on its way."""
        with self._lock:
            self._busy.discard(line)
        line.close()
        if isinstance(problem, NoLine):
            self._refused(str(problem))

    def _put_back(self, line: LineT) -> None:
        """Its call is over: the next one may have it."""
        with self._lock:
            self._busy.discard(line)
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    def give_back(self, session: pb.SessionRef, claims: Sequence[int]) -> None:
        """Release claims without waiting for the answer. Raises NoLine, PrefixdError."""
        with self.line(CONNECT_S) as line:
            for start in range(0, len(claims), MAX_BATCH_KEYS):
                batch = claims[start : start + MAX_BATCH_KEYS]
                asked = pb.ReleaseRequest(session=session, claim_ids=batch)
                self._send(line, "give_back", asked, CONNECT_S)

    def hang_up(self) -> None:
        """The session has ended: calls under way fail, now."""
        self.close()
        with self._lock:
            for line in self._busy:
                line.shut_down()

    def close(self) -> None:
        """Hang up, now or when the calls under way have ended."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _ask(self, name: str, request: object, _answer: type[T], timeout_s: float) -> T:
        until_s = time.monotonic() + timeout_s
        kind = name.lower()
        try:
            line = self._taken(timeout_s)
            # Not `line`, which takes a tenth of a small call.
            try:
                self._send(line, kind, request, timeout_s)
                answer: T = getattr(self._receive(line, timeout_s), kind)
            except BaseException as problem:
                self._failed(line, problem)
                raise
            self._put_back(line)
        except NoLine:
            deadline = Deadline((until_s - time.monotonic()) * 1e3)
            answer = getattr(self._instead, name)(request, timeout=deadline.left_s())
        return answer

    # ---- connection.Calls

    def Lookup(self, request: pb.LookupRequest, timeout: float) -> pb.LookupResponse:
        return self._ask("Lookup", request, pb.LookupResponse, timeout)

    def Claim(self, request: pb.ClaimRequest, timeout: float) -> pb.ClaimResponse:
        return self._ask("Claim", request, pb.ClaimResponse, timeout)

    def Release(self, request: pb.ReleaseRequest, timeout: float) -> pb.ReleaseResponse:
        return self._ask("Release", request, pb.ReleaseResponse, timeout)

    def Reserve(self, request: pb.ReserveRequest, timeout: float) -> pb.ReserveResponse:
        return self._ask("Reserve", request, pb.ReserveResponse, timeout)

    def Cancel(self, request: pb.CancelRequest, timeout: float) -> pb.CancelResponse:
        return self._ask("Cancel", request, pb.CancelResponse, timeout)
