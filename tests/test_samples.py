"""The documents' code and commands are taken by the programs, and what they state holds.

Every block of code in every Markdown file is walked by its language; a language that no test here
knows is a failure.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import prefixd.client.wire.session as client_session
from prefixd.client import Client, SavePolicy
from prefixd.client.chains import COARSE_TOKENS, MAX_WALK_LENGTHS
from prefixd.client.ctl.main import app
from prefixd.proto import limits
from prefixd.server.api import local_socket
from prefixd.server.api.access import Tokens
from prefixd.server.config.loading import load_config
from prefixd.server.core.entries import EntryState
from prefixd.server.runtime import scrubbing

ROOT = Path(__file__).resolve().parent.parent
_OTHERS = {".venv", "build", "dist", "node_modules"}
#: Those below the root's folders are looked for in each, so that the environment is not walked.
DOCUMENTS = sorted(
    path
    for top in ROOT.iterdir()
    if top.name not in _OTHERS and not top.name.startswith(".")
    for path in (top.rglob("*.md") if top.is_dir() else [top])
    if path.suffix == ".md"
)
_BLOCK = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:prefixctl|prefixd|make) [^`]+)`")


def blocks() -> Iterator[tuple[str, str, str]]:
    """Every block: its language, its text, and where it is."""
    for document in DOCUMENTS:
        for number, (_, language, text) in enumerate(_BLOCK.findall(document.read_text()), 1):
            yield language, text, f"{document.relative_to(ROOT)}-{number}"


def samples(language: str) -> list[Any]:
    return [pytest.param(text, id=where) for kind, text, where in blocks() if kind == language]


#: What the tests below walk. A block without a language is a drawing, or what a program prints.
KNOWN = {
    "",
    "python",
    "pycon",
    "console",
    "toml",
    "tokens",
    "yaml",
    "ini",
    "json",
    "jsonl",
    "js",
    "mermaid",
}


def test_every_language_is_walked() -> None:
    assert {language for language, _, _ in blocks()} <= KNOWN
    for language in ("python", "console", "toml", "tokens"):
        assert samples(language)


# ---- by language


@pytest.mark.parametrize("text", samples("tokens"))
def test_a_file_with_tokens_is_taken(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    assert len(Tokens.from_file(file)) == len(text.splitlines())


@pytest.mark.parametrize("text", samples("toml"))
def test_a_configuration_is_taken(text: str, tmp_path: Path) -> None:
    """As far as that does not depend on the files and addresses that it names."""
    file = tmp_path / "prefixd.toml"
    file.write_text(text)
    load_config(["--config", str(file)], {})


@pytest.mark.parametrize("text", samples("python"))
def test_python_compiles_and_its_names_exist(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prefixd"):
            module = importlib.import_module(node.module or "")
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


@pytest.mark.parametrize("text", samples("yaml"))
def test_yaml_is_yaml(text: str) -> None:
    assert list(yaml.safe_load_all(text))


@pytest.mark.parametrize("text", samples("json"))
def test_json_is_json(text: str) -> None:
    assert json.loads(text)


@pytest.mark.parametrize("text", samples("jsonl"))
def test_every_line_is_json(text: str) -> None:
    assert all(map(json.loads, text.splitlines()))


@pytest.mark.parametrize("text", samples("ini"))
def test_a_unit_has_sections(text: str) -> None:
    parser = configparser.ConfigParser(strict=False)
    parser.read_string(text)
    assert parser.sections()


# ---- commands

COMMANDS: Any = get_command(app)
#: Words of a synopsis that stand for a value.
_PLACE = re.compile(r"[A-Z]+$|\.\.\.$|<.*>$")


def commands_in(text: str) -> Iterator[list[str]]:
    """The commands of a console's block, without their output."""
    lines = text.replace("\\\n", " ").splitlines()
    for line in lines:
        if line.lstrip().startswith("$ "):
            yield from split(line.lstrip()[2:])


def split(line: str) -> Iterator[list[str]]:
    """The commands of a line, without the assignments in front of them."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*_words(lexer), ";"]:
        if word and not word.strip("|&;<>()"):
            if command:
                yield command
            command = []
        elif command or not re.match(r"[A-Z_]+=", word):
            command.append(word)


def _words(lexer: shlex.shlex) -> list[str]:
    try:
        return list(lexer)
    except ValueError:  # a quotation that goes on in the next line: not one of ours
        return []


def check_command(words: list[str], where: str) -> None:
    match words:
        case ["prefixctl", *rest]:
            check_prefixctl(rest, where)
        case ["prefixd", *rest] if not {"--help", "--version"} & {*rest}:
            flags = [word for word in rest if word not in ("--check-config", "--print-config")]
            if not any(_PLACE.search(word) or word.endswith(".toml") for word in flags):
                load_config(flags, {})
        case ["make", target, *_]:
            pattern = re.sub(r"-.*", "-%", target)  # engines-vllm is made by engines-%
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^({target}|{pattern})( .*)?:", makefile, re.MULTILINE), where
        case ["python", script, *_] if script.startswith("tests/"):
            assert (ROOT / script).is_file(), where
        case ["python", "-m", module, *_] if module.startswith("tests."):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), where


def check_prefixctl(words: list[str], where: str) -> None:
    """The command and its options exist."""
    group = COMMANDS
    known = {name for each in group.params for name in each.opts} | {"--help", "-h"}
    for word in words:
        if hasattr(group, "commands") and word in group.commands:
            group = group.commands[word]
            known |= {name for each in group.params for name in each.opts}
        elif word.startswith("--"):
            assert word.partition("=")[0].rstrip(",;:)") in known, f"{where}: {words}"
    named = [word for word in words if word.isidentifier() and word.islower()]
    assert group is not COMMANDS or not named or words[0].startswith("-"), f"{where}: {words}"


@pytest.mark.parametrize("text", samples("console"))
def test_commands_exist(text: str, request: pytest.FixtureRequest) -> None:
    for words in commands_in(text):
        check_command(words, request.node.name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_sentences_exist(document: Path) -> None:
    for inline in _INLINE.findall(document.read_text()):
        for words in split(inline.replace("\n", " ")):
            if words[0] != "prefixd":  # options may be named as in the file
                check_command(words, document.name)


# ---- numbers


def options() -> Any:
    return load_config([], {}).options


SAYS: list[tuple[str, str, tuple[object, ...]]] = [
    ("README.md", r"its deadline \(`deadline_ms`, (\d+) s;", (limits.DEFAULT_DEADLINE_MS // 1000,)),
    ("README.md", r"`save_timeout_ms`,\s+(\d+) s\)", (limits.DEFAULT_SAVE_TIMEOUT_MS // 1000,)),
    (
        "docs/watch.md",
        r"at once, then after (\d+) to (\d+) ms, and so on up to (\d+) to (\d+) s",
        (
            client_session.INITIAL_MS / 2,
            client_session.INITIAL_MS,
            client_session.MAX_MS / 2000,
            client_session.MAX_MS / 1000,
        ),
    ),
    (
        "docs/understand/bounds.md",
        r"threads that read lent memory \| twice the number of processors, at least (\d+), at most "
        r"(\d+), (two) per session",
        (4, 16, "two"),
    ),
    ("docs/understand/bounds.md", r"labels of usage reports \| (\d+),", (limits.MAX_LABELS,)),
    (
        "docs/understand/bounds.md",
        r"the latest (\d+) of a session, (\d+) KiB of words",
        (limits.MAX_IDENTITIES_PER_SESSION, limits.MAX_IDENTITY_WORDS_BYTES // 1024),
    ),
    (
        "client/lookups.py",
        r"Of prompts above ([\d,]+) tokens, the last\s+([\d,]+) lengths and the multiples of "
        r"([\d,]+) before",
        (MAX_WALK_LENGTHS, MAX_WALK_LENGTHS, COARSE_TOKENS),
    ),
    ("client/lookups.py", r"One rpc for ([\d,]+) keys", (limits.MAX_BATCH_KEYS,)),
    ("server/config/options.py", r"over a tier takes (\d+) min", (scrubbing.MIN_PASS_S / 60,)),
    ("SECURITY.md", r"a namespace \(1 to (\d+) letters", (limits.MAX_NAMESPACES,)),
]


@pytest.mark.parametrize(("file", "sentence", "values"), SAYS, ids=lambda each: str(each)[:40])
def test_a_stated_number_is_that_of_the_code(
    file: str, sentence: str, values: tuple[object, ...]
) -> None:
    found = re.search(sentence, (ROOT / file).read_text())
    assert found is not None, "the sentence has changed: say here what it says now"
    said = [each.replace(",", "") for each in found.groups()]
    assert said == [f"{each:g}" if isinstance(each, float) else str(each) for each in values]


def test_lent_saves_have_as_many_threads_as_is_said() -> None:
    import os

    assert min(16, max(4, 2 * (os.cpu_count() or 1))) == local_socket.LENT_THREADS
    assert local_socket._SESSION_THREADS == 2
    assert EntryState.__slots__, "176 bytes an entry need slots"


#: Settings that the text of a docstring states in numbers, by the name before them.
@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("deadline_ms", limits.DEFAULT_DEADLINE_MS),
        ("save_timeout_ms", limits.DEFAULT_SAVE_TIMEOUT_MS),
        ("shared_wait_ms", limits.DEFAULT_SHARED_WAIT_MS),
    ],
)
def test_a_client_has_the_defaults_of_the_limits(name: str, default: int) -> None:
    assert Client.__init__.__kwdefaults__[name] == default


def test_the_policy_has_the_defaults_of_the_limits() -> None:
    policy = SavePolicy()
    assert policy.boundary_align_tokens == limits.DEFAULT_BOUNDARY_ALIGN_TOKENS == COARSE_TOKENS
    assert policy.session_resume_wait_ms == limits.DEFAULT_WAIT_MS


#: Behind a name that is that of a section, too: of files, and of a watch in the client.
NO_OPTIONS = {"py", "toml", "position", "json"}


def test_every_option_that_a_document_names_with_its_section_exists() -> None:
    known = {
        line.split(" = ")[0].lstrip("# ")
        for line in (ROOT / "deploy/prefixd.toml").read_text().splitlines()
        if " = " in line
    }
    sections = ["ram", "shm", "disk", "server", "log", "watch", "shared", "pressure", "metrics"]
    for document in DOCUMENTS:
        if document.name == "CHANGELOG.md":
            continue
        named = re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_]+)`", document.read_text())
        for name in named:
            option = name.partition(".")[2]
            assert option in known | NO_OPTIONS, f"{document.name}: {name}"
