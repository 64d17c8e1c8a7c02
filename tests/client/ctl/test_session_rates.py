"""What `prefixctl sessions` shows of each, at every width."""

from __future__ import annotations

import pytest

from prefixd.client.ctl.session_rates import SessionRates, rates, sessions_table
from prefixd.proto import prefixd_pb2 as pb
from tests.client.ctl.test_render import drawn

OWNER = "vllm-worker-0 (pid 40123 on node-17.example)"


def session(number: int, age_ms: int, scale: int) -> pb.SessionDetail:
    """Sums that grow with `scale`."""
    return pb.SessionDetail(
        session_id=number,
        owner=OWNER,
        label="llama-3-70b",
        age_ms=age_ms,
        heartbeat_age_ms=2000,
        lookups=30 * scale,
        hits=20 * scale,
        restores=20 * scale,
        restored_bytes=2**30 * scale,
        saves=5 * scale,
        saved_bytes=2**20 * scale,
    )


def test_without_an_earlier_look_it_is_the_average_of_a_session() -> None:
    (rate,) = rates([session(1, 10_000, 2)], [], 0.0)
    assert rate == SessionRates(6.0, 4.0, 4.0, 2**30 / 5, 1.0, 2**20 / 5)


def test_with_one_it_is_what_came_between() -> None:
    before = [session(1, 60_000, 10), session(2, 60_000, 10)]
    now = [session(1, 62_000, 14), session(2, 62_000, 10), session(3, 500, 1)]
    busy, idle, new = rates(now, before, 2.0)
    assert busy == SessionRates(60.0, 40.0, 40.0, 2**31, 10.0, 2**21)
    assert idle == SessionRates(*[0.0] * 6)
    assert new.lookups == 60.0, "of the half second that it is there"


def test_sessions_of_another_start_are_others() -> None:
    (rate,) = rates([session(1, 1_000, 1)], [session(1, 60_000, 10)], 2.0)
    assert rate.lookups == 30.0


def test_one_that_was_opened_this_moment_has_no_rate() -> None:
    assert rates([session(1, 0, 0)], [], 0.0) == [SessionRates(*[0.0] * 6)]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_all_of_it_is_there_at_every_width(width: int) -> None:
    found = [session(1, 10_000, 2), session(2, 61_000, 1)]
    text = drawn(sessions_table(found, rates(found, [], 0.0), 0.0), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("llama-3-70b", "2s ago", "1m1s", "205MiB", "2GiB", "0.49", "16.8MiB", "namespace"):
        assert word in text, word
    assert "since a session was opened" in " ".join(text.split())
    later = drawn(sessions_table(found, rates(found, found, 2.0), 2.0), width)
    assert "the last 2 s" in later


def test_none() -> None:
    assert drawn(sessions_table([], [], 0.0)).strip() == "no sessions"
