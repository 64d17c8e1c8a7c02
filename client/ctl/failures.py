"""How a command of prefixctl fails: one sentence on standard error, and an exit code.

With `--json` the sentence is a JSON object, `{"version": 1, "error": "...", "exit_code": 2}`; a
note is one, too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NoReturn

import typer

from .command import PlainGroup, versioned

#: Errors of a write that say that nothing can be written: no room, or nowhere to.
UNWRITABLE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
#: Wrong arguments of every kind. Which package has this class depends on the version of Typer.
_UsageError: Final[Any] = typer.BadParameter.__mro__[1]
#: What Typer, Click and pydantic say of wrong arguments, and what is said here.
_WORDINGS: Final = (
    (r"Input should be a valid integer.*|Value .* is not a valid int\.|.* is not a valid integer\.",
     "takes a whole number"),
    (r"Input should be a valid number.*|.* is not a valid float\.", "takes a number"),
    (r"Input should be greater than or equal to (\S+)", r"is at least \1"),
    (r"Input should be less than or equal to (\S+)", r"is at most \1"),
    (r"(\S+) is not in the range (.+?)\.?", r"is in \2, not \1"),
    (r"No such command '(.*?)'\.", r"there is no command \1"),
    (r"No such command '(.*?)'\. Did you mean (.*?)\?", r"there is no command \1; \2?"),
    (r"(?:Value error, )?'(.*?)' is not one of (.*)\.", r"\1 is none of \2"),
    (r"Value error, (.*)", r"\1"),
    (r"Missing command\.?", "say which command"),
    (r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"it takes no more arguments: \1"),
    (r"Option '?(\S+?)'? requires (?:an argument|\d+ arguments)\.", r"\1 takes a value"),
    (r"Option '?(\S+?)'? does not take a value\.", r"\1 takes no value"),
)  # fmt: skip

#: Those of them with names that need no quotes.
_UNQUOTED: Final = (r"there is no command \1; \2?", r"\1 is none of \2")


class ExitCode(IntEnum):
    """What a script can tell from the exit status."""

    OK = 0
    PROBLEM = 1
    """The command failed, or found something wrong."""
    BAD_INPUT = 2
    UNREACHABLE = 3
    """No daemon answers at the address."""
    INTERRUPTED = 130
    """Ctrl-C; the results so far were shown."""


class _Style:
    """How errors are written: as JSON, if the arguments have `--json`."""

    as_json = False


def fail(sentence: str, code: ExitCode) -> NoReturn:
    """Print what went wrong on standard error and exit. Raises typer.Exit."""
    _print_error(sentence, code)
    raise typer.Exit(code)


def _print_error(sentence: str, code: ExitCode, *, hint: str = "") -> None:
    if _Style.as_json:
        typer.echo(json.dumps(versioned({"error": sentence, "exit_code": int(code)})), err=True)
    else:
        typer.echo(_wrapped(f"prefixctl: {sentence}") + hint, err=True)


def _wrapped(sentence: str) -> str:
    """In lines of whole words for a terminal; unchanged for a pipe or a file."""
    if not sys.stderr.isatty():
        return sentence
    columns = shutil.get_terminal_size().columns
    lines = (
        textwrap.fill(
            line, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for line in sentence.split("\n")
    )
    return "\n".join(lines)


def print_note(note: str) -> None:
    """Print what is good to know, on standard error."""
    if _Style.as_json:
        typer.echo(json.dumps(versioned({"note": note})), err=True)
    else:
        typer.echo(_wrapped(f"prefixctl: note: {note}"), err=True)


def exit_if(condition: object, code: ExitCode = ExitCode.PROBLEM) -> None:
    """Exit with `code` if the condition is true. Raises typer.Exit."""
    if condition:
        raise typer.Exit(code)


@contextmanager
def bad_input() -> Iterator[None]:
    """Report a ValueError as bad input: one sentence, exit code 2."""
    try:
        yield
    except ValueError as error:
        fail(str(error), ExitCode.BAD_INPUT)


def exit_code_of(error: Exception) -> ExitCode:
    """The exit status for an expected failure."""
    from ...proto.errors import CallerError, DaemonUnavailable, DeadlineExceeded, PrefixdError

    if isinstance(error, DaemonUnavailable | DeadlineExceeded):
        return ExitCode.UNREACHABLE
    if isinstance(error, CallerError) or not isinstance(error, PrefixdError):
        return ExitCode.BAD_INPUT
    return ExitCode.PROBLEM


class Group(PlainGroup):
    """Reports each expected failure as one sentence and an exit code."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **how: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        _Style.as_json = "--json" in given
        _with_streams()
        try:
            try:
                return super().main(given, *more, **how)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            _let_go_of_stdout()
            sys.exit(ExitCode.OK)  # the reader (head, less) has seen enough
        except OSError as problem:
            if problem.errno not in UNWRITABLE:
                raise
            _let_go_of_stdout()
            why = os.strerror(problem.errno or 0).lower()
            _print_error(f"standard output can't be written: {why}", ExitCode.PROBLEM)
            sys.exit(ExitCode.PROBLEM)

    def make_context(self, *names: Any, **how: Any) -> Any:
        with _own_words():
            return super().make_context(*names, **how)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _own_words():
                return super().invoke(ctx)
        except BrokenPipeError:
            _let_go_of_stdout()
            raise typer.Exit(ExitCode.OK) from None
        except OSError as problem:
            if problem.filename is None:
                raise  # of standard output
            fail(f"{problem.filename}: {(problem.strerror or '').lower()}", ExitCode.PROBLEM)
        except Exception as error:
            # Imported here, so that --help does not import gRPC.
            from ...proto.errors import PrefixdError
            from ..lab.trace_file import TraceError

            if not isinstance(error, PrefixdError | TraceError):
                raise
            fail(str(error), exit_code_of(error))


def _with_streams() -> None:
    """Python has no stream objects for descriptors that were closed at its start."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # until the end
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # until the end
        _print_error("standard output is closed", ExitCode.PROBLEM)
        sys.exit(ExitCode.PROBLEM)


def _let_go_of_stdout() -> None:
    """Standard output leads nowhere from now on, so that the flush at exit does not fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _own_words() -> Iterator[None]:
    """Report wrong arguments as every other failure."""
    try:
        yield
    except _UsageError as problem:
        if type(problem).__name__ == "NoArgsIsHelpError":
            raise
        path = "" if problem.ctx is None else problem.ctx.command_path
        where = " ".join(["prefixctl", *path.split()[1:]])
        hint = f"\n  {where} --help shows what it takes"
        _print_error(_sentence_of(problem), ExitCode.BAD_INPUT, hint=hint)
        raise typer.Exit(ExitCode.BAD_INPUT) from None


def _sentence_of(problem: Any) -> str:
    """What is wrong with the arguments."""
    kind = type(problem).__name__
    if kind == "NoSuchOption":
        known = " or ".join(problem.possibilities or ())
        return f"there is no option {problem.option_name}" + (f"; {known}?" if known else "")
    name = _name_of(problem)
    if kind == "MissingParameter":
        return f"{name} is missing"
    message = problem.message
    for wording, ours in _WORDINGS:
        if found := re.fullmatch(wording, message, re.DOTALL):
            message = found.expand(ours)
            if ours in _UNQUOTED:
                message = message.replace("'", "")
            break
    if not name:
        return str(message)
    return f"{name} {message}" if message.startswith(("is ", "takes ")) else f"{name}: {message}"


def _name_of(problem: Any) -> str:
    """The option or argument that a wrong value was for, if it is known."""
    parameter = getattr(problem, "param", None)
    if parameter is None:
        return getattr(problem, "param_hint", None) or ""
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.name).strip("[]")
