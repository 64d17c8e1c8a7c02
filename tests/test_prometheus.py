"""A real Prometheus in front of a daemon that works: what the dashboard and the alerts see there.

`test_dashboard.py` looks at the metrics alone, where there is no Prometheus.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.support.daemon import eventually, metrics_of
from tests.support.dashboard import (
    ROOT,
    WHEN_SOMETHING_IS_WRONG,
    started_again,
    targets,
    work,
)
from tests.support.prometheus import PROGRAM, Prometheus, prometheus

RULES = ROOT / "deploy/prometheus/prefixd.yml"
ALERTS = re.findall(r"expr: >-\n +(.*)", RULES.read_text())
#: Of the interval that Grafana chooses: a few scrapes, and all of them.
SHORT, WHOLE = "5s", "1h"

pytestmark = [
    pytest.mark.skipif(
        shutil.which(PROGRAM) is None, reason="needs prometheus (Debian: prometheus)"
    ),
    pytest.mark.timeout(300),
]


def as_grafana(expression: str, interval: str) -> str:
    """What Grafana makes of it for all instances."""
    found = expression.replace("$__rate_interval", interval).replace("$instance", ".*")
    assert "$" not in found
    return found


@pytest.fixture(scope="module")
def scraped() -> Iterator[Prometheus]:
    """One that saw a daemon at rest, under load, and at rest again."""
    with started_again() as daemon, prometheus(metrics_of(daemon), RULES) as made:
        work(daemon, made.saw)
        over_s = time.time()
        eventually(lambda: made.scraped_since(over_s))
        yield made


def test_no_panel_is_flat(scraped: Prometheus) -> None:
    moved: defaultdict[str, bool] = defaultdict(bool)
    for title, expression in targets():
        moved[title] |= any(scraped.since_the_start(as_grafana(expression, WHOLE)))
    flat = {title for title, moves in moved.items() if not moves}
    assert flat <= WHEN_SOMETHING_IS_WRONG


@pytest.mark.parametrize("interval", [SHORT, WHOLE])
def test_nothing_is_no_number(scraped: Prometheus, interval: str) -> None:
    """Neither under load nor while nothing happens."""
    for title, expression in targets():
        values = scraped.since_the_start(as_grafana(expression, interval))
        assert all(map(math.isfinite, values)), (title, expression)


def test_every_expression_has_something_to_show(scraped: Prometheus) -> None:
    """Zeros, if nothing else. Of what is ill there is nothing while all is well."""
    for title, expression in targets():
        found = scraped.since_the_start(as_grafana(expression, WHOLE))
        assert found or title == "Ill parts", (title, expression)


def test_the_alerts_are_evaluated_and_none_fires(scraped: Prometheus) -> None:
    (group,) = scraped.get("rules")["groups"]
    assert len(group["rules"]) == len(ALERTS)
    eventually(lambda: all(rule["health"] == "ok" for rule in rules_of(scraped)))
    for rule in rules_of(scraped):
        assert rule.get("lastError", "") == "", rule
        assert rule["state"] != "firing", rule
    for expression in ALERTS:
        assert all(map(math.isfinite, scraped.now(expression))), expression


def rules_of(scraped: Prometheus) -> list[dict[str, str]]:
    (group,) = scraped.get("rules")["groups"]
    return list(group["rules"])


def test_the_scrapes_are_taken(scraped: Prometheus) -> None:
    (target,) = scraped.get("targets", state="active")["activeTargets"]
    assert target["scrapePool"] == "prefixd"
    assert scraped.now("scrape_samples_scraped")[0] > 100
