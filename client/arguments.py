"""Checks of what callers give. What is wrong raises CallerError, before any call is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import index
from typing import Any, TypeVar

from ..proto.errors import CallerError, InvalidKey, InvalidSize
from ..proto.keys import Key, check_key
from ..proto.limits import KEY_BYTES

T = TypeVar("T")


def whole(what: str, value: int, least: int | None = None, most: int | None = None) -> int:
    """A whole number. Raises InvalidSize for anything else, and out of its range."""
    if type(value) is not int:
        try:
            value = index(value)
        except TypeError:
            raise InvalidSize(f"{what} is a whole number, not {_shown(value)}") from None
    if (least is not None and value < least) or (most is not None and value > most):
        within = f"at least {least}" if most is None else f"in {least} ... {most}"
        raise InvalidSize(f"{what} is {within}, not {value}")
    return value


def instance(what: str, value: T, kind: type[T]) -> T:
    """A value of this class. Raises CallerError."""
    if not isinstance(value, kind):
        raise CallerError(f"{what} is a {kind.__name__}, not {_shown(value)}")
    return value


def instances(what: str, values: Iterable[T], kind: type[T]) -> list[T]:
    """A list of values of this class. Raises CallerError, which says which value is none."""
    try:
        found = list(values)
    except TypeError:
        raise CallerError(f"{what} are a list of {kind.__name__}, not {_shown(values)}") from None
    for number, value in enumerate(found):
        if not isinstance(value, kind):
            where = f"{what}[{number}]"
            raise CallerError(f"{where} is a {kind.__name__}, not {_shown(value)}")
    return found


def sequence(what: str, values: Sequence[T]) -> Sequence[T]:
    """Something with a length, and not bytes, which people give for a list of them. Raises
    CallerError."""
    if isinstance(values, str | bytes | bytearray):
        raise CallerError(f"{what} are a list, not {_shown(values)}")
    try:
        len(values)
    except TypeError:
        raise CallerError(f"{what} are a list, not {_shown(values)}") from None
    return values


def checked_keys(keys: Sequence[Key], most: int | None = None) -> list[Key]:
    """The keys, or so many of the first. Raises InvalidKey."""
    if isinstance(keys, str | bytes | bytearray | memoryview):
        raise InvalidKey("keys are a list of keys: write [key] for one")
    try:
        keys = list(keys if most is None else islice(keys, most))
    except TypeError:
        raise InvalidKey(f"keys are a list of keys, not {_shown(keys)}") from None
    if set(map(type, keys)) == {bytes} and set(map(len, keys)) == {KEY_BYTES}:
        return keys  # nearly always, at a tenth of the cost
    return [check_key(key) for key in keys]


def _shown(value: Any) -> str:
    """A value in a message, for people: large ones by their type."""
    text = repr(value) if isinstance(value, str | int | float | None) else ""
    if 0 < len(text) <= 40:
        return text
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
