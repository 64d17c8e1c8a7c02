"""Resolves `auto`: the budget that each tier gets on this machine, and why; and adds up how much
memory a configuration may take, by the bounds of all options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...proto.errors import ConfigError
from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from .machine import Machine
from .options import Config, DiskSection, RamSection, SharedSection, ShmSection, TierSection
from .values import parse_shares

if TYPE_CHECKING:
    from ...tiers.arena_stores import RecordedStore

_MIB: Final = 2**20
#: The largest disk budget that `auto` chooses.
AUTO_DISK_BYTES: Final = 64 * 2**30
#: What a daemon takes that serves nobody: the interpreter, its libraries, buffers of gRPC.
_BASE_BYTES: Final = 256 * 2**20
#: An entry in the tables, and its row in the index.
_ENTRY_BYTES: Final = 600
#: A connection with what it may have sent ahead, a call, and a session.
_CONNECTION_BYTES: Final = 64 * 2**10
_CALL_BYTES: Final = 64 * 2**10
_SESSION_BYTES: Final = 16 * 2**10
#: A key that a claim or an unfinished save holds, with what the tables note of it.
_HELD_KEY_BYTES: Final = 100
#: The keys that an engine is known to have (`sharing.engine_link.MAX_KNOWN`).
_KNOWN_KEYS: Final = 262_144
_KNOWN_KEY_BYTES: Final = 200


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier without `auto`. There is no such tier when `budget_bytes` is 0."""

    tier: Tier
    budget_bytes: int
    #: Why the budget has this size, for people.
    why: str
    policy: str
    max_entries: int
    slab_bytes: int = 0
    #: What saves in flight may reserve; 0: no limit.
    max_in_flight_bytes: int = 0
    directory: Path | None = None
    #: The largest budget without a restart; at least `budget_bytes`.
    max_budget_bytes: int = 0
    #: Why its directory can't be used now: the daemon starts without it, and takes it later.
    problem: str = ""
    #: Guaranteed bytes by namespace; together at most `budget_bytes`.
    shares: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration without `auto`: what each tier gets on this machine."""

    config: Config
    all_tiers: dict[Tier, TierPlan]
    #: Likely mistakes that do not prevent a start.
    warnings: tuple[str, ...]
    #: A daemon has used this socket, or these directories, before.
    restarted: bool = False

    @property
    def tiers(self) -> dict[Tier, TierPlan]:
        """The tiers that have a budget."""
        return {tier: plan for tier, plan in self.all_tiers.items() if plan.budget_bytes}

    def describe(self) -> list[str]:
        """One line per tier: its budget and why."""
        lines = []
        for plan in self.all_tiers.values():
            size = format_bytes(plan.budget_bytes) if plan.budget_bytes else "off"
            place = f" in {plan.directory}" if plan.directory and plan.budget_bytes else ""
            lines.append(f"{plan.tier.label}: {size}{place} ({plan.why})")
        return lines


def resolve(config: Config, machine: Machine) -> Plan:
    """Decide every budget. Changes nothing. Raises ConfigError for shares that add up to more than
    their tier gets."""
    ram, shm = _plan_ram(config.ram, machine), _plan_shm(config.shm, machine)
    tiers = (ram, shm, _plan_disk(config.disk, machine))
    for plan in tiers:
        shares_bytes = sum(plan.shares.values())
        if shares_bytes > plan.budget_bytes:
            raise ConfigError(
                f"{plan.tier.label}.shares add up to {format_bytes(shares_bytes)}, and the tier "
                f"has {format_bytes(plan.budget_bytes)} ({plan.why})"
            )
    return Plan(
        config,
        {plan.tier: plan for plan in tiers},
        tuple(_warnings(*tiers, machine)),
        restarted=bool(machine.shm_arena_bytes or machine.disk_arena_bytes or machine.disk_problem),
    )


def too_small(plan: Plan) -> Iterator[str]:
    """The tiers that hold no entry beside their header and records."""
    from ...tiers.arena_stores import DiskStore, ShmStore

    kinds: dict[Tier, type[RecordedStore]] = {Tier.SHM: ShmStore, Tier.DISK: DiskStore}
    for tier, of in plan.tiers.items():
        least_bytes = kinds[tier].least_budget_bytes(of.slab_bytes) if tier in kinds else 0
        if of.budget_bytes < least_bytes:
            yield (
                f"{tier.label}.budget: {format_bytes(of.budget_bytes)} ({of.why}) have no room for "
                f"a slab of {format_bytes(of.slab_bytes)} and its record: at least "
                f"{format_bytes(least_bytes)}"
            )


def _budget(budget_bytes: int | str, slab_bytes: int, *choices: tuple[int, str]) -> tuple[int, str]:
    """The configured budget in whole slabs, or the smallest of `choices` in whole MiB; and why."""
    if isinstance(budget_bytes, int):
        whole_bytes = budget_bytes // slab_bytes * slab_bytes
        rounded = "" if whole_bytes == budget_bytes else f", in whole {format_bytes(slab_bytes)}"
        return whole_bytes, f"configured{rounded}" if budget_bytes else "switched off"
    least_bytes, why = min(choices)
    return max(0, least_bytes) // max(_MIB, slab_bytes) * max(_MIB, slab_bytes), f"auto: {why}"


def _plan(
    tier: Tier, options: TierSection, choices: Sequence[tuple[int, str]], **more: Any
) -> TierPlan:
    """`auto` takes the smallest of `choices`. `more`: fields that not every tier has."""
    slab_bytes = options.slab_bytes
    budget_bytes, why = _budget(options.budget_bytes, slab_bytes, *choices)
    return TierPlan(
        tier,
        budget_bytes,
        why,
        options.policy,
        options.max_entries,
        slab_bytes,
        max_budget_bytes=max(budget_bytes, options.max_budget_bytes // slab_bytes * slab_bytes),
        shares=parse_shares(options.shares),
        **more,
    )


def _plan_ram(ram: RamSection, machine: Machine) -> TierPlan:
    available = format_bytes(machine.available_bytes)
    quarter = (machine.available_bytes // 4, f"25% of {available} of available memory")
    return _plan(Tier.RAM, ram, [quarter])


def _plan_shm(shm: ShmSection, machine: Machine) -> TierPlan:
    # The budget has to be the same at the next start, because a tier that shrinks evicts entries.
    # So it depends on sizes, and on free space (plus what the directory holds) only where it is
    # scarce.
    free_bytes = machine.available_bytes + machine.shm_held_bytes
    size, room = format_bytes(machine.shm_size_bytes), format_bytes(machine.shm_room_bytes)
    place = shm.directory.parent
    choices = (
        (machine.memory_bytes // 4, f"25% of {format_bytes(machine.memory_bytes)} of memory"),
        (free_bytes // 2, f"50% of {format_bytes(free_bytes)} of available memory"),
        (machine.shm_size_bytes // 2, f"50% of the {size} of {place}"),
        (machine.shm_room_bytes * 3 // 4, f"75% of {room} of room in {place}"),
    )
    return _plan(Tier.SHM, shm, choices, directory=shm.directory)


def _plan_disk(disk: DiskSection, machine: Machine) -> TierPlan:
    room = format_bytes(machine.disk_room_bytes)
    choices = [(AUTO_DISK_BYTES, "the most that is taken unasked")]
    if not machine.disk_problem:
        quarter_bytes = machine.disk_room_bytes // 4
        choices.append((quarter_bytes, f"25% of {room} of room on its file system"))
    return _plan(
        Tier.DISK,
        disk,
        choices,
        directory=disk.directory,
        problem=machine.disk_problem,
        max_in_flight_bytes=disk.max_in_flight_bytes,
    )


def smaller(tier: Tier, budget_bytes: int, found_bytes: int) -> str:
    """What a start with this budget does to a tier that has been larger, for people."""
    return (
        f"{tier.label}.budget is {format_bytes(budget_bytes)}, and the tier is "
        f"{format_bytes(found_bytes)} now: a start keeps what fits, the last that would be evicted"
    )


def _warnings(ram: TierPlan, shm: TierPlan, disk: TierPlan, machine: Machine) -> Iterator[str]:
    for plan in (ram, shm, disk):
        if plan.shares and sum(plan.shares.values()) >= plan.budget_bytes:
            yield (
                f"{plan.tier.label}.shares leave nothing of the tier: clients without a namespace "
                "can save nothing there"
            )
    in_memory_bytes = ram.budget_bytes + shm.budget_bytes
    if in_memory_bytes > machine.memory_bytes:
        yield (
            f"ram.budget and shm.budget together are {format_bytes(in_memory_bytes)}, more than "
            f"the {format_bytes(machine.memory_bytes)} of memory"
        )
    for plan, found_bytes in ((shm, machine.shm_arena_bytes), (disk, machine.disk_arena_bytes)):
        if 0 < plan.budget_bytes < found_bytes:
            yield smaller(plan.tier, plan.budget_bytes, found_bytes)
    if disk.budget_bytes and disk.problem:
        yield f"disk.directory: {disk.problem}; the tier is unavailable until that is over"
    for plan, room_bytes in ((shm, machine.shm_room_bytes), (disk, machine.disk_room_bytes)):
        if plan.budget_bytes > room_bytes and not plan.problem:
            yield (
                f"{plan.tier.label}.budget is {format_bytes(plan.budget_bytes)}, more than the "
                f"{format_bytes(room_bytes)} that {plan.directory} has room for"
            )


def memory_parts(plan: Plan) -> dict[str, int]:
    """What each option adds, in bytes, by the option's name. The table in deploy/README.md shows
    the same."""
    config = plan.config
    server, sessions, watch = config.server, config.sessions, config.watch
    # gRPC over TCP accepts half as many again (`runtime.descriptors.with_arrivals`).
    connections = int(server.max_connections * (3.5 if server.tcp else 1))
    entries = sum(
        min(tier.max_entries or tier.max_budget_bytes, tier.max_budget_bytes // tier.slab_bytes)
        for tier in plan.tiers.values()
    )
    parts = {
        "ram.budget": plan.all_tiers[Tier.RAM].max_budget_bytes,
        "shm.budget": plan.all_tiers[Tier.SHM].max_budget_bytes,
        "server.staging_total": server.staging_total_bytes,
        "server.max_reads": server.max_read_bytes,
        "server.max_saves": server.max_save_bytes,
        "server.max_local": server.max_local_bytes * (2 if server.tcp else 1),
        "server.max_connections": connections * _CONNECTION_BYTES,
        "server.max_rpcs": server.max_rpcs * _CALL_BYTES,
        "server.journal": server.journal_bytes * 5 // 4,
        "sessions.max_sessions": sessions.max_sessions * _SESSION_BYTES,
        "sessions.max_held_keys": sessions.max_held_keys * _HELD_KEY_BYTES,
        "watch.history": watch.history_bytes if watch.max_watchers else 0,
        "shared.memory": config.shared.memory_bytes * _copies(config.shared),
        "shared.engine": _known_keys(config.shared) * _KNOWN_KEY_BYTES,
        "entries": entries * _ENTRY_BYTES,
        "the daemon itself": _BASE_BYTES,
    }
    return {name: size_bytes for name, size_bytes in parts.items() if size_bytes}


def _copies(shared: SharedSection) -> int:
    """Of entries on their way. A request to a bucket has one of its own, which may outlive the
    call."""
    if not shared.engine:
        return 0
    return 2 if shared.capacity or shared.engine.startswith("s3:") else 1


def _known_keys(shared: SharedSection) -> int:
    """A bucket behind the engine has a list of its own, and one of what it has in part."""
    if not shared.engine:
        return 0
    return _KNOWN_KEYS * (3 if shared.capacity else 1)


def describe_memory(plan: Plan) -> str:
    """One line: the sum, and its largest parts."""
    parts = memory_parts(plan)
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    named = ", ".join(f"{name} {format_bytes(parts[name])}" for name in largest)
    return f"memory: at most {format_bytes(sum(parts.values()))}, of which {named}"
