"""What deploy/ has of the Helm chart: the manifests of kustomize, and the table of its values.

    python -m tests.support.manifests

writes them. `tests/test_deploy_helm.py` renders them again and compares. Helm's own code renders
(helm-python-sdk brings it along).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
CHART: Final = DEPLOY / "helm"
VALUES_PAGE: Final = CHART / "README.md"
#: Each manifest of kustomize, the template that it comes from, and the values.
MADE: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "kubernetes/daemonset.yaml": ("daemonset.yaml", {}),
    "kubernetes/tls/daemonset.yaml": ("daemonset.yaml", {"tls": {"enabled": True}}),
    "kubernetes/tls/service.yaml": ("service.yaml", {"tls": {"enabled": True}}),
    "fleet/daemonset.yaml": ("daemonset.yaml", {"fleet": {"enabled": True}}),
    "fleet/valkey.yaml": ("valkey.yaml", {"fleet": {"enabled": True}}),
}
_MADE_BY: Final = "# Made from the chart in deploy/helm by `make manifests`.\n"
#: Labels of Helm's own, and blanks at the ends of lines.
_NOT_FOR_FILES: Final = re.compile(
    r"^ +(?:app.kubernetes.io/managed-by|helm.sh/chart): .*\n| +$", re.MULTILINE
)
_TABLE: Final = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- end -->)", re.DOTALL)


def rendered(values: Mapping[str, Any], release: str = "prefixd") -> dict[str, str]:
    """What `helm template` prints, by the name of the template; without those that are empty."""
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        made = chart.render(dict(values), name=release, namespace="default")
    files = {name.rpartition("/")[2]: text for name, text in made.items()}
    return {name: text for name, text in files.items() if text.strip()}


def manifests() -> dict[Path, str]:
    """The text of each file in `MADE`."""
    return {
        DEPLOY / name: _MADE_BY + _NOT_FOR_FILES.sub("", rendered(values)[template]).strip() + "\n"
        for name, (template, values) in MADE.items()
    }


def values_page() -> str:
    """The chart's README, with the table of values as values.yaml has them."""
    rows = [f"| `{name}` | {default} | {about} |" for name, default, about in described()]
    table = "\n".join(["| value | default | |", "|---|---|---|", *rows])
    return _TABLE.sub(lambda _: f"\n{table}\n\n", VALUES_PAGE.read_text())


def described() -> Iterator[tuple[str, str, str]]:
    """Each value of values.yaml: its name, its default, and the comment above it."""
    path: list[str] = []
    about: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            about.append(text.removeprefix("#").strip())
            continue
        if text:
            name, _, default = text.partition(":")
            path[(len(line) - len(line.lstrip())) // 2 :] = [name]
            if default:
                yield ".".join(path), f"`{default.strip()}`", " ".join(about)
        about = []


def main() -> None:
    for path, text in {**manifests(), VALUES_PAGE: values_page()}.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
