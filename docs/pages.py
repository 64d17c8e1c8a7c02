"""What mkdocs does beside docs/: pages from other folders, the generated reference, and links.

The files of the repository link to each other as files. On the site a link goes to the page that
a file has there, or else to the repository.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Pages of the site that lie elsewhere in the repository.
ELSEWHERE = {
    "deploy/README.md": "running.md",
    "deploy/helm/README.md": "chart.md",
    "ARCHITECTURE.md": "understand/architecture.md",
    "RELIABILITY.md": "understand/reliability.md",
    "SECURITY.md": "understand/security.md",
    "BENCHMARKS.md": "understand/benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
#: Pages that answer questions come before those that mention their words.
RANK = {"operate.md": 4, "running.md": 2, "changelog.md": 0.3, "understand/benchmarks-log.md": 0.3}
LINK = re.compile(r"(\]\(|(?:src|srcset|href)=\")([^)\"\s]+)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, name in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for name, make in generated().items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    home = f"{config['repo_url'].rstrip('/')}/"
    here = page.file.src_uri
    page.meta["search"] = {"boost": RANK.get(here, 0.5 if here.startswith("api/") else 1)}
    source = next((path for path, name in ELSEWHERE.items() if name == here), f"docs/{here}")

    def mended(found: re.Match[str]) -> str:
        target, hash_, anchor = found[2].partition("#")
        if target.startswith(f"{home}blob/main/"):
            path = target.removeprefix(f"{home}blob/main/")
        elif not target or re.match(r"[a-z]+:|/", target):
            return found[0]
        else:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = ELSEWHERE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if name:
            target = posixpath.relpath(name, posixpath.dirname(here) or ".")
        elif (ROOT / path).exists():
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            target = f"{home}{kind}/main/{path}"
        return f"{found[1]}{target}{hash_}{anchor}"

    return LINK.sub(mended, markdown)


def generated() -> dict[str, Callable[[], str]]:
    """Pages of the reference, and what makes their text."""
    return {
        "reference/cli.md": commands,
        "reference/options.md": options,
        "reference/metrics.md": metrics,
    }


def commands() -> str:
    """Every command of `prefixctl`, as its --help."""
    import typer
    from typer.cli import get_docs_for_click

    from prefixd.client.ctl.main import app

    command = typer.main.get_command(app)
    made = get_docs_for_click(obj=command, ctx=typer.Context(command), name="prefixctl")
    return made.replace("# `prefixctl`", "# Commands: prefixctl", 1)


def options() -> str:
    """deploy/prefixd.toml, a heading for each section."""
    text = (ROOT / "deploy/prefixd.toml").read_text()
    tomllib.loads(text)
    first, *sections = re.split(r"\n\n(?=(?:#[^\n]*\n)*(?:\n)?\[\w+\]\n)", text)
    parts = ["# Options: prefixd.toml", "`prefixd --print-config` prints this file.", fenced(first)]
    for section in sections:
        (name,) = re.findall(r"^\[(.*)\]$", section, re.MULTILINE)
        parts += [f"## {name}", fenced(section)]
    return "\n\n".join(parts)


def fenced(text: str) -> str:
    return f"```toml\n{text.strip()}\n```"


def metrics() -> str:
    """Every metric of /metrics: its kind, and what it says of itself."""
    rows = [f"| `{name}` | {kind} | {about} |" for name, kind, about in families()]
    head = (
        "# Metrics\n\nWhat `server.metrics` shows at `/metrics`."
        " [How to read them](../running.md#monitoring).\n"
    )
    return "\n".join([head, "| metric | kind | |", "|---|---|---|", *sorted(rows), ""])


def families() -> Iterator[tuple[str, str, str]]:
    from types import SimpleNamespace

    from prefixd.server.api.metrics import PRESSURE, SHARED, StateCollector
    from prefixd.server.core.counters import Histogram
    from prefixd.server.core.state import MetaState
    from prefixd.server.core.tables import StateConfig
    from prefixd.server.runtime.clock import BOUNDS_NS, Clock, Latencies

    collector = StateCollector(
        MetaState(StateConfig(), {}, {}, frozenset(), 1),
        lag=SimpleNamespace(pulses=Histogram(BOUNDS_NS)),  # type: ignore[arg-type]
        latencies=Latencies(Clock()),
        pressure=lambda: dict.fromkeys(PRESSURE, 0.0),
        shared=lambda: dict.fromkeys(SHARED, 0),
    )
    for family in collector.collect():
        total = "_total" if family.type == "counter" else ""
        yield f"{family.name}{total}", family.type, family.documentation
