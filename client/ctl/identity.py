"""`prefixctl identity`: what the keys of the connected engines depend on, and why two differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .command import Ctl, make_console, print_json
from .failures import ExitCode, exit_if, fail
from .files import STDOUT

if TYPE_CHECKING:
    from ..identity import StateIdentity

_BEGINNING: Final = re.compile(r"[0-9a-f]{4,64}")
#: The size of a file that is read: more than an identity has.
_MAX_FILE_BYTES: Final = 2**20


def identity(
    ctl: Ctl,
    one: Annotated[
        str | None,
        typer.Argument(
            metavar="A", help="A digest, the beginning of one, or a file that --json wrote."
        ),
    ] = None,
    other: Annotated[str | None, typer.Argument(metavar="B", help="Another one.")] = None,
) -> None:
    """Say what the keys of the connected engines depend on.

    Without arguments it lists the identities of open sessions: engines share where the digests are
    equal. With one it shows its dimensions. With two it says in which dimensions they differ, and
    exits 1 if they do.
    """
    from .views.identity import differences_view, identities_table, identity_view

    if one is None:
        with ctl.connect() as daemon:
            listed = daemon.identities()
        if ctl.as_json:
            print_json({"identities": listed})
        else:
            make_console().print(identities_table(listed))
        return
    found = _find(ctl, one)
    if other is None:
        ctl.show(found.to_json(), lambda: identity_view(found))
        return
    second = _find(ctl, other)
    from ..identity import differences

    differing = differences(found, second)
    ctl.show(
        {"equal": not differing, "differences": [each._asdict() for each in differing]},
        lambda: differences_view(found, second, differing),
    )
    exit_if(differing)


def _find(ctl: Ctl, text: str) -> StateIdentity:
    """The identity that open sessions announced with a digest that begins with `text`, or that of a
    file, for which no daemon is needed."""
    from ...proto.errors import InvalidNamespace

    digits = text.strip().lower()
    if not _BEGINNING.fullmatch(digits):
        try:
            return _parsed(_read(text))
        except OSError as problem:
            why = (problem.strerror or "").lower()
        except ValueError as problem:
            why = str(problem)
        fail(
            f"{text[:80]!r} begins no digest (4 to 64 hexadecimal digits), and is no file with an "
            f"identity: {why}",
            ExitCode.BAD_INPUT,
        )
    # The daemon searches for whole bytes. The last digit may be half a byte.
    with ctl.connect() as daemon:
        announced = daemon.identities(bytes.fromhex(digits[: len(digits) // 2 * 2]))
    listed = [each for each in announced if each.identity.digest.hex().startswith(digits)]
    digests = {each.identity.digest for each in listed}
    if not digests:
        fail(f"no open session has announced an identity {digits}", ExitCode.PROBLEM)
    if len(digests) > 1:
        some = ", ".join(sorted(each.hex()[: len(digits) + 8] for each in digests)[:5])
        fail(f"{len(digests)} digests begin with {digits}, such as {some}", ExitCode.BAD_INPUT)
    # Each session says what it wants: words that do not give the digest are not believed.
    for each in listed:
        try:
            found = _parsed(each.identity.words)
        except InvalidNamespace:
            continue
        if found.digest == each.identity.digest:
            return found
    return fail(f"no session says in words what {digits} stands for", ExitCode.PROBLEM)


def _read(name: str) -> str:
    if name == STDOUT:
        return typer.get_text_stream("stdin").read(_MAX_FILE_BYTES)
    with Path(name).open(encoding="utf-8") as file:
        return file.read(_MAX_FILE_BYTES)


def _parsed(text: str) -> StateIdentity:
    """Raises InvalidNamespace."""
    from ...proto.errors import InvalidNamespace
    from ..identity import StateIdentity

    try:
        return StateIdentity.from_json(json.loads(text))
    except InvalidNamespace:
        raise
    except (ValueError, RecursionError):
        raise InvalidNamespace("it is no JSON of one") from None
