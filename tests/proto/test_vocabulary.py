"""Enumerations have the members of the contract, the shared ones and those of the daemon."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest

from prefixd.client.ctl.change import LogLevel
from prefixd.client.ctl.message_json import enum_label
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import (
    ClaimMode,
    DeleteStatus,
    Labelled,
    MissReason,
    Presence,
    SaveReason,
    SaveStatus,
    Tier,
    label_of,
)
from prefixd.server.api.usage import IN_NO_TIER, LEFT, NO_KEY
from prefixd.server.core.events import TierState
from prefixd.server.core.journal import CAUSES, Happening
from prefixd.server.core.sessions import Stage
from prefixd.server.sharing.engine_link import What
from prefixd.server.sharing.engine_store import NodeState
from prefixd.tiers.eviction import POLICIES


def members(enum: Any) -> dict[str, int]:
    """Of an enumeration of the contract, by their names for people."""
    return {enum_label(enum.DESCRIPTOR, number): number for _name, number in enum.items() if number}


@pytest.mark.parametrize(
    ("ours", "enum"),
    [
        (Tier, pb.Tier),
        (SaveReason, pb.SaveReason),
        (ClaimMode, pb.ClaimMode),
        (SaveStatus, pb.SaveStatus),
        (Presence, pb.Presence),
        (TierState, pb.TierState),
        (What, pb.SharedEventKind),
        (NodeState, pb.SharedNodeState),
    ],
)
def test_members_have_the_numbers_of_the_wire(ours: type[IntEnum], enum: Any) -> None:
    assert {each.name.lower(): each.value for each in ours} == members(enum)


def test_deletes_end_in_one_more_way_for_clients() -> None:
    statuses = {each.name.lower(): each.value for each in DeleteStatus}
    assert statuses == members(pb.DeleteStatus) | {"failed": 100}


def test_an_unfinished_save_is_in_a_stage_of_the_contract() -> None:
    stages = {each.name.lower(): each.value for each in Stage}
    assert stages == members(pb.SaveStage) | {"published": 5, "gone": 6}


def test_every_word_that_the_daemon_uses_is_one_of_the_contract() -> None:
    reasons = {*(each.value for each in MissReason), NO_KEY, "evicted", *LEFT, *IN_NO_TIER}
    assert reasons == members(pb.MissReason).keys()
    assert {cause.value for cause in CAUSES.values()} == members(pb.EvictionCause).keys()
    happened = {each.name.lower() for each in Happening if each not in CAUSES} | {"evicted"}
    assert happened == members(pb.KeyEventKind).keys()
    assert POLICIES.keys() == members(pb.EvictionPolicy).keys()
    assert {level.value for level in LogLevel} == members(pb.LogLevel).keys()


def test_labels_are_lower_case_names() -> None:
    assert [tier.label for tier in Tier] == ["ram", "shm", "disk"]
    assert [str(reason) for reason in SaveReason] == [
        "cold",
        "continued",
        "finish",
        "evict",
        "shutdown",
    ]


@pytest.mark.parametrize(("ours", "enum"), [(Tier, pb.Tier), (SaveReason, pb.SaveReason)])
def test_labels_are_those_of_the_contract(ours: type[Labelled], enum: Any) -> None:
    numbers = [*enum.values(), 99]
    found = [label_of(ours, number) for number in numbers]
    assert found == [enum_label(enum.DESCRIPTOR, number) for number in numbers]
    assert (found[0], found[-1]) == ("unspecified", "99")
