"""The three things about the package that pyproject.toml can't say.

The package `prefixd` consists of links in src/prefixd to the top-level folders. Git on Windows, zip
tools and source distributions lose symbolic links, and a wheel built without them would be empty.
So they are made again here, or the build ends with a sentence.

A package index shows the README alone, so its relative links are made to point at the repository.

The native kernel (`proto/kernel.py`) is built where there is a C compiler, and left out elsewhere.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src/prefixd"
KERNEL = ROOT / "proto/native"
LINKED = ("client", "proto", "server", "tiers")

#: A link or a picture of the README within the repository.
RELATIVE = re.compile(r"""(\]\(|(?:src|srcset|href)=")(?![a-z]+:|[#/])([^)"\s]+)""")


def mend_links() -> None:
    """Make each link in src/prefixd that is missing, or that became a file with the link's text."""
    for name in LINKED:
        link, target = PACKAGE / name, Path("../..", name)
        if link.is_dir():
            continue
        if not (PACKAGE / target).is_dir():
            sys.exit(f"prefixd can't be built from an incomplete checkout: {name}/ is missing")
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(target, target_is_directory=True)
        except OSError as problem:
            sys.exit(
                f"prefixd can't be built here: {link} has to be a symbolic link to {target}, "
                f"and it can't be made ({problem.strerror})"
            )


def readme() -> str:
    """The README with links that work anywhere."""
    home = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Repository"]
    text = Path("README.md").read_text(encoding="utf-8")
    return RELATIVE.sub(lambda found: f"{found[1]}{home}/{_view(found[2])}/main/{found[2]}", text)


def _view(path: str) -> str:
    return "raw" if path.endswith((".svg", ".png")) else "blob"


def kernel() -> Extension:
    """One module for every Python from 3.11 on."""
    return Extension(
        "prefixd.proto._native",
        sources=[str(path.relative_to(ROOT)) for path in sorted(KERNEL.glob("*.c"))],
        depends=[str(path.relative_to(ROOT)) for path in KERNEL.glob("*.h")],
        extra_compile_args=["-O3"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        optional=True,
    )


if __name__ == "__main__":
    mend_links()
    setup(
        long_description=readme(),
        long_description_content_type="text/markdown",
        ext_modules=[kernel()],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
