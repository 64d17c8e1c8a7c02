"""The dashboard in front of a daemon that works: which of its panels move."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemon import metrics_of
from tests.support.dashboard import (
    METRIC,
    WHEN_SOMETHING_IS_WRONG,
    started_again,
    targets,
    work,
)


def scraped(address: str) -> Counter[str]:
    """The sum of the samples of each metric."""
    with urlopen(f"http://{address}/metrics") as response:
        text = response.read().decode()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value  # type: ignore[assignment]  # seconds
    return found


@contextmanager
def looked_at(address: str) -> Iterator[list[Counter[str]]]:
    """Again and again meanwhile, and once behind it."""
    looks, over = [scraped(address)], threading.Event()

    def look() -> None:
        while not over.is_set():
            looks.append(scraped(address))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
    looks.append(scraped(address))


def moved(name: str, looks: list[Counter[str]]) -> bool:
    first, last = looks[0], looks[-1]
    if name.endswith(("_total", "_bucket")):
        since_the_start = name == "prefixd_tier_recovered_entries_total"
        return last[name] > (0 if since_the_start else first[name])
    return any(look[name] for look in looks)


@pytest.mark.timeout(300)
def test_no_panel_is_flat_under_load() -> None:
    with started_again() as daemon, looked_at(metrics_of(daemon)) as looks:
        work(daemon, lambda name: any(look[name] for look in looks))
    flat = {title for title, _ in targets()}
    for title, expression in targets():
        if all(moved(name, looks) for name in METRIC.findall(expression)):
            flat.discard(title)
    assert flat <= WHEN_SOMETHING_IS_WRONG
