"""Write the generated half of this package from prefixd.proto; with --check, only compare.

Run it with `make proto`. The tools that it needs are pinned in pyproject.toml, because
their output is compared byte for byte.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUTS = ("prefixd_pb2.py", "prefixd_pb2.pyi", "prefixd_pb2_grpc.py", "prefixd_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Generate every output below `out`."""
    from grpc_tools import protoc

    # protoc looks for the plugins of this environment on PATH, activated or not.
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
    # protoc writes a top-level import; inside a package it has to be a relative one.
    for name in ("prefixd_pb2_grpc.py", "prefixd_pb2_grpc.pyi"):
        path = out / name
        text = path.read_text()
        text = text.replace("import prefixd_pb2 as prefixd__pb2", "from . import prefixd_pb2 as prefixd__pb2")
        text = text.replace("import prefixd_pb2\n", "from . import prefixd_pb2\n")
        path.write_text(text)


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(HERE)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        stale = [
            name
            for name in OUTPUTS
            if not (HERE / name).exists() or (HERE / name).read_bytes() != (Path(scratch) / name).read_bytes()
        ]
    if stale:
        sys.exit(f"generated code is out of date, run `make proto`: {', '.join(stale)}")
    print("generated code is up to date")


if __name__ == "__main__":
    main()
