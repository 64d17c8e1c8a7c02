"""How values are written on prefixctl's command line."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Final, TypeVar

import typer

from ...proto.units import parse_bytes, parse_duration_ns
from ...proto.vocabulary import SaveReason, Tier

Member = TypeVar("Member", bound=IntEnum)

DEFAULT_TIMEOUT_S: Final = 10.0
#: Reading and checking every payload of a daemon, or dropping gigabytes, takes its time.
LONG_TIMEOUT_S: Final = 600.0
#: Columns of a table that goes into a pipe or a file.
PIPE_WIDTH: Final = 180


class LogLevel(StrEnum):
    """The log levels as people write them."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class PathName(StrEnum):
    """How a client gets at bytes on the daemon's host."""

    LOCAL = "local"
    GRPC = "grpc"


def parse_size(text: str | int) -> int:
    """`512MiB` as bytes, at least 1. Defaults come as numbers."""
    try:
        size_bytes = parse_bytes(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if size_bytes < 1:
        raise typer.BadParameter("a size is at least 1 byte")
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
        raise typer.BadParameter(f"{text!r} is no time above 0")
    return seconds


def parse_tier(text: str | Tier) -> Tier:
    """`ram` as the tier."""
    return _member(text, Tier)


def parse_reason(text: str | SaveReason) -> SaveReason:
    """`finish` as the save reason."""
    return _member(text, SaveReason)


def _member(text: str | Member, kind: type[Member]) -> Member:
    for member in kind:
        if text in (member, member.name.lower()):
            return member
    names = ", ".join(member.name.lower() for member in kind)
    raise typer.BadParameter(f"{text!r} is none of {names}")


def chosen(tiers: list[Tier] | None) -> list[Tier]:
    """The tiers of a `TiersOption`, each once; empty: all."""
    return list(dict.fromkeys(tiers or ()))


TIER_NAMES: Final = "|".join(tier.label for tier in Tier)
REASON_NAMES: Final = "|".join(reason.label for reason in SaveReason)
TierOption = Annotated[
    Tier, typer.Option("--tier", metavar=TIER_NAMES, parser=parse_tier, help="Which tier.")
]
#: With `Tier.DISK` as the default, which would be shown as its number.
DiskTierOption = Annotated[
    Tier,
    typer.Option(
        "--tier",
        metavar=TIER_NAMES,
        parser=parse_tier,
        show_default=False,
        help="Which tier (default: disk).",
    ),
]
TiersOption = Annotated[
    list[Tier] | None,
    typer.Option(
        "--tier",
        metavar=TIER_NAMES,
        parser=parse_tier,
        help="Which tier; may be repeated (default: all).",
    ),
]
