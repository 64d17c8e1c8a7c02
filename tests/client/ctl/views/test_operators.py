"""What the operators' commands show: entries, claims, sessions, results."""

from __future__ import annotations

import pytest

from prefixd.client.ctl.views import operators as views
from prefixd.client.ctl.views.operators import SessionRates, session_rates, sessions_table
from prefixd.proto import prefixd_pb2 as pb
from tests.client.ctl.views.test_text_tables import drawn

KEY = bytes(range(32))
SECOND = 1_000_000_000


def entry(**fields: int) -> pb.EntryDetail:
    info = pb.EntryInfo(
        tier=pb.TIER_SHM, payload_bytes=4096, token_count=512, reason=pb.SAVE_REASON_COLD
    )
    return pb.EntryDetail(key=KEY, info=info, stored_bytes=8192, **fields)


def test_an_entry_says_everything() -> None:
    response = pb.InspectResponse(
        entry=entry(hits=3, pins=1, created_unix_ns=SECOND, last_used_unix_ns=3 * SECOND)
    )
    response.entry.extents.extend([4096, 8192])
    text = drawn(views.entry_view(response, 5 * SECOND, verify=False))
    assert KEY.hex() in text
    for words in ("8KiB at 4096", "4s ago", "2s ago", "cold", "no layer table"):
        assert words in text
    assert "verified" not in text


def test_verification_is_told_either_way() -> None:
    good = pb.InspectResponse(entry=entry(), verified=True)
    bad = pb.InspectResponse(entry=entry(), verified=True, problem="CRC32C differs")
    assert "every byte matches" in drawn(views.entry_view(good, 0, verify=True))
    assert "CRC32C differs" in drawn(views.entry_view(bad, 0, verify=True))


def test_lists_name_owners_and_times() -> None:
    claims = drawn(
        views.claims_table(
            [pb.ClaimDetail(claim_id=4, owner="vllm", keys=[KEY], age_ms=1500, lease_left_ms=9000)]
        )
    )
    assert all(word in claims for word in ("vllm", "1s", "9s"))
    reservations = drawn(
        views.reservations_table(
            [pb.ReservationDetail(key=KEY, owner="sglang", stage=pb.SAVE_STAGE_WRITING, waiters=3)]
        )
    )
    assert all(word in reservations for word in ("sglang", "writing", KEY.hex()[:16]))


def test_empty_lists_say_so() -> None:
    assert drawn(views.claims_table([])).strip() == "no claims"
    assert drawn(views.reservations_table([])).strip() == "no reservations"


@pytest.mark.parametrize(
    ("admissible", "retryable", "verdict"),
    [(True, False, "admissible"), (False, True, "not now, but later"), (False, False, "never")],
)
def test_a_preview_has_a_verdict(admissible: bool, retryable: bool, verdict: str) -> None:
    preview = pb.PreviewResponse(
        admissible=admissible, retryable=retryable, message="because", victims=[entry()]
    )
    text = drawn(views.preview_view(preview, "shm", 0))
    assert f"shm: {verdict}" in text
    assert "because" in text
    assert "would evict 1 entries" in text


def test_a_check_lists_its_problems() -> None:
    bad = pb.CheckResponse(problems=["bytes do not add up"], entries=3)
    assert "- bytes do not add up" in drawn(views.check_view(bad))
    assert "everything adds up: 3 entries" in drawn(views.check_view(pb.CheckResponse(entries=3)))


def test_a_verification_says_how_far_it_came_and_what_is_wrong() -> None:
    good = pb.VerifyResponse(entries=3, payload_bytes=4096, progress_permille=1_000, done=True)
    assert "every byte is right: 3 entries (4KiB) verified" in drawn(views.verify_view(good))
    stopped = pb.VerifyResponse(entries=3, payload_bytes=4096, progress_permille=250)
    assert drawn(views.verify_view(stopped)).startswith("stopped at 25%: 3 entries")
    bad = pb.VerifyResponse(
        entries=3, damaged_entries=2, unreadable_entries=1, problems=["entry 12: bad"], done=True
    )
    text = drawn(views.verify_view(bad))
    assert "3 problems in 3 entries (0B) verified, 2 damaged and dropped, 1 could not be" in text
    assert "- entry 12: bad" in text
    assert "... and 2 more" in text


OWNER = "vllm-worker-0 (pid 40123 on node-17.example)"


def session(number: int, age_ms: int, scale: int) -> pb.SessionDetail:
    """A session whose sums grow with `scale`."""
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
    (rate,) = session_rates([session(1, 10_000, 2)], [], 0.0)
    assert rate == SessionRates(6.0, 4.0, 4.0, 2**30 / 5, 1.0, 2**20 / 5)


def test_with_one_it_is_what_came_between() -> None:
    before = [session(1, 60_000, 10), session(2, 60_000, 10)]
    now = [session(1, 62_000, 14), session(2, 62_000, 10), session(3, 500, 1)]
    busy, idle, new = session_rates(now, before, 2.0)
    assert busy == SessionRates(60.0, 40.0, 40.0, 2**31, 10.0, 2**21)
    assert idle == SessionRates(*[0.0] * 6)
    assert new.lookups == 60.0, "of the half second that it is there"


def test_sessions_of_another_start_are_others() -> None:
    (rate,) = session_rates([session(1, 1_000, 1)], [session(1, 60_000, 10)], 2.0)
    assert rate.lookups == 30.0


def test_one_that_was_opened_this_moment_has_no_rate() -> None:
    assert session_rates([session(1, 0, 0)], [], 0.0) == [SessionRates(*[0.0] * 6)]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_sessions_are_whole_at_every_width(width: int) -> None:
    found = [session(1, 10_000, 2), session(2, 61_000, 1)]
    text = drawn(sessions_table(found, session_rates(found, [], 0.0), 0.0), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("llama-3-70b", "2s ago", "1m1s", "205MiB", "2GiB", "0.49", "16.8MiB", "namespace"):
        assert word in text, word
    assert "since the session was opened" in " ".join(text.split())
    later = drawn(sessions_table(found, session_rates(found, found, 2.0), 2.0), width)
    assert "the last 2 s" in later


def test_no_sessions() -> None:
    assert drawn(sessions_table([], [], 0.0)).strip() == "no sessions"
