"""`PREFIXD_COMPILE=1 pip install .` compiles the busiest modules to C extensions, with mypyc.

Other modules import them as before. All else about the package is in pyproject.toml; without the
variable this file does nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

#: The state and its tables, the ledgers and eviction orders, and the index writer: where a daemon
#: spends its time apart from copies and sockets.
COMPILED = (
    "server/core/*.py",
    "server/runtime/index.py",
    "tiers/eviction/*.py",
    "tiers/extents.py",
    "tiers/ledger.py",
    "tiers/order.py",
    "tiers/shares.py",
)


def arguments() -> list[str]:
    """mypyc's options and files. What the files import need not be installed."""
    package = Path("src/prefixd")
    found = [path for pattern in COMPILED for path in sorted(package.glob(pattern))]
    files = [str(path) for path in found if path.name != "__init__.py"]
    return ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", *files]


def options() -> dict[str, Any]:
    if os.environ.get("PREFIXD_COMPILE") != "1":
        return {}
    needed: dict[str, Any] = {"setup_requires": ["mypy[mypyc]>=1.14"]}
    try:
        from mypyc.build import mypycify
    except ImportError:
        if "egg_info" not in sys.argv:
            raise
        return needed  # pip asks for the build requirements before installing them
    return needed | {"ext_modules": mypycify(arguments(), opt_level="2")}


if __name__ == "__main__":
    setup(**options())
