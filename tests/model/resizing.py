"""The machine of `tests.model.machine` with an operator who resizes tiers step by step between
other events."""

from __future__ import annotations

from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefixd.proto.vocabulary import Tier
from prefixd.server.core import effects as an
from prefixd.server.core import effects as fx
from prefixd.server.core import events as ev
from tests.model.machine import MetaStateMachine
from tests.model.tiers import (
    RAM_BYTES,
    RAM_SECURED_BYTES,
    RAM_SLAB_BYTES,
    SHM_BYTES,
    SHM_HEADER_BYTES,
    SHM_SLAB_BYTES,
)

HEADERS = {"ram": 0, "shm": SHM_HEADER_BYTES}
SLABS = {"ram": RAM_SLAB_BYTES, "shm": SHM_SLAB_BYTES}
MOST = {"ram": RAM_BYTES, "shm": SHM_BYTES}
#: The tiers with slabs.
RESIZED = st.sampled_from(sorted(HEADERS))


class ResizingMachine(MetaStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.secured = RAM_SECURED_BYTES

    def compare_state(self, event: ev.Event) -> None:
        super().compare_state(event)
        for name, header in HEADERS.items():
            ledger, twin = self.state.tables.ledgers[Tier[name.upper()]], self.twin.tiers[name]
            assert (ledger.limit_bytes, ledger.arena_bytes - header) == (twin.limit, twin.budget)
            held = sum(sum(location[1::2]) for location in ledger.retired)
            assert held == ledger.retired_bytes

    def twin_resize(self, request: int, tier: str, target: int, most: int) -> None:
        twin = self.twin
        rules = twin.tiers[tier]
        pinned = [e["cost"] for e in twin.entries.values() if e["tier"] == tier and e["pins"]]
        pinned += [e["cost"] for e in twin.condemned if e["tier"] == tier]
        victims = freed = retired = 0
        if rules.limit > target:
            if sum(pinned) > target:
                twin.emit("reply", request, ("refused", "limit_reached"))
                return
            while (
                rules.limit - twin.used(tier)[0] < rules.limit - target
                and victims < most
                and twin.order[tier]
            ):
                freed += twin.entries[twin.order[tier][0]]["cost"]
                victims += 1
                twin.leave(twin.order[tier][0])
            retired = min(rules.limit - twin.used(tier)[0], rules.limit - target)
            rules.limit -= retired
        done = rules.limit <= target
        if done:
            rules.budget = target
        twin.emit("reply", request, ("resize", victims, freed, retired, done))

    @rule(
        name=RESIZED,
        part=st.sampled_from([0.2, 0.5, 0.75, 1.0]),
        most=st.sampled_from([1, 2, 9, 9]),
    )
    def resize(self, name: str, part: float, most: int) -> None:
        """One step of a resize. Other events come between the steps."""
        slab, tier = SLABS[name], Tier[name.upper()]
        target = max(slab, round(part * MOST[name]) // slab * slab)
        arena, request = HEADERS[name] + target, self.question()
        event = ev.ResizeAsked(request, tier, arena, arena, most, self.now)
        effects = self.happens(event, partial(self.twin_resize, request, name, target, most))
        for effect in effects:
            if isinstance(effect, fx.Reply) and isinstance(effect.answer, an.ResizeAnswer):
                self.witness.take(tier, effect.answer.retired, ("retired", 0))

    def twin_retire(self, request: int, name: str, start: int, end: int) -> None:
        tier, rules = Tier[name.upper()], self.twin.tiers[name]
        end = min(end, self.secured if tier is Tier.RAM else HEADERS[name] + SHM_BYTES)
        units = range(max(start, HEADERS[name]), end)
        retired = sum((tier, unit) not in self.witness.owners for unit in units)
        rules.limit -= retired
        self.twin.emit("reply", request, ("resize", 0, 0, retired, not retired))

    @rule(name=RESIZED, slab=st.integers(0, 20), slabs=st.integers(1, 5))
    def retire(self, name: str, slab: int, slabs: int) -> None:
        """What is free of a range of slabs is taken out of use, as at a start with holes."""
        tier, request = Tier[name.upper()], self.question()
        start, length = slab * SLABS[name], slabs * SLABS[name]
        event = ev.RetireAsked(request, tier, (start, length), self.now)
        end = start + length
        effects = self.happens(event, partial(self.twin_retire, request, name, start, end))
        for effect in effects:
            if isinstance(effect, fx.Reply) and isinstance(effect.answer, an.ResizeAnswer):
                self.witness.take(tier, effect.answer.retired, ("retired", 0))

    @precondition(lambda self: any(t.limit < t.budget for t in self.twin.tiers.values()))
    @rule(name=RESIZED, slabs=st.integers(1, 3))
    def restore(self, name: str, slabs: int) -> None:
        """Retired extents are restored, up to the budget of the tier."""
        tier, rules = Tier[name.upper()], self.twin.tiers[name]
        missing = min(rules.budget - rules.limit, slabs * SLABS[name])
        location = self.state.tables.ledgers[tier].next_restored(max(0, missing))
        if not location:
            return
        self.witness.free(tier, location, ("retired", 0))
        rules.limit += location[1]
        self.happens(ev.SlabsRestored(tier, location, self.now), lambda: None)

    @precondition(lambda self: self.secured < RAM_BYTES)
    @rule(slabs=st.integers(1, 2))
    def grow(self, slabs: int) -> None:
        """Secured memory beyond the budget of a shrunk tier is not added to it."""
        before, ledger = self.secured, self.state.tables.ledgers[Tier.RAM]
        self.secured = min(before + slabs * RAM_SLAB_BYTES, RAM_BYTES)
        rules, held = self.twin.tiers["ram"], len(ledger.retired)
        rules.limit = min(rules.limit + self.secured - before, max(rules.budget, rules.limit))
        self.happens(ev.ArenaGrown(Tier.RAM, self.secured, self.now), lambda: None)
        for location in ledger.retired[held:]:
            self.witness.take(Tier.RAM, location, ("retired", 0))
