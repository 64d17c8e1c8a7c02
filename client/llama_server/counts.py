"""What the proxy counts, as JSON and for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

#: Each counter with its label, and what it counts.
COUNTERS: Final = {
    "requests": ("outcome", "Requests by what the cache did for them."),
    "bypassed": ("why", "Requests that passed through untouched, by why."),
    "missed": ("why", "Requests that were served without a restore, by why."),
    "tokens": ("kind", "Tokens of prompts: restored from the cache, reused, evaluated."),
    "saves": ("reason", "Slots that were saved, by why."),
    "failures": ("what", "Calls of the proxy's own that failed, by which."),
}


class PromptCounts(Collector):
    """Counters with one label each. For one thread."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTERS}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, name: str, label: str, amount: int = 1) -> None:
        self._counts[name][label] += amount

    def get(self, name: str, label: str) -> int:
        return self._counts[name][label]

    def to_json(self) -> dict[str, dict[str, int]]:
        return {name: dict(counts) for name, counts in self._counts.items()}

    def to_prometheus(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, (label, help) in COUNTERS.items():
            family = CounterMetricFamily(f"prefixd_llama_server_{name}", help, labels=[label])
            for value, count in self._counts[name].items():
                family.add_metric([value], count)
            yield family
