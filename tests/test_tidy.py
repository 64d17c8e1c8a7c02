"""The style guide as far as a program can check it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("proto", "tiers", "server", "client")
MAX_LINES, MAX_TEST_LINES = 500, 600
#: What people read on a terminal comes from here.
COMMAND_LINES = (
    "client/ctl",
    "proto/generate.py",
    "server/config.py",
    "server/daemon.py",
    "server/sources.py",
)
#: Who may import whom, beside itself.
MAY_IMPORT = {
    "proto": set(),
    "tiers": {"proto"},
    "server": {"proto", "tiers"},
    "client": {"proto", "tiers.eviction"},
}
#: No clock, no randomness, no files, no threads, no logging, no configuration.
PURE = [
    "server/events.py",
    "server/effects.py",
    "server/answers.py",
    "server/tables.py",
    "server/turn.py",
    "server/reading.py",
    "server/saving.py",
    "server/state.py",
    "server/checking.py",
    "tiers/ledger.py",
    "tiers/extents.py",
    "tiers/eviction/*.py",
]
IMPURE_MODULES = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "logging",
    "mmap",
    "os",
    "pathlib",
    "random",
    "secrets",
    "shutil",
    "signal",
    "socket",
    "structlog",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval"}


def generated(path: Path) -> bool:
    return "_pb2" in path.name


@functools.cache
def modules() -> tuple[Path, ...]:
    """Everything in the package that a person wrote."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(path for path in found if not generated(path))


@functools.cache
def files_of_tests() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), path.name)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def dotted(path: Path) -> str:
    """`server/state.py` is `server.state`, `server/__init__.py` is `server`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, relative ones resolved below the package; what is
    imported by name from a module comes with that name: `tiers.eviction.lru.LRU`."""
    package = [*path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["prefixd", *package][: len(package) + 2 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def within(imported: str, module: str) -> bool:
    return imported == module or imported.startswith(f"{module}.")


def calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def source(path: Path, line: int) -> str:
    return path.read_text().splitlines()[line - 1]


def none(problems: Iterator[str]) -> None:
    assert "\n".join(problems) == ""


# ---- structure


def test_the_rules_below_look_at_something() -> None:
    assert len(modules()) > 40
    assert len(files_of_tests()) > 20
    assert all(list(ROOT.glob(pattern)) for pattern in PURE)
    lru = list(imports(ROOT / "tiers/eviction/lru.py"))
    assert "prefixd.tiers.eviction.base.EvictionPolicy" in [imported for _, imported in lru]


def test_imports_run_one_way() -> None:
    def problems() -> Iterator[str]:
        for path in modules():
            folder = path.relative_to(ROOT).parts[0]
            allowed = {folder} | MAY_IMPORT[folder]
            for line, imported in imports(path):
                if not within(imported, "prefixd") or imported == "prefixd.__version__":
                    continue
                target = imported.removeprefix("prefixd.")
                if not any(within(target, module) for module in allowed):
                    yield f"{name(path)}:{line}: {folder} does not know {target}"

    none(problems())


def test_imports_within_the_package_are_relative() -> None:
    def problems() -> Iterator[str]:
        for path in modules():
            for node in ast.walk(tree(path)):
                absolute = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom) and not node.level
                    else []
                )
                if any(within(module, "prefixd") for module in absolute):
                    yield f"{name(path)}:{node.lineno}: import it relatively"

    none(problems())


def test_the_core_touches_nothing_outside_itself() -> None:
    def problems() -> Iterator[str]:
        for path in (path for pattern in PURE for path in sorted(ROOT.glob(pattern))):
            for line, imported in imports(path):
                if imported.split(".")[0] in IMPURE_MODULES:
                    yield f"{name(path)}:{line}: imports {imported}"
            for line, called in calls(path):
                if called in IMPURE_CALLS:
                    yield f"{name(path)}:{line}: calls {called}"

    none(problems())


def test_every_module_is_in_a_test() -> None:
    """By a test of its name, imported, or run by its path."""
    tested = {imported for path in files_of_tests() for _, imported in imports(path)}
    text = "".join(path.read_text() for path in files_of_tests())

    def problems() -> Iterator[str]:
        for path in modules():
            module = f"prefixd.{dotted(path)}"
            own = any(path.stem in test.stem for test in files_of_tests())
            if own or path.name == "__init__.py" or name(path) in text:
                continue
            if not any(within(one, module) for one in tested):
                yield f"{name(path)}: in no test"

    none(problems())


# ---- size and words


def test_no_file_is_too_long() -> None:
    def problems() -> Iterator[str]:
        for path in (*modules(), *files_of_tests()):
            lines = path.read_text().count("\n")
            most = MAX_LINES if path in modules() else MAX_TEST_LINES
            if lines > most:
                yield f"{name(path)}: {lines} lines, {most} are a lot"

    none(problems())


def test_every_module_says_what_it_is_for() -> None:
    none(
        f"{name(path)}: no docstring"
        for path in (*modules(), *files_of_tests())
        if tree(path).body and ast.get_docstring(tree(path)) is None
    )


@functools.cache
def project_files() -> tuple[Path, ...]:
    """What git has, without what it only stores: golden files and traces."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    paths = [ROOT / one for one in listed.stdout.decode().split("\0") if one]
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def test_the_project_speaks_of_no_machine_but_the_readers() -> None:
    """Paths of one particular computer help nobody."""
    foreign = re.compile(rb"/(?:work|root)/|/home/\w")

    def problems() -> Iterator[str]:
        for path in project_files():
            if path == Path(__file__):
                continue
            for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
                if foreign.search(line):
                    yield f"{name(path)}:{number}: {line.strip()[:80].decode(errors='replace')}"

    none(problems())


# ---- habits


def test_tests_do_not_sleep() -> None:
    def problems() -> Iterator[str]:
        for path in files_of_tests():
            for line, called in calls(path):
                # A sleep of no time only lets others run.
                if called.split(".")[-1] == "sleep" and "sleep(0)" not in source(path, line):
                    yield f"{name(path)}:{line}: wait for what happens, or own the clock"

    none(problems())


def test_only_command_lines_print() -> None:
    def problems() -> Iterator[str]:
        for path in modules():
            if name(path).startswith(COMMAND_LINES):
                continue
            for line, called in calls(path):
                if called in ("print", "pprint", "sys.stdout.write"):
                    yield f"{name(path)}:{line}: log it, return it or raise it"

    none(problems())


def test_nothing_is_left_to_do() -> None:
    marker = re.compile(r"#.*\b(?:TODO|FIXME|XXX|HACK)\b")

    def problems() -> Iterator[str]:
        for path in (*modules(), *files_of_tests()):
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if marker.search(line) and path != Path(__file__):
                    yield f"{name(path)}:{number}: {line.strip()}"

    none(problems())
