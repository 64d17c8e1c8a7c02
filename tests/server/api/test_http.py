"""What monitors and orchestrators ask for over HTTP."""

from __future__ import annotations

import threading
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixd.proto.vocabulary import Tier
from prefixd.server.api.http import serve_metrics
from prefixd.server.api.metrics import StateCollector
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.tiers.eviction import make_policy
from prefixd.tiers.ledger import Ledger

ANYWHERE = "127.0.0.1:0"


def state() -> MetaState:
    ledgers = {Tier.RAM: Ledger(Tier.RAM, 1000, make_policy("lru", 1000))}
    return MetaState(StateConfig(), ledgers, {}, frozenset(), 1)


def get(address: str, path: str) -> str:
    with urlopen(f"http://{address}{path}", timeout=30) as response:
        text: str = response.read().decode()
        return text


def scrape(address: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(get(address, "/metrics"))
        for sample in family.samples
    }


def test_it_is_served_until_the_context_ends() -> None:
    made = state()
    with serve_metrics(ANYWHERE, StateCollector(made)) as address:
        assert scrape(address)["prefixd_tier_saves_total", "ram"] == 0
        made.tables.tier_counters[Tier.RAM].saves += 1
        found = scrape(address)
        assert found["prefixd_tier_saves_total", "ram"] == 1
        assert found["prefixd_healthy", ""] == 1
        assert found["process_resident_memory_bytes", ""] > 0
    assert not [t for t in threading.enumerate() if t.name == "prefixd-http"]
    with pytest.raises(OSError, match="refused"):
        scrape(address)


def test_two_daemons_in_one_process_do_not_mix() -> None:
    one, other = state(), state()
    one.tables.counters.touches += 1
    with (
        serve_metrics(ANYWHERE, StateCollector(one)) as first,
        serve_metrics(ANYWHERE, StateCollector(other)) as second,
    ):
        assert scrape(first)["prefixd_touches_total", ""] == 1
        assert scrape(second)["prefixd_touches_total", ""] == 0


def test_an_address_in_use_is_named_with_its_option() -> None:
    collector = StateCollector(state())
    with (
        serve_metrics(ANYWHERE, collector) as address,
        pytest.raises(OSError, match=f"server.metrics: can't serve metrics on {address}"),
        serve_metrics(address, collector),
    ):
        pass


def test_it_is_ready_while_everything_works() -> None:
    problems: dict[str, str] = {}
    with serve_metrics(ANYWHERE, StateCollector(state(), lambda: problems)) as address:
        assert get(address, "/readyz") == "serving\n"
        problems["disk commit"] = "no space"
        with pytest.raises(HTTPError) as failed:
            get(address, "/readyz")
        with failed.value as answer:
            assert (answer.code, answer.read()) == (503, b"disk commit: no space\n")
        assert get(address, "/healthz") == "alive\n", "to restart it would mend nothing"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics/x", "/..", "/healthzz"])
def test_other_paths_do_not_exist(path: str) -> None:
    with (
        serve_metrics(ANYWHERE, StateCollector(state())) as address,
        pytest.raises(HTTPError) as failed,
    ):
        get(address, path)
    with failed.value as answer:
        assert answer.code == 404
