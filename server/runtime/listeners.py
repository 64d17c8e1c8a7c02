"""Interfaces through which the runtime reports: to the streams of sessions, to what follows
entries, and to a tracer."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.vocabulary import Tier
from ...tiers.store import Usage
from ..core.effects import TellClaimLost, TellReservationLost
from ..core.entries import EntryState
from ..core.shares import Holder

M = TypeVar("M", bound=Callable[..., Any])
SessionNote: TypeAlias = TellClaimLost | TellReservationLost


class Listener(Protocol):
    """The stream of one session. Neither method may raise."""

    def told(self, note: SessionNote) -> None:
        """The session lost a claim or a reservation."""

    def ended(self, why: PrefixdError | None) -> None:
        """The session is over, or (None) the daemon stops. Called again until it unsubscribes."""


class EntryListener(Protocol):
    """Follows entries that are published, used and deleted by key, on the event loop. Only
    `deleting` may raise."""

    def published(self, entries: Sequence[EntryState]) -> None:
        """These entries can be found from now on: at least one, in the order of their saves."""

    def used(self, usages: Sequence[Usage]) -> None:
        """These entries were used since the last call; the most recent come last."""

    def deleting(self, keys: Sequence[Key], holder: Holder) -> None:
        """These keys are about to be deleted by `holder`: do not bring them back. Raises
        LimitReached, and then they must not be deleted."""

    async def deleted(
        self, keys: Sequence[Key], kept: Sequence[Key], deadline_s: float, *, announced: bool
    ) -> bool:
        """Of the keys of `deleting`, `keys` are gone and `kept` stay. `announced`: other nodes are
        to delete `keys`, too. False: by `deadline_s` (`time.monotonic`) they were not told, or what
        could bring keys back has not dropped them."""

    async def cleared(self, namespace: str, deadline_s: float) -> bool:
        """The entries of a namespace, or label, are gone; other nodes are to delete theirs. False:
        they were not told by `deadline_s`."""


class Step(NamedTuple):
    """One step of a commit, in nanoseconds since the epoch."""

    name: str
    began_ns: int
    ended_ns: int


class Tracing(Protocol):
    """What the daemon reports of its work to a tracer; `server/tracing.py` makes spans of it.
    Belongs to the event loop, except `committed`. No method raises."""

    def rpc(self, name: str, transport: str, method: M, caller_at: int = 1) -> M:
        """`method`, wrapped in a span for each call: a child of the caller's span, where the caller
        names one. `caller_at`: the position of the `Caller` among the arguments."""

    def now_ns(self) -> int:
        """Since the epoch."""

    def asked(self, name: str, reply: Future[Any], began_ns: int) -> None:
        """The current call has asked the state a question, which `reply` answers."""

    def read(self, tier: Tier, read_bytes: int, began_ns: int) -> None:
        """The current call has read `read_bytes` from a store, until now."""

    @property
    def current(self) -> object | None:
        """The current call, for `committed`. None when it is not traced."""

    def committed(self, calls: Iterable[object], tier: Tier, steps: Iterable[Step]) -> None:
        """A store has made durable what these calls saved, in one commit. On any thread."""
