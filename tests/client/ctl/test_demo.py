"""The demonstration: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.warm import WARM

SHM = Path("/dev/shm")
SCRIPT = (Path(sys.executable).with_name("prefixctl"),)
#: The same with more frequent lines about the progress.
IN_A_HURRY = """
from prefixd.client.ctl import demo
from prefixd.commands import prefixctl
demo.LINE_EVERY_S = 0.2
prefixctl()
"""


@contextmanager
def demo(
    directory: Path,
    *arguments: str,
    command: Sequence[str | Path] = (*WARM, "-c", IN_A_HURRY),
) -> Iterator[subprocess.Popen[str]]:
    """A running demonstration with its temporary files below `directory`."""
    with subprocess.Popen(
        [*command, "demo", "--workers", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a path short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="pd-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def name_of_its_directories(directory: Path) -> str:
    (made,) = directory.iterdir()
    assert (SHM / made.name).is_dir()
    return made.name


def test_it_shows_what_it_does_and_ends_with_no_mismatches(directory: Path) -> None:
    with demo(directory, "--requests", "20", command=SCRIPT) as process:
        shown, complaints = process.communicate()
    assert process.returncode == 0, shown + complaints
    assert shown.splitlines()[-1] == "0 mismatches"
    for words in (
        "prefixd demo",
        "20 of 20",
        "everything adds up",
        "kill -9",
        "and recovered",
        "tokens not prefilled",
    ):
        assert words in shown
    for tier in ("ram", "shm", "disk"):
        assert f" {tier} " in shown
    assert list(directory.iterdir()) == []


def test_it_can_be_read_by_a_program(directory: Path) -> None:
    with demo(directory, "--requests", "20", "--json") as process:
        shown, _ = process.communicate()
    assert process.returncode == 0
    data = json.loads(shown)
    assert data["replay"]["mismatches"] == 0
    assert data["replay"]["requests"] == 20
    assert data["check"]["problems"] == []
    assert data["crash"]["away_seconds"] > 0
    assert data["replay"]["reconnects"] == 2, "each of the workers found the next daemon"
    assert [tier["tier"] for tier in data["stats"]["tiers"]] == ["ram", "shm", "disk"]


def test_it_can_be_drawn(directory: Path) -> None:
    picture = directory / "demo.svg"
    with demo(directory, "--requests", "20", "--picture", str(picture)) as process:
        process.communicate()
    assert process.returncode == 0
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    for words in ("0&#160;mismatches", "kill&#160;-9", "20&#160;of&#160;20"):
        assert words in drawn


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_it_cleans_up_when_it_is_stopped(
    directory: Path, number: signal.Signals, status: int
) -> None:
    with demo(directory, "--requests", "100000") as process:
        assert process.stdout is not None
        # Skip the first such line, which comes before the first request.
        next(line for line in process.stdout if re.match(r"[1-9].* of 100,000 ", line))
        name = name_of_its_directories(directory)
        process.send_signal(number)
        rest, complaints = process.communicate()
        assert process.returncode == status, complaints
    assert list(directory.iterdir()) == []
    assert not (SHM / name).exists()
    # After Ctrl-C it shows the results so far.
    assert ("stopped before the end" in rest) is (number == signal.SIGINT)
