"""The machine of `tests.model.machine` with tiers that recover while the daemon serves, and with
devices that hang at times."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefixd.proto.vocabulary import Tier
from prefixd.server.core import events as ev
from prefixd.server.core.events import TierState
from tests.model.machine import KEY, PAYLOADS, MetaStateMachine

RECOVERED = st.sampled_from([Tier.SHM, Tier.DISK])


class ClosingMachine(MetaStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.recovering: set[Tier] = set()

    def change(self, tier: Tier, state: TierState) -> None:
        def twin() -> None:
            self.twin.closed.pop(tier.label, None)
            if state is not TierState.SERVING:
                self.twin.closed[tier.label] = state.label
            elif not self.twin.closed:
                self.twin.superseded.clear()

        self.happens(ev.TierChanged(tier, state, self.now), twin)

    def begin_recovery(self, tier: Tier) -> None:
        self.recovering.add(tier)
        self.change(tier, TierState.RECOVERING)

    @precondition(lambda self: self.recovering)
    @rule(tier=RECOVERED, key=KEY, payload=PAYLOADS, used=st.integers(0, 3))
    def find(self, tier: Tier, key: str, payload: int, used: int) -> None:
        if tier in self.recovering:
            self.recover(tier, [(key, tier.label, payload, used, 0)], 1)

    @precondition(lambda self: self.recovering)
    @rule(tier=RECOVERED)
    def end_recovery(self, tier: Tier) -> None:
        if tier in self.recovering:
            self.recovering.remove(tier)
            self.change(tier, TierState.SERVING)

    @rule(tier=RECOVERED, hangs=st.booleans())
    def hang(self, tier: Tier, hangs: bool) -> None:
        if hangs:
            self.change(tier, TierState.HUNG)
        else:
            recovers = tier in self.recovering
            self.change(tier, TierState.RECOVERING if recovers else TierState.SERVING)
