"""All log lines have one format, whether from the daemon or from a library."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import structlog

from prefixd.server.logs import Format, configure_logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restore the logging configuration, which is that of the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_without_a_terminal() -> None:
    stream = io.StringIO()
    configure_logs("info", stream=stream)
    structlog.get_logger("prefixd.loop").warning("index_failed", changes=3, path=Path("/x"))
    (line,) = json_lines(stream)
    written = datetime.fromisoformat(line.pop("timestamp"))
    assert written.tzinfo == UTC
    assert line == {
        "event": "index_failed",
        "level": "warning",
        "logger": "prefixd.loop",
        "changes": 3,
        "path": "/x",
    }


@pytest.mark.parametrize(
    ("stream", "format", "as_json", "colors"),
    [
        (Terminal(), "auto", False, True),
        (Terminal(), "console", False, True),
        (Terminal(), "json", True, False),
        (io.StringIO(), "auto", True, False),
        (io.StringIO(), "console", False, False),
    ],
)
def test_the_format_follows_the_stream_unless_configured(
    stream: io.StringIO, format: Format, as_json: bool, colors: bool
) -> None:
    configure_logs("info", format, stream)
    structlog.get_logger("prefixd").info("serving", pid=7)
    text = stream.getvalue()
    assert text.startswith("{") == as_json
    assert ("\x1b[" in text) == colors
    assert "serving" in text
    assert text.count("\n") == 1


def test_lines_of_libraries_have_the_same_format() -> None:
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    logging.getLogger("grpc").error("no %s of %d", "route", 5, extra={"peer": "p"})
    logging.getLogger("asyncio").debug("not this")
    (line,) = json_lines(stream)
    assert line.pop("timestamp")
    assert line == {"event": "no route of 5", "level": "error", "logger": "grpc", "peer": "p"}


def test_pythons_own_warnings_are_lines_too() -> None:
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # Inside catch_warnings the capturing hook has to be set again.
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("never awaited", RuntimeWarning, stacklevel=1)
        logging.captureWarnings(False)
    (line,) = json_lines(stream)
    assert line["logger"] == "py.warnings"
    assert "never awaited" in line["event"]


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_holds_for_all(level: str) -> None:
    stream = io.StringIO()
    configure_logs(level, "json", stream)
    levels = ["debug", "info", "warning", "error"]
    for name in levels:
        getattr(structlog.get_logger("ours"), name)("x")
        getattr(logging.getLogger("theirs"), name)("x")
    expected = [name for name in levels[levels.index(level) :] for _ in range(2)]
    assert [line["level"] for line in json_lines(stream)] == expected


@pytest.mark.parametrize("format", ["json", "console"])
def test_tracebacks_are_logged_without_variables(format: Format) -> None:
    stream = io.StringIO()
    configure_logs("info", format, stream)
    secret = "the tokens of somebody"
    try:
        raise LookupError("lost")
    except LookupError:
        structlog.get_logger("prefixd").exception("task_failed", attempt=secret.count("o"))
    text = stream.getvalue()
    assert "LookupError" in text
    assert "lost" in text
    assert secret not in text
    if format == "json":
        (line,) = json_lines(stream)
        assert line["exception"][0]["frames"][-1]["filename"] == __file__


def test_the_last_configuration_counts_for_loggers_that_exist() -> None:
    first, second = io.StringIO(), io.StringIO()
    log = structlog.get_logger("prefixd")
    configure_logs("info", "json", first)
    log.info("one")
    configure_logs("error", "json", second)
    log.info("two")
    log.error("three")
    assert [line["event"] for line in json_lines(first)] == ["one"]
    assert [line["event"] for line in json_lines(second)] == ["three"]
