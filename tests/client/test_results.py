"""The client's enums match those of the wire."""

from __future__ import annotations

import pytest

from prefixd.client.results import Found, ReserveStatus, RestoreResult, SaveOutcome
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, MissReason, Presence, SaveStatus

KEY = Key(b"k" * 32)


@pytest.mark.parametrize(
    ("ours", "wire", "prefix"),
    [
        (ClaimMode, pb.ClaimMode, "CLAIM_MODE_"),
        (Presence, pb.Presence, "PRESENCE_"),
        (SaveStatus, pb.SaveStatus, "SAVE_STATUS_"),
        (ReserveStatus, pb.ReserveStatus, "RESERVE_STATUS_"),
    ],
)
def test_statuses_are_those_of_the_wire(ours: type, wire: type, prefix: str) -> None:
    named = {
        name.removeprefix(prefix): number
        for name, number in wire.items()  # type: ignore[attr-defined]
        if not name.endswith("UNSPECIFIED")
    }
    members = {each.name: each.value for each in ours}  # type: ignore[attr-defined]
    # From 100 on: what only clients report, of which the wire has those that they report on.
    assert {n: value for n, value in members.items() if value < 100 or n in named} == named


def test_published_is_what_counts() -> None:
    ok = {status for status in SaveStatus if SaveOutcome(KEY, status).ok}
    final = {status for status in SaveStatus if not SaveOutcome(KEY, status).retryable}
    assert ok == {SaveStatus.SAVED, SaveStatus.PRESENT}
    assert final == ok | {SaveStatus.TOO_LARGE}


def test_present_is_neither_absent_nor_in_flight() -> None:
    assert [p for p in Presence if Found(p).present] == [Presence.PRESENT]


def test_a_restore_is_true_when_nothing_is_missing() -> None:
    assert RestoreResult((True,), 1, 512, 10)
    assert not RestoreResult((True, False), 1, 512, 10, MissReason.CORRUPT)
