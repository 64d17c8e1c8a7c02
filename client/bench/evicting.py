"""What one eviction takes when there is nothing to walk over, and when there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.vocabulary import SaveReason, SaveStatus, Tier
from ..client import Client
from ..saves import SaveItem
from .moving import new_keys
from .samples import Case

if TYPE_CHECKING:
    from ..ctl.connection import AdminConnection

PEER: Final = "prefixd-ram"
#: What is evicted beside nothing, beside as many unclaimed entries as then are claimed.
ALONE, UNPINNED, PINNED = "evict", "evict-unpinned", "evict-pinned"
OPS: Final = (ALONE, UNPINNED, PINNED)
#: Entries that one measured call evicts.
EVICTED: Final = 1_000
#: What an entry takes of its tier: the smallest slab there is.
STORED_BYTES: Final = 4096


class Evictions:
    """A daemon whose RAM tier holds `beside` older entries, claimed or not.

    Evictions must skip claimed entries. Unclaimed ones are evicted, oldest first, and replaced:
    they show what the size of the tables alone costs. The client holds the claims.
    """

    def __init__(
        self, client: Client, admin: AdminConnection, op: str, beside: int, *, pinned: bool
    ) -> None:
        self._client = client
        self._admin = admin
        self._op = op
        keys = self._saved(beside)
        self._claims = [client.claim(some) for some in _batches(keys)] if pinned else []
        if pinned and sum(len(hit) for hit in self._claims) < beside:
            raise PrefixdError(f"{op}: the entries to pin could not be claimed")

    def release(self) -> None:
        """Give the claims back."""
        self._client.release_many(self._claims)

    def case(self) -> Case:
        return Case(PEER, self._op, EVICTED, self.evict, before=self.refill)

    def refill(self) -> None:
        """As many entries as the next call evicts."""
        self._saved(EVICTED)

    def evict(self) -> None:
        (result,) = self._admin.evict(EVICTED * STORED_BYTES, [Tier.RAM]).results
        if result.entries != EVICTED:
            raise PrefixdError(f"{self._op}: {result.entries} of {EVICTED} entries were evicted")

    def _saved(self, count: int) -> list[Key]:
        keys = new_keys(count)
        for some in _batches(keys):
            items = [SaveItem(key, b"state", 512) for key in some]
            outcomes = self._client.save_many(items, tier=Tier.RAM, reason=SaveReason.EVICT)
            if any(one.status is not SaveStatus.SAVED for one in outcomes):
                raise PrefixdError(f"{self._op}: the entries to evict could not be saved")
        return keys


def _batches(keys: Sequence[Key]) -> list[Sequence[Key]]:
    return [keys[at : at + MAX_BATCH_KEYS] for at in range(0, len(keys), MAX_BATCH_KEYS)]
