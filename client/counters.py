"""What a client counts of itself."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from ..proto import prefixd_pb2 as pb
from ..proto.vocabulary import Tier
from .results import Entry, MissReason, SaveOutcome, SaveStatus

Snapshot: TypeAlias = dict[str, int | dict[str, int]]

_SCALARS: Final = (
    "lookups",  # searches and claims, each with one hit or one miss
    "hits",
    "hit_entries",
    "hit_tokens",
    "restored_entries",
    "restored_bytes",
    "saved_entries",
    "saved_bytes",
    "lost_claims",
    "lost_reservations",
    "sessions",  # opened, the first one included
)

#: Over gRPC or over the local socket, where SaveStaged is the one that gRPC does not have.
_RPCS: Final = (*pb.DESCRIPTOR.services_by_name["Cache"].methods_by_name, "SaveStaged")
_LABELS: Final = {tier: tier.label for tier in Tier}


class Counters:
    """Thread-safe counts, all of them there from the start.

    `misses` are by reason. A hit whose bytes then can't be restored is a hit, and a miss for
    its reason as well. `saves` are by the status in which they ended, `rpcs` by their name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scalars = dict.fromkeys(_SCALARS, 0)
        self._groups: dict[str, dict[str, int]] = {
            "misses": {reason.value: 0 for reason in MissReason},
            "saves": {status.label: 0 for status in SaveStatus},
            "rpcs": dict.fromkeys(_RPCS, 0),
            "hit_tokens_by_tier": {tier.label: 0 for tier in Tier},
            "restored_bytes_by_tier": {tier.label: 0 for tier in Tier},
        }

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._scalars[name] += amount

    def rpc(self, name: str) -> None:
        with self._lock:
            self._groups["rpcs"][name] += 1

    def miss(self, reason: MissReason, count: int = 1) -> None:
        with self._lock:
            self._groups["misses"][reason.value] += count

    def hit(self, entries: Iterable[Entry], token_counts: Iterable[int]) -> None:
        """One search that found these."""
        with self._lock:
            scalars, by_tier = self._scalars, self._groups["hit_tokens_by_tier"]
            scalars["hits"] += 1
            for tier, (entries_there, tokens) in _by_tier(entries, token_counts).items():
                scalars["hit_entries"] += entries_there
                scalars["hit_tokens"] += tokens
                by_tier[_LABELS[tier]] += tokens

    def restored(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            by_tier = self._groups["restored_bytes_by_tier"]
            sizes = [entry.payload_bytes for entry in entries]
            for tier, (entries_there, size_bytes) in _by_tier(entries, sizes).items():
                self._scalars["restored_entries"] += entries_there
                self._scalars["restored_bytes"] += size_bytes
                by_tier[_LABELS[tier]] += size_bytes

    def saves(self, outcomes: Iterable[SaveOutcome], payload_bytes: Iterable[int]) -> None:
        with self._lock:
            saves = self._groups["saves"]
            for outcome, size_bytes in zip(outcomes, payload_bytes, strict=True):
                saves[outcome.status.label] += 1
                if outcome.status is SaveStatus.SAVED:
                    self._scalars["saved_entries"] += 1
                    self._scalars["saved_bytes"] += size_bytes

    def snapshot(self) -> Snapshot:
        """Everything at one moment, as a dict that is the caller's own."""
        with self._lock:
            groups = {name: dict(group) for name, group in self._groups.items()}
            return {**self._scalars, **groups}


def _by_tier(entries: Iterable[Entry], amounts: Iterable[int]) -> dict[Tier, tuple[int, int]]:
    """How many entries there are of each tier, and the sum of their amounts."""
    found: dict[Tier, tuple[int, int]] = {}
    for entry, amount in zip(entries, amounts, strict=True):
        tier = entry.tier
        count, total = found.get(tier, (0, 0))
        found[tier] = count + 1, total + amount
    return found
