"""What `pressure.source` can be: functions that say how much memory is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final, TypeAlias

from ...proto.errors import ConfigError
from .machine import cgroups, meminfo

#: Used bytes, bytes in all, and the part of the last seconds in which somebody waited for memory.
Source: TypeAlias = Callable[[], tuple[int, int, float]]

_SOME_10S: Final = re.compile(r"^some avg10=([0-9.]+)", re.MULTILINE)


def make_source(name: str, root: Path = Path("/")) -> Source | None:
    """The source of that name; None for "none". `root`: where `proc` and `sys` are.

    Raises ConfigError for a source that does not work on this machine, or can't be imported.
    """
    if name == "none":
        return None
    source: Source
    if name == "system":
        source = lambda: _system(root)  # noqa: E731
    elif name == "cgroup":
        source = lambda: _cgroup(root)  # noqa: E731
    else:
        return _imported(name)
    try:
        source()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"pressure.source = {name!r}: {problem}") from None
    return source


def _system(root: Path) -> tuple[int, int, float]:
    """What the kernel could not give at once (MemAvailable), of all; PSI where it keeps it."""
    facts = meminfo(root)
    if "MemTotal" not in facts or "MemAvailable" not in facts:
        raise ValueError(f"{root / 'proc/meminfo'} does not say how much memory is available")
    used_bytes = max(0, facts["MemTotal"] - facts["MemAvailable"])
    return used_bytes, facts["MemTotal"], _stalled(root / "proc/pressure/memory")


def _cgroup(root: Path) -> tuple[int, int, float]:
    """Of the groups that this process is in, the one that is nearest to its limit. What is used is
    what the kernel could not drop at once, as kubelet counts it."""
    limited = list(cgroups(root))
    if not limited:
        raise ValueError("no cgroup of this process has a memory limit; try 'system'")
    total_bytes, used_bytes = max(limited, key=lambda group: group[1] / max(1, group[0]))
    return max(0, used_bytes), total_bytes, _stalled(_own_group(root) / "memory.pressure")


def _own_group(root: Path) -> Path:
    """The group of version 2; what is mounted in a container is its own."""
    top = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = top / line[3:].strip("/")
                return group if group.is_dir() else top
    return top


def _stalled(file: Path) -> float:
    """0 where the kernel does not keep it."""
    try:
        found = _SOME_10S.search(file.read_text())
    except OSError:
        return 0.0
    return min(1.0, float(found[1]) / 100) if found else 0.0


def _imported(name: str) -> Source:
    """`module:function`, called without arguments on a thread of its own."""
    module, _, function = name.partition(":")
    try:
        source = getattr(import_module(module), function)
    except Exception as problem:
        raise ConfigError(f"pressure.source = {name!r}: {problem!r}") from None
    if not callable(source):
        raise ConfigError(f"pressure.source = {name!r}: that is nothing that can be called")
    found: Source = source
    return found
