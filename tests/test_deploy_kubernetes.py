"""The manifests of deploy/kubernetes: valid by Kubernetes' own schemas, and consistent with the
daemon that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixd import __version__
from prefixd.proto.units import parse_bytes
from prefixd.server.config.budgets import memory_parts, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.config.options import Config
from tests.support.running import MACHINE

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with kubernetes-validate")

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "deploy/kubernetes"
#: A recent version, and the first that has sidecars enabled.
VERSIONS = ("1.35", "1.29")
USER = 10001


def read(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((MANIFESTS / name).read_text())
    assert isinstance(document, dict)
    return document


def pod_of(name: str) -> dict[str, Any]:
    document = read(name)
    if document["kind"] == "DaemonSet":
        document = document["spec"]["template"]
    pod: dict[str, Any] = document["spec"]
    return pod


def daemon_of(name: str) -> dict[str, Any]:
    pod = pod_of(name)
    everything = [*pod.get("initContainers", ()), *pod["containers"]]
    (container,) = (one for one in everything if one["name"] == "prefixd")
    found: dict[str, Any] = container
    return found


def config_of(name: str) -> Config:
    env = {one["name"]: one["value"] for one in daemon_of(name)["env"] if "value" in one}
    return load_config([], env)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_kubernetes_takes_the_manifest(name: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    validate.validate(read(name), version, strict=True)


def test_the_schemas_would_notice() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    wrong = read("daemonset.yaml")
    wrong["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize(
    "name", ["daemonset.yaml", "sidecar.yaml", "tls/daemonset.yaml", "../fleet/daemonset.yaml"]
)
def test_the_memory_limit_is_the_sum_of_what_the_daemon_may_take(name: str) -> None:
    resources = daemon_of(name)["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    most_bytes = sum(memory_parts(resolve(config_of(name), MACHINE)).values())
    limit_bytes = parse_bytes(f"{resources['limits']['memory']}B")
    assert most_bytes <= limit_bytes < most_bytes + 2**30, "the sum, and no more"


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_budgets_paths_and_ports_fit_together(name: str) -> None:
    pod, daemon, config = pod_of(name), daemon_of(name), config_of(name)
    mounts = {mount["name"]: mount["mountPath"] for mount in daemon["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert config.server.address == f"unix:{mounts['socket']}/prefixd.sock"
    assert config.shm.directory.is_relative_to(mounts["shm"])
    assert config.disk.directory.is_relative_to(mounts["disk"])
    shm_room = parse_bytes(f"{volumes['shm']['emptyDir']['sizeLimit']}B")
    shm = config.shm.budget_bytes
    assert isinstance(shm, int)
    assert shm < shm_room
    (port,) = (one["containerPort"] for one in daemon["ports"] if one["name"] == "metrics")
    assert config.server.metrics.endswith(f":{port}")


@pytest.mark.parametrize("name", ["daemonset.yaml", "sidecar.yaml"])
def test_the_daemon_is_unprivileged(name: str) -> None:
    pod, daemon = pod_of(name), daemon_of(name)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == USER
    own = daemon["securityContext"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert not {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & pod.keys()


def test_the_init_container_may_only_prepare_the_node() -> None:
    pod = pod_of("daemonset.yaml")
    (container,) = pod["initContainers"]
    assert container["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["CHOWN", "FOWNER"],
    }
    made = [word for word in container["command"] if word.startswith("/")]
    on_the_node = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    assert sorted(made) == sorted(on_the_node.values())
    assert str(USER) in container["command"]


def test_an_engine_needs_the_socket_and_nothing_else() -> None:
    """The manifest's comment tells the author of an engine's pod what to add."""
    text = (MANIFESTS / "daemonset.yaml").read_text()
    comment = yaml.safe_load(
        "\n".join(line[4:] for line in text.splitlines() if line[:4] == "#   ")
    )
    (volume,) = comment["volumes"]
    (mount,) = comment["volumeMounts"]
    (address,) = comment["env"]
    (socket,) = (v for v in pod_of("daemonset.yaml")["volumes"] if v["name"] == "socket")
    assert volume["hostPath"]["path"] == socket["hostPath"]["path"]
    assert address["value"] == config_of("daemonset.yaml").server.address
    assert address["value"].startswith(f"unix:{mount['mountPath']}/")


def test_the_base_has_what_it_names() -> None:
    for folder in (MANIFESTS, MANIFESTS / "tls", MANIFESTS.parent / "fleet"):
        base = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert all((folder / name).is_file() for name in base["resources"])
        (image,) = base["images"]
        images = {one["image"] for one in (daemon_of("daemonset.yaml"), daemon_of("sidecar.yaml"))}
        assert images == {f"{image['name']}:{image['newTag']}"}
        if "unknown" not in __version__:
            assert image["newTag"] == __version__


def test_secrets_are_mounted_where_the_daemon_looks_and_readable_to_its_group() -> None:
    pod = read("tls/daemonset.yaml")["spec"]["template"]["spec"]
    (daemon,) = pod["containers"]
    env = {one["name"]: one["value"] for one in daemon["env"]}
    server = load_config([], env).server
    mounts = {
        each["mountPath"]: each["name"]
        for each in daemon["volumeMounts"]
        if each["mountPath"].startswith("/secrets")
    }
    for file in (server.tls_cert, server.tls_key, server.tokens):
        assert str(Path(file).parent) in mounts
    assert all("subPath" not in each for each in daemon["volumeMounts"])
    secrets = [each for each in pod["volumes"] if "secret" in each]
    volumes = {each["name"]: each["secret"]["defaultMode"] for each in secrets}
    assert volumes == dict.fromkeys(mounts.values(), 0o400)
    assert pod["securityContext"]["fsGroup"] == USER
    ports = {each["name"]: each["containerPort"] for each in daemon["ports"]}
    assert server.tcp == f"0.0.0.0:{ports['grpc']}"
    assert server.data == f"0.0.0.0:{ports['data']}"
    service = read("tls/service.yaml")["spec"]
    assert {each["name"]: each["port"] for each in service["ports"]}.items() < ports.items()
