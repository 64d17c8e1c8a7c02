"""Searches that find nothing, find too slow entries, or are a mistake. (client/search.py)"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import (
    Client,
    MissReason,
    Tier,
)
from prefixd.client.policy import RETRY_EVERY
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import (
    CallerError,
    DaemonUnavailable,
    DeadlineExceeded,
    Draining,
    InvalidBatch,
    InvalidKey,
    InvalidSize,
    InvalidTokens,
    LimitReached,
    MalformedMessage,
    StaleIncarnation,
    UnknownSession,
)
from prefixd.proto.limits import MAX_WAIT_MS
from tests.support.fake_clients import (
    ALL,
    NAMESPACE,
    ONE,
    POLICY,
    TOKENS,
    TWO,
    fake_daemon,
    save_prefix,
    searched,
    searching_client,
)
from tests.support.fakes import FakeDaemon

daemon = pytest.fixture(fake_daemon)
client = pytest.fixture(searching_client)


def unserved(client: Client) -> dict[str, int]:
    """Look-ups that found nothing and probes that failed, by reason."""
    snapshot = client.counters
    found: Counter[str] = Counter()
    for group in ("misses", "failures"):
        counts = snapshot[group]
        assert isinstance(counts, dict)
        found.update({reason: count for reason, count in counts.items() if count})
    return dict(found)


# ---- misses


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DaemonUnavailable, "unavailable"),
        (Draining, "unavailable"),
        (DeadlineExceeded, "deadline"),
        (LimitReached, "refused"),
    ],
)
def test_whatever_goes_wrong_is_a_miss(
    daemon: FakeDaemon, client: Client, error: Any, reason: str
) -> None:
    daemon.put(ONE, b"bytes")
    save_prefix(daemon, 40)
    daemon.fail("Claim", *[error("no")] * 4)
    daemon.fail("Lookup", *[error("no")] * 3)
    assert not client.longest_prefix(NAMESPACE, TOKENS)
    assert not client.longest_prefix(NAMESPACE, TOKENS, claim=False)
    assert not client.resume(ONE, TOKENS, 0, namespace=NAMESPACE)
    assert client.longest_run([ONE]).miss == reason
    assert client.claim([ONE]).miss == reason
    assert not client.probe([ONE])[0].present
    assert client.exists([ONE]) == [False]
    assert unserved(client) == {reason: 7}
    with client.claim([ONE]) as hit:
        assert hit


@pytest.mark.parametrize("error", [UnknownSession, StaleIncarnation])
def test_a_session_lost_twice_is_a_miss(daemon: FakeDaemon, client: Client, error: Any) -> None:
    daemon.put(ONE, b"bytes")
    daemon.fail("Claim", error("who?"), error("who?"))
    assert client.claim([ONE]).miss is MissReason.UNAVAILABLE


def test_a_daemon_that_does_not_answer_is_a_miss_by_the_deadline(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.hold("Claim")
    assert client.claim([ONE], deadline_ms=20).miss is MissReason.DEADLINE
    assert client.claim([ONE], deadline_ms=0).miss is MissReason.DEADLINE


def test_no_daemon_is_a_miss_at_once(tmp_path: Path) -> None:
    with Client(f"unix:{tmp_path}/nobody.sock", policy=POLICY) as client:
        assert not client.longest_prefix(NAMESPACE, TOKENS)
        assert client.claim([ONE]).miss is MissReason.UNAVAILABLE
        assert not client.probe([ONE])[0].present
        assert not client.connected
        assert unserved(client) == {"unavailable": 3}
        assert searched(client)["rpcs"] == {}


# ---- the caller's own mistakes


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda c: c.claim([b"short"]), InvalidKey),
        (lambda c: c.claim(["k" * 32]), InvalidKey),
        (lambda c: c.claim([ONE], mode=2), CallerError),
        (lambda c: c.exists([b"short"]), InvalidKey),
        (lambda c: c.longest_run([b"short"]), InvalidKey),
        (lambda c: c.claim([ONE], wait_ms=-1), InvalidSize),
        (lambda c: c.claim([ONE], wait_ms=MAX_WAIT_MS + 1), InvalidSize),
        (lambda c: c.longest_prefix(NAMESPACE, [-1] * 50), InvalidTokens),
        (lambda c: c.longest_prefix(NAMESPACE, b"tokens" * 50), InvalidTokens),
        (lambda c: c.chain(NAMESPACE, TOKENS, 0), InvalidSize),
    ],
)
def test_mistakes_raise_and_ask_nobody(
    daemon: FakeDaemon, client: Client, use: Any, error: type[CallerError]
) -> None:
    with pytest.raises(error):
        use(client)
    assert not set(daemon.rpcs) - {"Session"}


@pytest.mark.parametrize("error", [InvalidBatch, InvalidKey, MalformedMessage, InvalidSize])
def test_what_the_daemon_calls_a_mistake_is_a_miss(
    daemon: FakeDaemon, client: Client, error: type[CallerError], caplog: pytest.LogCaptureFixture
) -> None:
    """The call passed the client's own checks, so the daemon is of another version: a miss."""
    daemon.fail("Claim", error("not for me"))
    daemon.fail("Lookup", *[error("not for me")] * 3)
    assert not client.claim([ONE])
    assert not client.probe([ONE])[0].present
    assert client.exists([ONE]) == [False]
    assert not client.longest_run([ONE], claim=False)
    reason = "unexpected" if error is MalformedMessage else "refused"
    assert unserved(client) == {reason: 4}
    assert client.counters["misses"][reason] == 3, "a probe is no look-up"
    assert [message.count("not for me") for message in caplog.messages] == [1]


def test_an_entry_of_a_later_version_is_a_miss(daemon: FakeDaemon, client: Client) -> None:
    daemon.put(ONE, b"bytes", tier=99)
    assert not client.claim([ONE])
    assert not client.probe([ONE])[0].present
    assert unserved(client) == {"unexpected": 2}
    daemon.wait_until(lambda: not daemon.claims)


def test_nothing_asked_for_is_nothing_found(daemon: FakeDaemon, client: Client) -> None:
    assert not client.claim([])
    assert client.probe([]) == client.exists([]) == []
    assert not set(daemon.rpcs) - {"Session"}


def test_a_key_named_twice_is_there_twice(daemon: FakeDaemon, client: Client) -> None:
    daemon.put(ONE, b"bytes")
    assert client.exists([ONE, TWO, ONE]) == [True, False, True]
    with client.claim([ONE, ONE]) as hit:
        assert hit.keys == [ONE, ONE]
        assert (hit.read(0), hit.read(1)) == (b"bytes", b"bytes")


# ---- not worth it


@pytest.mark.parametrize("claim", [True, False])
def test_a_hit_slower_than_computing_is_no_hit(daemon: FakeDaemon, claim: bool) -> None:
    save_prefix(daemon, 40)
    with Client(daemon.address, policy=POLICY, local=False, prefill_tokens_per_s=100) as client:
        hit = client.longest_prefix(NAMESPACE, TOKENS, claim=claim)
        assert hit  # nothing was measured yet
        hit.release()
        client.speeds.measured(Tier.RAM, 1, 1.0)  # 11 bytes: 11 s, against 0.4 s
        for _ in range(RETRY_EVERY - 1):
            assert not client.longest_prefix(NAMESPACE, TOKENS, claim=claim)
        assert searched(client)["misses"] == {"slow": RETRY_EVERY - 1}
        assert not daemon.claims
        hit = client.longest_prefix(NAMESPACE, TOKENS, claim=claim)
        assert hit  # one in `RETRY_EVERY`, to measure again
        hit.release()


@pytest.mark.parametrize("claim", [True, False])
def test_a_run_is_cut_before_its_slow_blocks(daemon: FakeDaemon, claim: bool) -> None:
    for key, tier in zip(ALL, (pb.TIER_RAM, pb.TIER_RAM, pb.TIER_DISK), strict=True):
        daemon.put(key, b"bytes", tier=tier, token_count=10)
    with Client(daemon.address, local=False, prefill_tokens_per_s=100) as client:
        client.speeds.measured(Tier.DISK, 1, 1.0)
        with client.longest_run(ALL, claim=claim) as hit:
            assert hit.keys == [ONE, TWO]
            assert hit.miss is MissReason.SLOW
            assert hit.restore_into([bytearray(5), bytearray(5)])
        assert not daemon.claims
        with client.claim(ALL) as hit:  # claims of given keys are not gated
            assert len(hit) == 3
