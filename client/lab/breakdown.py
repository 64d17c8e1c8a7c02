"""The hits of a replay: divided over time, after a warm-up, by model and tenant, or label; and what
they are worth in time to first token, GPU hours and money."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .trace import Request

_HOURS_PER_MONTH = 730.0


class Requests:
    """Passes requests on, counts their blocks, and remembers when each came and whose it was."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        #: Of all requests that were passed on.
        self.blocks = 0
        self._times = array("d")
        #: Whose each request was; empty while all are one owner's.
        self._owners = array("I")
        self._names: dict[tuple[str, str], int] = {}

    def __iter__(self) -> Iterator[Request]:
        times, names = self._times, self._names
        for request in self._requests:
            owner = (request.model, request.tenant or request.label)
            if owner not in names:
                if len(names) == 1:
                    self._owners.frombytes(bytes(self._owners.itemsize * len(times)))
                names[owner] = len(names)
            if len(names) > 1:
                self._owners.append(names[owner])
            times.append(request.timestamp_ms)
            self.blocks += len(request.hash_ids)
            yield request

    @property
    def duration_s(self) -> float:
        """From the first request to the last."""
        return (self._times[-1] - self._times[0]) / 1000 if self._times else 0.0

    @property
    def owners(self) -> int:
        """Different pairs of a model and a tenant."""
        return len(self._names)

    def over_time(self, prompt: Sequence[int], hit: Sequence[int], parts: int) -> list[Any]:
        """The hit rate in so many parts of the time, equally long. `prompt` and `hit` are the
        tokens of each request."""
        span_ms = max(self.duration_s * 1000, 1e-9)
        sums = [[0, 0, 0] for _ in range(parts)]
        for at_ms, prompt_tokens, hit_tokens in zip(self._times, prompt, hit, strict=True):
            part = min(int((at_ms - self._times[0]) * parts / span_ms), parts - 1)
            _add(sums[part], prompt_tokens, hit_tokens)
        length_s = self.duration_s / parts
        return [
            {"from_s": part * length_s, "to_s": (part + 1) * length_s, **_rates(counts)}
            for part, counts in enumerate(sums)
        ]

    def after(self, prompt: Sequence[int], hit: Sequence[int], warm_up_s: float) -> dict[str, Any]:
        """The hit rate of the requests that came later than `warm_up_s` after the first."""
        counts = [0, 0, 0]
        for at_ms, prompt_tokens, hit_tokens in zip(self._times, prompt, hit, strict=True):
            if at_ms - self._times[0] >= warm_up_s * 1000:
                _add(counts, prompt_tokens, hit_tokens)
        return {"warm_up_s": warm_up_s, **_rates(counts)}

    def by_owner(self, prompt: Sequence[int], hit: Sequence[int]) -> list[Any]:
        """The hit rate by model and tenant, the one with the most prompt tokens first."""
        sums = [[0, 0, 0] for _ in self._names]
        for owner, prompt_tokens, hit_tokens in zip(self._owners, prompt, hit, strict=True):
            _add(sums[owner], prompt_tokens, hit_tokens)
        rows = [
            {"model": model, "tenant": tenant, **_rates(sums[number])}
            for (model, tenant), number in self._names.items()
        ]
        return sorted(rows, key=lambda row: -row["prompt_tokens"])


def _add(counts: list[int], prompt_tokens: int, hit_tokens: int) -> None:
    counts[0] += 1
    counts[1] += prompt_tokens
    counts[2] += hit_tokens


def _rates(counts: Sequence[int]) -> dict[str, Any]:
    requests, prompt_tokens, hit_tokens = counts
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "hit_rate": hit_tokens / prompt_tokens if prompt_tokens else 0.0,
    }


@dataclass(frozen=True, slots=True)
class Prices:
    """What prefill costs. `prefill_tokens_per_s` is what one replica computes, which has `gpus`
    GPUs; `gpu_hour` is the price of one for an hour, in any currency (None: not known).

    Raises ValueError for numbers that are not above 0.
    """

    prefill_tokens_per_s: float
    gpu_hour: float | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.prefill_tokens_per_s < float("inf"):
            raise ValueError("prefill tokens per second must be above 0, got "
                             f"{self.prefill_tokens_per_s}")  # fmt: skip
        if self.gpu_hour is not None and not 0 < self.gpu_hour < float("inf"):
            raise ValueError(f"the price of a GPU hour must be above 0, got {self.gpu_hour}")
        if self.gpus < 1:
            raise ValueError(f"a replica has at least one GPU, got {self.gpus}")

    def worth(self, hit_tokens: int, requests: int, duration_s: float) -> dict[str, Any]:
        """What a cache that hits so many tokens of a trace saves.

        `ttft_saved_s` is the mean over all requests, without their waiting for each other;
        `gpu_hours_saved` and `money_saved` are over the trace, and `money_saved_per_month` is the
        same traffic for 730 hours (None without a duration).
        """
        seconds = hit_tokens / self.prefill_tokens_per_s
        gpu_hours = seconds * self.gpus / 3600
        money = None if self.gpu_hour is None else gpu_hours * self.gpu_hour
        monthly = None
        if money is not None and duration_s > 0:
            monthly = money * _HOURS_PER_MONTH * 3600 / duration_s
        return {
            "ttft_saved_s": seconds / requests if requests else 0.0,
            "gpu_hours_saved": gpu_hours,
            "money_saved": money,
            "money_saved_per_month": monthly,
        }
