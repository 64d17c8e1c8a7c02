"""What monitors, orchestrators and browsers ask for over HTTP: what is on the page, what is not,
and how it looks in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from prefixd.client import Client, SaveItem
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.api import http
from prefixd.server.api.admin_views import AdminViews
from prefixd.server.api.http import (
    FRESH_S,
    MAX_CONNECTIONS,
    Board,
    NoSample,
    load_page,
    serve_metrics,
    status_of,
)
from prefixd.server.api.metrics import StateCollector
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.tiers.eviction import make_policy
from prefixd.tiers.ledger import Ledger
from tests.support.chromium import Browser, browser, find_chromium
from tests.support.daemon import eventually, metrics_of, private_daemon
from tests.support.event_loop import in_loop

ANYWHERE = "127.0.0.1:0"


def state() -> MetaState:
    ledgers = {Tier.RAM: Ledger(Tier.RAM, 1000, make_policy("lru", 1000))}
    return MetaState(StateConfig(), ledgers, {}, frozenset(), 1)


def text_of(address: str, path: str) -> str:
    with urlopen(f"http://{address}{path}", timeout=30) as response:
        text: str = response.read().decode()
        return text


def scrape(address: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(text_of(address, "/metrics"))
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


def status_for(address: str, *hosts: str, version: int = 11) -> int:
    connection = HTTPConnection(address, timeout=30)
    connection._http_vsn_str = f"HTTP/{version / 10}"  # type: ignore[attr-defined]
    connection.putrequest("GET", "/metrics", skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def test_on_loopback_a_page_with_a_name_of_its_own_gets_nothing() -> None:
    """DNS rebinding: the browser believes that the attacker's name is this address."""
    with serve_metrics(ANYWHERE, StateCollector(state())) as address:
        port = address.rpartition(":")[2]
        for good in (address, "localhost", f"localhost:{port}", f"[::1]:{port}", "LOCALHOST."):
            assert status_for(address, good) == 200
        for bad in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1"):
            assert status_for(address, bad) == 421
        assert status_for(address, address, "evil.example") == 421
        assert status_for(address, version=10) == 200


def test_where_others_reach_it_every_name_is_good() -> None:
    with serve_metrics("0.0.0.0:0", StateCollector(state())) as address:
        port = address.rpartition(":")[2]
        assert status_for(f"127.0.0.1:{port}", "node-7.cluster.example:9464") == 200


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
        assert text_of(address, "/readyz") == "serving\n"
        problems["disk commit"] = "no space"
        with pytest.raises(HTTPError) as failed:
            text_of(address, "/readyz")
        with failed.value as answer:
            assert (answer.code, answer.read()) == (503, b"disk commit: no space\n")
        assert text_of(address, "/healthz") == "alive\n", "to restart it would mend nothing"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics/x", "/..", "/healthzz"])
def test_other_paths_do_not_exist(path: str) -> None:
    with (
        serve_metrics(ANYWHERE, StateCollector(state())) as address,
        pytest.raises(HTTPError) as failed,
    ):
        text_of(address, path)
    with failed.value as answer:
        assert answer.code == 404


SECRET_KEY = Key(bytes(range(32)))
#: A name that a client may give itself.
NASTY = "<img src=x onerror=alert(1)>"


class Looked:
    """Stands in for the service of operators, and counts the calls."""

    def __init__(self) -> None:
        self.looks = 0
        self.stuck: asyncio.Event | None = None
        self.broken = False

    async def stats(self, _request: pb.StatsRequest, _caller: object) -> pb.StatsResponse:
        self.looks += 1
        if self.stuck is not None:
            await self.stuck.wait()
        if self.broken:
            raise RuntimeError("of a secret")
        return pb.StatsResponse(health="serving", pid=self.looks)

    async def list_claims(
        self, request: pb.ListClaimsRequest, _caller: object
    ) -> pb.ListClaimsResponse:
        assert request.page_claims == 5
        return pb.ListClaimsResponse()


def collector() -> StateCollector:
    return StateCollector(MetaState(StateConfig(), {}, {}, frozenset(), 1))


def get(address: str, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection(address, timeout=30)
    try:
        connection.request(method, path)
        with connection.getresponse() as answer:
            return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def test_metrics_take_a_tenth_of_a_processor_however_many_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "AT_MOST", 0.1)
    now_s, made = 0.0, 0

    def make() -> bytes:
        nonlocal now_s, made
        now_s += 0.02
        made += 1
        return b"%d" % made

    kept = http.Kept(make, lambda: now_s)
    assert {kept.get() for _ in range(100)} == {b"1"}
    now_s += 0.17
    assert kept.get() == b"1"
    now_s += 0.011
    assert kept.get() == b"2"


def test_metrics_have_two_forms_whatever_is_asked_for() -> None:
    with serve_metrics(ANYWHERE, StateCollector(state())) as address:
        for accept, kind in (
            ("", "text/plain"),
            ("application/openmetrics-text;version=7.0.1;escaping=dots", "application/openmetrics"),
        ):
            connection = HTTPConnection(address, timeout=30)
            connection.request("GET", "/metrics", headers={"Accept": accept})
            response = connection.getresponse()
            assert response.headers["Content-Type"].startswith(kind)
            assert b"prefixd_" in response.read()
            connection.close()


@in_loop
async def test_who_asks_at_the_same_time_gets_the_same_sample() -> None:
    looked, now = Looked(), SimpleNamespace(s=100.0)
    board = Board(cast(AdminViews, looked), lambda: now.s)
    first = await asyncio.to_thread(board.sample)
    assert await asyncio.to_thread(board.sample) == first
    assert looked.looks == 1
    now.s += FRESH_S + 0.1
    assert json.loads(await asyncio.to_thread(board.sample))["pid"] == 2


@in_loop
async def test_a_loop_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.server.api.http._ANSWERED_WITHIN_S", 0.05)
    looked = Looked()
    board = Board(cast(AdminViews, looked))
    looked.stuck = asyncio.Event()
    with serve_metrics(ANYWHERE, collector(), board) as address:
        status, _, body = await asyncio.to_thread(get, address, "/status.json")
        assert (status, body) == (503, b"the event loop does not answer\n")
        looked.stuck = None
        status, headers, body = await asyncio.to_thread(get, address, "/status.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body)["health"] == "serving"


@in_loop
async def test_a_sample_that_failed_is_not_shown_as_a_good_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefixd.server.api.http._ANSWERED_WITHIN_S", 0.05)
    looked, now = Looked(), SimpleNamespace(s=100.0)
    board = Board(cast(AdminViews, looked), lambda: now.s)
    await asyncio.to_thread(board.sample)
    now.s += 1
    looked.stuck = asyncio.Event()
    with pytest.raises(NoSample):
        await asyncio.to_thread(board.sample)


@in_loop
async def test_a_bug_is_in_the_log_and_a_word_of_it_on_the_page() -> None:
    looked = Looked()
    board = Board(cast(AdminViews, looked))
    looked.broken = True
    with serve_metrics(ANYWHERE, collector(), board) as address, capture_logs() as logs:
        status, _, body = await asyncio.to_thread(get, address, "/status.json")
        assert (status, body) == (503, b"the daemon failed: RuntimeError\n")
        assert [line["event"] for line in logs] == ["sample_failed"]
        looked.broken = False
        assert (await asyncio.to_thread(get, address, "/status.json"))[0] == 200


def test_a_loop_that_is_over_is_said() -> None:
    async def made() -> Board:
        return Board(cast(AdminViews, Looked()))

    board = asyncio.run(made())
    with pytest.raises(NoSample, match="the daemon stops"):
        board.sample()


@in_loop
async def test_the_headers_let_nothing_in() -> None:
    board = Board(cast(AdminViews, Looked()))
    with serve_metrics(ANYWHERE, collector(), board) as address:
        _, headers, body = await asyncio.to_thread(get, address, "/")
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Server"].strip() == "prefixd", "no version of anything"
        status, headers, empty = await asyncio.to_thread(get, address, "/", "HEAD")
        assert (status, int(headers["Content-Length"]), empty) == (200, len(body), b"")
        for path in ("/status", "/page.html", "/..", "/status.json/", "/healthzz"):
            status, headers, _ = await asyncio.to_thread(get, address, path)
            assert status == 404
            assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert (await asyncio.to_thread(get, address, "/", "POST"))[0] == 501


@in_loop
async def test_whoever_says_nothing_keeps_nobody_out() -> None:
    board = Board(cast(AdminViews, Looked()))
    with serve_metrics(ANYWHERE, collector(), board) as address, ExitStack() as stack:
        elsewhere = HTTPConnection(address, timeout=30, source_address=("127.0.0.2", 0))
        stack.callback(elsewhere.close)
        elsewhere.connect()
        silent = [HTTPConnection(address, timeout=30) for _ in range(MAX_CONNECTIONS + 5)]
        for connection in silent:
            stack.callback(connection.close)
            connection.connect()
        status, _, _ = await asyncio.to_thread(get, address, "/healthz")
        assert status == 200
        assert silent[0].sock.recv(1) == b"", "the oldest were closed"
        await asyncio.to_thread(elsewhere.request, "GET", "/healthz")
        answer = await asyncio.to_thread(elsewhere.getresponse)
        assert answer.status == 200, "of the host that has most"
        # Their threads end a moment later.
        await asyncio.to_thread(eventually, lambda: serving_threads() <= MAX_CONNECTIONS)


def serving_threads() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    html, _ = load_page()
    text = html.decode()
    assert not re.findall(r"https?://|//cdn|@import|url\(", text)
    assert text.count("<script>") == text.count("<style>") == 1
    assert "innerHTML" not in text
    assert " style=" not in text, "the policy refuses them"
    assert not re.search(r"\son\w+=", text)


def test_no_key_and_no_secret_is_in_a_sample() -> None:
    stats = pb.StatsResponse(
        incarnation=b"I" * 16,
        tiers=[pb.TierStats(tier=pb.TIER_RAM, state=pb.TIER_STATE_SERVING)],
        counters={"x": 1},
    )
    claims = [pb.ClaimDetail(claim_id=3, owner="o", keys=[SECRET_KEY])]
    sample = status_of(stats, claims)
    assert sample["oldest_claims"] == [
        {
            "claim_id": 3, "owner": "o", "age_ms": 0, "lease_left_ms": 0, "entries": 0,
            "payload_bytes": 0,
        }
    ]  # fmt: skip
    text = json.dumps(sample)
    assert SECRET_KEY.hex() not in text
    assert "I" * 16 not in text
    assert "incarnation" not in text


# ---- in a browser


@pytest.fixture(scope="module")
def daemon() -> Iterator[tuple[PrivateDaemon, str]]:
    """A daemon with something to show: hits, misses, evictions, a claim, and odd names."""
    flags = ("--server.metrics=127.0.0.1:0", "--sessions.heartbeat=2s")
    label = "a-" + "long" * 12
    with (
        private_daemon(*flags, ram="1MiB") as made,
        Client(made.address, name=NASTY, label=label) as client,
    ):
        for tier in Tier:
            for number in range(40):
                key = Key(bytes([tier, number]) * 16)
                client.save_many([SaveItem(key, b"x" * 65536, 512)], tier=tier)
        with client.claim([Key(bytes([Tier.RAM, 39]) * 16)]) as hit, Client(made.address) as by:
            assert hit
            assert not by.claim([SECRET_KEY], prompt_tokens=512)
            with made.admin() as admin:
                eventually(lambda: admin.stats().usage["default"].missed)
            yield made, metrics_of(made)


def test_every_heading_of_a_table_says_what_it_heads() -> None:
    page = (Path(__file__).parents[3] / "server/api/page.html").read_text()
    headings = re.findall(r"<th\b[^>]*>", page)
    assert len(headings) > 20
    assert all('scope="col" role="columnheader"' in each for each in headings)
    assert page.count("<table ") == page.count('<table role="table"') > 3


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("needs Chromium; the other tests here read the page without it")
    with browser(chromium, tmp_path_factory.mktemp("profile")) as made:
        yield made


def texts(tab: Browser, selector: str) -> list[str]:
    found: list[str] = tab.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    )
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_in_chromium(
    daemon: tuple[PrivateDaemon, str], tab: Browser, width: int, dark: bool
) -> None:
    """After two refreshes the console is empty, nothing overflows, and the numbers are shown."""
    made, address = daemon
    tab.logged.clear()
    tab.size(width, 900, dark=dark)
    tab.open(f"http://{address}/")
    tab.until("Number(document.documentElement?.dataset.looks) >= 2")
    assert tab.logged == []
    # Numbers are those of the time that the page was open.
    with Client(made.address) as client:
        assert not client.claim([SECRET_KEY], prompt_tokens=512)
    tab.until("document.querySelector('#missed td')?.textContent === 'never saved'")
    measured: dict[str, Any] = tab.evaluate(
        "({page: document.documentElement.scrollWidth, seen: innerWidth, "
        "back: getComputedStyle(document.body).backgroundColor})"
    )
    assert measured["page"] <= measured["seen"] == width
    assert (measured["back"] != "rgb(255, 255, 255)") is dark
    assert texts(tab, "#health") == ["serving"]
    assert texts(tab, "#problem") == [""]
    assert texts(tab, "#tiers td:first-child") == ["ram", "shm", "disk"]
    assert "default" in texts(tab, "#namespaces td:first-child")
    (owner,) = texts(tab, "#claims td:nth-child(2)")
    assert owner.startswith(NASTY), "it is text, not an element"
    assert texts(tab, "main img") == []
    assert SECRET_KEY.hex() not in "".join(texts(tab, "body"))


def test_the_page_says_that_nothing_answers(tab: Browser) -> None:
    async def page_of_a_daemon_that_ends() -> None:
        board = Board(cast(AdminViews, Looked()))
        with serve_metrics(ANYWHERE, collector(), board) as address:
            tab.open(f"http://{address}/")
            await asyncio.to_thread(tab.until, "document.documentElement?.dataset.looks > 0")
            assert texts(tab, "#problem") == [""]

    asyncio.run(page_of_a_daemon_that_ends())
    assert "does not answer" in tab.until("document.getElementById('problem').textContent")
    assert texts(tab, "#health") == ["no answer"]
    assert tab.evaluate("document.body.className") == "old", "the figures are greyed"


def test_the_page_is_in_the_wheel() -> None:
    """Besides modules a wheel has only the files that pyproject.toml names."""
    root = Path(__file__).parents[3]
    assert '"prefixd.server.api" = ["*.html"]' in (root / "pyproject.toml").read_text()
