"""Is this the engine that a connector was written against? Asked once, when it is attached."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class UnsupportedEngine(ImportError):
    """The engine is not there, or not as the connector knows it."""


def version_of(package: str) -> str:
    """The installed version, "unknown" if it says none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def require(engine: str, package: str, tested: str, module: str, names: Iterable[str]) -> Any:
    """The engine's module, which has to have these names (dotted ones below them, too).

    `tested`: the versions whose interface the connector follows. Raises UnsupportedEngine.
    """
    try:
        found = import_module(module)
    except ImportError as problem:
        raise UnsupportedEngine(
            f"prefixd's connector needs {engine} (made for {tested}): {problem}"
        ) from problem
    missing = [name for name in names if not _has(found, name)]
    if missing:
        raise unsupported(engine, package, tested, f"it has no {', '.join(missing)}")
    return found


def check_abstract(engine: str, package: str, tested: str, ours: type) -> None:
    """Has our class every method that the engine asks for? Raises UnsupportedEngine."""
    missing: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
    if missing:
        what = f"it asks for {', '.join(sorted(missing))}"
        raise unsupported(engine, package, tested, what)


def unsupported(engine: str, package: str, tested: str, what: str) -> UnsupportedEngine:
    """The refusal, in a sentence."""
    return UnsupportedEngine(
        f"prefixd's connector does not know {engine} {version_of(package)}: {what}; it was made "
        f"for {tested}"
    )


def _has(owner: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
