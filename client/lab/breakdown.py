"""The hits of a replay, divided: over time, after a warm-up, by model and tenant, or label."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .trace import Request


class Requests:
    """Passes requests on, and remembers when each came and whose it was."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
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
