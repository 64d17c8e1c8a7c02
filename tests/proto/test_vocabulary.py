"""The shared enumerations are those of the wire."""

from __future__ import annotations

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import SaveReason, Tier


def test_tiers_are_those_of_the_wire() -> None:
    assert {f"TIER_{tier.name}": int(tier) for tier in Tier} == {
        name: number for name, number in pb.Tier.items() if number
    }


def test_save_reasons_are_those_of_the_wire() -> None:
    assert {f"SAVE_REASON_{reason.name}": int(reason) for reason in SaveReason} == {
        name: number for name, number in pb.SaveReason.items() if number
    }


def test_labels_are_lower_case_names() -> None:
    assert [tier.label for tier in Tier] == ["ram", "shm", "disk"]
    assert [reason.label for reason in SaveReason] == [
        "cold",
        "continued",
        "finish",
        "evict",
        "shutdown",
    ]
