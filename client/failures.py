"""What a failed call is to the caller: a miss with a reason, whatever the transport raised.

What the caller passed is checked before anything is asked. Everything that goes wrong after that
is the state of the world: a daemon that is gone, slow, full, of another version, or wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ..proto.errors import (
    CallerError,
    ClaimLost,
    ClientClosed,
    DaemonUnavailable,
    DeadlineExceeded,
    Draining,
    EntryCorrupt,
    MalformedMessage,
    PrefixdError,
    StaleIncarnation,
    StoreFailed,
    UnknownClaim,
    UnknownEntry,
    UnknownReservation,
    UnknownSession,
)
from ..proto.keys import Key
from ..proto.vocabulary import MissReason, SaveStatus
from .results import SaveOutcome

logger = logging.getLogger("prefixd.client")


def miss_reason(problem: Exception) -> MissReason:
    """The miss that a failed call is. Total: every exception is one."""
    match problem:
        case DeadlineExceeded():
            return MissReason.DEADLINE
        case DaemonUnavailable() | Draining() | UnknownSession() | StaleIncarnation():
            return MissReason.UNAVAILABLE
        case ClientClosed():  # by another thread, while this call was under way
            return MissReason.UNAVAILABLE
        case ClaimLost() | UnknownClaim():
            return MissReason.LOST
        case EntryCorrupt():
            return MissReason.CORRUPT
        case StoreFailed():
            return MissReason.UNREADABLE
        case UnknownEntry():
            return MissReason.ABSENT
        case MalformedMessage():
            return MissReason.UNEXPECTED
        case PrefixdError() if type(problem) is not PrefixdError:
            return MissReason.REFUSED
        case _:
            return MissReason.UNEXPECTED


_SAVE_STATUS = {
    MissReason.UNAVAILABLE: SaveStatus.UNAVAILABLE,
    MissReason.DEADLINE: SaveStatus.DEADLINE,
}


class Failures:
    """Classifies what the calls of one client fail with. Thread-safe.

    What should not happen is logged once for each kind: a request that passed the client's own
    checks and was called wrong by the daemon, and whatever is no error of the contract.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[type[Exception]] = set()

    def reason(self, problem: Exception) -> MissReason:
        """The miss that this is."""
        reason = miss_reason(problem)
        if reason is MissReason.UNEXPECTED or (
            reason is MissReason.REFUSED and isinstance(problem, CallerError)
        ):
            self._log(problem)
        return reason

    def saves(self, keys: Sequence[Key], problem: Exception) -> list[SaveOutcome]:
        """The outcome of every item of a save whose call failed."""
        reason = self.reason(problem)
        if isinstance(problem, UnknownReservation):
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
        ours = isinstance(problem, PrefixdError)
        logger.warning(
            "a call failed in a way that it should not, which is a miss: %r (logged once)",
            problem,
            exc_info=None if ours else problem,
        )
