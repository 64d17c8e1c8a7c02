"""Log lines that clients can cause, at a bounded rate.

Whatever a client does again and again, an event leaves `BURST` lines at once and then one line
every `EVERY_S`. The next line of the event says how many were left out before it, and all of them
are counted (`log_lines_left_out` of `prefixctl stats`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import structlog

BURST: Final = 50
EVERY_S: Final = 1.0
#: Names of events come from our code, not from clients.
_left_out: dict[str, int] = {}


def lines_left_out() -> int:
    """Lines that were left out since the start, over all events."""
    return sum(_left_out.values())


class LimitedLog:
    """A logger for everything that a client can cause. Levels and fields are those of structlog.
    May be used on any thread: a race miscounts a line."""

    def __init__(self, name: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._log = structlog.get_logger(name)
        self._now_s = now_s
        #: By event: lines that may be written at once, and since when.
        self._tokens: dict[str, tuple[float, float]] = {}
        #: By event: lines left out since the last one that was written.
        self._missing: dict[str, int] = {}

    def debug(self, event: str, **fields: Any) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        now_s = self._now_s()
        tokens, since_s = self._tokens.get(event, (float(BURST), now_s))
        tokens = min(BURST, tokens + (now_s - since_s) / EVERY_S)
        if tokens < 1:
            self._tokens[event] = tokens, now_s
            self._missing[event] = self._missing.get(event, 0) + 1
            _left_out[event] = _left_out.get(event, 0) + 1
            return
        self._tokens[event] = tokens - 1, now_s
        missing = self._missing.pop(event, 0)
        if missing:
            fields = {**fields, "left_out_before": missing}
        getattr(self._log, level)(event, **fields)
