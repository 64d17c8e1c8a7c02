"""The files that commands of prefixctl write. None that exists is replaced without `--force`."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from .command import Ctl, make_console, print_json, versioned
from .failures import UNWRITABLE, ExitCode, fail, print_note

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Standard input or output, as the name of a file.
STDOUT: Final = "-"

#: Ends of names that JSON or CSV would be a surprise under.
_PAGES_AND_PICTURES: Final = (".html", ".htm", ".svg", ".png", ".pdf")


def _check_output(path: str | None) -> str | None:
    """Refuse the name of a page or a picture, before any work is done for it."""
    if path is not None and path.lower().endswith(_PAGES_AND_PICTURES):
        fail(
            f"{path}: --output writes JSON, or CSV if the name ends in .csv; the commands that "
            "make pages and pictures have --html and --svg",
            ExitCode.BAD_INPUT,
        )
    return path


ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=_check_output,
        help="Also write the result into a file, as JSON; its table as CSV, if it ends in .csv.",
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
    code = ExitCode.PROBLEM if error.errno in UNWRITABLE else ExitCode.BAD_INPUT
    fail(f"{path}: cannot be written: {why}", code)


def warn(notes: Iterable[str]) -> None:
    """Print notes on the input on standard error."""
    for note in notes:
        print_note(note)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a line of names: those of the JSON, joined by dots where one is within
    another. What is a list there has no place in a table and is left out."""
    flat = [dict(_cells(row)) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(chain.from_iterable(flat))), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _cells(row: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _cells(value, f"{within}{name}.")
        elif not isinstance(value, list | tuple):
            yield within + name, value


def show_result(
    ctl: Ctl,
    data: dict[str, Any],
    view: Callable[[], RenderableType],
    output: str | None = None,
    *,
    force: bool = False,
    stderr: bool = False,
    rows: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the result to `output`, and print it: as JSON with `--json`, else for people (on
    standard error if `stderr`). `rows` are the table of a result that has one; of others, CSV is a
    single row."""
    data = versioned(data)
    if output is not None and output != STDOUT:
        as_csv = output.endswith(".csv")
        text = csv_of(rows or [data]) if as_csv else json.dumps(data, indent=2) + "\n"
        write_text(output, text, force=force)
    if ctl.as_json or output == STDOUT:
        print_json(data)
    else:
        make_console(stderr=stderr).print(view())
