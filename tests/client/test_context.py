"""Every failed call is a miss: each gRPC code, each error of the contract, any other exception."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.client import (
    Client,
    Hit,
    Namespace,
    Reservation,
    ReserveItem,
    SaveItem,
    SaveReason,
    Tier,
)
from prefixd.client.context import Failures, miss_reason
from prefixd.client.results import SaveOutcome
from prefixd.proto import errors
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import MissReason, SaveStatus
from tests.support.fakes import PATIENCE_S, FakeDaemon
from tests.support.lengths import times

KEY, OTHER, ANOTHER = (Key(letter * 32) for letter in (b"k", b"o", b"a"))
NAMESPACE = Namespace(b"f" * 32, "q4_0", b"c" * 32)
TOKENS = list(range(4_000))
TERMS: dict[str, Any] = {"tier": Tier.RAM, "reason": SaveReason.EVICT}
RPCS = [
    method.name
    for method in pb.DESCRIPTOR.services_by_name["Cache"].methods
    if method.name != "Session"
]

#: The reasons of all errors that are not `REFUSED`.
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
    """The exception of a call that failed with a status alone."""

    def __init__(self, code: errors.Code) -> None:
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


#: Each makes at least one rpc, and returns something false when the daemon serves nothing.
USES: dict[str, Callable[[Client, Hit, Reservation], Any]] = {
    "longest_prefix": lambda c, _h, _r: c.longest_prefix(NAMESPACE, TOKENS),
    "longest_prefix, unclaimed": lambda c, _h, _r: c.longest_prefix(NAMESPACE, TOKENS, claim=False),
    "longest_run": lambda c, h, _r: len(c.longest_run(h.keys)),
    "resume": lambda c, h, _r: c.resume(h.keys[0], TOKENS, 0, namespace=NAMESPACE),
    "claim": lambda c, h, _r: len(c.claim(h.keys)),
    "claim_async": lambda c, h, _r: len(c.claim_async(h.keys).result(PATIENCE_S)),
    "probe": lambda c, h, _r: c.probe(h.keys)[0].present,
    "exists": lambda c, h, _r: any(c.exists(h.keys)),
    "delete": lambda c, h, _r: c.delete(h.keys)[0] == pb.DELETE_STATUS_DELETED,
    "restore_into": lambda _c, h, _r: h.restore_into([bytearray(3)]).run,
    "read": lambda _c, h, _r: h.read(0),
    "layer": lambda _c, h, _r: h.layer(0, 0),
    "token_ids": lambda _c, h, _r: h.token_ids(0),
    "save": lambda c, h, _r: c.save(h.keys[0], b"abc", **TERMS).ok,
    "save_many": lambda c, _h, _r: c.save_many([SaveItem(OTHER, bytes(2**21))], **TERMS)[0].ok,
    "save_async": lambda c, _h, _r: c.save_async(OTHER, b"abc", **TERMS).result(PATIENCE_S).ok,
    "reserve": lambda c, _h, _r: c.reserve([ReserveItem(OTHER, 3)], **TERMS)[0].granted,
    "write": lambda _c, _h, r: r.write(b"abc").ok,
    "cancel": lambda c, _h, r: c.cancel([r])[0],
    "release": lambda _c, h, _r: h.release(),
}


class Bare(errors.PrefixdError):
    """A status without one of our names, as from another server or a later version."""

    name = "of_a_later_version"

    def __init__(self, code: errors.Code) -> None:
        super().__init__("the sentence")
        self.code = code  # type: ignore[misc]  # of this one alone


@pytest.mark.parametrize(
    "code",
    [code for code in errors.Code if code is not errors.Code.OK],
    ids=lambda code: code.name,
)
def test_no_status_of_any_call_reaches_the_engine(tmp_path: Path, code: errors.Code) -> None:
    """Whatever a daemon answers, an engine continues without the cache. A status is the same to all
    calls, so a third of them is tried with each."""
    with FakeDaemon(f"unix:{tmp_path}/d.sock") as daemon:
        daemon.put(KEY, b"abc", layer_count=3, token_ids=bytes(4))
        share = times(3, 1)
        for name, use in list(USES.items())[code.value % share :: share]:
            with Client(daemon.address, local=False) as client:
                hit = client.claim([KEY])
                # The fake may still be ending the previous session.
                waiting = {"wait_ms": 30_000, "deadline_ms": 60_000}
                (reservation,) = client.reserve([ReserveItem(ANOTHER, 3)], **TERMS, **waiting)
                assert hit
                assert reservation.granted
                for rpc in RPCS:
                    daemon.fail(rpc, *[Bare(code)] * 20)
                asked = daemon.rpcs.total()
                assert not use(client, hit, reservation), name
                # The fake has no Delete, so gRPC answers.
                assert daemon.rpcs.total() > asked or name == "delete", name
                for rpc in RPCS:
                    daemon.fail_no_more(rpc)


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
