"""What the machine offers: memory, room in /dev/shm and on disk; and how much memory is in use.

`Machine` is read once, at the start; a `Source` (`pressure.source`) again and again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, TypeAlias

from ...proto.errors import ConfigError
from ...tiers.arena import ARENA_FILE
from ...tiers.device import asked

#: A cgroup without a limit reports `max` (v2) or a number beyond any memory (v1).
_NO_LIMIT_BYTES: Final = 2**60
#: How long a start waits for the device of the disk tier.
_ANSWER_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes at the start of the daemon, in bytes."""

    #: All memory that this process may use: the machine's, or the limit of its cgroup.
    memory_bytes: int
    #: The part of it that is free, or that the kernel can free at once.
    available_bytes: int
    #: Size of the file system of the shm directory.
    shm_size_bytes: int
    #: Free space for the tiers, plus what their directories hold already.
    shm_room_bytes: int
    disk_room_bytes: int
    #: What the shm directory holds already. It is memory, but not counted as available.
    shm_held_bytes: int
    #: What the arenas of an earlier start take.
    shm_arena_bytes: int = 0
    disk_arena_bytes: int = 0
    #: What a person or a device has to change before the disk tier can be used; empty: nothing.
    disk_problem: str = ""

    @classmethod
    def probe(
        cls,
        shm_directory: Path,
        disk_directory: Path | None,
        root: Path = Path("/"),
        disk_mount: str = "",
    ) -> Machine:
        """Read this machine's sizes. `root` is where `proc` and `sys` are mounted. The sizes of the
        disk are 0 if it can't be used, or without a directory."""
        facts = meminfo(root)
        memory_bytes = facts.get("MemTotal", 0)
        available_bytes = facts.get("MemAvailable", memory_bytes)
        for limit_bytes, used_bytes in cgroups(root):
            memory_bytes = min(memory_bytes, limit_bytes)
            available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
        shm_size_bytes, shm_free_bytes = _file_system_bytes(shm_directory)
        shm_held_bytes = _held_bytes(shm_directory)
        disk_problem, disk_room_bytes, disk_arena_bytes = "", 0, 0
        if disk_directory is not None:
            disk_problem = asked(disk_directory, disk_mount, _ANSWER_S)
        if disk_directory is not None and not disk_problem:
            _, disk_free_bytes = _file_system_bytes(disk_directory)
            disk_room_bytes = disk_free_bytes + _held_bytes(disk_directory)
            disk_arena_bytes = _occupied_bytes(disk_directory / ARENA_FILE)
        return cls(
            memory_bytes=memory_bytes,
            available_bytes=available_bytes,
            shm_size_bytes=shm_size_bytes,
            shm_room_bytes=shm_free_bytes + shm_held_bytes,
            disk_room_bytes=disk_room_bytes,
            shm_held_bytes=shm_held_bytes,
            shm_arena_bytes=_occupied_bytes(shm_directory / ARENA_FILE),
            disk_arena_bytes=disk_arena_bytes,
            disk_problem=disk_problem,
        )


def meminfo(root: Path) -> dict[str, int]:
    """The sizes in /proc/meminfo, in bytes. Raises OSError."""
    facts = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        number, _, unit = amount.strip().partition(" ")
        if unit == "kB":
            facts[name] = int(number) * 1024
    return facts


def cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of each cgroup of this process that has a memory limit, v2 and v1."""
    sys_cgroup = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = sys_cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = sys_cgroup / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's, while the mount is the container's own group.
        group = top / path.strip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(top):
                yield from _limited(place, *names)


def _limited(group: Path, limit: str, usage: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    with suppress(OSError, ValueError):
        limit_bytes = int((group / limit).read_text())
        if limit_bytes < _NO_LIMIT_BYTES:
            used_bytes = int((group / usage).read_text())
            for line in (group / "memory.stat").read_text().splitlines():
                name, _, amount = line.partition(" ")
                if name == reclaimable:
                    used_bytes -= int(amount)
            yield limit_bytes, used_bytes


def _file_system_bytes(directory: Path) -> tuple[int, int]:
    """Size and free bytes of the file system of the directory, which need not exist yet."""
    for place in (directory, *directory.parents):
        with suppress(OSError):
            system = os.statvfs(place)
            return system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    return 0, 0


def _held_bytes(directory: Path) -> int:
    """Bytes that the files in the directory and below occupy on their device."""
    return sum(
        _occupied_bytes(Path(folder, file))
        for folder, _, files in os.walk(directory)
        for file in files
    )


def _occupied_bytes(file: Path) -> int:
    """Bytes that a file occupies on its device; 0 if there is none."""
    with suppress(OSError):
        return file.lstat().st_blocks * 512
    return 0


# ---- sources of memory pressure

#: Returns used bytes, total bytes, and the share of the last seconds in which tasks waited for
#: memory.
Source: TypeAlias = Callable[[], tuple[int, int, float]]

_SOME_10S: Final = re.compile(r"^some avg10=([0-9.]+)", re.MULTILINE)


def make_source(name: str, root: Path = Path("/")) -> Source | None:
    """The source of that name; None for "none". `root` is where `proc` and `sys` are mounted.

    Raises ConfigError for a source that does not work on this machine or can't be imported.
    """
    if name == "none":
        return None
    if name not in _OWN_SOURCES:
        return _imported(name)
    source = partial(_OWN_SOURCES[name], root)
    try:
        source()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"pressure.source = {name!r}: {problem}") from None
    return source


def _system(root: Path) -> tuple[int, int, float]:
    """The machine's memory without what the kernel can free at once (MemAvailable), and its PSI."""
    facts = meminfo(root)
    if "MemTotal" not in facts or "MemAvailable" not in facts:
        raise ValueError(f"{root / 'proc/meminfo'} does not say how much memory is available")
    used_bytes = max(0, facts["MemTotal"] - facts["MemAvailable"])
    return used_bytes, facts["MemTotal"], _stalled(root / "proc/pressure/memory")


def _cgroup(root: Path) -> tuple[int, int, float]:
    """Of this process's groups, the one nearest to its limit. Like kubelet, this counts as used
    what the kernel can't drop at once."""
    limited = list(cgroups(root))
    if not limited:
        raise ValueError("no cgroup of this process has a memory limit; try 'system'")
    total_bytes, used_bytes = max(limited, key=lambda group: group[1] / max(1, group[0]))
    return max(0, used_bytes), total_bytes, _stalled(_own_group(root) / "memory.pressure")


_OWN_SOURCES: Final = {"system": _system, "cgroup": _cgroup}


def _own_group(root: Path) -> Path:
    """The v2 group of this process. In a container the mount is its own group."""
    top = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = top / line[3:].strip("/")
                return group if group.is_dir() else top
    return top


def _stalled(file: Path) -> float:
    """The share of the last 10 s in which tasks waited; 0 on a kernel without PSI."""
    try:
        found = _SOME_10S.search(file.read_text())
    except OSError:
        return 0.0
    return min(1.0, float(found[1]) / 100) if found else 0.0


def _imported(name: str) -> Source:
    """The function `module:function`, which is called without arguments on a thread of its own."""
    module, _, function = name.partition(":")
    try:
        source: Source = getattr(import_module(module), function)
    except Exception as problem:
        raise ConfigError(f"pressure.source = {name!r}: {problem!r}") from None
    if not callable(source):
        raise ConfigError(f"pressure.source = {name!r}: it can't be called")
    return source
