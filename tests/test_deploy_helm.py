"""The Helm chart, linted and rendered by Helm's own code: valid by Kubernetes' schemas, fitting the
daemon that it starts, and the same as the manifests of kustomize."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd import __version__
from prefixd.proto.units import parse_bytes
from prefixd.server.config.budgets import memory_parts, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.config.options import Config
from tests.support.manifests import (
    CHART,
    DEPLOY,
    VALUES_PAGE,
    described,
    manifests,
    rendered,
    values_page,
)
from tests.support.running import MACHINE

helm = pytest.importorskip(
    "helm_python",
    reason="Helm's code is not installed; it comes with `pip install .[chart]` on x86-64",
)
yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with kubernetes-validate")

#: The versions of Kubernetes that the chart is checked with.
VERSIONS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35")
EVERYTHING = {
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-node-critical",
    "podLabels": {"team": "inference"},
    "podAnnotations": {"note": "cache"},
    "image": {"repository": "registry.example/prefixd", "tag": "1", "pullSecrets": ["registry"]},
    "options": {"log.level": "debug", "server.max_connections": 512},
    "shm": {"hostPath": "/dev/shm/prefixd"},
    "tls": {"enabled": True},
    "fleet": {"enabled": True},
    "monitoring": {
        "annotations": False,
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}
CASES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "everything": EVERYTHING,
    "TLS": {"tls": {"enabled": True}},
    "an engine that exists": {
        "fleet": {"enabled": True, "engine": "redis://valkey:6379", "passwordSecret": ""}
    },
    "small": {"budgets": {"ram": "64MiB", "shm": "0", "disk": "0"}},
    "large": {"budgets": {"ram": "500GiB", "shm": "1TiB", "disk": "20TiB"}},
}
EACH_CASE = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    texts = (text for name, text in rendered(values).items() if name != "NOTES.txt")
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def the(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    (found,) = (one for one in objects(values) if one["kind"] == kind)
    assert isinstance(found, dict)
    return found


def pod_of(values: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = the("DaemonSet", values)["spec"]["template"]["spec"]
    return pod


def config_of(values: dict[str, Any]) -> Config:
    (daemon,) = pod_of(values)["containers"]
    return load_config([], {one["name"]: one["value"] for one in daemon["env"]})


@EACH_CASE
def test_helm_finds_nothing_to_say(values: dict[str, Any]) -> None:
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == []
    found = [one["error"] for one in report["messages"]]
    assert found == ["icon is recommended"], "which a site without a place for one can't have"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"budgets": {"ram": "8GB"}}, "/budgets/ram"),
        ({"budgets": {"ramm": "8GiB"}}, "ramm"),
        ({"shm": {"hostPath": "/var/shm"}}, "/shm/hostPath"),
        ({"resources": {"memory": "20"}}, "/resources/memory"),
        ({"options": {"LOG": "debug"}}, "LOG"),
        ({"tolerationz": []}, "tolerationz"),
    ],
)
def test_a_value_that_is_none_is_refused_by_its_name(values: dict[str, Any], named: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError) as refused:
        chart.validate_schema(values)
    assert named in str(refused.value)


def test_the_schema_knows_every_value() -> None:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(chart.values)
        schema = chart.schema
    for name, _, _ in described():
        at: Any = schema
        for part in name.split("."):
            at = at["properties"].get(part) if "properties" in at else {"a map": True}
            assert at, name


@pytest.mark.parametrize("version", VERSIONS)
@EACH_CASE
def test_kubernetes_takes_every_object(values: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for one in objects(values):
        if not one["apiVersion"].startswith("monitoring.coreos.com/"):
            validate.validate(one, version, strict=True)


@EACH_CASE
def test_the_daemon_takes_its_environment(values: dict[str, Any]) -> None:
    config = config_of(values)
    (daemon,) = pod_of(values)["containers"]
    mounts = {mount["mountPath"] for mount in daemon["volumeMounts"]}
    assert config.server.address == "unix:/run/prefixd/prefixd.sock"
    needed = [config.disk.directory]
    if config.server.tcp:
        needed += map(Path, (config.server.tls_cert, config.server.tls_key, config.server.tokens))
    if config.shared.password_file:
        needed.append(Path(config.shared.password_file))
    for path in (*needed, config.shm.directory):
        assert any(path.is_relative_to(mount) for mount in mounts), path
    ports = {one["name"]: str(one["containerPort"]) for one in daemon["ports"]}
    served = {"metrics": config.server.metrics}
    if config.server.tcp:
        served |= {"grpc": config.server.tcp, "data": config.server.data}
    assert ports == {n: address.rpartition(":")[2] for n, address in served.items()}


@EACH_CASE
@pytest.mark.parametrize("budgets", [("8GiB", "8GiB", "80GiB"), ("700MiB", "3GiB", "1TiB")])
def test_memory_is_the_sum_of_what_the_daemon_may_take(
    values: dict[str, Any], budgets: tuple[str, str, str]
) -> None:
    if "budgets" not in values:
        values = values | {"budgets": dict(zip(("ram", "shm", "disk"), budgets, strict=True))}
    values = {name: value for name, value in values.items() if name != "options"}
    (daemon,) = pod_of(values)["containers"]
    limit_bytes = parse_bytes(daemon["resources"]["limits"]["memory"] + "B")
    assert daemon["resources"]["requests"]["memory"] == daemon["resources"]["limits"]["memory"]
    most_bytes = sum(memory_parts(resolve(config_of(values), MACHINE)).values())
    assert most_bytes <= limit_bytes < most_bytes + 2**30 + 2**21, "the sum, and no more"


@EACH_CASE
def test_the_shm_tier_fits_its_volume(values: dict[str, Any]) -> None:
    (volume,) = (one for one in pod_of(values)["volumes"] if one["name"] == "shm")
    if "hostPath" in volume:
        assert volume["hostPath"]["path"] == values["shm"]["hostPath"]
        (prepares,) = pod_of(values)["initContainers"]
        assert "/dev/shm/prefixd" in prepares["command"]
    else:
        budget_bytes = config_of(values).shm.budget_bytes
        assert int(budget_bytes) < parse_bytes(volume["emptyDir"]["sizeLimit"] + "B")


def test_a_node_is_chosen_by_the_values() -> None:
    pod = pod_of(EVERYTHING)
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod[name] == EVERYTHING[name]
        assert name not in pod_of({})


def test_what_prometheus_and_grafana_get(tmp_path: Path) -> None:
    monitor, rule = the("PodMonitor", EVERYTHING), the("PrometheusRule", EVERYTHING)
    labels = the("DaemonSet", EVERYTHING)["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (daemon,) = pod_of(EVERYTHING)["containers"]
    assert endpoint["port"] in {port["name"] for port in daemon["ports"]}
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/prefixd.yml").read_text())
    maps = [one for one in objects(EVERYTHING) if one["kind"] == "ConfigMap"]
    (board,) = (one for one in maps if "grafana_dashboard" in one["metadata"]["labels"])
    shown = json.loads(board["data"]["prefixd.json"])
    assert shown == json.loads((DEPLOY / "grafana/prefixd.json").read_text())
    if tool := shutil.which("promtool"):
        file = tmp_path / "rules.yml"
        file.write_text(yaml.safe_dump(rule["spec"]))
        subprocess.run([tool, "check", "rules", file], check=True, stdout=subprocess.DEVNULL)


def pods(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in objects(values):
        if one["kind"] in ("DaemonSet", "StatefulSet", "Deployment"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def more_than_restricted(pod: dict[str, Any]) -> set[str]:
    """What Pod Security's level *restricted* forbids, of Linux pods since Kubernetes 1.25."""
    found = {name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)}
    kinds = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"}
    kinds |= {"persistentVolumeClaim", "projected", "secret"}
    for volume in pod.get("volumes", ()):
        found |= {f"volume {kind}" for kind in volume.keys() - {"name"} - kinds}
    common = pod.get("securityContext", {})
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        own = common | container.get("securityContext", {})
        capabilities = own.get("capabilities", {})
        wrong = {
            "privileged": own.get("privileged"),
            "escalates": own.get("allowPrivilegeEscalation") is not False,
            "may be root": own.get("runAsNonRoot") is not True or own.get("runAsUser") == 0,
            "no seccomp": own.get("seccompProfile", {}).get("type") != "RuntimeDefault",
            "keeps capabilities": capabilities.get("drop") != ["ALL"],
            "adds capabilities": not set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
            "host ports": any("hostPort" in port for port in container.get("ports", ())),
            "writes its root": own.get("readOnlyRootFilesystem") is not True,
        }
        found |= {f"{container['name']} {name}" for name, is_so in wrong.items() if is_so}
    return found


@EACH_CASE
def test_nothing_has_more_rights_than_it_needs(values: dict[str, Any]) -> None:
    for name, pod in pods(values):
        assert pod["automountServiceAccountToken"] is False
        needed = set()
        if name == "prefixd":
            needed = {"volume hostPath", "directories may be root", "directories adds capabilities"}
        assert more_than_restricted(pod) == needed, name


def test_a_sidecar_is_restricted() -> None:
    pod = yaml.safe_load((DEPLOY / "kubernetes/sidecar.yaml").read_text())["spec"]
    # The engine is a place-holder.
    pod["containers"] = []
    assert more_than_restricted(pod) == set()


def test_the_policy_would_notice() -> None:
    pod = {"hostPID": True, "containers": [{"name": "a"}], "volumes": [{"name": "b", "nfs": {}}]}
    assert {"hostPID", "volume nfs", "a may be root", "a no seccomp"} <= more_than_restricted(pod)


def test_two_releases_select_their_own_pods() -> None:
    texts = rendered({"fleet": {"enabled": True}}, "blue"), rendered({}, "green")
    sets = [yaml.safe_load(text["daemonset.yaml"]) for text in texts]
    assert [one["metadata"]["name"] for one in sets] == ["blue-prefixd", "green-prefixd"]
    selectors = [one["spec"]["selector"]["matchLabels"] for one in sets]
    assert selectors[0] != selectors[1]


def test_the_notes_name_what_has_to_exist() -> None:
    notes = rendered(EVERYTHING)["NOTES.txt"]
    for secret in ("prefixd-tls", "prefixd-tokens", "valkey-password"):
        assert secret in notes
    assert "has to exist" not in rendered({})["NOTES.txt"]


def test_the_manifests_of_kustomize_are_made_from_the_chart() -> None:
    for path, text in manifests().items():
        assert path.read_text() == text, f"{path.name} is not what `make manifests` writes"


def test_every_value_is_described_and_the_page_is_made_of_that() -> None:
    assert all(about for _, _, about in described()), [
        n for n, _, about in described() if not about
    ]
    assert VALUES_PAGE.read_text() == values_page(), "run `make manifests`"


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        ("kubernetes", {}),
        ("kubernetes/tls", {"tls": {"enabled": True}}),
        ("fleet", {"fleet": {"enabled": True}}),
    ],
)
def test_kustomize_builds_the_objects_of_the_chart(
    tmp_path: Path, folder: str, values: dict[str, Any]
) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(DEPLOY / folder, tmp_path / "base")
    (tmp_path / "base/valkey-password").write_text("secret")
    command = [kubectl, "kustomize", str(tmp_path / "base")]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def comparable(all_of_them: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
        # Kustomize names its secret by its contents, and puts everything into the namespace.
        text = json.dumps(all_of_them)
        for one in all_of_them:
            if one["kind"] == "Secret":
                text = text.replace(one["metadata"]["name"], "valkey-password")
        found = {}
        for one in json.loads(text):
            one["metadata"].pop("namespace", None)
            labels = one["metadata"].get("labels", {})
            for name in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
                labels.pop(name, None)
            if one["kind"] not in ("Secret", "Namespace"):
                found[one["kind"], one["metadata"]["name"]] = one
        return found

    assert comparable(list(yaml.safe_load_all(built))) == comparable(objects(values))


def test_a_package_of_the_chart_is_whole(tmp_path: Path) -> None:
    """The chart shares files with deploy/ through links, which a package has to resolve."""
    with helm.Chart.load(CHART) as chart:
        package = chart.save(tmp_path)
        here = chart.render(EVERYTHING, name="prefixd", namespace="default")
    with helm.Chart.load(package) as packed:
        assert packed.render(EVERYTHING, name="prefixd", namespace="default") == here


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    if "unknown" not in __version__:
        assert chart["version"] == chart["appVersion"] == __version__
