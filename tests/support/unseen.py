"""A batch that is too long, and has to be refused before any of its elements is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Unseen(Sequence[Any]):
    """A sequence that has a length but no elements: reading one fails the test."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(f"element {index} of {self._count} was read")
