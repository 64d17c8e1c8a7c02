"""What the stores are told to do: through a committer where they take their time, else at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog

from ..proto.keys import Key
from ..proto.vocabulary import Tier
from ..tiers.store import EntryWriter, Store, StoreError, StoreFull, Usage
from .committer import CommitResult, Committer

log = structlog.get_logger("prefixd.orders")


class StoreOrders:
    """The changes of all stores. Belongs to the event loop; none of its methods raises.

    `committed` is called on a committer's thread, once for every token of a commit.
    """

    def __init__(
        self, stores: Mapping[Tier, Store], committed: Callable[[CommitResult], None]
    ) -> None:
        self._stores = stores
        self._committers = {
            tier: Committer(store, committed) for tier, store in stores.items() if store.blocking
        }
        #: of the stores that answer at once
        self._ill: dict[Tier, str] = {}

    def commit(self, tier: Tier, writes: Sequence[tuple[int, EntryWriter]]) -> None:
        """Make sealed writes of a blocking store durable."""
        self._committers[tier].commit(writes)

    def erase(self, tier: Tier, keys: tuple[Key, ...]) -> None:
        """Let a store forget keys that nobody can find any more."""
        committer = self._committers.get(tier)
        if committer is not None:
            committer.erase(keys)
        else:
            self._change(tier, lambda store: store.apply((), keys))

    def record_usage(self, tier: Tier, usages: tuple[Usage, ...]) -> None:
        committer = self._committers.get(tier)
        if committer is not None:
            committer.record_usage(usages)
        else:
            self._change(tier, lambda store: store.record_usage(usages))

    def _change(self, tier: Tier, change: Callable[[Store], None]) -> None:
        try:
            change(self._stores[tier])
        except StoreFull as problem:
            # All that is lost is an order of eviction after a restart.
            log.warning("store_full", tier=tier.label, error=str(problem))
        except StoreError as problem:
            self._ill[tier] = str(problem)
        else:
            self._ill.pop(tier, None)

    def ill(self) -> dict[str, str]:
        """What does not work, by name."""
        ill = {f"{tier.label} store": why for tier, why in self._ill.items()}
        for tier, committer in self._committers.items():
            if committer.failure is not None:
                ill[f"{tier.label} commit"] = committer.failure
        return ill

    def close(self) -> None:
        """Finish what was ordered and end the threads. Blocks."""
        for committer in self._committers.values():
            committer.close()
