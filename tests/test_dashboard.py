"""The dashboard and a daemon under load: each panel that should change does."""

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
    OF_SHARING,
    WHEN_SOMETHING_IS_WRONG,
    generate_load,
    restarted_daemon,
    targets,
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
def scraping(address: str) -> Iterator[list[Counter[str]]]:
    """Scrapes before, continuously during, and after the context."""
    scrapes, over = [scraped(address)], threading.Event()

    def scrape() -> None:
        while not over.is_set():
            scrapes.append(scraped(address))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield scrapes
    finally:
        over.set()
        thread.join()
    scrapes.append(scraped(address))


def moved(name: str, scrapes: list[Counter[str]]) -> bool:
    first, last = scrapes[0], scrapes[-1]
    if name.endswith(("_total", "_bucket")):
        since_the_start = name == "prefixd_tier_recovered_entries_total"
        return last[name] > (0 if since_the_start else first[name])
    return any(scrape[name] for scrape in scrapes)


@pytest.mark.timeout(300)
def test_no_panel_is_flat_under_load() -> None:
    with restarted_daemon() as daemon, scraping(metrics_of(daemon)) as scrapes:
        generate_load(daemon, lambda name: any(scrape[name] for scrape in scrapes))
    flat = {title for title, _ in targets()}
    for title, expression in targets():
        if all(moved(name, scrapes) for name in METRIC.findall(expression)):
            flat.discard(title)
    assert flat <= WHEN_SOMETHING_IS_WRONG | OF_SHARING
