"""What each tier gets on a machine, and why: the step that leaves nothing `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ...proto.errors import ConfigError
from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from .machine import Machine
from .options import Config, Disk, Ram, Shm, TierSection
from .values import parse_shares

_MIB: Final = 2**20
#: What `auto` takes of the disk at most.
AUTO_DISK_BYTES: Final = 64 * 2**30


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier, with nothing left open. `budget_bytes` 0: there is no such tier."""

    tier: Tier
    budget_bytes: int
    #: why it is as large as it is
    why: str
    policy: str
    max_entries: int
    #: bytes of one slab of the arena
    slab_bytes: int = 0
    #: what saves under way may have reserved; 0: not bounded
    max_in_flight_bytes: int = 0
    directory: Path | None = None
    #: what the tier can be given before a restart; no less than `budget_bytes`
    max_budget_bytes: int = 0
    #: what namespaces are sure of, in bytes; together no more than `budget_bytes`
    shares: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration in which nothing is `auto` any more: what each tier gets on this machine."""

    config: Config
    all_tiers: dict[Tier, TierPlan]
    #: what is likely a mistake, and yet no reason not to start
    warnings: tuple[str, ...]

    @property
    def tiers(self) -> dict[Tier, TierPlan]:
        """The tiers that exist: those with a budget."""
        return {tier: plan for tier, plan in self.all_tiers.items() if plan.budget_bytes}

    def describe(self) -> list[str]:
        """One line per tier: what it gets and why."""
        lines = []
        for plan in self.all_tiers.values():
            size = format_bytes(plan.budget_bytes) if plan.budget_bytes else "off"
            place = f" in {plan.directory}" if plan.directory and plan.budget_bytes else ""
            lines.append(f"{plan.tier.label}: {size}{place} ({plan.why})")
        return lines


def resolve(config: Config, machine: Machine) -> Plan:
    """What the tiers get on this machine. Changes nothing. Raises ConfigError for shares that are
    more than the machine gives their tier."""
    ram, shm = _plan_ram(config.ram, machine), _plan_shm(config.shm, machine)
    tiers = (ram, shm, _plan_disk(config.disk, machine))
    for plan in tiers:
        shares_bytes = sum(plan.shares.values())
        if shares_bytes > plan.budget_bytes:
            raise ConfigError(
                f"{plan.tier.label}.shares add up to {format_bytes(shares_bytes)}, and the tier "
                f"has {format_bytes(plan.budget_bytes)} ({plan.why})"
            )
    return Plan(config, {plan.tier: plan for plan in tiers}, tuple(_warnings(*tiers, machine)))


def _share(budget_bytes: int | str, slab_bytes: int, *choices: tuple[int, str]) -> tuple[int, str]:
    """The configured budget, or the least of the `choices` in whole MiB; in whole slabs."""
    if isinstance(budget_bytes, int):
        whole_bytes = budget_bytes // slab_bytes * slab_bytes
        rounded = "" if whole_bytes == budget_bytes else f", in whole {format_bytes(slab_bytes)}"
        return whole_bytes, f"configured{rounded}" if budget_bytes else "switched off"
    least_bytes, why = min(choices)
    return max(0, least_bytes) // max(_MIB, slab_bytes) * max(_MIB, slab_bytes), f"auto: {why}"


def _plan(
    tier: Tier, options: TierSection, choices: Sequence[tuple[int, str]], **more: Any
) -> TierPlan:
    """`choices`: what `auto` comes to, the least of them; `more`: what other tiers have not."""
    slab_bytes = options.slab_bytes
    budget_bytes, why = _share(options.budget_bytes, slab_bytes, *choices)
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


def _plan_ram(ram: Ram, machine: Machine) -> TierPlan:
    available = format_bytes(machine.available_bytes)
    quarter = (machine.available_bytes // 4, f"25% of {available} of available memory")
    return _plan(Tier.RAM, ram, [quarter])


def _plan_shm(shm: Shm, machine: Machine) -> TierPlan:
    # The budget has to come out the same at the next start, because an arena that shrinks is a
    # new one and loses its entries: so it depends on sizes, and on what is free (what the
    # directory holds included) only where that is scarce.
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


def _plan_disk(disk: Disk, machine: Machine) -> TierPlan:
    room = format_bytes(machine.disk_room_bytes)
    choices = (
        (AUTO_DISK_BYTES, "the most that is taken unasked"),
        (machine.disk_room_bytes // 4, f"25% of {room} of room on its file system"),
    )
    own = {"directory": disk.directory, "max_in_flight_bytes": disk.max_in_flight_bytes}
    return _plan(Tier.DISK, disk, choices, **own)


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
    for plan, room_bytes in ((shm, machine.shm_room_bytes), (disk, machine.disk_room_bytes)):
        if plan.budget_bytes > room_bytes:
            yield (
                f"{plan.tier.label}.budget is {format_bytes(plan.budget_bytes)}, more than the "
                f"{format_bytes(room_bytes)} that {plan.directory} has room for"
            )
