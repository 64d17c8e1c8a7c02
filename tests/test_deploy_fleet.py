"""The fleets of deploy/fleet: their parts fit together, and the script forms a real Cluster."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import takewhile
from pathlib import Path
from time import monotonic

import pytest

from prefixd.proto.units import parse_bytes
from prefixd.server.config.loading import load_config
from tests.support.ports import free_ports
from tests.support.redis_servers import RedisServer, needs_redis

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
FLEET = (DEPLOY / "fleet/compose.yaml").read_text()
NODES = (DEPLOY / "fleet/daemonset.yaml").read_text()
VALKEY = (DEPLOY / "fleet/valkey.yaml").read_text()
KUSTOMIZATION = (DEPLOY / "fleet/kustomization.yaml").read_text()
SCRIPT = DEPLOY / "fleet/form-cluster.sh"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PATIENCE_S = 60.0


def services() -> list[str]:
    text = FLEET[FLEET.index("\nservices:") : FLEET.index("\nsecrets:")]
    return re.findall(r"^  ([\w-]+):$", text, re.MULTILINE)


def valkey_options(text: str) -> list[str]:
    """The options of valkey-server in a file, without those that are specific to containers."""
    lines = text[text.index("exec valkey-server") :].splitlines()
    given = list(takewhile(lambda line: "--" in line, lines[1:]))
    options = re.findall(r"(--[\w-]+) (\S+)", "\n".join(given))
    of_containers = (
        "--requirepass",
        "--cluster-announce-hostname",
        "--cluster-preferred-endpoint-type",
    )
    return [
        word
        for name, value in options
        if name not in of_containers
        for word in (name, value.strip('"'))
    ]


def test_the_nodes_are_configured_well_and_know_the_engine() -> None:
    env = dict(re.findall(r"(PREFIXD_\w+): (\S+)", FLEET))
    env |= dict(re.findall(r"(PREFIXD_\w+)=(\S+)", DOCKERFILE))
    config = load_config([], env)
    nodes = [f"redis://{name}:6379" for name in services() if name.startswith("valkey-")]
    assert len(nodes) == 3
    assert config.shared.engine.split(",") == nodes
    (listed,) = re.findall(r"exec /form-cluster.sh (.*)", FLEET)
    assert listed.split() == [node.removeprefix("redis://") for node in nodes]
    assert sum(name.startswith("node-") for name in services()) == 3
    (secret,) = re.findall(r"^secrets:\n  ([\w-]+):", FLEET, re.MULTILINE)
    assert config.shared.password_file == f"/run/secrets/{secret}"
    assert FLEET.count(f"secrets: [{secret}]") == 3, (
        "the engine, the nodes, and the container that forms the Cluster"
    )
    (shm,) = re.findall(r"shm_size: (\w+)", FLEET)
    assert int(config.shm.budget_bytes) < parse_bytes(f"{shm[:-2]}GiB")


def test_the_image_can_share() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert {"server", "shared"} <= set(extras.split(","))


def test_every_volume_is_of_one_node_and_declared() -> None:
    used = re.findall(r"([\w-]+):/(?:run|var)[/\w]+[,\]]", FLEET)
    declared = re.findall(r"^  ([\w-]+):$", FLEET[FLEET.index("\nvolumes:") :], re.MULTILINE)
    assert sorted(used) == sorted(declared)
    assert len(set(used)) == len(used)


def test_kubernetes_daemons_are_configured_well_and_know_the_engine() -> None:
    env = dict(re.findall(r"- name: (PREFIXD_\w+)\n +value: \"?([^\s\"]+)", NODES))
    assert len(env) == NODES.count("- name: PREFIXD_")
    config = load_config([], env)
    (replicas,) = re.findall(r"replicas: (\d)\n  podManagement", VALKEY)
    name = "prefixd-valkey"
    hosts = [f"{name}-{number}.{name}:6379" for number in range(int(replicas))]
    assert config.shared.engine.split(",") == [f"redis://{host}" for host in hosts]
    (listed,) = re.findall(r"form-cluster.sh\n((?: +prefixd-valkey.*\n)+)", VALKEY)
    assert listed.split() == hosts
    assert f'announce-hostname "$(hostname).{name}"' in VALKEY
    (secret,) = re.findall(r"- name: valkey\n +secret:\n +secretName: (\S+)", NODES)
    assert f"- name: {secret}\n" in KUSTOMIZATION
    (path,) = re.findall(r"- name: valkey\n +mountPath: (\S+)", NODES)
    assert config.shared.password_file == f"{path}/valkey-password"
    (pod,) = set(re.findall(r"^        app.kubernetes.io/name: (\w+)$", NODES, re.MULTILINE))
    (allowed,) = re.findall(r"values: \[(.*)\]", VALKEY)
    assert pod in allowed.split(", ")


def test_the_script_is_the_one_that_runs_anywhere() -> None:
    assert textwrap.indent(SCRIPT.read_text(), "    ").strip() in VALKEY


def test_both_fleets_have_the_same_engine_but_for_its_size() -> None:
    ours, theirs = (
        dict(zip(options[::2], options[1::2], strict=True))
        for options in map(valkey_options, (FLEET, VALKEY))
    )
    sizes = [parse_bytes(of.pop("--maxmemory")[:-2] + "MiB") for of in (ours, theirs)]
    assert ours == theirs
    engine = VALKEY[VALKEY.index("kind: StatefulSet") : VALKEY.index("kind: Deployment")]
    (limit,) = set(re.findall(r"memory: (\w+)", engine))
    assert sizes[1] < parse_bytes(f"{limit}B"), "replies and requests need memory, too"


def test_kustomize_has_what_it_names() -> None:
    listed = re.findall(r"^ +- (?:path: )?([\w./-]+)$", KUSTOMIZATION, re.MULTILINE)
    assert {"valkey.yaml", "daemonset.yaml", "namespace.yaml", "valkey-password"} <= {*listed}
    for name in listed:
        # The password is made at the deployment, and never committed.
        assert (DEPLOY / "fleet" / name).exists() or name == "valkey-password"
    assert "deploy/fleet/valkey-password" in (DEPLOY.parent / ".gitignore").read_text()


@pytest.mark.parametrize("text", [FLEET, NODES, VALKEY, KUSTOMIZATION])
def test_files_are_indented_by_steps_of_two_blanks(text: str) -> None:
    for line in text.splitlines():
        assert "\t" not in line
        assert (len(line) - len(line.lstrip())) % 2 == 0
        assert line == line.rstrip()


def test_compose_takes_the_file() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run(
            [docker, "compose", "version"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("docker compose is not installed")
    command = [docker, "compose", "-f", DEPLOY / "fleet/compose.yaml", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- forming the Cluster


def test_the_script_is_posix() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/bin/sh\n")
    for shell in ("dash", "sh"):
        if shutil.which(shell):
            subprocess.run([shell, "-n", SCRIPT], check=True)


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """Three servers with the options of the compose file, which do not know each other."""
    options = valkey_options(FLEET)
    assert "volatile-ttl" in options
    with ExitStack() as stack:
        servers = []
        for number in range(3):
            server = RedisServer(tmp_path / str(number), *options)
            server.port = port_with_bus()
            stack.callback(server.kill)
            server.start()
            servers.append(server)
        yield servers


def port_with_bus() -> int:
    """A free port whose Cluster bus, 10,000 above it, is free as well."""
    deadline_s = monotonic() + PATIENCE_S
    while monotonic() < deadline_s:
        (port,) = free_ports(1)
        with closing(socket.socket()) as bus:
            try:
                bus.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
        return port
    raise AssertionError("there is no free pair of ports")


def form(servers: list[RedisServer], within_s: int = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *(f"127.0.0.1:{server.port}" for server in servers)],
        env={**os.environ, "CLI": "redis-cli", "WITHIN": str(within_s)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S + within_s,
        check=False,
    )


@needs_redis
def test_the_script_forms_a_cluster_that_the_daemon_finds_nothing_wrong_with(
    masters: list[RedisServer],
) -> None:
    from prefixd.server.sharing.redis_store import RedisStore

    for _ in range(2):  # the second run finds the Cluster, and changes nothing
        done = form(masters)
        assert done.returncode == 0, done.stderr
    store = RedisStore([master.url for master in masters], "1")
    try:
        assert store.nodes.wait_until_reached(PATIENCE_S)
        assert len(store.nodes.all()) == 3
        assert store.problems() == []
    finally:
        store.close()


@needs_redis
def test_a_missing_master_is_reported(masters: list[RedisServer]) -> None:
    masters[1].kill()
    done = form(masters, within_s=2)
    assert done.returncode == 1
    assert "no Cluster" in done.stderr
    masters[1].start()
    assert form(masters).returncode == 0
