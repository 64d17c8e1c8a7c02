"""The two ways in which a save returns, as a type checker sees them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_overloads

import pytest

from prefixd.client import SaveReason
from prefixd.client.save_methods import AsynchronousReason, Saves, SynchronousReason


def test_every_reason_is_one_of_the_two_kinds() -> None:
    asynchronous, synchronous = set(get_args(AsynchronousReason)), set(get_args(SynchronousReason))
    assert asynchronous == {reason for reason in SaveReason if reason.asynchronous}
    assert synchronous == set(SaveReason) - asynchronous


@pytest.mark.parametrize(
    ("method", "outcome"), [(Saves.save, "SaveOutcome"), (Saves.save_many, "list[SaveOutcome]")]
)
def test_the_reason_decides_the_type(method: Callable[..., Any], outcome: str) -> None:
    overloads = {
        inspect.signature(each).parameters["reason"].annotation: inspect.signature(each)
        for each in get_overloads(method)
    }
    assert {reason: each.return_annotation for reason, each in overloads.items()} == {
        "SynchronousReason": outcome,
        "AsynchronousReason": f"Future[{outcome}]",
        "SaveReason": f"{outcome} | Future[{outcome}]",
    }
    made = inspect.signature(method)
    for each in overloads.values():
        assert each.parameters.keys() == made.parameters.keys()
        for name, parameter in each.parameters.items():
            if name != "reason":
                assert parameter == made.parameters[name]
