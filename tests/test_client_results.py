"""The client's words are those of the wire, and every failure is some miss."""

from __future__ import annotations

import pytest

from prefixd.client.results import (
    ClaimMode,
    Found,
    MissReason,
    Presence,
    ReserveStatus,
    RestoreResult,
    SaveOutcome,
    SaveStatus,
    failed_saves,
    miss_reason,
)
from prefixd.proto import errors
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key

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
    assert {name: value for name, value in members.items() if value < 100} == named


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.DeadlineExceeded, MissReason.DEADLINE),
        (errors.DaemonUnavailable, MissReason.UNAVAILABLE),
        (errors.Draining, MissReason.UNAVAILABLE),
        (errors.UnknownSession, MissReason.UNAVAILABLE),
        (errors.StaleIncarnation, MissReason.UNAVAILABLE),
        (errors.ClaimLost, MissReason.LOST),
        (errors.UnknownClaim, MissReason.LOST),
        (errors.EntryCorrupt, MissReason.CORRUPT),
        (errors.RecordError, MissReason.CORRUPT),
        (errors.UnknownEntry, MissReason.ABSENT),
        (errors.LimitReached, MissReason.REFUSED),
        (errors.StoreFailed, MissReason.REFUSED),
        (errors.PrefixdError, MissReason.REFUSED),
    ],
)
def test_every_failure_is_a_miss_with_a_reason(
    error: type[errors.PrefixdError], reason: MissReason
) -> None:
    assert miss_reason(error("why")) is reason


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.DaemonUnavailable, SaveStatus.UNAVAILABLE),
        (errors.DeadlineExceeded, SaveStatus.DEADLINE),
        (errors.UnknownReservation, SaveStatus.LOST),
        (errors.LimitReached, SaveStatus.FAILED),
    ],
)
def test_a_failed_call_fails_every_item(
    error: type[errors.PrefixdError], status: SaveStatus
) -> None:
    outcomes = failed_saves([KEY, KEY], error("the sentence"))
    assert outcomes == [SaveOutcome(KEY, status, message="the sentence")] * 2
    assert outcomes[0].retryable
    assert not outcomes[0].ok


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
