"""Is this the engine that a connector was written against? Asked once, when it is attached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, Signature, signature
from typing import Any


class UnsupportedEngine(ImportError):
    """The engine is not there, or not as the connector knows it."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as its connector knows it. Raises UnsupportedEngine where it is another one."""

    name: str
    package: str
    #: the version whose interface the connector follows
    tested: str

    @property
    def version(self) -> str:
        """The installed one, "unknown" if it says none."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"

    def require(self, module: str, names: Iterable[str]) -> Any:
        """A module of the engine, which has to have these names (dotted ones below them, too)."""
        try:
            found = import_module(module)
        except ImportError as problem:
            raise UnsupportedEngine(
                f"prefixd's connector needs {self.name} (made for {self.tested}): {problem}"
            ) from problem
        missing = [name for name in names if not _has(found, name)]
        if missing:
            raise self.unsupported(f"it has no {', '.join(missing)}")
        return found

    def check_interface(self, ours: type) -> None:
        """Has our class every method that the engine asks for, and can each be called as its base
        declares it?"""
        missing: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
        if missing:
            raise self.unsupported(f"it asks for {', '.join(sorted(missing))}")
        for name, method in vars(ours).items():
            declared = getattr(ours.__base__, name, None)
            # Constructors are called by the engine's factories, not as the base declares its own.
            if name.startswith("_") or not callable(method) or not callable(declared):
                continue
            expected = signature(declared)
            if not _takes(signature(method), expected):
                raise self.unsupported(f"it calls {name}{_untyped(expected)}")

    def check_call(self, function: Callable[..., Any], *names: str) -> None:
        """Does a function of the engine take such arguments, by position?"""
        expected = signature(function)
        try:
            expected.bind(*names)
        except TypeError:
            what = f"it has {function.__qualname__}{_untyped(expected)}"
            raise self.unsupported(what) from None

    def unsupported(self, what: str) -> UnsupportedEngine:
        """The refusal, in a sentence."""
        return UnsupportedEngine(
            f"prefixd's connector does not know {self.name} {self.version}: {what}; it was made "
            f"for {self.tested}"
        )


def _has(owner: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _takes(ours: Signature, expected: Signature) -> bool:
    """Every call that `expected` allows: all arguments or the required ones, by position or by
    name."""
    every = [
        each
        for each in expected.parameters.values()
        if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    required = [each for each in every if each.default is Parameter.empty]
    try:
        for some in (every, required):
            for named in (Parameter.POSITIONAL_OR_KEYWORD, None):
                by_name = (Parameter.KEYWORD_ONLY, named)
                ours.bind(
                    *(each.name for each in some if each.kind not in by_name),
                    **{each.name: each.name for each in some if each.kind in by_name},
                )
    except TypeError:
        return False
    return True


def _untyped(of: Signature) -> str:
    """Its parameters, without their types."""
    plain = [each.replace(annotation=Parameter.empty) for each in of.parameters.values()]
    return str(Signature(plain))
