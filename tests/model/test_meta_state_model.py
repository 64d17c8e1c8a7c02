"""The metadata server against its twin: see `machine`, `twin` and `witness` beside this file."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import HealthCheck, settings

from tests.model.closing import ClosingMachine
from tests.model.machine import MetaStateMachine


class SmallStepsMachine(MetaStateMachine):
    """Leaves all that can wait for later, and does it one piece at a time."""

    max_steps = 1


SETTINGS = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class SharesMachine(ClosingMachine):
    """Two namespaces and some of none, with shares of each tier: more than all of what RAM has so
    far, and such that not much is left of the others."""

    shares: ClassVar[dict[str, dict[str, int]]] = {
        "ram": {"one": 16, "two": 12},
        "shm": {"one": 20},
        "disk": {"one": 12, "two": 9},
    }
    parts: ClassVar[dict[str, str]] = {"a": "one", "b": "one", "c": "two", "d": "two"}


TestMetaState = MetaStateMachine.TestCase
TestMetaState.settings = SETTINGS
TestMetaStateInSmallSteps = SmallStepsMachine.TestCase
TestMetaStateInSmallSteps.settings = SETTINGS
TestMetaStateWhoseTiersClose = ClosingMachine.TestCase
TestMetaStateWhoseTiersClose.settings = SETTINGS
TestMetaStateWithShares = SharesMachine.TestCase
TestMetaStateWithShares.settings = SETTINGS
