"""A real Prometheus, in a process and a directory of its own, that scrapes daemons."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from tests.support.daemon import WITHIN_S, eventually
from tests.support.ports import free_ports

PROGRAM: Final = "prometheus"
#: Points of a response. Prometheus returns 11,000 at most.
_MOST_POINTS: Final = 10_000
_LEAST_STEP_S: Final = 0.1
#: Another process may take the free port before Prometheus does.
_TRIES: Final = 5

_CONFIG: Final = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
rule_files: [{rules}]
scrape_configs:
  - job_name: prefixd
    file_sd_configs:
      - files: ["{targets}"]
"""


class Prometheus:
    """A running Prometheus, queried over its HTTP API."""

    def __init__(self, port: int, targets: Path) -> None:
        self._port = port
        self._targets = targets
        self.started_s: Final = time.time()

    def scrape(self, targets: Sequence[str]) -> None:
        """Scrape these, and no others, from soon on."""
        write_targets(self._targets, targets)

    def get(self, path: str, **parameters: object) -> Any:
        """The data of a response. Fails if Prometheus reports an error or a warning."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=WITHIN_S)
        try:
            connection.request("GET", f"/api/v1/{path}?{urlencode(parameters)}")
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert answer["status"] == "success", (parameters, answer)
        assert not answer.get("warnings"), (parameters, answer)
        return answer["data"]

    def now(self, expression: str) -> list[float]:
        """The current values of all series of an expression."""
        found = self.get("query", query=expression)
        return [float(series["value"][1]) for series in found["result"]]

    def since_the_start(self, expression: str) -> list[float]:
        """The values of all series from its start until now, in steps short enough to include
        every scrape."""
        end_s = time.time()
        step_s = max(_LEAST_STEP_S, (end_s - self.started_s) / _MOST_POINTS)
        start_s = end_s - (end_s - self.started_s) // step_s * step_s
        found = self.get("query_range", query=expression, start=start_s, end=end_s, step=step_s)
        return [float(value) for series in found["result"] for _, value in series["values"]]

    def saw(self, metric: str) -> bool:
        """Was the metric above zero in any scrape?"""
        return any(self.now(f"max_over_time({metric}[1h]) > 0"))

    def scraped_since(self, moment_s: float) -> bool:
        """Was the daemon scraped at or after this Unix time?"""
        found = self.now("timestamp(prefixd_healthy)")
        return bool(found) and min(found) >= moment_s and not any(map(math.isnan, found))


@contextmanager
def prometheus(target: str, rules: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes `target` (empty: nothing yet) each second, with `rules`."""
    with tempfile.TemporaryDirectory(prefix="pd-prometheus-") as made:
        directory = Path(made)
        config = directory / "prometheus.yml"
        targets = directory / "targets.json"
        write_targets(targets, [target] if target else [])
        config.write_text(_CONFIG.format(rules=rules, targets=targets))
        process, port = _started(directory, config)
        try:
            one = Prometheus(port, targets)
            eventually(lambda: not target or one.now("up == 1"))
            yield one
        finally:
            process.terminate()
            process.wait()


def write_targets(file: Path, targets: Sequence[str]) -> None:
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps([{"targets": list(targets)}] if targets else []))
    aside.replace(file)


def _started(directory: Path, config: Path) -> tuple[subprocess.Popen[bytes], int]:
    program = shutil.which(PROGRAM)
    assert program is not None
    log = directory / "log"
    for _ in range(_TRIES):
        (port,) = free_ports(1)
        process = _start(
            (
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                # Looks for new targets each second instead of every 5 s.
                "--scrape.discovery-reload-interval=1s",
            ),
            log,
        )
        if eventually(lambda process=process, port=port: _state_of(process, port)) == "ready":  # type: ignore[misc]
            return process, port
    raise AssertionError(log.read_text())


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _state_of(process: subprocess.Popen[bytes], port: int) -> str:
    """`ready`, `ended`, or nothing yet."""
    if process.poll() is not None:
        return "ended"
    connection = HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/-/ready")
        return "ready" if connection.getresponse().status == 200 else ""
    except (OSError, HTTPException):
        return ""
    finally:
        connection.close()
