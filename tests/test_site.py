"""The site: it builds without a warning, and its search answers what an operator asks."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.chromium import Browser, browser, find_chromium

pytest.importorskip("material", reason="needs mkdocs-material (`pip install .[docs]`)")

ROOT = Path(__file__).resolve().parent.parent
#: What an operator types, and the page that has to be among the first three that it finds.
QUESTIONS = {
    "systemd": "operate/",
    "alert": "operate/",
    "upgrade": "operate/",
    "grafana": "operate/",
    "drain": "operate/",
    "top": "operate/",
    "helm values": "chart/",
    "how much memory does the daemon take": "running/",
    "replace a disk": "operate/",
    "disk not mounted": "operate/",
    "missed tokens": "running/",
    "tls certificate expires": "running/",
    "survives a reboot": "operate/",
    "PrefixdLoopLate": "operate/",
    "PREFIXD_ADDRESS": "attach/",
    "valkey cluster": "share-between-nodes/",
    "max_connections": "reference/options/",
    "prefixctl why": "reference/cli/",
    "prefixd_loop_lag_seconds": "reference/metrics/",
    "time to first token": "llama-server/",
}

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages. A link without a target, or a page outside the navigation, fails here."""
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-q"]
    done = subprocess.run(
        [*command, "--site-dir", str(made)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return made


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of static files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_every_kind_of_page_is_there(site: Path) -> None:
    for page in ("", "attach/", "operate/", "chart/", "understand/security/", "reference/cli/"):
        assert (site / page / "index.html").is_file(), page
    assert "<code>prefixctl drain</code>" in (site / "reference/cli/index.html").read_text()


def found(tab: Browser, address: str, question: str) -> list[str]:
    """The pages that the site's own search lists, best first."""
    tab.open(f"{address}?q={quote(question)}")
    tab.until(f"document.location.search.includes({quote(question)!r})")
    tab.until("document.querySelector('.md-search-result__item a') !== null")
    links = tab.evaluate(
        "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.href).join(' ')"
    )
    pages = (re.sub("[?#].*", "", link.removeprefix(address)) for link in links.split())
    return list(dict.fromkeys(pages))


@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium (Debian: chromium)")
def test_the_search_answers_what_an_operator_asks(site: Path, tmp_path: Path) -> None:
    chromium = find_chromium()
    assert chromium is not None
    wrong = {}
    with served(site) as address, browser(chromium, tmp_path / "profile") as tab:
        tab.size(1280, 900)
        for question, page in QUESTIONS.items():
            pages = found(tab, address, question)
            if page not in pages[:3]:
                wrong[question] = pages[:5]
    assert wrong == {}
