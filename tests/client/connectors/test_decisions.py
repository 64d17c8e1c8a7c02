"""The guard of the connectors' tables finds every field, and decisions that hold no more."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import pydantic
import pytest

from prefixd.client.identity import Dimension, Part, StateIdentity
from tests.support.decisions import InKey, Irrelevant, check_decided, fields_of, undecided

HERE = "tests/client/connectors/test_decisions.py::test_fields_are_enumerated"


@dataclass
class Data:
    a: int = 1
    b: int = 2


@dataclass
class More(Data):
    c: int = 3


class Base(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int),)


class Derived(Base):
    _fields_ = (("b", ctypes.c_bool),)


class Model(pydantic.BaseModel):
    a: int = 1
    b: int = 2


class Named(NamedTuple):
    a: int = 1
    b: int = 2


class Slotted:
    __slots__ = ("a",)


class Attributes(Slotted):
    def __init__(self) -> None:
        self.b = 1


class HuggingFace:
    def to_dict(self) -> dict[str, int]:
        return {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "config",
    [
        *(Data(), Data, Base, Derived(), Derived, Model(), Model, Named(), Named),
        *(Attributes(), HuggingFace(), {"a": 1, "b": 2}),
    ],
)
def test_fields_are_enumerated(config: object) -> None:
    assert fields_of(config) == (["a"] if config is Base else ["a", "b"])


@pytest.mark.parametrize("config", [object(), 5, HuggingFace])
def test_what_has_no_fields_is_refused(config: object) -> None:
    with pytest.raises(TypeError):
        fields_of(config)


def test_a_complete_table_passes() -> None:
    identity = StateIdentity("e", (Dimension("rope", 1, "a", Part.CONTEXT),))
    check_decided(Data(), {"a": InKey("rope"), "b": Irrelevant("a name", HERE)}, identity)


def test_a_new_field_fails_until_somebody_decides() -> None:
    table = {"a": InKey("rope"), "b": Irrelevant("a name", HERE)}
    assert undecided(More(), table) == ["c"]
    with pytest.raises(AssertionError, match=r"More:\nundecided: c$"):
        check_decided(More(), table)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"a": InKey("rope")}, "no longer a field: a"),
        ({"b": InKey("nope")}, "b: the identity has no dimension 'nope'"),
        ({"b": Irrelevant(" ", HERE)}, "b: irrelevant without a reason"),
        ({"b": Irrelevant("r", "tests/none.py::test_a")}, "b: there is no test"),
        ({"b": Irrelevant("r", f"{HERE}_not")}, "b: there is no test"),
        ({"b": Irrelevant("r", HERE.partition("::")[0])}, "b: there is no test"),
        ({"b": Irrelevant("r", "../elsewhere.py::test_a")}, "b: there is no test"),
    ],
)
def test_a_decision_that_does_not_hold(table: dict[str, InKey | Irrelevant], problem: str) -> None:
    identity = StateIdentity("e", (Dimension("rope", 1, "a", Part.CONTEXT),))
    with pytest.raises(AssertionError, match=problem):
        check_decided({"b": 1}, table, identity)
