"""The contract is clean, and what would break clients of the last release is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).with_name("buf")
CONTRACT = ROOT / "proto/prefixd.proto"

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="needs buf: pip install buf-bin")


def buf(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUF, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={"HOME": str(cwd), "PATH": "/usr/bin:/bin"},
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the contract and, in `released`, that of the last release."""
    (tmp_path / "buf.yaml").write_text((ROOT / "buf.yaml").read_text())
    for folder in ("proto", "build/released"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / CONTRACT.name).write_text(CONTRACT.read_text())
    return tmp_path


def test_it_has_nothing_to_lint(tree: Path) -> None:
    done = buf("lint", cwd=tree)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FIELD = "  uint32 pid = 2;\n"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (FIELD, FIELD + "  uint32 more = 60;\n", ""),
        (FIELD, '  reserved 2;\n  reserved "pid";\n', ""),
        (FIELD, "", 'Previously present field "2"'),
        (FIELD, FIELD.replace("= 2", "= 61"), 'Previously present field "2"'),
        (FIELD, FIELD.replace("uint32", "string"), "changed type"),
        ("  DELETE_STATUS_PINNED = 3;", "//", 'Previously present enum value "3"'),
        ("  rpc Pull(PullRequest) returns (PullResponse);\n", "", 'Previously present RPC "Pull"'),
    ],
)
def test_it_only_grows(tree: Path, before: str, after: str, words: str) -> None:
    contract = tree / "proto" / CONTRACT.name
    text = contract.read_text()
    assert before in text
    contract.write_text(text.replace(before, after, 1))
    done = buf("breaking", "proto", "--against", "build/released", cwd=tree)
    assert (done.returncode == 0, words in done.stdout) == (not words, True), done.stdout
