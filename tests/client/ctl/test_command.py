"""What every command shares: options before and after its name, output, exit codes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from prefixd.client.ctl import command as commands
from prefixd.client.ctl.command import (
    Ctl,
    chosen,
    command,
    parse_reason,
    parse_seconds,
    parse_size,
    parse_tier,
)
from prefixd.client.ctl.failures import ExitCode, Group
from prefixd.client.ctl.main import app as real_app
from prefixd.client.ctl.main import root
from prefixd.client.ctl.message_json import as_dict
from prefixd.client.ctl.output_files import warn
from prefixd.client.lab.trace import Request, write_trace
from prefixd.client.lab.trace_file import TraceError
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import (
    ConfigError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidKey,
    LimitReached,
    PrefixdError,
    UnknownEntry,
)
from prefixd.proto.vocabulary import SaveReason, Tier

seen: list[Any] = []
#: prefixctl, as a process.
WARM_CTL = [sys.executable, "-c", "from prefixd.client.ctl.main import main; main()"]


def made(function: Any, **options: Any) -> typer.Typer:
    """prefixctl with one command, `it`."""
    app = typer.Typer(cls=Group)
    app.callback()(root)
    command(app, "it", function, **options)
    app.command("other")(lambda: None)
    return app


def run(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def note(ctl: Ctl, number: int = 1) -> None:
    """Do nothing."""
    seen.append((ctl, number))


def long_winded(ctl: Ctl, flag: Annotated[bool, typer.Option("--flag")] = False) -> None:
    """Do something.

    It is said in a sentence that goes on over the end of the line here, and elsewhere
    on a terminal.

    - a list
      stays one
    """
    seen.append((ctl, flag))


def test_help_breaks_lines_where_the_terminal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    lines = [line.strip() for line in run(made(long_winded), "it", "--help").stdout.splitlines()]
    assert "It is said in a sentence that goes on over the end of the line here," in lines
    assert "and elsewhere on a terminal." in lines
    assert lines[lines.index("- a list") + 1] == "stays one"


def test_a_flag_names_no_value() -> None:
    shown = run(made(long_winded), "it", "--help").stdout
    for flag in ("--flag", "--json"):
        (line,) = (line for line in shown.splitlines() if flag in line)
        assert "bool" not in line.lower()


@pytest.mark.parametrize(
    ("arguments", "ctl"),
    [
        (["it"], Ctl()),
        (["--address", "h:1", "--json", "--timeout", "2s", "it"], Ctl("h:1", True, 2.0)),
        (["it", "--address", "h:1", "--json", "--timeout", "2s"], Ctl("h:1", True, 2.0)),
        (["--address", "h:1", "it", "--address", "h:2"], Ctl("h:2")),
        (["--timeout", "1", "it", "--timeout", "500ms"], Ctl(timeout_s=0.5)),
    ],
)
def test_options_may_be_before_and_after_the_name(arguments: list[str], ctl: Ctl) -> None:
    seen.clear()
    result = run(made(note), *arguments, "--number", "7")
    assert result.exit_code == 0, result.output
    assert seen == [(ctl, 7)]


def test_a_command_without_a_daemon_takes_json_on_both_sides_and_no_address() -> None:
    app = made(note, needs_daemon=False)
    for arguments in (["--json", "it"], ["it", "--json"]):
        seen.clear()
        assert run(app, *arguments).exit_code == 0
        assert seen == [(Ctl(as_json=True), 1)]
    assert run(app, "it", "--address", "h:1").exit_code == ExitCode.BAD_INPUT


def commands_of(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands_of(each, *path, name)
        else:
            yield (*path, name), each


COMMANDS = dict(commands_of(get_command(real_app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_json_is_a_flag_of_every_command_and_files_are_named_by_o(path: tuple[str, ...]) -> None:
    options = {name: each for each in COMMANDS[path].params for name in each.opts}
    assert options["--json"].is_flag
    if {"--output", "--html", "--svg", "--picture"} & options.keys():
        assert options["--force"].is_flag


def test_an_option_has_one_kind_of_value_in_all_commands() -> None:
    kinds: dict[str, set[str]] = {}
    for each in COMMANDS.values():
        for option in each.params:
            for name in option.opts:
                if name.startswith("--"):
                    flag = getattr(option, "is_flag", False)
                    kinds.setdefault(name, set()).add("flag" if flag else "value")
    assert {name for name, found in kinds.items() if len(found) > 1} == set()


# ---- errors in words of ours


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "--limit", "x"], "--limit takes a whole number"),
        (["ls", "--limit", "-1"], "--limit is at least"),
        (["ls", "--nope"], "there is no option --nope"),
        (["nope"], "there is no command nope"),
        (["trace", "nope"], "there is no command nope"),
        (["evict"], "--bytes is missing"),
        (["statz"], "there is no command statz; stats"),
        (["log-level", "loud"], "LEVEL: loud is none of debug, info, warning, error"),
        (["evict", "--bytes", "99999999TiB"], "--bytes: '99999999TiB' is more than any daemon has"),
        (["ls", "--tier", "tape"], "--tier: 'tape' is none of ram, shm, disk"),
        (["ls", "extra"], "it takes no more arguments: extra"),
        (["ls", "--limit"], "--limit takes a value"),
        (["replay-live", "t", "--speed", "fast"], "--speed takes a number"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], sentence: str) -> None:
    result = run(real_app, *arguments)
    assert result.exit_code == ExitCode.BAD_INPUT
    said, hint = result.stderr.splitlines()
    assert said.startswith(f"prefixctl: {sentence}")
    assert hint.endswith("--help shows what it takes")
    error = json.loads(run(real_app, "--json", *arguments).stderr)
    assert (error["exit_code"], error["error"]) == (2, said.removeprefix("prefixctl: "))


def test_a_failure_is_json_with_json(tmp_path: Path) -> None:
    result = run(real_app, "stats", "--json", "--address", f"{tmp_path}/no.sock")
    assert result.exit_code == ExitCode.UNREACHABLE
    assert result.stdout == ""
    error = json.loads(result.stderr)
    assert error["exit_code"] == 3
    assert f"{tmp_path}/no.sock" in error["error"]


@pytest.mark.parametrize(
    ("as_json", "said"),
    [(True, '{"version": 1, "note": "one"}\n'), (False, "prefixctl: note: one\n")],
)
def test_a_note_is_json_with_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool, said: str
) -> None:
    monkeypatch.setattr("prefixd.client.ctl.failures._Style.as_json", as_json)
    warn(["one"])
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", ["--help", "trace generate --profile code -o - -n 9000"])
def test_a_full_device_is_a_sentence(arguments: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*WARM_CTL, *arguments.split()], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == ExitCode.PROBLEM
    assert done.stderr.decode().endswith("can't be written: no space left on device\n")
    assert b"Traceback" not in done.stderr


def test_a_closed_output_is_a_sentence() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *WARM_CTL, "--help"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.PROBLEM
    assert done.stderr == "prefixctl: standard output is closed\n"


# ---- files


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "{trace}", "-o", "{old}"],
        ["replay", "{trace}", "-o", "{old}"],
        ["curve", "{trace}", "--svg", "{old}"],
        ["curve", "{trace}", "--html", "{old}"],
        ["simulate", "{trace}", "--html", "{old}"],
        ["trace", "generate", "--profile", "code", "-n", "5", "-o", "{old}"],
        ["trace", "convert", "{trace}", "-o", "{old}"],
        ["demo", "--picture", "{old}"],
        ["bench", "-o", "{old}"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_no_file_is_replaced_without_force(tmp_path: Path, arguments: list[str]) -> None:
    trace, old = tmp_path / "trace.jsonl", tmp_path / "old"
    write_trace(trace, [Request(0, 512, 1, (1,))])
    old.write_text("mine")
    given = [each.format(trace=trace, old=old) for each in arguments]
    result = run(real_app, *given)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stderr == f"prefixctl: {old} exists already; --force replaces it\n"
    assert old.read_text() == "mine"
    if arguments[0] not in ("demo", "bench"):
        assert run(real_app, *given, "--force").exit_code == 0
        assert old.read_text() != "mine"


def test_what_cannot_be_replaced_may_be_written_to(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [Request(0, 512, 1, (1,))])
    assert run(real_app, "analyze", str(trace), "-o", "/dev/null").exit_code == 0


def test_help_lists_what_all_commands_share() -> None:
    help_text = run(made(note), "it", "--help").stdout
    for words in ("Do nothing.", "--number", "--address", "--json", "--timeout"):
        assert words in help_text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DaemonUnavailable("nobody"), ExitCode.UNREACHABLE),
        (DeadlineExceeded("too slow"), ExitCode.UNREACHABLE),
        (InvalidKey("no key"), ExitCode.BAD_INPUT),
        (ConfigError("no address"), ExitCode.BAD_INPUT),
        (TraceError("file", 3, "no JSON"), ExitCode.BAD_INPUT),
        (UnknownEntry("not there"), ExitCode.PROBLEM),
        (LimitReached("full"), ExitCode.PROBLEM),
        (PrefixdError("whatever"), ExitCode.PROBLEM),
    ],
)
def test_an_expected_failure_is_a_sentence_and_an_exit_code(
    error: Exception, code: ExitCode
) -> None:
    def fails(ctl: Ctl) -> None:
        assert ctl
        raise error

    result = run(made(fails), "it")
    assert result.exit_code == code
    assert result.stderr == f"prefixctl: {error}\n"
    assert result.stdout == ""


def test_an_unexpected_failure_is_not_hidden() -> None:
    def fails(ctl: Ctl) -> None:
        raise KeyError(str(ctl))

    assert isinstance(run(made(fails), "it").exception, KeyError)


@pytest.mark.parametrize("address", ["nowhere", "host:99999", "unix:relative"])
def test_an_address_that_is_none_is_bad_input(address: str) -> None:
    result = run(real_app, "stats", "--address", address)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert address in result.stderr


@pytest.mark.parametrize("time", ["0", "soon", "-1"])
def test_a_timeout_that_is_none_is_bad_input(time: str) -> None:
    assert run(real_app, "stats", f"--timeout={time}").exit_code == ExitCode.BAD_INPUT


def test_the_daemon_is_found_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFIXD_ADDRESS", "/somewhere/else")
    assert Ctl().address == "unix:/somewhere/else"
    assert Ctl("h:1").address == "h:1"
    monkeypatch.delenv("PREFIXD_ADDRESS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "prefixd").mkdir()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(f"{tmp_path}/prefixd/prefixd.sock")
        with pytest.raises(DaemonUnavailable, match=r"prefixd\.sock: no process listens there"):
            Ctl().address  # noqa: B018  # it looks for a daemon
        daemon.listen()
        assert Ctl().address == f"unix:{tmp_path}/prefixd/prefixd.sock"


def test_data_is_shown_as_json_or_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    Ctl(as_json=True).show({"a": [1]}, lambda: "table")
    assert json.loads(capsys.readouterr().out) == {"version": 1, "a": [1]}
    Ctl().show({"a": [1]}, lambda: "table")
    assert capsys.readouterr().out == "table\n"


def test_a_pipe_gets_whole_lines_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console = commands.make_console()
    assert not console.is_terminal
    assert console.width > 150
    monkeypatch.setenv("COLUMNS", "70")
    assert commands.make_console().width == 70


@pytest.mark.parametrize(
    "shown", ["print_json({'all': list(range(10_000))})", "ctl.show(0, lambda: 'line\\n' * 10_000)"]
)
def test_a_reader_that_has_seen_enough_is_no_failure(shown: str) -> None:
    """`prefixctl ... | head -1`"""
    program = (
        "from prefixd.client.ctl.main import app\n"
        "from prefixd.client.ctl.command import command, print_json\n"
        "def much(ctl):\n"
        f"    for _ in range(100): {shown}\n"
        "command(app, 'much', much)\n"
        "app(['much'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    complaints = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), complaints) == (0, b"")


def test_help_needs_none_of_the_slow_modules() -> None:
    """What `prefixctl --help` imports, rather than how long it takes on this machine."""
    program = (
        "import sys\n"
        "from prefixd.client.ctl.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'grpc', 'google.protobuf', 'msgpack', 'multiprocessing'}\n"
        "sys.exit(', '.join(sorted(slow & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


# ---- values of options


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1", 1), ("4KiB", 4096), ("1.5MiB", 3 * 2**19), (4096, 4096)]
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "8GB", "many", "0.2B", "8388608TiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("500ms", 0.5), ("2m", 120.0), (60.0, 60.0)]
)
def test_times(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "nan", "inf", "1e10", "5 parsecs"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_seconds(text)


def test_tiers_and_reasons_go_by_the_names_of_the_vocabulary() -> None:
    assert [parse_tier(tier.label) for tier in Tier] == [*Tier]
    assert [parse_reason(reason.label) for reason in SaveReason] == [*SaveReason]
    assert chosen([Tier.SHM, Tier.RAM, Tier.SHM]) == [Tier.SHM, Tier.RAM]
    assert chosen(None) == []
    with pytest.raises(typer.BadParameter, match="none of ram, shm, disk"):
        parse_tier("tape")


@pytest.mark.parametrize(
    "data",
    [
        {"tiers": [{"tier": "ram", "entries": [1, {"a": []}, "line\nof\ttext"]}, {}], "none": None},
        {},
        {"all": [[], {}, [[1.5, True]], ""]},
        {"message": pb.EntryDetail(key=b"k", extents=[1, 2]), "empty": [], "é": "ü"},
        pb.CheckResponse(problems=["one", "two"]),
    ],
)
def test_json_comes_in_pieces_as_if_it_came_at_once(
    data: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.print_json(data)
    printed = capsys.readouterr().out
    fields = as_dict(data) if isinstance(data, pb.CheckResponse) else data
    expected = json.dumps({"version": 1, **fields}, indent=2, default=as_dict)
    assert printed == expected + "\n"

    def streamed(value: Any) -> Any:
        """The same with iterators in the place of lists."""
        if isinstance(value, list):
            return iter([streamed(item) for item in value])
        if isinstance(value, dict):
            return {name: streamed(item) for name, item in value.items()}
        return value

    commands.print_json(streamed(data))
    assert capsys.readouterr().out == printed


def test_a_list_is_printed_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    def items() -> Iterator[dict[str, int]]:
        yield {"number": 1}
        assert '"number": 1' in capsys.readouterr().out
        yield {"number": 2}
        assert '"number": 2' in capsys.readouterr().out

    commands.print_json({"lists": iter([{"items": items()}])})


def test_a_list_of_any_length_is_shown_as_tables_of_some_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "TABLE_ROWS", 2)
    Ctl().show_list("numbers", iter(range(5)), lambda page: str(list(page)))
    assert capsys.readouterr().out.split("\n") == ["[0, 1]", "[2, 3]", "[4]", ""]
    Ctl().show_list("numbers", iter(()), lambda page: str(list(page)))
    assert capsys.readouterr().out == "[]\n"
    Ctl(as_json=True).show_list("numbers", iter(range(2)), lambda page: str(list(page)))
    assert json.loads(capsys.readouterr().out) == {"version": 1, "numbers": [0, 1]}


# ---- the names of values in --help


def paths(command: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command, of groups too."""
    below = getattr(command, "commands", {})
    return [before, *(path for name, one in below.items() for path in paths(one, (*before, name)))]


@pytest.mark.parametrize("path", paths(get_command(real_app)), ids=" ".join)
def test_no_help_shows_a_type_of_python(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(real_app, [*path, "--help"], env={"COLUMNS": "80"}).stdout
    assert "--help" in shown
    assert not re.search(r"<\w", shown), shown
    assert "...}" not in shown, shown


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("kick", ["prefixctl kick [OPTIONS] {SESSION}"]),
        ("ls", ["--limit N [x>=0] Entries", "--tier ram|shm|disk Which"]),
        ("log-level", ["[OPTIONS] {LEVEL}", "LEVEL The lowest level to log: debug,"]),
        ("publish-kv-events", ["--topic TEXT"]),
    ],
)
def test_values_have_names(path: str, lines: list[str]) -> None:
    shown = CliRunner().invoke(real_app, [path, "--help"], env={"COLUMNS": "100"}).stdout
    shown = " ".join(shown.split())
    for line in lines:
        assert line in shown, shown
