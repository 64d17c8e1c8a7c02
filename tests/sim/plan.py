"""The plan that a seed stands for: the steps of each client and of the nemesis. Any step can be
left out, which is how a failing plan is made smaller."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from prefixd.proto.vocabulary import Tier
from tests.sim.files import FAULTS

#: Client steps in a run.
STEPS: Final = 12
#: The actor that harms the daemon, its devices and the machine.
NEMESIS: Final = "nemesis"
#: The share of runs with each feature, see `plan_of`.
_RESTARTS_RATE: Final = 0.15
_RESIZES_RATE: Final = 0.25
_ENLARGED_RATE: Final = 0.12
_REGRETTED_RATE: Final = 0.05
_COLD_RATE: Final = 0.05


@dataclass(frozen=True)
class Step:
    """A step keeps its `number` when others are left out, because the number seeds its random
    choices."""

    number: int
    actor: str
    kind: str
    args: dict[str, Any]

    def __str__(self) -> str:
        args = ", ".join(f"{name}={value}" for name, value in self.args.items())
        return f"{self.number:3} {self.actor:8} {self.kind}({args})"


@dataclass(frozen=True)
class Plan:
    """The steps of a run and its parameters.

    - `slabs`: the size of each tier
    - `yield_rate`: how often another fiber runs between two operations of a process
    - `lost_rate`: the share of calls whose connection breaks
    - `head_start_s`: how long a starting daemon waits for recovery before it serves
    - `batch_ms`: the duration of one recovery batch
    - `lies`: whether file reads may return wrong bytes
    - `flips`: whether stored bits may flip
    - `cold`: whether no read of a disk finds anything in the page cache
    """

    seed: int
    steps: tuple[Step, ...]
    clients: int
    slabs: int
    yield_rate: float
    lost_rate: float
    head_start_s: float
    batch_ms: int
    lies: bool
    flips: bool
    cold: bool = False

    def of(self, actor: str) -> list[Step]:
        return [step for step in self.steps if step.actor == actor]

    def without(self, left_out: Sequence[Step]) -> Plan:
        omitted = {step.number for step in left_out}
        return replace(self, steps=tuple(s for s in self.steps if s.number not in omitted))

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.clients} clients, {self.slabs} slabs, "
            f"yield_rate {self.yield_rate}, lost_rate {self.lost_rate}"
        )
        return "\n".join([head, *map(str, self.steps)])


def plan_of(seed: int, steps: int = STEPS) -> Plan:
    """Draw a plan with this many client steps, and a few steps of the nemesis."""
    draw = random.Random(f"plan {seed}")
    clients = draw.choice([1, 2, 2, 3])
    flips = draw.random() < 0.25
    lies = draw.random() < 0.15
    tiers = draw.sample(list(Tier), draw.randint(1, 3))
    kinds = draw.sample(sorted(FAULTS), draw.randint(0, 3))
    if not lies:
        kinds = [kind for kind in kinds if kind != "flipped read"]
    if kinds:
        # Device faults only matter to a tier with a device.
        tiers.append(Tier.DISK)
    # Some plans test clients that keep using the descriptors of an earlier start.
    restarts = random.Random(f"restarts {seed}").random() < _RESTARTS_RATE
    if restarts:
        tiers, kinds, flips, lies = [Tier.SHM], [], False, False
    drawn: list[Step] = []
    keys = draw.choice([3, 6, 10])
    for number in range(steps):
        actor = f"client{draw.randrange(clients)}"
        step = _client_step(draw, number, actor, tiers, keys, always_check=flips or lies)
        if restarts and step.kind == "restore":
            args = {"keys": list(range(keys)), "claim": False, "check": False, "stale": True}
            step = replace(step, args=step.args | args | {"place": True, "hold_ms": 0})
        drawn.append(step)
    enlarged = random.Random(f"enlarged {seed}")
    if enlarged.random() < _ENLARGED_RATE:
        drawn = [*_enlarged(enlarged), *drawn]
    regretted = random.Random(f"regretted {seed}")
    regrets = regretted.random() < _REGRETTED_RATE and not restarts
    if regrets:
        drawn = [*_regretted(regretted), *drawn]
    chilled = random.Random(f"cold {seed}")
    cold = chilled.random() < _COLD_RATE and not restarts
    if cold:
        drawn = [*_cold(chilled), *drawn]
    # A separate generator keeps the plans of all other seeds unchanged. Holes are punched into the
    # real file below, at once and durably.
    resizes = random.Random(f"resizes {seed}")
    if resizes.random() < _RESIZES_RATE:
        for number in range(resizes.choice([1, 2, 4])):
            step = Step(
                500 + number,
                f"client{resizes.randrange(clients)}",
                "resize",
                {
                    "pause_ms": resizes.choice([0, 0, 20, 300]),
                    "tier": resizes.choice(["ram", "shm", "disk"]),
                    "part": resizes.choice([0.4, 0.6, 0.8, 1.0, 1.5, 2.0]),
                },
            )
            drawn.insert(resizes.randrange(len(drawn) + 1), step)
    harm = range(draw.choice([2, 4, 6] if restarts else [0, 2, 4, 6]))
    drawn += [_nemesis_step(draw, 1000 + number, kinds, flips=flips) for number in harm]
    return Plan(
        seed=seed,
        steps=tuple(drawn),
        clients=clients,
        slabs=7 if restarts else draw.choice([7, 10, 20]),
        yield_rate=draw.choice([0.02, 0.1, 0.3]),
        lost_rate=draw.choice([0, 0, 0.05, 0.2]),
        head_start_s=draw.choice([0, 0, 0.5]) * (not regrets),
        batch_ms=max(draw.choice([0, 0, 200, 2000]), 2000 * regrets),
        lies="flipped read" in kinds,
        flips=flips,
        cold=cold,
    )


def _enlarged(draw: random.Random) -> list[Step]:
    """A tier is enlarged and filled, and the daemon killed: the next start has to make it fit."""
    tier = draw.choice(["shm", "shm", "disk"])
    well = {"how": "save", "behaves": "well", "together": 99, "quiet": False, "wait_ms": 0}
    steps = [Step(600, "client0", "resize", {"tier": tier, "part": 2.0})]
    for number, first in enumerate((0, 3, 6, 9)):
        keys = list(range(first, first + 3))
        args = {"tier": tier, "keys": keys, "sizes": [draw.choice([4096, 9000]) for _ in keys]}
        steps.append(Step(601 + number, "client0", "save", well | args))
    used = {"keys": draw.sample(range(12), 3)}
    kill = {"pause_ms": draw.choice([1000, 3000]), "start_ops": draw.choice([0, 0, 45, 150])}
    kill |= {"ops": 10, "syncs": 0, "down_ms": 10}
    return [*steps, Step(610, "client0", "touch", used), Step(900, NEMESIS, "kill", kill)]


def _regretted(draw: random.Random) -> list[Step]:
    """Entries are deleted while a start recovers them, and that start is killed, too."""
    tier = draw.choice(["shm", "disk"])
    keys = [0, 1, 2]
    well = {"how": "save", "behaves": "well", "together": 99, "quiet": False, "wait_ms": 0}
    # Every start takes two seconds, in which a recovering tier takes no saves.
    save = {"tier": tier, "keys": keys, "sizes": [4096] * 3, "pause_ms": 3000}
    kill = {"ops": 1, "syncs": 0, "down_ms": 10}
    return [
        Step(620, "client0", "save", well | save),
        Step(901, NEMESIS, "kill", kill | {"pause_ms": 4000, "start_ops": 0}),
        Step(621, "client0", "delete", {"keys": keys, "pause_ms": draw.choice([1300, 1700])}),
        Step(902, NEMESIS, "kill", kill | {"pause_ms": draw.choice([500, 1000]), "start_ops": 0}),
    ]


def _cold(draw: random.Random) -> list[Step]:
    """A disk hangs while a client reads it in place, which gives up and uses its buffers again."""
    keys = [0, 1, 2]
    well = {"how": "save", "behaves": "well", "together": 99, "quiet": False, "wait_ms": 0}
    save = {"tier": "disk", "keys": keys, "sizes": [9000] * 3, "pause_ms": 0}
    read = {"keys": keys, "claim": False, "place": True, "check": draw.random() < 0.5}
    read |= {"stale": False, "wait_ms": 0, "hold_ms": 0, "pieces": 1, "stop_in": 0}
    hang = {"fault": "hang", "part": "disk/arena", "rate": 1.0, "times": 1000}
    return [
        Step(630, "client0", "save", well | save),
        Step(910, NEMESIS, "fault", hang | {"pause_ms": draw.choice([900, 1100]), "for_ms": 4000}),
        *(
            Step(631 + n, "client0", "restore", read | {"pause_ms": pause_ms, "deadline_ms": 300})
            for n, pause_ms in enumerate((1200, 0, 100, 5000))
        ),
    ]


def _client_step(
    draw: random.Random,
    number: int,
    actor: str,
    tiers: Sequence[Tier],
    keys: int,
    *,
    always_check: bool,
) -> Step:
    kind = draw.choices(
        [
            *("save", "restore", "views", "lookup", "forge", "evict"),
            *("touch", "leave", "die", "stop", "gc", "delete", "scrub"),
        ],
        [40, 30, 8, 6, 4, 4, 3, 3, 2, 2, 2, 6, 2],
    )[0]
    args: dict[str, Any] = {"pause_ms": draw.choice([0, 0, 1, 20, 300, 1500])}
    chosen = draw.sample(range(keys), min(keys, draw.choice([1, 1, 2, 3])))
    match kind:
        case "save":
            args |= {
                "tier": draw.choice(tiers).label,
                "keys": chosen,
                "sizes": [draw.choice([9, 500, 4096, 5000, 9000, 20000]) for _ in chosen],
                "how": draw.choice(["save", "save", "save_whole", "write", "staged", "staged"]),
                "behaves": draw.choices(
                    ["well", "wrong crc", "short", "stalls", "leaves", "scribbles", "cancels"],
                    [70, 5, 5, 4, 5, 5, 4],
                )[0],
                "together": draw.choice([1, 2, 99]),
                "quiet": draw.random() < 0.5,
                "wait_ms": draw.choice([0, 0, 500, 3000]),
            }
        case "restore":
            stale = draw.random() < 0.3
            args |= {
                "keys": list(range(keys)) if stale else chosen,
                "claim": draw.random() < 0.6,
                "place": draw.random() < 0.65,
                "check": always_check or draw.random() < 0.5,
                "stale": stale,
                "wait_ms": draw.choice([0, 0, 500, 3000]),
                "hold_ms": draw.choice([0, 0, 100, 3000]),
                "pieces": draw.choice([1, 1, 3]),
                "stop_in": draw.choice([0, 0, 0, 2, 5]),
            }
        case "views":
            args |= {"keys": chosen, "hold_ms": draw.choice([0, 50, 1000, 8000])}
        case "lookup":
            args |= {"keys": chosen, "wait_ms": draw.choice([0, 1000, 4000])}
        case "forge":
            args |= {
                "call": draw.choice(
                    ["claim", "reserve", "save", "read", "release", "cancel", "delete"]
                )
            }
        case "evict":
            args |= {"tier": draw.choice(tiers).label, "entries": draw.choice([1, 2, 99])}
        case "scrub":
            args |= {"tier": draw.choice(tiers).label}
        case "touch" | "delete":
            args |= {"keys": chosen}
        case "die":
            args |= {"ops": draw.choice([1, 5, 20, 60])}
        case "stop":
            args |= {"ops": draw.choice([1, 5, 20]), "for_ms": draw.choice([100, 1500, 6000])}
    return Step(number, actor, kind, args)


def _nemesis_step(draw: random.Random, number: int, faults: Sequence[str], *, flips: bool) -> Step:
    kinds = {"kill": 4, "lose power": 3, "end": 2, "stop daemon": 1, "set clock": 1}
    if faults:
        kinds["fault"] = 6
    if flips:
        kinds["flip"] = 6
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    args: dict[str, Any] = {"pause_ms": draw.choice([0, 1, 10, 100, 1000])}
    match kind:
        case "kill" | "lose power" | "end":
            args |= {
                "start_ops": draw.choice([0, 0, 0, 5, 20, 45, 80]),
                "ops": draw.choice([1, 10, 50, 200, 1000]),
                "syncs": draw.choice([0, 0, 1, 2, 3, 4]) if kind == "lose power" else 0,
                "down_ms": draw.choice([0, 10, 1000]),
            }
        case "stop daemon":
            args |= {"for_ms": draw.choice([10, 1000, 7000])}
        case "set clock":
            args |= {"by_ms": draw.choice([-3_600_000, -1000, 1000, 3_600_000])}
        case "fault":
            args |= {
                "fault": draw.choice(faults),
                "part": draw.choice(["disk/arena", "disk/records", "disk", "disk", "shm/records"]),
                "rate": draw.choice([0.1, 0.5, 1.0]),
                "for_ms": draw.choice([50, 500, 4000, 8000]),
                "times": draw.choice([1, 3, 1000]),
            }
        case "flip":
            args |= {
                "tier": draw.choice(["shm", "disk"]),
                "file": draw.choice(["arena", "arena", "records"]),
                "bits": draw.choice([1, 3]),
            }
    return Step(number, NEMESIS, kind, args)
