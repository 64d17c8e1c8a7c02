"""`MetaState` against its twin: see `machine`, `twin` and `witness` in this folder."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.model.closing import ClosingMachine
from tests.model.machine import MetaStateMachine
from tests.model.resizing import ResizingMachine
from tests.model.sharing import FewEntriesMachine, SharesMachine
from tests.support.lengths import times


class SmallStepsMachine(MetaStateMachine):
    """Defers as much work as possible, and does it one step at a time."""

    max_steps = 1


SETTINGS = settings(
    max_examples=times(15, 1_000),
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


TestMetaState = MetaStateMachine.TestCase
TestMetaState.settings = SETTINGS
TestMetaStateInSmallSteps = SmallStepsMachine.TestCase
TestMetaStateInSmallSteps.settings = SETTINGS
TestMetaStateWhoseTiersClose = ClosingMachine.TestCase
TestMetaStateWhoseTiersClose.settings = SETTINGS
TestMetaStateWhoseTiersAreResized = ResizingMachine.TestCase
TestMetaStateWhoseTiersAreResized.settings = SETTINGS
TestMetaStateWithShares = SharesMachine.TestCase
TestMetaStateWithShares.settings = SETTINGS
TestMetaStateWithSharesOfFewEntries = FewEntriesMachine.TestCase
TestMetaStateWithSharesOfFewEntries.settings = SETTINGS
