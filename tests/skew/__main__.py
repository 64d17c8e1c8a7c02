"""Tries the previous release beside this one, both ways.

    python -m tests.skew v0.1.0

The release is a tag or commit of this repository, a wheel, or the interpreter of an environment in
which it is installed. Prints a line of JSON for each thing that was tried. Exit status 1: bytes
were wrong, or something that is promised was not there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .run import Release, run

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def installed(previous: str) -> Iterator[str]:
    """The interpreter of an environment with this release."""
    if os.access(previous, os.X_OK) and Path(previous).name.startswith("python"):
        yield str(Path(previous).absolute())  # not resolved: the link tells the environment
        return
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        source = Path(folder) / "source"
        if previous.endswith(".whl"):
            what = f"{Path(previous).resolve()}[server,shared]"
        else:
            source.mkdir()
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", previous], check=True, capture_output=True
            ).stdout
            subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
            what = f"{source}[server,shared]"
        environment = Path(folder) / "environment"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        python = str(environment / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, what], check=True)
        yield python


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.skew", description=__doc__)
    parser.add_argument("previous", help="a tag, a commit, a wheel, or an interpreter")
    arguments = parser.parse_args()
    with installed(arguments.previous) as python:
        report = run(Release("the previous release", python), Release("this one", sys.executable))
    for line in report.lines:
        print(json.dumps(line))
    if report.broken:
        sys.exit(f"not as promised: {'; '.join(report.broken)}")


if __name__ == "__main__":
    main()
