"""Events, effects and answers: complete unions of frozen values."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType
from typing import get_args, get_type_hints

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import ClaimMode, DeleteStatus, SaveStatus
from prefixd.server.core import effects, events

UNIONS = {events: events.Event, effects: effects.Effect | effects.Answer}
#: Parts of others, which are in no union.
PARTS = {
    events: {events.KeyToSave},
    effects: {effects.FlightInfo, effects.Closed, effects.OverShare},
}


def words_of(module: ModuleType) -> set[type]:
    """Dataclasses and named tuples."""
    return {
        member
        for member in vars(module).values()
        if inspect.isclass(member)
        and member.__module__ == module.__name__
        and (dataclasses.is_dataclass(member) or issubclass(member, tuple))
    }


@pytest.mark.parametrize("module", UNIONS, ids=lambda module: module.__name__)
def test_every_word_is_in_its_union_and_the_union_has_no_others(module: ModuleType) -> None:
    assert set(get_args(UNIONS[module])) == words_of(module) - PARTS[module]


@pytest.mark.parametrize("module", UNIONS, ids=lambda module: module.__name__)
def test_words_cannot_be_changed(module: ModuleType) -> None:
    for word in words_of(module):
        if issubclass(word, tuple):
            continue
        assert word.__dataclass_params__.frozen, word
        assert "__slots__" in vars(word), word


def test_every_event_says_when_it_happened() -> None:
    for event in get_args(events.Event):
        assert get_type_hints(event)["now_ns"] is int, event


def test_exactly_the_questions_are_numbered() -> None:
    numbered = {e for e in get_args(events.Event) if "request" in get_type_hints(e)}
    assert numbered - {events.RequestDropped} == set(get_args(events.Question))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ClaimMode, pb.ClaimMode),
        (SaveStatus, pb.SaveStatus),
        (DeleteStatus, pb.DeleteStatus),
        (effects.ReleaseOutcome, pb.ReleaseStatus),
    ],
)
def test_numbers_that_go_over_the_wire_are_those_of_the_contract(
    ours: type[SaveStatus], theirs: type[pb.SaveStatus]
) -> None:
    prefixes = ("CLAIM_MODE_", "SAVE_STATUS_", "DELETE_STATUS_", "RELEASE_STATUS_")
    names = {}
    for name, number in theirs.items():
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        names[name] = number
    names.pop("UNSPECIFIED", None)
    members = {each.name: each.value for each in ours}
    assert {n: number for n, number in members.items() if number < 100 or n in names} == names
