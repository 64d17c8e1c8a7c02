"""A real Prometheus that scrapes a daemon under load: the results of the dashboard's expressions
and of the alerts.

`test_dashboard.py` checks the metrics alone, and needs no Prometheus.
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
    OF_SHARING,
    ROOT,
    WHEN_SOMETHING_IS_WRONG,
    generate_load,
    restarted_daemon,
    targets,
)
from tests.support.prometheus import PROGRAM, Prometheus, prometheus

RULES = ROOT / "deploy/prometheus/prefixd.yml"
ALERTS = re.findall(r"expr: >-\n +(.*)", RULES.read_text())
#: Values for `$__rate_interval`, which Grafana chooses: a few scrapes, and all of them.
SHORT, WHOLE = "5s", "1h"

pytestmark = [
    pytest.mark.skipif(
        shutil.which(PROGRAM) is None, reason="needs prometheus (Debian: prometheus)"
    ),
    pytest.mark.timeout(300),
]


def as_grafana(expression: str, interval: str) -> str:
    """The expression with its variables replaced, as Grafana does for all instances."""
    replaced = expression.replace("$__rate_interval", interval).replace("$instance", ".*")
    assert "$" not in replaced
    return replaced


@pytest.fixture(scope="module")
def scraped() -> Iterator[Prometheus]:
    """A Prometheus that scraped a daemon at rest, under load, and at rest again."""
    with restarted_daemon() as daemon, prometheus(metrics_of(daemon), RULES) as made:
        generate_load(daemon, made.saw)
        over_s = time.time()
        eventually(lambda: made.scraped_since(over_s))
        yield made


def test_no_panel_is_flat(scraped: Prometheus) -> None:
    moved: defaultdict[str, bool] = defaultdict(bool)
    for title, expression in targets():
        moved[title] |= any(scraped.since_the_start(as_grafana(expression, WHOLE)))
    flat = {title for title, moves in moved.items() if not moves}
    assert flat <= WHEN_SOMETHING_IS_WRONG | OF_SHARING


@pytest.mark.parametrize("interval", [SHORT, WHOLE])
def test_every_value_is_a_finite_number(scraped: Prometheus, interval: str) -> None:
    """Under load, and while nothing happens."""
    for title, expression in targets():
        values = scraped.since_the_start(as_grafana(expression, interval))
        assert all(map(math.isfinite, values)), (title, expression)


def test_every_expression_has_something_to_show(scraped: Prometheus) -> None:
    """At least zeros. Only the panels of parts are empty while nothing is wrong."""
    empty = {"Ill parts", "Notices"} | OF_SHARING
    for title, expression in targets():
        found = scraped.since_the_start(as_grafana(expression, WHOLE))
        assert found or title in empty, (title, expression)


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
