"""The examples run, and the documents name only files, tests and functions that exist."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import prefixd.client
from prefixd.client import Client, Tier
from prefixd.client.connectors.engine import attach
from prefixd.client.ctl.private import PrivateDaemon
from tests.support.daemon import private_daemon

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXPECTED = {
    "images.py": "computed blocks: 16\nthe same again: 0\nanother picture: 8\n",
    "shared_prefix.py": "computed blocks: 24\nthe same again: 0\nanother question: 8\n",
    "engine_hashes.py": (
        "pages there: 3\npages restored: 3 right: True\ndeleted: deleted deleted deleted\n"
    ),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_every_example_runs(daemon: PrivateDaemon, example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example), daemon.address], capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", EXPECTED[example.name])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_what_is_to_be_installed_exists() -> None:
    """Documents and messages name a clone of prefixd with its extras, or packages that it declares:
    prefixd itself is in no index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    known = {re.split(r"[^\w-]", each)[0] for names in extras.values() for each in names}
    known = known - {"prefixd"} | {
        ".",
        "llama-cpp-python",
        "lmcache",
        "sglang",
        "torch",
        "transformers",
        "vllm",
    }
    files = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *PAGES, *ROOT.glob("deploy/*.*")]
    for room in ("client", "server", "src"):
        files += [file for file in (ROOT / room).rglob("*.py") if not file.is_symlink()]
    for file in files:
        for line in re.findall(r"pip install (.+)", file.read_text()):
            # Up to what ends a command in a text.
            for word in re.split(r"  |[`\")#:]| in a| if ", line)[0].split():
                package, _, wanted = word.strip("'].").removesuffix("]").partition("[")
                where = f"{file.relative_to(ROOT)}: {line}"
                assert (package or ".") in known, where
                if not package:
                    assert set(wanted.split(",")) <= {"", *extras}, where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_imports_names_that_exist(page: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(code, page.name, "exec")
        for module, names in re.findall(r"^from (prefixd[\w.]*) import (.+)$", code, re.MULTILINE):
            found = __import__(module, fromlist=["_"])
            assert all(hasattr(found, name.strip()) for name in names.split(","))


def test_the_methods_that_the_page_for_connectors_names_exist() -> None:
    text = (ROOT / "docs/write-a-connector.md").read_text()
    named = set(re.findall(r"(?<!prefixd\.)client\.(\w+)", text))
    assert len(named) > 8
    assert {name for name in named if not hasattr(Client, name)} == set()


#: By engine: the option in front of the configuration on its page, and the path to prefixd's part.
CONFIGURED = {
    "vllm": ("--kv-transfer-config", ("kv_connector_extra_config", "secondary_tiers", 0)),
    "sglang": ("--hicache-storage-backend-extra-config", ()),
    "lmcache": ("--l2-adapter", ("adapter_params",)),
}


@pytest.mark.parametrize("engine", CONFIGURED)
def test_the_options_on_an_engines_page_exist(engine: str) -> None:
    option, place = CONFIGURED[engine]
    text = (ROOT / f"docs/{engine}.md").read_text()
    (found,) = re.findall(rf"{option} '(\{{.*?\}})'$", text, re.MULTILINE | re.DOTALL)
    options = given = json.loads(found)
    for step in place:
        options = options[step]
    engine_options = {"type", "backend_name", "module_path", "class_name", "interface_v1"}
    client, tier = attach(engine, {k: v for k, v in options.items() if k not in engine_options}, [])
    client.close()
    assert tier is Tier.SHM
    if "module_path" in given:
        module = importlib.import_module(given["module_path"])
        assert f'"{given["class_name"]}"' in Path(module.__file__ or "").read_text()


def test_every_public_name_exists() -> None:
    names: dict[str, object] = {}
    exec("from prefixd.client import *", names)
    assert set(prefixd.client.__all__) <= names.keys()


#: A test file, with or without the name of a test.
NAMED = re.compile(r"`((?:[a-z_]+/)*test_[a-z_]+\.py)(?:::([A-Za-z_]+))?`")


@pytest.mark.parametrize(
    "page",
    [
        "RELIABILITY.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        *(str(p.relative_to(ROOT)) for p in PAGES),
    ],
)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / page).read_text())
    missing = []
    for file, name in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        exists = path.is_file() and (not name or f"def {name}(" in path.read_text())
        if not exists:
            missing.append(f"{file}::{name}")
    assert missing == []
    assert len(named) > 40 or page != "RELIABILITY.md", "it names the tests of its promises"


def test_what_users_of_other_caches_suffered_has_tests() -> None:
    text = (ROOT / "RELIABILITY.md").read_text()
    table = text.split("## What users of other caches suffered")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| \w[\w-]*#", line)]
    assert len(rows) == 25
    assert [row for row in rows if not NAMED.search(row)] == []


#: A row of the tables of a save and a restore: the folder, the module and the function.
STEP = re.compile(r"^\| `([a-z/]+)/` \| `(\w+)\.(\w+)` \|", re.MULTILINE)
#: The layers from the caller down. The client's two transports are one layer.
LEVELS = (
    "client", "client/local client/wire", "server/api", "server/core", "server/runtime", "tiers"
)  # fmt: skip


def test_the_steps_of_a_save_and_a_restore_exist_and_go_down() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    ways = text[text.index("## The path of a save") : text.index("## One event")].split("\n\n|")[1:]
    assert len(ways) == 6
    for way in ways:
        steps = STEP.findall("|" + way)
        levels = [next(n for n, at in enumerate(LEVELS) if f in at.split()) for f, *_ in steps]
        assert len(steps) == way.count("\n| `"), way
        assert levels == sorted(levels), "no step goes back up"
        for folder, module, function in steps:
            assert f"def {function}(" in (ROOT / folder / f"{module}.py").read_text()


def test_everything_public_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    named = set(re.findall(r"^::: (prefixd[\w.]+)$", pages, re.MULTILINE))
    public = {f"prefixd.client.{name}" for name in prefixd.client.__all__}
    assert public - {"prefixd.client.errors"} <= named
    for name in named - public:
        module, _, attribute = name.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, attribute), name


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    site = runpy.run_path(str(ROOT / "docs/pages.py"))
    of_docs = [str(page.relative_to(ROOT / "docs")) for page in PAGES]
    assert sorted(listed) == sorted([*of_docs, *site["ELSEWHERE"].values(), *site["generated"]()])
