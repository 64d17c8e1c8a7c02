"""The moments of a restore in place, and a way to interfere at one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest

from prefixd.client.hits import Reader
from prefixd.client.local import arenas
from prefixd.client.local.arenas import FileArena, MappedArena
from prefixd.client.local.node import LocalNode
from prefixd.client.wire.deadline import Deadline
from prefixd.proto.arena_header import ARENA_HEADER_BYTES
from prefixd.proto.payload import crc32c

#: In order, for a restore of two or more entries by one thread. A "look" reads the index rows.
MOMENTS: Final = (
    "before the first look",
    "before the first byte",
    "in the middle of a copy",
    "between two copies",
    "before the second look",
    "after the second look",
)
_AMID_COPIES: Final = MOMENTS[1:4]


def disrupt(patch: pytest.MonkeyPatch, moment: str, do: Callable[[], object]) -> None:
    """Call `do()` once, at this moment of the process's next restore in place."""
    left = [do]

    def interfere() -> None:
        if left:
            left.pop()()

    if moment in _AMID_COPIES:
        # The kernel copies all entries in one call, so nothing can come in between there.
        patch.setattr(arenas, "native", None)
    match moment:
        case "before the first look":
            _before(patch, (LocalNode,), "copy", 1, interfere)
        case "before the first byte":
            _before(patch, (MappedArena, FileArena), "read_into", 1, interfere)
        case "in the middle of a copy":
            _in_halves(patch, MappedArena, interfere)
            _in_halves(patch, FileArena, interfere)
        case "between two copies":
            _before(patch, (MappedArena, FileArena), "read_into", 2, interfere)
        case "before the second look":
            _before(patch, (LocalNode,), "_validated", 1, interfere)
        case "after the second look":
            _before(patch, (Reader,), "_account", 1, interfere)
        case _:
            raise ValueError(moment)


def _before(
    patch: pytest.MonkeyPatch,
    owners: tuple[type, ...],
    name: str,
    number: int,
    interfere: Callable[[], None],
) -> None:
    """Call `interfere()` right before call `number` of the method, counted over all owners."""
    calls = itertools.count(1)

    def patched(real: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        if next(calls) == number:
            interfere()
        return real(*args, **kwargs)

    for owner in owners:
        real = getattr(owner, name)
        method = lambda *args, _real=real, **kwargs: patched(_real, *args, **kwargs)  # noqa: E731
        patch.setattr(owner, name, method)


def _in_halves(patch: pytest.MonkeyPatch, arena: type, interfere: Callable[[], None]) -> None:
    """Split every copy in two halves, with `interfere()` between them."""
    real = arena.read_into  # type: ignore[attr-defined]  # of both arenas

    def read_into(
        this: object,
        location: tuple[int, ...],
        target: memoryview,
        *,
        check: bool,
        deadline: Deadline,
    ) -> int | None:
        if len(target) < 2 * ARENA_HEADER_BYTES:  # the header, which is read to validate
            return real(this, location, target, check=check, deadline=deadline)
        half = len(target) // 2
        real(this, location, target[:half], check=False, deadline=deadline)
        interfere()
        rest = arenas._parts(location, half, len(target) - half)
        places = tuple(itertools.chain(*rest))
        real(this, places, target[half:], check=False, deadline=deadline)
        return crc32c(target) if check else None

    patch.setattr(arena, "read_into", read_into)
