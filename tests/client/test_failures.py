"""Every failure is some miss: each gRPC code, each error of the contract, and anything else."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

from prefixd.client.failures import Failures, miss_reason
from prefixd.client.results import MissReason, SaveOutcome, SaveStatus
from prefixd.proto import errors
from prefixd.proto.keys import Key

KEY = Key(b"k" * 32)

#: The reasons of those that are not simply refused.
REASONS: dict[type[errors.PrefixdError], MissReason] = {
    errors.DeadlineExceeded: MissReason.DEADLINE,
    errors.DaemonUnavailable: MissReason.UNAVAILABLE,
    errors.Draining: MissReason.UNAVAILABLE,
    errors.UnknownSession: MissReason.UNAVAILABLE,
    errors.StaleIncarnation: MissReason.UNAVAILABLE,
    errors.ClientClosed: MissReason.UNAVAILABLE,
    errors.ClaimLost: MissReason.LOST,
    errors.UnknownClaim: MissReason.LOST,
    errors.EntryCorrupt: MissReason.CORRUPT,
    errors.RecordError: MissReason.CORRUPT,
    errors.StoreFailed: MissReason.UNREADABLE,
    errors.UnknownEntry: MissReason.ABSENT,
    errors.MalformedMessage: MissReason.UNEXPECTED,
    errors.PrefixdError: MissReason.UNEXPECTED,
}


@pytest.mark.parametrize("error", errors.BY_NAME.values(), ids=lambda error: error.name)
def test_every_error_is_a_miss(error: type[errors.PrefixdError]) -> None:
    assert miss_reason(error("why")) is REASONS.get(error, MissReason.REFUSED)


class Failed(grpc.RpcError):
    """What a call raises that failed with a bare status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "the sentence"

    def trailing_metadata(self) -> Any:
        return None


@pytest.mark.parametrize("code", grpc.StatusCode, ids=lambda code: code.name)
def test_every_status_is_a_miss(code: grpc.StatusCode) -> None:
    expected = {
        "DEADLINE_EXCEEDED": MissReason.DEADLINE,
        "UNAVAILABLE": MissReason.UNAVAILABLE,
        "CANCELLED": MissReason.UNAVAILABLE,
        "ABORTED": MissReason.UNAVAILABLE,
        "NOT_FOUND": MissReason.ABSENT,
        "DATA_LOSS": MissReason.CORRUPT,
        "INVALID_ARGUMENT": MissReason.REFUSED,
        "PERMISSION_DENIED": MissReason.REFUSED,
        "UNAUTHENTICATED": MissReason.REFUSED,
        "OUT_OF_RANGE": MissReason.REFUSED,
        "RESOURCE_EXHAUSTED": MissReason.REFUSED,
    }
    problem = errors.from_grpc(Failed(code))
    assert miss_reason(problem) is expected.get(code.name, MissReason.UNEXPECTED)


@pytest.mark.parametrize("problem", [KeyError(7), ValueError("no"), MemoryError(), RuntimeError()])
def test_what_is_no_error_of_ours_is_a_miss(problem: Exception) -> None:
    assert miss_reason(problem) is MissReason.UNEXPECTED


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (errors.DaemonUnavailable("the sentence"), SaveStatus.UNAVAILABLE),
        (errors.ClientClosed("the sentence"), SaveStatus.UNAVAILABLE),
        (errors.DeadlineExceeded("the sentence"), SaveStatus.DEADLINE),
        (errors.UnknownReservation("the sentence"), SaveStatus.LOST),
        (errors.UnknownTier("the sentence"), SaveStatus.FAILED),
        (errors.LimitReached("the sentence"), SaveStatus.FAILED),
        (RuntimeError("the sentence"), SaveStatus.FAILED),
    ],
)
def test_a_failed_call_fails_every_item(problem: Exception, status: SaveStatus) -> None:
    outcomes = Failures().saves([KEY, KEY], problem)
    assert outcomes == [SaveOutcome(KEY, status, message="the sentence")] * 2
    assert outcomes[0].retryable
    assert not outcomes[0].ok


def test_what_should_not_happen_is_logged_once_for_each_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = Failures()
    for _ in range(3):
        failures.reason(errors.InvalidSize("the daemon finds that too large"))
        failures.reason(KeyError("a tier of a later version"))
        failures.reason(errors.LimitReached("as it may"))
        failures.reason(errors.DaemonUnavailable("as it may"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "too large" in caplog.messages[0]
    assert "later version" in caplog.messages[1]
