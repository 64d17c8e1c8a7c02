"""What the calls of one client share, which of them raise, and what a failed one is otherwise.

Mistakes of the caller raise, before any call: wrong arguments, or a use in another process than
the client's. Everything that goes wrong later is a miss with a reason, whatever the transport
raised: the daemon is gone, slow, full, wrong, or its version differs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from ..proto import errors
from ..proto.keys import Key
from ..proto.vocabulary import MissReason, SaveStatus
from .arguments import whole
from .counters import ClientCounters
from .results import SaveOutcome
from .wire.deadline import Deadline
from .wire.transport import Transport

logger = logging.getLogger("prefixd.client")


class Owner:
    """The process that made a client.

    A fork has copies of the client, its hits and its locks, but none of its threads and no
    connection of its own, so nothing of the client works there.
    """

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Is this still that process?"""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises CallerError in a fork of that process."""
        if not self.is_here:
            raise errors.CallerError(
                f"this client belongs to process {self._pid}, of which this one is a fork: make "
                "a client in each process, and spawn workers rather than fork them"
            )


def miss_reason(problem: Exception) -> MissReason:
    """The miss that a failed call is. Every exception is one."""
    match problem:
        case errors.DeadlineExceeded():
            return MissReason.DEADLINE
        case errors.DaemonUnavailable() | errors.Draining() | errors.ClientClosed():
            return MissReason.UNAVAILABLE
        case errors.UnknownSession() | errors.StaleIncarnation():
            return MissReason.UNAVAILABLE
        case errors.ClaimLost() | errors.UnknownClaim():
            return MissReason.LOST
        case errors.EntryCorrupt():
            return MissReason.CORRUPT
        case errors.StoreFailed():
            return MissReason.UNREADABLE
        case errors.UnknownEntry():
            return MissReason.ABSENT
        case errors.MalformedMessage():
            return MissReason.UNEXPECTED
        case errors.PrefixdError() if type(problem) is not errors.PrefixdError:
            return MissReason.REFUSED
        case _:
            return MissReason.UNEXPECTED


_SAVE_STATUS = {
    MissReason.UNAVAILABLE: SaveStatus.UNAVAILABLE,
    MissReason.DEADLINE: SaveStatus.DEADLINE,
}


class Failures:
    """Classifies the failed calls of one client. Thread-safe.

    What should not happen is logged once for each type of exception: that the daemon calls a
    request wrong which passed the client's own checks, and whatever is no error of the contract.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[type[Exception]] = set()

    def reason(self, problem: Exception) -> MissReason:
        """The miss that this is; logs what should not happen."""
        reason = miss_reason(problem)
        if reason is MissReason.UNEXPECTED or (
            reason is MissReason.REFUSED and isinstance(problem, errors.CallerError)
        ):
            self._log(problem)
        return reason

    def saves(self, keys: Sequence[Key], problem: Exception) -> list[SaveOutcome]:
        """The outcome of every item of a save whose call failed."""
        reason = self.reason(problem)
        if isinstance(problem, errors.UnknownReservation):
            status = SaveStatus.LOST
        else:
            status = _SAVE_STATUS.get(reason, SaveStatus.FAILED)
        message = str(problem) or type(problem).__name__
        return [SaveOutcome(key, status, message=message) for key in keys]

    def _log(self, problem: Exception) -> None:
        with self._lock:
            if type(problem) in self._logged:
                return
            self._logged.add(type(problem))
        ours = isinstance(problem, errors.PrefixdError)
        logger.warning(
            "a call failed in a way that it should not, which is a miss: %r (logged once)",
            problem,
            exc_info=None if ours else problem,
        )


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the calls of one client share."""

    transport: Transport
    counters: ClientCounters
    #: For calls that are given none.
    deadline_ms: int
    failures: Failures = field(default_factory=Failures)
    owner: Owner = field(default_factory=Owner)

    def deadline(
        self, deadline_ms: int | None, *, wait_ms: int = 0, transfer_bytes: int = 0
    ) -> Deadline:
        """The deadline of a call that begins now; see `Deadline`."""
        within_ms = self.deadline_ms if deadline_ms is None else whole("deadline_ms", deadline_ms)
        return Deadline(within_ms + wait_ms, transfer_bytes)

    def countdown(self, deadline_ms: int | None) -> Callable[[], int]:
        """A function that returns the milliseconds left until the deadline of a call that begins
        now."""
        within_ms = self.deadline_ms if deadline_ms is None else whole("deadline_ms", deadline_ms)
        since_s = monotonic()
        return lambda: within_ms - round((monotonic() - since_s) * 1e3)
