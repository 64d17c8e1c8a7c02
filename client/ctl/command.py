"""What every command of prefixctl shares: its options, its output, its exit codes.

A command is a function whose first parameter is a `Ctl`; `command()` gives it `--address`,
`--json` and `--timeout` too, which may be written before the command's name as well.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    NoReturn,
    ParamSpec,
    cast,
    get_args,
    get_origin,
)

import typer
from typer.core import TyperGroup

from . import options

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from .connection import AdminConnection

P = ParamSpec("P")


#: What can be asked of several daemons at once.
FLEET_COMMANDS = ("stats", "check", "top")


class ExitCode(IntEnum):
    """What a script can tell from the exit status."""

    OK = 0
    PROBLEM = 1
    """The command ran and what it found is not good, or it failed."""
    BAD_INPUT = 2
    UNREACHABLE = 3
    """No daemon answers at the address."""
    INTERRUPTED = 130
    """Ctrl-C; what was done until then was shown."""


@dataclass(frozen=True, slots=True)
class Ctl:
    """What a command works with: the options that every command has."""

    #: None: not given
    given_address: str | None = None
    as_json: bool = False
    timeout_s: float | None = None
    #: several daemons, in the place of one
    targets: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The daemon's address: as given, else the one that everybody agrees on."""
        from ...proto.endpoints import default_address, normalize_address

        given = self.given_address
        return default_address() if given is None else normalize_address(given)

    def connect(self, timeout_s: float = options.DEFAULT_TIMEOUT_S) -> AdminConnection:
        """The daemon, for operators. `timeout_s`: of one call, unless --timeout says otherwise."""
        from ...proto.endpoints import ADMIN_ADDRESS_VARIABLE, normalize_address
        from .connection import AdminConnection

        given = os.environ.get(ADMIN_ADDRESS_VARIABLE)
        operators = normalize_address(given) if given else None
        return AdminConnection(self.address, self.timeout_s or timeout_s, operators)

    def show(self, data: object, table: Callable[[], RenderableType]) -> None:
        """Print the data as JSON, or else what `table` makes of it."""
        if self.as_json:
            print_json(data)
        else:
            make_console().print(table())


def print_json(data: object, *, indent: int | None = 2) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(data, indent=indent) + "\n")
    sys.stdout.flush()


def make_console(*, stderr: bool = False) -> Console:
    """A console for people. Into a pipe it is wide, so that lines stay whole for grep."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = options.PIPE_WIDTH
    return console


AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="unix:/path or host:port (default: $PREFIXD_ADDRESS, or the local daemon). Operators "
        "are served at the socket beside it, with .admin behind its name ($PREFIXD_ADMIN_ADDRESS "
        "if it is elsewhere).",
        rich_help_panel="Common options",
    ),
]
TargetsOption = Annotated[
    str | None,
    typer.Option(
        "--targets",
        metavar="ADDRESS,...",
        help="Several daemons instead of one, for stats and check.",
        rich_help_panel="Common options",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Common options")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        parser=options.parse_seconds,
        help="How long one call may take: 5, 500ms, 2m.",
        rich_help_panel="Common options",
    ),
]


def command(
    app: typer.Typer,
    name: str,
    *,
    panel: str | None = None,
    cls: type[Any] | None = None,
    own_json: bool = False,
) -> Callable[[Callable[Concatenate[Ctl, P], None]], Callable[Concatenate[Ctl, P], None]]:
    """Register a function as the command `name` of `app`.

    `own_json`: the command has a `--json` option of another kind; only the one before the
    command's name reaches `Ctl` then.
    """

    def register(
        function: Callable[Concatenate[Ctl, P], None],
    ) -> Callable[Concatenate[Ctl, P], None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        common = [_option("address", AddressOption), _option("timeout", TimeoutOption)]
        if not own_json:
            common.insert(1, _option("as_json", JsonOption, default=False))

        def invoke(ctx: typer.Context, **given: Any) -> None:
            ctl = _merged(ctx, given)
            if ctl.targets and (ctl.given_address is not None or name not in FLEET_COMMANDS):
                raise typer.BadParameter(
                    f"--targets goes with {', '.join(FLEET_COMMANDS)}, without --address"
                )
            function(ctl, **given)  # type: ignore[call-arg]  # keywords only

        context = inspect.Parameter(
            "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        parameters = [context, *own, *common]
        for parameter in parameters:
            _is_no_value(parameter.annotation)
        invoke.__name__ = function.__name__
        invoke.__doc__ = _unwrapped(function.__doc__)
        # Typer reads the signature and the annotations.
        vars(invoke)["__signature__"] = inspect.Signature(parameters)
        invoke.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, rich_help_panel=panel, cls=cls)(invoke)
        return function

    return register


def _option(name: str, annotation: Any, default: object = None) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _is_no_value(annotation: Any) -> None:
    """Of a flag: its help names no value, for it takes none."""
    if get_origin(annotation) is Annotated and get_args(annotation)[0] is bool:
        get_args(annotation)[1].metavar = ""


def _unwrapped(text: str | None) -> str:
    """A docstring as paragraphs of one line each, which the terminal breaks; lists stay."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(
        each if "\n " in each or each.startswith((" ", "\b")) else " ".join(each.split("\n"))
        for each in paragraphs
    )


def _merged(ctx: typer.Context, given: dict[str, Any]) -> Ctl:
    """The common options: as written after the command's name, else as written before it."""
    before = cast(Ctl, ctx.find_root().obj or Ctl())
    address, timeout_s = given.pop("address"), given.pop("timeout")
    return Ctl(
        before.given_address if address is None else address,
        given.pop("as_json", False) or before.as_json,
        before.timeout_s if timeout_s is None else timeout_s,
        before.targets,
    )


def parse_targets(text: str | None) -> tuple[str, ...]:
    """Addresses with commas between them. Raises BadParameter."""
    from ...proto.endpoints import normalize_address
    from ...proto.errors import ConfigError

    try:
        return tuple(dict.fromkeys(map(normalize_address, text.split(",")))) if text else ()
    except ConfigError as problem:
        raise typer.BadParameter(f"--targets: {problem}") from None


class Group(TyperGroup):
    """Turns what is expected to go wrong into one sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader (head, less) has seen enough. Nothing more can be written, not even
            # by the flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ExitCode.OK) from None
        except Exception as error:
            # Imported here: commands that never fail (--help) don't pay for gRPC.
            from ...proto.errors import PrefixdError
            from ..lab.trace_file import TraceError

            if not isinstance(error, PrefixdError | TraceError):
                raise
            fail(str(error), exit_code_of(error))


def exit_code_of(error: Exception) -> ExitCode:
    """The exit status for a failure that was expected."""
    from ...proto.errors import CallerError, DaemonUnavailable, DeadlineExceeded, PrefixdError

    if isinstance(error, DaemonUnavailable | DeadlineExceeded):
        return ExitCode.UNREACHABLE
    if isinstance(error, CallerError) or not isinstance(error, PrefixdError):
        return ExitCode.BAD_INPUT
    return ExitCode.PROBLEM


def fail(sentence: str, code: ExitCode) -> NoReturn:
    """Say on standard error what went wrong, and leave. Raises typer.Exit."""
    typer.echo(f"prefixctl: {sentence}", err=True)
    raise typer.Exit(code)
