"""What the stores are told to do: changes of records go through a committer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from ...proto.vocabulary import Tier
from ...tiers.store import EntryRef, EntryWriter, Store, Usage
from ..core.counters import Histogram
from .clock import Clock
from .committer import CommitResult, Committer


class StoreOrders:
    """The changes of all stores. Belongs to the event loop; none of its methods raises.

    `committed` is called once for every token of a commit, on any thread. Tiers without records
    have no committer: nothing of theirs has to be written, and nothing can fail.
    """

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        committed: Callable[[CommitResult], None],
        under_way: Callable[[Tier], AbstractContextManager[None]] = lambda _: nullcontext(),
        died: Callable[[Tier, BaseException], None] = lambda _tier, _problem: None,
        clock: Clock | None = None,
    ) -> None:
        """`under_way`: around all I/O of a tier. `died`: told on the thread of a committer."""
        self._stores = stores
        #: while garbage is looked for: the generations of what was forgotten meanwhile
        self.forgotten: set[int] | None = None
        self._committers = {
            tier: Committer(
                store,
                committed,
                under_way=partial(under_way, tier),
                died=partial(died, tier),
                clock=clock,
            )
            for tier, store in stores.items()
            if store.recorded
        }

    def commit(self, tier: Tier, writes: Sequence[tuple[int, EntryWriter]]) -> None:
        """Make sealed writes durable."""
        self._committers[tier].commit(writes)

    def latencies(self) -> dict[Tier, Histogram]:
        """How long commits take, in nanoseconds."""
        return {tier: committer.latency for tier, committer in self._committers.items()}

    def syncs(self) -> dict[Tier, Histogram]:
        """How long devices take to make the payloads of a commit durable, in nanoseconds."""
        return {
            tier: committer.sync
            for tier, committer in self._committers.items()
            if self._stores[tier].blocking
        }

    def time_steps(self, wall_ns: Callable[[], int]) -> None:
        """Have each result of a commit say when its steps were, by `wall_ns`."""
        for committer in self._committers.values():
            committer.time_steps(wall_ns)

    def forget(self, tier: Tier, entries: Sequence[EntryRef]) -> None:
        """Let a store forget entries that no search finds any more."""
        store = self._stores[tier]
        store.forget(entries)
        if self.forgotten is not None:
            self.forgotten.update(entry.generation for entry in entries)
        if store.unerased:
            self._committers[tier].erase()

    def record_usage(self, tier: Tier, usages: tuple[Usage, ...]) -> None:
        committer = self._committers.get(tier)
        if committer is not None:
            committer.record_usage(usages)

    def unhealthy(self) -> dict[str, str]:
        """What does not work, by name."""
        return {
            f"{tier.label} commit": committer.failure
            for tier, committer in self._committers.items()
            if committer.failure is not None
        }

    def notices(self) -> dict[str, str]:
        """What is less than it could be, by name."""
        found = {}
        for tier, committer in self._committers.items():
            if committer.full is not None:
                found[f"{tier.label} device"] = f"full: {committer.full}"
            if committer.usage_failure is not None:
                found[f"{tier.label} usage"] = committer.usage_failure
        return found

    def closings(self) -> list[Callable[[], None]]:
        """For each thread: finish what was ordered, and end it. Each blocks."""
        return [committer.close for committer in self._committers.values()]
