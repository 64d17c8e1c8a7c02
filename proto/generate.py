"""Generate the code for prefixd.proto; with --check, only compare it with what is there.

`make proto` runs it. Its tools are pinned in pyproject.toml, because their output is compared byte
for byte.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUTS = ("prefixd_pb2.py", "prefixd_pb2.pyi", "prefixd_pb2_grpc.py", "prefixd_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Write every output into `out`."""
    from grpc_tools import protoc

    # protoc looks for its plugins on PATH, which lacks this environment unless it is activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    status = protoc.main(
        [
            "protoc",
            f"-I{HERE}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            str(HERE / "prefixd.proto"),
        ]
    )
    if status:
        sys.exit(f"protoc failed with status {status}")
    # protoc writes a top-level import, but a package needs a relative one.
    for name in ("prefixd_pb2_grpc.py", "prefixd_pb2_grpc.pyi"):
        path = out / name
        text = path.read_text()
        path.write_text(re.sub(r"^import (prefixd_pb2\b)", r"from . import \1", text, flags=re.M))


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(HERE)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        stale = [name for name in OUTPUTS if _read(HERE / name) != _read(Path(scratch) / name)]
    if stale:
        sys.exit(f"generated code is out of date, run `make proto`: {', '.join(stale)}")
    print("generated code is up to date")


if __name__ == "__main__":
    main()
