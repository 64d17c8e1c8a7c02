"""How values are written on prefixctl's command line."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import typer

from ...proto.units import parse_bytes, parse_duration_ns

DEFAULT_TIMEOUT_S: Final = 10.0
#: Reading and checking every payload of a daemon, or dropping gigabytes, takes its time.
LONG_TIMEOUT_S: Final = 600.0
#: Columns of a table that goes into a pipe or a file.
PIPE_WIDTH: Final = 180


class TierName(StrEnum):
    """The tiers as people write them."""

    RAM = "ram"
    SHM = "shm"
    DISK = "disk"


class LogLevel(StrEnum):
    """The log levels as people write them."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


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


class TierChoice(StrEnum):
    """Where a live replay saves."""

    RAM = "ram"
    SHM = "shm"
    DISK = "disk"
    ALL = "all"


class PathName(StrEnum):
    """How a client gets at bytes on the daemon's host."""

    LOCAL = "local"
    GRPC = "grpc"


class ReasonName(StrEnum):
    """The save reasons as people write them."""

    COLD = "cold"
    CONTINUED = "continued"
    FINISH = "finish"
    EVICT = "evict"
    SHUTDOWN = "shutdown"
