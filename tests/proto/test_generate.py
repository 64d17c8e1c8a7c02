"""The generated code is up to date, and `--check` notices when it is not."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).resolve().parents[2] / "proto"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None
    or importlib.util.find_spec("mypy_protobuf") is None,
    reason="needs grpcio-tools and mypy-protobuf, which are in the dev extra",
)


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "proto"
    folder.mkdir()
    for path in (PROTO / "generate.py", *PROTO.glob("prefixd*")):
        shutil.copy(path, folder)
    return folder


def test_the_generated_code_was_not_edited_and_is_up_to_date() -> None:
    result = check(PROTO)
    assert result.returncode == 0, result.stderr
    assert "up to date" in result.stdout


def test_an_edited_and_a_missing_file_are_named(copy: Path) -> None:
    with (copy / "prefixd_pb2.py").open("a") as edited:
        edited.write("# edited by hand\n")
    (copy / "prefixd_pb2_grpc.pyi").unlink()
    result = check(copy)
    assert result.returncode == 1
    assert "make proto" in result.stderr
    assert "prefixd_pb2.py" in result.stderr
    assert "prefixd_pb2_grpc.pyi" in result.stderr
    assert "prefixd_pb2.pyi" not in result.stderr


def test_a_change_of_the_contract_makes_the_code_stale(copy: Path) -> None:
    contract = copy / "prefixd.proto"
    text = contract.read_text()
    assert text.count("message GcRequest {}") == 1
    contract.write_text(text.replace("message GcRequest {}", "message GcRequest { bool now = 1; }"))
    assert "out of date" in check(copy).stderr


def test_a_contract_that_is_none_is_refused(copy: Path) -> None:
    (copy / "prefixd.proto").write_text("no contract")
    result = check(copy)
    assert result.returncode == 1
    assert "protoc failed" in result.stderr
