"""Replaces the clock, threads, files and secrets under the package's code by simulated ones."""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Final

from prefixd.proto import payload
from prefixd.proto.payload import FlatBytes, Pieces, pairs
from tests.sim.files import Devices, SimOs
from tests.sim.threads import SimCondition, SimEvent, SimExecutor, SimLock, SimThread
from tests.sim.world import World

#: Copies are made in pieces of this size, between which other fibers may run.
PIECE_BYTES: Final = 2048


class _SimTime:
    """Stands in for the module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic_ns(self) -> int:
        return self._world.now_ns if self._world.here() else time.monotonic_ns()

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9

    perf_counter = monotonic

    def time_ns(self) -> int:
        if not self._world.here():
            return time.time_ns()
        return self._world.now_ns + self._world.wall_offset_ns

    def time(self) -> float:
        return self.time_ns() / 1e9


class _SimThreading:
    """Stands in for the module `threading`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Lock(self) -> Any:
        return SimLock(self._world) if self._world.here() else threading.Lock()

    def Condition(self, lock: Any = None) -> Any:
        if not self._world.here():
            return threading.Condition(lock)
        return SimCondition(self._world, lock)

    def Event(self) -> Any:
        return SimEvent(self._world) if self._world.here() else threading.Event()

    def Thread(self, *args: Any, **kwargs: Any) -> Any:
        if not self._world.here():
            return threading.Thread(*args, **kwargs)
        return SimThread(*args, **kwargs, world=self._world)


class _SimSecrets:
    """Stands in for the module `secrets`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(secrets, name)

    def token_bytes(self, size: int = 32) -> bytes:
        here = self._world.here()
        return self._world.entropy.randbytes(size) if here else secrets.token_bytes(size)

    def randbits(self, bits: int) -> int:
        here = self._world.here()
        return self._world.entropy.getrandbits(bits) if here else secrets.randbits(bits)


def _in_pieces(world: World, real: Callable[..., Any], *, crc: bool) -> Callable[..., Any]:
    """A copy that other fibers can interrupt."""

    def copy(destination: FlatBytes, source: Any, before: int = 0) -> Any:
        if not world.here():
            return real(destination, source, before) if crc else real(destination, source)
        if isinstance(destination, Pieces) or isinstance(source, Pieces):
            result = before
            flat = source if isinstance(source, Pieces) else memoryview(source).cast("B")
            for room, part in pairs(destination, flat):
                result = copy(room, part, result)
            return result
        data = memoryview(source).cast("B")
        if len(data) != len(destination):
            raise ValueError(f"{len(data)} bytes do not fill {len(destination)}")
        result = before
        for start in range(0, len(data), PIECE_BYTES):
            world.operate()
            piece = destination[start : start + PIECE_BYTES]
            part = data[start : start + PIECE_BYTES]
            if crc:
                result = real(piece, part, result)
            else:
                real(piece, part)
        world.operate()
        return result if crc else None

    return copy


def _modules() -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("prefixd.")]


@contextmanager
def installed(world: World, devices: Devices) -> Iterator[None]:
    """Give every module of the package the world's clock, threads, files and secrets. Threads that
    are not fibers of the world still get the real ones."""

    def executor(max_workers: int = 2, name: str = "worker", **_: Any) -> Any:
        if not world.here():
            return concurrent.futures.ThreadPoolExecutor(max_workers, name)
        return SimExecutor(world, max_workers, name)

    changes: dict[int, Any] = {
        id(os): SimOs(world, devices),
        id(time): _SimTime(world),
        id(threading): _SimThreading(world),
        id(secrets): _SimSecrets(world),
        id(concurrent.futures.ThreadPoolExecutor): executor,
        id(payload.copy_crc32c): _in_pieces(world, payload.copy_crc32c, crc=True),
        id(payload.copy): _in_pieces(world, payload.copy, crc=False),
    }
    places = _places(frozenset(changes))
    try:
        for module, name, value in places:
            setattr(module, name, changes[id(value)])
        yield
    finally:
        for module, name, value in places:
            setattr(module, name, value)


@cache
def _places(ids: frozenset[int]) -> list[tuple[ModuleType, str, Any]]:
    """All names in the package's modules for objects with these ids. Cached, as the search takes a
    tenth of a run."""
    return [
        (module, name, value)
        for module in _modules()
        if module is not payload
        for name, value in vars(module).items()
        if id(value) in ids
    ]
