"""The style guide as far as a program can check it."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.conftest import FIRST, SLOW

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("proto", "tiers", "server", "client")
#: Beyond this a reader loses the thread. No reason to cut a room in two below it.
MAX_LINES, MAX_TEST_LINES = 800, 1_000
#: Modules that may print to a terminal.
COMMAND_LINES = (
    "client/ctl",
    "proto/generate.py",
    "server/config/loading.py",
    "server/daemon.py",
    "server/config/sources.py",
)
#: What the modules of a folder may import from the package, beside the folder itself. A folder
#: without an entry has the rules of its parent.
MAY_IMPORT = {
    "proto": set(),
    "tiers/eviction": {"proto"},
    "tiers": {"proto"},
    "server/core": {"proto", "tiers"},
    "server/runtime": {"proto", "tiers", "server.core"},
    "server/api": {"proto", "tiers", "server.core", "server.runtime", "server.config"},
    # A node is a client of its peers.
    "server/sharing": {"proto", "tiers", "server.core", "server.runtime", "client"},
    "server/config": {"proto", "tiers", "server.core.tables"},
    "server": {"proto", "tiers"},
    # The library: its two transports to a daemon.
    "client/wire": {"proto", "client.results", "client.counters"},
    "client/local": {"proto", "client.results", "client.thread_pool", "client.wire"},
    # The programs on top of it.
    "client/lab": {"proto", "tiers.eviction", "client"},
    "client/bench": {"proto", "client"},
    "client/llama_server": {"proto", "client"},
    "client/ctl": {"proto", "tiers.eviction", "client"},
    # What engines attach, on top of it as well.
    "client/connectors": {"proto", "client"},
    "client": {"proto"},
}
#: Programs, which the library must not import.
PROGRAMS = (
    "client/ctl",
    "client/lab",
    "client/bench",
    "client/llama_server",
    "client/connectors",
)
#: The library that engines import, and what it may need. `typing_extensions` is for type checkers.
LIBRARY = ("proto/", "client/")
LIBRARY_NEEDS = {"prefixd", "grpc", "google", "fastcrc", "typing_extensions"}
#: Exceptions: a developer's program, and a module that is imported only on request.
NEEDS_MORE = ("proto/generate.py", "client/tracing.py")
#: No clock, no randomness, no files, no threads, no logging, no configuration.
PURE = [
    "server/core/*.py",
    "tiers/ledger.py",
    "tiers/order.py",
    "tiers/extents.py",
    "tiers/eviction/*.py",
    # What the proxy before llama-server decides, apart from its I/O.
    "client/llama_server/command_line.py",
    "client/llama_server/requests.py",
    "client/llama_server/slot_file.py",
    "client/llama_server/slots.py",
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
    """All modules of the package that are not generated."""
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
    """Line and dotted name of every import. Relative imports are resolved, and a `from` import
    includes the imported name: `prefixd.tiers.eviction.lru.LRU`."""
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


def calls(path: Path, names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each call of a function or method with one of these names."""
    text = path.read_text()
    names = {each for each in names if each in text}
    for node in ast.walk(tree(path)) if names else ():
        if isinstance(node, ast.Call):
            last = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if last in names:
                yield node.lineno, ast.unparse(node.func)


def source(path: Path, line: int) -> str:
    return path.read_text().splitlines()[line - 1]


def none(problems: Iterator[str]) -> None:
    assert "\n".join(problems) == ""


# ---- structure


def test_the_rules_below_find_files() -> None:
    assert len(modules()) > 40
    assert len(files_of_tests()) > 20
    assert all(list(ROOT.glob(pattern)) for pattern in PURE)
    assert all((ROOT / folder).is_dir() for folder in (*MAY_IMPORT, *PROGRAMS))
    lru = list(imports(ROOT / "tiers/eviction/lru.py"))
    assert "prefixd.tiers.eviction.base.EvictionPolicy" in [imported for _, imported in lru]


def governing_folder(path: Path) -> str:
    """The folder whose rules in `MAY_IMPORT` apply to a module."""
    folder = str(path.relative_to(ROOT).parent)
    while folder not in MAY_IMPORT:
        folder = str(Path(folder).parent)
    return folder


def test_every_folder_imports_what_it_may() -> None:
    def problems() -> Iterator[str]:
        for path in modules():
            folder = governing_folder(path)
            allowed = {folder.replace("/", ".")} | MAY_IMPORT[folder]
            for line, imported in imports(path):
                if not within(imported, "prefixd") or imported == "prefixd.__version__":
                    continue
                target = imported.removeprefix("prefixd.")
                if not any(within(target, module) for module in allowed):
                    yield f"{name(path)}:{line}: {folder} must not import {target}"

    none(problems())


def test_the_library_imports_no_program() -> None:
    def problems() -> Iterator[str]:
        programs = [program.replace("/", ".") for program in PROGRAMS]
        for path in modules():
            if not name(path).startswith("client/") or name(path).startswith(PROGRAMS):
                continue
            for line, imported in imports(path):
                target = imported.removeprefix("prefixd.")
                if any(within(target, program) for program in programs):
                    yield f"{name(path)}:{line}: imports {target}"

    none(problems())


def test_the_library_needs_no_more_than_its_three_packages() -> None:
    """The library is installed into the engines' environments."""

    def problems() -> Iterator[str]:
        for path in modules():
            if not name(path).startswith(LIBRARY) or name(path).startswith(
                (*PROGRAMS, *NEEDS_MORE)
            ):
                continue
            for line, imported in imports(path):
                top = imported.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in LIBRARY_NEEDS:
                    yield f"{name(path)}:{line}: imports {imported}"

    none(problems())


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers and within functions count too."""
    by_name = {f"prefixd.{dotted(path)}": path for path in modules()}

    def module_of(imported: str) -> str | None:
        while imported not in by_name:
            imported, _, rest = imported.rpartition(".")
            if not rest:
                return None
        return imported

    # A name that `__init__` re-exports belongs to the module that defines it.
    graph = {
        module: {
            target
            for _, imported in imports(path)
            if (target := module_of(imported)) not in (None, module)
        }
        for module, path in by_name.items()
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> Iterator[str]:
        if module in trail:
            yield " -> ".join([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                yield from walk(target, (*trail, module))
            done.add(module)

    none(circle for module in sorted(graph) for circle in walk(module, ()))


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
            for line, called in calls(path, IMPURE_CALLS):
                if called in IMPURE_CALLS:
                    yield f"{name(path)}:{line}: calls {called}"

    none(problems())


def test_nothing_but_the_core_changes_the_tables() -> None:
    """All other modules send it events (`MetaState.apply`)."""
    changed = re.compile(
        r"\btables\.\w+[\w.]*(\[[^]]*\])? *([-+]?=)[^=]"
        r"|\btables\.\w+\.(pop|popitem|append|clear|add|discard|update|setdefault|remove)\("
        r"|\bdel .*\btables\."
    )
    assert changed.search("core.state.tables.entries[key] = entry")
    assert changed.search("self._core.state.tables.counters.claims += 1")
    assert not changed.search("if tables.entries == known:")

    def problems() -> Iterator[str]:
        for path in modules():
            if name(path).startswith("server/") and not name(path).startswith("server/core/"):
                for number, line in enumerate(path.read_text().splitlines(), start=1):
                    if changed.search(line):
                        yield f"{name(path)}:{number}: {line.strip()}"

    none(problems())


# ---- size and words


def test_no_file_is_too_long() -> None:
    def problems() -> Iterator[str]:
        for path in (*modules(), *files_of_tests()):
            lines = path.read_text().count("\n")
            most = MAX_LINES if path in modules() else MAX_TEST_LINES
            if lines > most:
                yield f"{name(path)}: {lines} lines, the limit is {most}"

    none(problems())


def test_every_module_says_what_it_is_for() -> None:
    # Its beginning is enough: to parse all files takes seconds.
    begins = re.compile(r'(#.*\n|\s)*(r?"""\s*\S|\Z)')
    none(
        f"{name(path)}: no docstring"
        for path in (*modules(), *files_of_tests())
        if not begins.match(path.read_text())
    )


def side(path: Path) -> str:
    """Modules of one name may be the client's and the daemon's part of a subject, a group of
    commands and what draws it, or the `main` of two programs."""
    folder = str(path.relative_to(ROOT).parent)
    for part in ("client/ctl/views", "client/ctl", "client", "proto"):
        if folder.startswith(part):
            return part
    return "daemon"


def test_each_module_has_a_name_of_its_own_on_its_side() -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for path in modules():
        if path.stem not in ("__init__", "__main__"):
            places.setdefault((side(path), path.stem), []).append(name(path))
    none(", ".join(found) for found in places.values() if len(found) > 1)


def test_each_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name(path))
    none(f"{one}: {', '.join(found)}" for one, found in places.items() if len(found) > 1)


@functools.cache
def project_files() -> tuple[Path, ...]:
    """The files that git tracks or would add, without symbolic links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / one for one in listed.stdout.decode().split("\0") if one]
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def test_no_file_names_paths_of_a_particular_machine() -> None:
    """Paths of one particular computer are useless on any other."""
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
            if name(path).startswith("tests/bench/"):
                continue  # they measure time
            for line, _ in calls(path, ["sleep"]):
                # `sleep(0)` lets other tasks run, and `PAUSE_S` is the pause between two polls.
                if not re.search(r"sleep\((0|PAUSE_S)\)", source(path, line)):
                    yield f"{name(path)}:{line}: wait for an event, or own the clock"

    none(problems())


def test_every_path_that_is_slow_or_first_exists() -> None:
    assert [name for name in (*SLOW, *FIRST) if not (ROOT / "tests" / name).exists()] == []


def test_only_command_lines_print() -> None:
    def problems() -> Iterator[str]:
        for path in modules():
            if name(path).startswith(COMMAND_LINES):
                continue
            for line, called in calls(path, ["print", "pprint", "write"]):
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
