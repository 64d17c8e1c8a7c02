"""The files that commands of prefixctl write. None that exists is replaced without `--force`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from .command import Ctl, make_console, print_json
from .failures import ExitCode, fail

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Standard input or output, as the name of a file.
STDOUT: Final = "-"

ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Also write the result into a file, as JSON."
    ),
]


def check_new(*paths: str | os.PathLike[str] | None, force: bool) -> None:
    """Exit with a sentence if one of these files exists, before any work is done for it."""
    for path in paths:
        if path is not None and str(path) != STDOUT and not force and _replaced(Path(path)):
            fail(f"{path} exists already; --force replaces it", ExitCode.BAD_INPUT)


def _replaced(path: Path) -> bool:
    """Is there something that writing would destroy? A pipe or a device is none."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # opening it says why
    return not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))


def opened(path: str, *, force: bool) -> IO[str]:
    """A text file to write. Exits with a sentence if that can't be done."""
    check_new(path, force=force)
    try:
        mode = "w" if force or Path(path).exists() else "x"
        return Path(path).open(mode, encoding="utf-8")
    except OSError as error:
        cannot_write(path, error)


def write_text(path: str, text: str, *, force: bool) -> None:
    """Write a file, or exit with a sentence that says why not. A file that exists is replaced when
    the new one is whole."""
    from ..lab.trace_file import written_aside

    check_new(path, force=force)
    try:
        with written_aside(Path(path)) as file:
            file.write(text.encode())
    except OSError as error:
        cannot_write(path, error)


def cannot_write(path: str, error: OSError) -> NoReturn:
    """Exit with a sentence that says why a file cannot be written."""
    why = (error.strerror or str(error)).lower()
    fail(f"{path}: cannot be written: {why}", ExitCode.BAD_INPUT)


def warn(notes: Iterable[str]) -> None:
    """Print notes on the input on standard error."""
    for note in notes:
        typer.echo(f"prefixctl: note: {note}", err=True)


def show_result(
    ctl: Ctl,
    data: dict[str, Any],
    view: Callable[[], RenderableType],
    output: str | None = None,
    *,
    force: bool = False,
    stderr: bool = False,
) -> None:
    """Write the result as JSON to `output`, and print it: as JSON with `--json`, else for people
    (on standard error if `stderr`)."""
    if output is not None and output != STDOUT:
        write_text(output, json.dumps(data, indent=2) + "\n", force=force)
    if ctl.as_json or output == STDOUT:
        print_json(data)
    else:
        make_console(stderr=stderr).print(view())
