"""What importing the client costs an engine, in modules: on every machine the same."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
before = set(sys.modules)
{first}
after = set(sys.modules)
{then}
print(json.dumps([*map(sorted, (after - before, set(sys.modules) - after))]))
"""
#: Packages whose import takes longer than all of the client, and which the client can do without.
SLOW = {
    "asyncio",
    "inspect",
    "ssl",
    "multiprocessing",
    "pydantic",
    "rich",
    "typer",
    "numpy",
    "torch",
}


def modules(first: str, then: str = "") -> tuple[list[str], list[str]]:
    code = SCRIPT.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    one, other = json.loads(done.stdout)
    return one, other


def test_the_package_alone_imports_next_to_nothing() -> None:
    found, _ = modules("import prefixd.client")
    assert [name for name in found if name.startswith("prefixd")] == ["prefixd", "prefixd.client"]
    others = [name for name in found if not name.startswith("prefixd")]
    assert set(others) <= sys.stdlib_module_names | {name for name in others if "." in name}
    assert not {name.partition(".")[0] for name in found} & (SLOW | {"grpc", "google", "logging"})
    assert len(others) <= 3, others


def test_a_client_class_comes_without_grpc_and_protobuf() -> None:
    found, _ = modules("from prefixd.client import Client, SavePolicy, errors, prefix_key")
    others = [name for name in found if not name.startswith("prefixd")]
    # `inspect` comes with `dataclasses`.
    assert not {name.partition(".")[0] for name in found} & (
        SLOW - {"inspect"} | {"grpc", "google"}
    )
    assert len(others) <= 110, others
    assert len(found) - len(others) <= 40


def test_a_client_imports_little_beside_grpc_when_it_is_made() -> None:
    _, found = modules(
        "import fastcrc, grpc, google.protobuf.internal.builder",
        "from prefixd.client import Client; Client().close()",
    )
    others = [name for name in found if not name.startswith("prefixd")]
    assert not {name.partition(".")[0] for name in found} & SLOW
    assert len(others) <= 40, others
    assert len(found) - len(others) <= 70
