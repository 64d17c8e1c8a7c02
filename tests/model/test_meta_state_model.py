"""The metadata server against its twin: see `machine`, `twin` and `witness` beside this file."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from .machine import MetaStateMachine

TestMetaState = MetaStateMachine.TestCase
TestMetaState.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
