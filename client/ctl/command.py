"""What the commands of prefixctl share: their options and their output.

A command is a function whose first parameter is a `Ctl`. `command()` registers it with the common
options `--address`, `--json` and `--timeout`, which may also stand before the command's name.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import islice
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Final,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
)

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from ...proto.units import parse_bytes, parse_duration_ns
from ...proto.vocabulary import SaveReason, Tier

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from .connection import AdminConnection

P = ParamSpec("P")
T = TypeVar("T")
Member = TypeVar("Member", bound=IntEnum)

DEFAULT_TIMEOUT_S: Final = 10.0
#: For calls that read every payload, or drop gigabytes.
LONG_TIMEOUT_S: Final = 600.0
#: The largest number that a daemon, or SQLite, takes.
MAX_NUMBER: Final = 2**63 - 1
#: The version of the JSON that commands print and write, in each document. It rises if a field goes
#: or means something else.
DOCUMENT_VERSION: Final = 1
#: Rows of one table of a long list. A list of any length is shown as tables of so many rows.
TABLE_ROWS: Final = 1_000
_INDENT: Final = 2
#: Columns of a table that goes into a pipe or a file.
PIPE_WIDTH: Final = 180
#: The commands that take `--targets`.
FLEET_COMMANDS: Final = ("stats", "check", "top")


@dataclass(frozen=True, slots=True)
class Ctl:
    """The common options of a command."""

    #: The value of --address. None when it was not given.
    given_address: str | None = None
    as_json: bool = False
    timeout_s: float | None = None
    #: Addresses of several daemons, instead of one.
    targets: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The daemon's address: the given one, else the first of the default ones at which a
        daemon answers. Raises DaemonUnavailable."""
        from ...proto.endpoints import default_addresses, normalize_address

        if self.given_address is not None:
            return normalize_address(self.given_address)
        addresses = default_addresses()
        if len(addresses) == 1 or self.admin_address is not None:
            return addresses[0]
        from .connection import found_among

        return found_among(addresses)

    @property
    def admin_address(self) -> str | None:
        """Where the Admin service is, if $PREFIXD_ADMIN_ADDRESS says so."""
        from ...proto.endpoints import ADMIN_ADDRESS_VARIABLE, normalize_address

        given = os.environ.get(ADMIN_ADDRESS_VARIABLE)
        return normalize_address(given) if given else None

    def connect(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> AdminConnection:
        """An operator's connection. `timeout_s` is for one call; --timeout overrides it."""
        from .connection import AdminConnection

        return AdminConnection(self.address, self.timeout_s or timeout_s, self.admin_address)

    def show(self, data: object, table: Callable[[], RenderableType]) -> None:
        """Print `data` as JSON (see `print_json`), or `table()` for people."""
        if self.as_json:
            print_json(data)
        else:
            make_console().print(table())

    def show_list(
        self, name: str, items: Iterator[T], table: Callable[[Sequence[T]], RenderableType]
    ) -> None:
        """Print a list of any length as `{name: [...]}`, or as tables for people. Neither keeps
        what it has printed. An empty list is a table, too."""
        if self.as_json:
            print_json({name: items})
            return
        console = make_console()
        page = list(islice(items, TABLE_ROWS))
        console.print(table(page))
        while page := list(islice(items, TABLE_ROWS)):
            console.print(table(page))


# ---- output


def print_json(data: object, *, indent: int | None = _INDENT) -> None:
    """Print one JSON document on standard output, with its version. `data`: a message of
    prefixd.proto, or a mapping, which may hold some and, with an indentation of 2, iterators:
    lists that are printed as they come."""
    data = versioned(data)
    if indent == _INDENT:
        sys.stdout.writelines(_json_pieces(data, "\n"))
    else:
        sys.stdout.write(json.dumps(data, indent=indent, default=_message_as_dict))
    sys.stdout.write("\n")
    sys.stdout.flush()


def versioned(data: object) -> dict[str, Any]:
    """A document as its JSON, in front its version."""
    fields = data if isinstance(data, Mapping) else _message_as_dict(data)
    return {"version": DOCUMENT_VERSION, **fields}


def _json_pieces(data: object, newline: str) -> Iterator[str]:
    """The pieces of the document that `json.dumps` makes. `newline`: a line feed, and the spaces
    that the lines of `data` begin with."""
    within = newline + _INDENT * " "
    if isinstance(data, Mapping) and data:
        before = "{"
        for name, value in data.items():
            yield f"{before}{within}{json.dumps(name)}: "
            yield from _json_pieces(value, within)
            before = ","
        yield newline + "}"
    elif isinstance(data, Iterator | list | tuple):
        before = "["
        for value in data:
            yield before + within
            yield from _json_pieces(value, within)
            before = ","
        yield "[]" if before == "[" else newline + "]"
    else:
        text = json.dumps(data, indent=_INDENT, default=_message_as_dict)
        yield text.replace("\n", newline)


def _message_as_dict(message: Any) -> dict[str, Any]:
    from .message_json import as_dict

    return as_dict(message)


def make_console(*, stderr: bool = False) -> Console:
    """A console for people. It is wide when it writes to a pipe, so that grep sees whole lines."""
    from rich.console import Console

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # to `failures.Group`, as for JSON; Rich would exit with 1

    console = Pipe(stderr=stderr, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_WIDTH
    return console


# ---- values of options


def parse_size(text: str | int) -> int:
    """`512MiB` as bytes, at least 1. Typer passes defaults as numbers."""
    try:
        size_bytes = parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if size_bytes < 1:
        raise typer.BadParameter("a size is at least 1 byte")
    if size_bytes > MAX_NUMBER:
        raise typer.BadParameter(f"{text!r} is more than any daemon has")
    return size_bytes


def parse_seconds(text: str | float) -> float:
    """`5`, `0.5`, `500ms` or `2m` as seconds, above 0."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parse_duration_ns(str(text)) / 1e9
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if not 0 < seconds < 1e9:
        raise typer.BadParameter(f"{text!r} is not a time above 0")
    return seconds


def parse_tier(text: str | Tier) -> Tier:
    """The tier named `ram`, `shm` or `disk`."""
    return _member(text, Tier)


def parse_reason(text: str | SaveReason) -> SaveReason:
    """The save reason named `cold`, `finish`, ..."""
    return _member(text, SaveReason)


def _member(text: str | Member, kind: type[Member]) -> Member:
    for member in kind:
        if text in (member, member.name.lower()):
            return member
    names = ", ".join(member.name.lower() for member in kind)
    raise typer.BadParameter(f"{text!r} is none of {names}")


def chosen(tiers: list[Tier] | None) -> list[Tier]:
    """The tiers of a `TiersOption`, each once. Empty means all."""
    return list(dict.fromkeys(tiers or ()))


def parse_targets(text: str | None) -> tuple[str, ...]:
    """The addresses of a comma-separated list. Raises BadParameter."""
    from ...proto.endpoints import normalize_address
    from ...proto.errors import ConfigError

    try:
        return tuple(dict.fromkeys(map(normalize_address, text.split(",")))) if text else ()
    except ConfigError as problem:
        raise typer.BadParameter(f"--targets: {problem}") from None


def size_option(help_text: str, *names: str, panel: str | None = None) -> Any:
    """An option with a size, passed as a number of bytes."""
    return typer.Option(
        *names, metavar="SIZE", parser=parse_size, help=help_text, rich_help_panel=panel
    )


def time_option(help_text: str, *names: str, **how: Any) -> Any:
    """An option with a time, passed as a number of seconds."""
    return typer.Option(*names, metavar="TIME", parser=parse_seconds, help=help_text, **how)


def _tier_option(help_text: str) -> Any:
    # Typer would show a default as its number.
    return typer.Option(
        "--tier", metavar=TIER_NAMES, parser=parse_tier, show_default=False, help=help_text
    )


TIER_NAMES: Final = "|".join(tier.label for tier in Tier)
REASON_NAMES: Final = ", ".join(reason.label for reason in SaveReason)
TierOption = Annotated[Tier, _tier_option("Which tier.")]
#: For the default `Tier.DISK`.
DiskTierOption = Annotated[Tier, _tier_option("Which tier (default: disk).")]
TiersOption = Annotated[
    list[Tier] | None, _tier_option("Which tier; may be repeated (default: all).")
]
#: Where no tier is named by leaving it out.
NamedTiersOption = Annotated[list[Tier] | None, _tier_option("Which tier; may be repeated.")]
_COMMON: Final = "Common options"
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="unix:/path or host:port (default: $PREFIXD_ADDRESS, or the local daemon). Operators "
        "connect to a second socket with the same name and .admin behind it, or to "
        "$PREFIXD_ADMIN_ADDRESS.",
        rich_help_panel=_COMMON,
    ),
]
TargetsOption = Annotated[
    str | None,
    typer.Option(
        "--targets",
        metavar="ADDRESS,...",
        help="Several daemons instead of one, for stats, check and top.",
        rich_help_panel=_COMMON,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_COMMON)]
TimeoutOption = Annotated[
    float | None,
    time_option("How long one call may take: 5, 500ms, 2m.", "--timeout", rich_help_panel=_COMMON),
]


# ---- names of values in --help
#
# Typer names values by the types of Python (`<bool>`, `<int range>`, `<str>`), in another way in
# each of its versions.

#: Of an option without a name of its own for its value.
_NAMES = {bool: "", int: "N", float: "N", str: "TEXT"}


def _name_value(parameter: inspect.Parameter) -> None:
    """Name the value of an option or an argument of a command that has no name for it yet."""
    annotation = parameter.annotation
    if get_origin(annotation) is not Annotated:
        return
    kind, info = get_args(annotation)[:2]
    (kind,) = [each for each in get_args(kind) or (kind,) if each is not type(None)][:1]
    if info.metavar is not None or not isinstance(kind, type):
        return
    if isinstance(info, ArgumentInfo):
        info.metavar = parameter.name.upper()
    elif issubclass(kind, Enum):
        info.metavar = "|".join(str(each.value) for each in kind)
    else:
        info.metavar = _NAMES.get(kind)


class _Plain:
    """Shows no types in the help of a command or of a group."""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]  # the command's
        for each in parameters:
            if getattr(each, "is_flag", False):
                each.metavar = ""  # --help and --version, too
            if each.param_type_name == "argument" and hasattr(each, "display_type_rich"):
                each.display_type_rich = lambda **_: None  # of 0.29, behind the argument's name
        return parameters


class _PlainCommand(_Plain, TyperCommand):
    """A command."""


class PlainGroup(_Plain, TyperGroup):
    """A group of commands."""


# ---- registration


def command(
    app: typer.Typer,
    name: str,
    function: Callable[Concatenate[Ctl, P], None],
    *,
    panel: str | None = None,
    needs_daemon: bool = True,
) -> None:
    """Register a function as the command `name` of `app`. One that `needs_daemon` takes the options
    that say where it is."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    common = [_option("as_json", JsonOption, default=False)]
    if needs_daemon:
        common = [_option("address", AddressOption), *common, _option("timeout", TimeoutOption)]
    if name in FLEET_COMMANDS:
        common.append(_option("targets", TargetsOption))

    def invoke(ctx: typer.Context, **given: Any) -> None:
        ctl = _merged(ctx, given)
        if ctl.targets and (ctl.given_address is not None or name not in FLEET_COMMANDS):
            raise typer.BadParameter(
                f"--targets goes with {', '.join(FLEET_COMMANDS)}, without --address"
            )
        function(ctl, **given)  # type: ignore[call-arg]  # keywords only

    parameters = [_option("ctx", typer.Context, inspect.Parameter.empty), *own, *common]
    for parameter in parameters:
        _name_value(parameter)
    invoke.__name__ = function.__name__
    invoke.__doc__ = unwrapped(function.__doc__)
    # Typer reads the signature and the annotations.
    vars(invoke)["__signature__"] = inspect.Signature(parameters)
    invoke.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name, cls=_PlainCommand, rich_help_panel=panel)(invoke)


def _option(name: str, annotation: Any, default: object = None) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def unwrapped(text: str | None) -> str:
    """A docstring with each paragraph in one line, for the terminal to wrap. Lists are kept."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(
        each
        if "\n " in each or each.startswith((" ", "\b", "[bold]"))
        else " ".join(each.split("\n"))
        for each in paragraphs
    )


def _merged(ctx: typer.Context, given: dict[str, Any]) -> Ctl:
    """The common options. One that stands after the command's name overrides one before it."""
    found = ctx.find_root().obj
    before = found if isinstance(found, Ctl) else Ctl()
    address, timeout_s = given.pop("address", None), given.pop("timeout", None)
    targets = parse_targets(given.pop("targets", None))
    return Ctl(
        before.given_address if address is None else address,
        given.pop("as_json", False) or before.as_json,
        before.timeout_s if timeout_s is None else timeout_s,
        targets or before.targets,
    )
