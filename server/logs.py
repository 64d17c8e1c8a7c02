"""What the daemon says on stderr: lines for people on a terminal, JSON everywhere else.

Ours (structlog) and what libraries say through `logging` (grpc, asyncio) come out alike.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

Format = Literal["auto", "console", "json"]


def configure_logs(level: str, format: Format = "auto", stream: TextIO | None = None) -> None:
    """Set up all logging of the process: `level` and worse, to `stream` (default: stderr).

    Times are UTC, ISO 8601. In JSON every line is one object with `timestamp`, `level`,
    `logger`, `event` and what belongs to the event. Can be called again.
    """
    stream = sys.stderr if stream is None else stream
    on_terminal = stream.isatty()
    as_json = format == "json" or (format == "auto" and not on_terminal)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[Processor] = _as_json() if as_json else _for_people(colors=on_terminal)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Warnings of Python itself, a coroutine never awaited say, are lines like all others.
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Off: loggers that modules made at import follow a later call of this function.
        cache_logger_on_first_use=False,
    )


# Tracebacks come without local variables: those may hold somebody's tokens or KV state.


def _as_json() -> list[Processor]:
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(frames),
        structlog.processors.JSONRenderer(default=str),
    ]


def _for_people(*, colors: bool) -> list[Processor]:
    traceback = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=traceback)]
