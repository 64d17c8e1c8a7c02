"""Values of configurations: the same text in every process, or none."""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from prefixd.client.config_values import plain
from prefixd.proto.errors import InvalidNamespace


class Kind(enum.IntEnum):
    YARN = 2


@dataclass
class Rope:
    theta: float
    kind: Kind


class Configured:
    def to_dict(self) -> dict[str, object]:
        return {"b": (1, 2), "a": {"y", "x"}}


class Dtype:
    """As torch has it."""

    def __str__(self) -> str:
        return "torch.bfloat16"


Dtype.__module__, Dtype.__name__ = "torch", "dtype"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("text", "text"),
        (b"raw", b"raw"),
        (float("inf"), "inf"),
        (Kind.YARN, "Kind.YARN"),
        (Rope(1e4, Kind.YARN), '{"kind": "Kind.YARN", "theta": 10000.0}'),
        ({"b": 1, "a": [None, b"x", float("nan")]}, '{"a": [null, "bytes:78", "nan"], "b": 1}'),
        ({1: {"x"}, "y": {}}, '{"1": ["x"], "y": {}}'),
        (Configured(), '{"a": ["x", "y"], "b": [1, 2]}'),
        (Path("/a/b"), "/a/b"),
        (Rope, f"{Rope.__module__}.Rope"),
        (Dtype(), "torch.bfloat16"),
        (np.int64(5), 5),
        (np.arange(3), "[0, 1, 2]"),
        (types.SimpleNamespace(model_dump=lambda: {"a": 1}), '{"a": 1}'),
    ],
)
def test_values_and_their_text(value: object, expected: object) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


def test_a_long_array_is_there_in_full() -> None:
    long = np.arange(5_000)
    assert plain(long) != plain(np.where(long == 2_500, 0, long))
    assert "..." in str(long)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, [object()], {"a": sys}, {1: 1, "1": 2}, (x for x in "a")],
)
def test_what_has_no_exact_text_is_refused(value: object) -> None:
    with pytest.raises(InvalidNamespace):
        plain(value)


def test_a_value_within_itself_is_refused() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(InvalidNamespace, match="nested"):
        plain(circle)
