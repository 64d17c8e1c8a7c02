"""The files in deploy/ match the daemon that they deploy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from prefixd.client import Client, SaveItem, Tier
from prefixd.proto.keys import Key
from prefixd.proto.units import parse_bytes, parse_duration_ns
from prefixd.server.api.metrics import PRESSURE, SHARED, SHARED_GAUGES, StateCollector
from prefixd.server.config import budgets
from prefixd.server.config.budgets import memory_parts, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.config.options import Config
from prefixd.server.core.counters import Histogram
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.server.daemon import main
from prefixd.server.runtime.clock import BOUNDS_NS, Clock, Latencies, LoopLag
from tests.support.daemon import eventually, metrics_of, private_daemon
from tests.support.running import MACHINE

REPOSITORY = Path(__file__).resolve().parent.parent
DEPLOY = REPOSITORY / "deploy"
UNIT = (DEPLOY / "systemd/prefixd.service").read_text()
POD = (DEPLOY / "kubernetes/sidecar.yaml").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
DASHBOARD = json.loads((DEPLOY / "grafana/prefixd.json").read_text())
README = (DEPLOY / "README.md").read_text()
ALERTS = (DEPLOY / "prometheus/prefixd.yml").read_text()
ALERT_CASES = sorted((DEPLOY / "prometheus").glob("*.test.yml"))


def metric_names() -> set[str]:
    """The names of all metrics of a daemon."""
    registry = CollectorRegistry()
    registry.register(
        StateCollector(
            MetaState(StateConfig(), {}, {}, frozenset(), 1),
            lambda: {"part": "it broke"},
            # A real LoopLag needs an event loop. The collector reads only its histogram.
            cast(LoopLag, SimpleNamespace(pulses=Histogram(BOUNDS_NS))),
            latencies=Latencies(Clock()),
            pressure=lambda: dict.fromkeys(PRESSURE, 0.0),
            shared=lambda: dict.fromkeys(SHARED, 0),
        )
    )
    ProcessCollector(registry=registry)
    names = set()
    for family in registry.collect():
        names |= {sample.name for sample in family.samples}
        # Families of tiers have no samples here, because this state has no tiers.
        names.add(f"{family.name}_total" if family.type == "counter" else family.name)
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
    return names


def metrics_in(expression: str) -> list[str]:
    return re.findall(r"\b(?:prefixd|process)_[a-z_]+", expression)


# ---- grafana


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_dashboard_shows_only_metrics_that_exist() -> None:
    names = metric_names()
    assert "prefixd_tier_hits_total" in names
    for expression in expressions():
        shown = metrics_in(expression)
        assert shown
        assert set(shown) <= names, expression


def test_counters_are_shown_as_rates_and_gauges_are_not() -> None:
    since_the_start = {
        "prefixd_tier_recovered_entries_total",
        "prefixd_tier_dropped_at_start_total",
    }
    for expression in expressions():
        rated = set(re.findall(r"rate\(([a-z_]+)", expression))
        counters = {name for name in metrics_in(expression) if name.endswith(("_total", "_bucket"))}
        assert rated == counters - since_the_start, expression


def test_every_panel_has_its_own_number_and_place() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    for one, other in combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


def test_the_readme_alerts_on_metrics_that_exist() -> None:
    shown = metrics_in(README)
    assert shown
    assert set(shown) <= metric_names()


def test_the_alerts_are_on_metrics_that_exist() -> None:
    names = re.findall(r"- alert: (\w+)", ALERTS)
    expressions = alerts()
    assert len(set(names)) == len(names) == len(expressions) > 5
    for expression in expressions:
        assert set(metrics_in(expression)) <= metric_names(), expression


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of every metric of a running daemon."""
    with private_daemon("--server.metrics=127.0.0.1:0") as daemon:
        with Client(daemon.address) as client:
            for tier in Tier:
                client.save_many([SaveItem(Key(bytes([tier]) * 32), b"bytes", 5)], tier=tier)
            with client.claim([Key(bytes([Tier.RAM]) * 32)]) as hit:
                assert hit
        with daemon.admin() as admin:
            eventually(lambda: admin.stats().usage["default"].lookups)
        with urlopen(f"http://{metrics_of(daemon)}/metrics") as response:
            text = response.read().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {"instance", "job"}).update(sample.labels)
    return found


#: Metrics that do not exist while nothing is wrong, or without TLS.
NOT_ALWAYS = {
    "prefixd_unhealthy",
    "prefixd_notices",
    "prefixd_certificate_ends_timestamp_seconds",
    # Where entries are shared.
    *(f"prefixd_shared_{name}{'' if name in SHARED_GAUGES else '_total'}" for name in SHARED),
}


def alerts() -> list[str]:
    return re.findall(r"expr: >-\n +(.*)", ALERTS)


def test_every_label_in_an_expression_exists(labels: dict[str, set[str]]) -> None:
    """In the dashboard, its legends and the alerts, compared with a daemon's own /metrics."""
    for expression in (*expressions(), *alerts()):
        named = set(metrics_in(expression)) - NOT_ALWAYS
        assert named <= labels.keys(), expression
        common = (
            set.intersection(*(labels[name] for name in named))
            if named
            else {"part", "instance", "job"}
        )
        for metric, filters in re.findall(r"(prefixd_\w+)\{([^}]*)\}", expression):
            filtered = set(re.findall(r"(\w+)=~?\"", filters))
            assert metric in NOT_ALWAYS or filtered <= labels[metric], expression
        grouped_by: set[str] = set()
        for group in re.findall(r"\b(?:by|on) \(([\w, ]+)\)", expression):
            grouped_by |= set(group.split(", "))
        assert grouped_by <= common, expression
    for panel in panels():
        for target in panel["targets"]:
            grouped = re.search(r"by \(([\w, ]+)\)", target["expr"])
            kept = set(grouped[1].split(", ")) if grouped else None
            shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            assert kept is None or shown <= kept, panel["title"]


def promtool(*arguments: str) -> None:
    """Run promtool in the folder of the rules. Skips the test if it is not installed."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed; it comes with Prometheus")
    command = [tool, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=DEPLOY / "prometheus")
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_alerts() -> None:
    promtool("check", "rules", "prefixd.yml")


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", *(path.name for path in ALERT_CASES))


def test_every_alert_has_its_case() -> None:
    """A case with series that make the alert fire, and with a time or a series that does not."""
    cases = "".join(path.read_text() for path in ALERT_CASES)
    for name in re.findall(r"- alert: (\w+)", ALERTS):
        (case,) = (case for case in cases.split("  - name: ") if f"alertname: {name}\n" in case)
        assert case.count("exp_alerts:") == 1, name
        silent = case.count("alertname:") > case.count("exp_alerts:")
        assert silent or case.count("- series:") > 1, name


def test_every_alert_has_its_runbook() -> None:
    """And every runbook its alert."""
    page = (REPOSITORY / "docs/operate.md").read_text()
    named = re.findall(r'- alert: (\w+)\n(?:.*\n)+?.*runbook: "docs/operate.md#(\w+)"', ALERTS)
    assert [name.lower() for name, _ in named] == [anchor for _, anchor in named]
    assert [name for name, _ in named] == re.findall(r"- alert: (\w+)", ALERTS)
    assert [name for name, _ in named] == re.findall(r"^### (Prefixd\w+)$", page, re.MULTILINE)


# ---- systemd


def unit(key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_a_stop_takes_as_long_as_the_daemon_may_drain() -> None:
    config = load_config([], {})
    assert parse_duration_ns(f"{unit('TimeoutStopSec')}s") > config.server.drain_timeout_ns


def test_a_bad_configuration_ends_with_the_status_that_is_not_restarted() -> None:
    with pytest.raises(SystemExit) as left:
        main(["--ram", "8GB"])
    assert str(left.value.code) == unit("RestartPreventExitStatus")


def test_every_session_can_have_its_descriptor() -> None:
    assert int(unit("LimitNOFILE")) > 2 * load_config([], {}).sessions.max_sessions


def test_the_directories_of_the_unit_are_those_that_auto_finds() -> None:
    env = {
        "RUNTIME_DIRECTORY": f"/run/{unit('RuntimeDirectory')}",
        "STATE_DIRECTORY": f"/var/lib/{unit('StateDirectory')}",
    }
    config = load_config([], env)
    # prefixctl, too, looks for this address when root runs it.
    assert config.server.address == "unix:/run/prefixd/prefixd.sock"
    assert config.disk.directory == Path("/var/lib/prefixd")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze, true = shutil.which("systemd-analyze"), shutil.which("true")
    if analyze is None or true is None:
        pytest.skip("systemd-analyze is not installed")
    program = unit("ExecStart").split()[0]
    file = tmp_path / "prefixd.service"
    file.write_text(UNIT.replace(program, true))
    done = subprocess.run(
        [analyze, "verify", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert [line for line in done.stderr.splitlines() if "prefixd.service" in line] == []


# ---- kubernetes


def pod_config() -> Config:
    sidecar = POD[POD.index("initContainers:") : POD.index("  containers:")]
    env = dict(re.findall(r"- name: (PREFIXD_\w+)\n +value: (\S+)", sidecar))
    assert len(env) == sidecar.count("name: PREFIXD_")
    return load_config([], env)


def quantity(text: str) -> int:
    return parse_bytes(f"{text}B")


def test_the_sidecars_budgets_fit_its_limits() -> None:
    config = pod_config()
    (limit,) = set(re.findall(r"memory: (\w+)\n", POD))
    shm, disk = re.findall(r"sizeLimit: (\w+)", POD)
    budgets = (config.ram.budget_bytes, config.shm.budget_bytes, config.disk.budget_bytes)
    ram_bytes, shm_bytes, disk_bytes = map(int, budgets)
    most_bytes = sum(memory_parts(resolve(config, MACHINE)).values())
    assert most_bytes <= quantity(limit) < most_bytes + 2**30, "the sum, and no more"
    assert ram_bytes + shm_bytes < most_bytes
    assert shm_bytes < quantity(shm)
    assert disk_bytes < quantity(disk)


def test_the_readme_lists_every_bound_that_takes_memory() -> None:
    """Each option that adds to the sum, and each whose name says that it is a bound."""
    flags = ["--tcp=127.0.0.1:0", "--shared.engine=redis://127.0.0.1:1", "--ram=1MiB"]
    config = load_config([*flags, "--shm=1MiB", "--disk=1MiB"], {})
    table = README[README.index("### What clients may take") : README.index("## Access")]
    for name in memory_parts(resolve(config, MACHINE)):
        assert name in table, name
    for section in (config.server, config.sessions, config.watch):
        for name, field in type(section).model_fields.items():
            option = field.alias or name
            if option.startswith("max_") and option != "max_waited_keys_per_session":
                assert option in table, option


def test_the_readme_says_what_the_sum_is_made_of() -> None:
    each = {
        "server.max_connections": budgets._CONNECTION_BYTES,
        "server.max_rpcs": budgets._CALL_BYTES,
        "sessions.max_sessions": budgets._SESSION_BYTES,
        "sessions.max_held_keys": budgets._HELD_KEY_BYTES,
        "entries": budgets._ENTRY_BYTES,
    }
    table = README[README.index("### What clients may take") : README.index("## Access")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    said = {row[0].strip("`"): row[-1] for row in rows}
    for name, size_bytes in each.items():
        size, _, word = said[name].rpartition(" ")
        assert (parse_bytes(size.replace(" ", "")), word) == (size_bytes, "each"), name
    assert parse_bytes(said["the daemon itself"].replace(" ", "")) == budgets._BASE_BYTES


def test_the_pods_paths_ports_and_volumes_fit_together() -> None:
    config = pod_config()
    mounts = dict(re.findall(r"- name: (\w+)\n +mountPath: (\S+)", POD))
    volumes = re.findall(r"- name: (\w+)\n(?: +#.*\n)* +emptyDir:", POD)
    assert sorted(mounts) == sorted(volumes)
    assert config.server.address.startswith(f"unix:{mounts['socket']}/")
    assert config.shm.directory.is_relative_to(mounts["shm"])
    assert config.disk.directory.is_relative_to(mounts["disk"])
    engine = POD[POD.index("  containers:") : POD.index("  volumes:")]
    assert re.findall(r"- name: (\w+)\n +mountPath:", engine) == ["socket"], (
        "an engine needs only the socket"
    )
    assert "shareProcessNamespace" not in POD
    (port,) = re.findall(r"containerPort: (\d+)", POD)
    assert config.server.metrics.endswith(f":{port}")
    assert f'prometheus.io/port: "{port}"' in POD
    addresses = re.findall(r"- name: PREFIXD_ADDRESS\n +value: (\S+)", POD)
    assert addresses == [config.server.address] * 2


def test_the_pod_is_indented_by_steps_of_two_blanks() -> None:
    for line in POD.splitlines():
        indent = len(line) - len(line.lstrip())
        assert "\t" not in line
        assert indent % 2 == 0
        assert line == line.rstrip()


# ---- docker


def test_the_image_gets_everything_that_the_package_is_made_of() -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    packages = {link.name for link in (REPOSITORY / "src/prefixd").iterdir() if link.is_symlink()}
    assert copied == packages | {"src"}
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for name in (*copied, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        assert f"!{name}" in ignored


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed; it comes with `pip install .[dev]`")
    command = [linter, "--failure-threshold", "info", DEPLOY / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_layer_of_dependencies_is_what_the_extras_need(tmp_path: Path) -> None:
    """The Dockerfile's own command, on our pyproject.toml."""
    (program,) = re.findall(r'python -c "(.*)" "\$\{EXTRAS\}"', DOCKERFILE)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extras in ("server,shared", "server,shared,s3,opentelemetry"):
        command = [sys.executable, "-c", program, extras]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        needed = list(project["dependencies"])
        for extra in extras.split(","):
            needed += project["optional-dependencies"][extra]
        assert done.stdout.splitlines() == needed


def test_the_image_does_not_run_as_root() -> None:
    (user,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user == ("10001", "10001")
    assert "--uid 10001" in DOCKERFILE
    assert "--gid 10001" in DOCKERFILE


def test_the_images_environment_is_a_good_configuration() -> None:
    env = dict(re.findall(r"(PREFIXD_\w+)=(\S+)", DOCKERFILE))
    assert env
    config = load_config([], env)
    volumes = re.findall(r'"(/[^"]+)"', DOCKERFILE.partition("VOLUME")[2].partition("\n")[0])
    assert config.server.address.startswith(f"unix:{volumes[0]}/")
    assert str(config.disk.directory) == volumes[1]
