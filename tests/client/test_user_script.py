"""A user's script runs, and type checkers find nothing in it, as strict as they can be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import private_daemon

SCRIPT = Path(__file__).with_name("user_script.py")
PYRIGHT = Path(sys.executable).with_name("pyright")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where the settings of this project are not found."""
    return Path(shutil.copy(SCRIPT, tmp_path))


def test_it_runs(script: Path) -> None:
    with private_daemon() as daemon:
        done = run(sys.executable, "-W", "error", script, daemon.address, cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("saved")] == [
        "saved 2 None",
        "saved 0 b'state'",
    ]
    assert said[-3].startswith("['disk'] ")
    assert [line.split()[1] for line in said[-2:]] == ["ram", "ram"]


def test_it_has_no_errors_of_type_for_mypy(script: Path) -> None:
    flags = ("--strict", "--config-file=", f"--cache-dir={script.parent}")
    done = run(sys.executable, "-m", "mypy", *flags, script.name, cwd=script.parent)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr


@pytest.mark.skipif(
    shutil.which("node") is None or not PYRIGHT.exists(), reason="needs pyright, and node for it"
)
def test_nor_for_pyright(script: Path) -> None:
    (script.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = run(PYRIGHT, "--pythonpath", sys.executable, script.name, cwd=script.parent)
    assert done.returncode == 0, done.stdout + done.stderr
