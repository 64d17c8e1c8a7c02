"""Values of engines' configurations as values that keys can be made of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, TypeAlias

from ..proto.errors import InvalidNamespace

__all__ = ["Value", "plain"]

#: What `proto.keys.context_hash` takes.
Value: TypeAlias = bool | int | float | str | bytes | None

#: Types of torch whose text says everything about a value.
_TORCH_WORDS: Final = frozenset({"dtype", "device", "layout", "memory_format"})


def plain(value: object) -> Value:
    """A value of an engine's configuration as a dimension takes it, the same in every process.

    Bools, numbers, text, bytes and None stay. Mappings, sequences, sets, dataclasses, arrays and
    configurations (`to_dict`, `model_dump`) become JSON with sorted names. Paths, classes, members
    of enumerations, inf and NaN, and torch's dtypes, devices and layouts become their text. Raises
    InvalidNamespace for anything else: the text of an object may leave something out (a long
    tensor's does), or say its address.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Value) and not isinstance(value, Enum):
        return value
    tree = _tree(value, 0)
    return tree if isinstance(tree, Value) else _text(tree)


def _tree(value: object, depth: int) -> Any:
    """`value` as JSON's own types."""
    if depth > 32:
        raise InvalidNamespace("a value of a configuration is nested too deeply")
    match value:
        case Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return f"bytes:{value.hex()}"
        case type():
            return f"{value.__module__}.{value.__qualname__}"
        case PurePath():
            return str(value)
        case Mapping():
            return _distinct((str(name), _tree(each, depth + 1)) for name, each in value.items())
        case Set():
            return sorted((_tree(each, depth + 1) for each in value), key=_text)
        case Sequence():
            return [_tree(each, depth + 1) for each in value]
    if is_dataclass(value):
        return {each.name: _tree(getattr(value, each.name), depth + 1) for each in fields(value)}
    for method in ("model_dump", "to_dict", "tolist"):
        if callable(call := getattr(value, method, None)):
            return _tree(call(), depth + 1)
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in _TORCH_WORDS:
        return str(value)
    raise InvalidNamespace(f"a {kind.__qualname__} of a configuration has no exact text")


def _text(tree: object) -> str:
    return json.dumps(tree, sort_keys=True)


def _distinct(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise InvalidNamespace(f"two names of a mapping have the text {name!r:.80}")
        made[name] = value
    return made
