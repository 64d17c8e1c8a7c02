"""Logging to stderr: readable lines on a terminal, JSON everywhere else.

Our own events (structlog) and those of libraries through `logging` (grpc, asyncio) look alike.
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

    Times are UTC, ISO 8601. In JSON every line is one object with `timestamp`, `level`, `logger`,
    `event` and the fields of the event. Can be called again.
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
    # Tracebacks come without local variables, which may hold a user's tokens or KV state.
    rendering: list[Processor]
    if as_json:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        rendering = [
            structlog.processors.ExceptionRenderer(frames),
            structlog.processors.JSONRenderer(default=str),
        ]
    else:
        traceback = structlog.dev.plain_traceback
        rendering = [
            structlog.dev.ConsoleRenderer(colors=on_terminal, exception_formatter=traceback)
        ]
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
    # Python's own warnings (a coroutine that was never awaited) are logged like all else.
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        # Off, so that loggers created at import follow a later call of this function.
        cache_logger_on_first_use=False,
    )
