"""What a live replay did: the outcome of one request, and their sum."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from .histogram import LogHistogram

#: What is timed, in the order in which a request does it.
STEPS: Final = ("walk", "claim", "restore", "save", "release")
#: Mismatches that are described; the others are only counted.
MAX_DESCRIBED: Final = 10


@dataclass(slots=True)
class Outcome:
    """What one request did. Made by a worker, added up by `Totals`."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    #: Bytes that were compared with what the block should hold, and were right.
    verified_bytes: int = 0
    #: Sentences about blocks whose bytes were wrong.
    mismatches: list[str] = field(default_factory=list)
    #: Claimed, but lost or unreadable before all bytes had arrived: misses, not mismatches.
    lost_blocks: int = 0
    #: No daemon answered for some part of it.
    unavailable: bool = False
    #: Saves of single blocks by how they ended.
    saves: Counter[str] = field(default_factory=Counter)
    saved_bytes: int = 0
    #: By step; a step that was not needed is absent.
    durations_ns: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """The sum of outcomes."""

    requests: int = 0
    requests_with_hit: int = 0
    unavailable_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    lost_blocks: int = 0
    verified_bytes: int = 0
    mismatches: int = 0
    described: list[str] = field(default_factory=list)
    saves: Counter[str] = field(default_factory=Counter)
    saved_bytes: int = 0
    #: of each step, in nanoseconds
    latencies: dict[str, LogHistogram] = field(
        default_factory=lambda: {step: LogHistogram() for step in STEPS}
    )
    wall_seconds: float = 0.0
    #: Of all workers, by the name of the rpc.
    rpcs: Counter[str] = field(default_factory=Counter)
    #: Sessions that were opened because an earlier one had ended.
    reconnects: int = 0
    #: Workers that ended before their time, with the request that they had.
    workers_lost: int = 0
    #: Stopped before the end of the trace: by the user, or because no daemon answered for too long.
    interrupted: bool = False
    gave_up: bool = False

    def add(self, outcome: Outcome) -> None:
        """One more request."""
        self.requests += 1
        self.requests_with_hit += outcome.hit_tokens > 0
        self.unavailable_requests += outcome.unavailable
        self.prompt_tokens += outcome.prompt_tokens
        self.hit_tokens += outcome.hit_tokens
        self.blocks += outcome.blocks
        self.hit_blocks += outcome.hit_blocks
        self.lost_blocks += outcome.lost_blocks
        self.verified_bytes += outcome.verified_bytes
        self.mismatches += len(outcome.mismatches)
        self.described += outcome.mismatches[: MAX_DESCRIBED - len(self.described)]
        self.saves.update(outcome.saves)
        self.saved_bytes += outcome.saved_bytes
        for step, duration_ns in outcome.durations_ns.items():
            self.latencies[step].add(duration_ns)

    @property
    def hit_rate(self) -> float:
        """By tokens, 0 ... 1."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def request_hit_rate(self) -> float:
        """By requests with any hit, 0 ... 1."""
        return self.requests_with_hit / self.requests if self.requests else 0.0

    @property
    def good(self) -> bool:
        """Was every byte right, and did every worker see it through?"""
        return not (self.mismatches or self.workers_lost or self.gave_up)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the names are stable and carry their units."""
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
            "workers_lost": self.workers_lost,
            "interrupted": self.interrupted,
            "gave_up": self.gave_up,
        }


def _quantiles(latencies: LogHistogram) -> dict[str, float | int | None]:
    p50, p99 = (latencies.quantile(share) / 1e6 for share in (0.5, 0.99))
    some = latencies.count > 0
    return {"count": latencies.count, "p50": p50 if some else None, "p99": p99 if some else None}
