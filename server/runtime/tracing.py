"""What the daemon reports of its work to a tracer; `server/tracing.py` makes spans of it."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from ...proto.vocabulary import Tier

M = TypeVar("M", bound=Callable[..., Any])


class Step(NamedTuple):
    """Something that took a while, in nanoseconds since the epoch."""

    name: str
    began_ns: int
    ended_ns: int


class Tracing(Protocol):
    """The event loop's, but for `committed`. Nothing of it raises."""

    def rpc(self, name: str, transport: str, method: M, caller_at: int = 1) -> M:
        """`method`, with a span of each call that it serves: below the one that asks, where the
        caller says which that is. `caller_at`: the place of the `Caller` among the arguments."""

    def now_ns(self) -> int:
        """Since the epoch."""

    def asked(self, name: str, reply: Future[Any], began_ns: int) -> None:
        """The call at hand has asked the state something, and `reply` is its answer."""

    def read(self, tier: Tier, read_bytes: int, began_ns: int) -> None:
        """The call at hand has read `read_bytes` from a store, until now."""

    @property
    def current(self) -> object | None:
        """The call at hand, for later; None: it is not traced."""

    def committed(self, calls: Iterable[object], tier: Tier, steps: Iterable[Step]) -> None:
        """A store has made durable what these calls saved, all at once. On any thread."""
