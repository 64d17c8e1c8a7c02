"""Stands for a batch that is too long: refused for its length, before any element is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Unseen(Sequence[Any]):
    """Of a length, and without elements: whoever looks at one fails."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(f"element {index} of {self._count} was looked at")
