"""What `prefixctl top` shows of two samples, at every width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from prefixd.client.ctl.views.top import Interval, quantile_ns
from prefixd.proto import prefixd_pb2 as pb

TIER = {
    "tier": pb.TIER_RAM,
    "policy": pb.EVICTION_POLICY_S3FIFO,
    "budget_bytes": 2**33,
    "state": pb.TIER_STATE_SERVING,
}


def usage(scale: int) -> pb.Usage:
    return pb.Usage(
        lookups=10 * scale,
        hits=7 * scale,
        misses={"absent": 2 * scale, "slow": scale},
        missed=[
            pb.Missed(
                reason=pb.MISS_REASON_EVICTED,
                tier=pb.TIER_RAM,
                cause=pb.EVICTION_CAUSE_SAVE,
                tokens=150 * scale,
            ),
            pb.Missed(reason=pb.MISS_REASON_NEVER_SAVED, tokens=50 * scale, lookups=2 * scale),
        ],
        lookup_tokens=1000 * scale,
        restored_tokens=500 * scale,
        restore_times=[scale, *[0] * 16, 2 * scale],
        restore_ns=10**9 * scale,
        tiers=[
            pb.TierUsage(
                tier=pb.TIER_RAM, hit_tokens=800 * scale, restored_bytes={"copy": 2**20 * scale}
            )
        ],
    )


def sample(scale: int, incarnation: bytes = b"1") -> pb.StatsResponse:
    """Statistics whose sums grow with `scale`."""
    tier = pb.TierStats(
        **TIER,  # type: ignore[arg-type]
        published_bytes=2**32,
        entries=123_456,
        hits=100 * scale,
        saved_bytes=2**20 * scale,
        evicted_bytes=2**19 * scale,
    )
    times = [0, 98 * scale, 2 * scale, 0]
    return pb.StatsResponse(
        daemon_version="1.2.3",
        incarnation=incarnation,
        health="serving",
        tiers=[tier],
        usage={"llama-3-70b": usage(scale), "qwen": usage(2 * scale)},
        stages=[
            pb.StageTimes(stage="claim", bounds_ns=[50_000, 100_000, 2_000_000], times=times),
            pb.StageTimes(stage="commit disk", bounds_ns=[10**6], times=[0, 5 * scale]),
        ],
        notices={"disk arena": "smaller"},
        claims=1,
    )


CLAIM = pb.ClaimDetail(
    claim_id=7, session_id=3, owner="worker-0 (pid 4 on node-17)", entries=5, age_ms=61_000
)


def shown(board: Interval, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(board)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_all_of_it_is_there_at_every_width(width: int) -> None:
    board = Interval("unix:/run/prefixd/prefixd.sock")
    board.take(sample(1), [], 10.0)
    board.take(sample(3), [CLAIM], 14.0)
    text = shown(board, width)
    for words in (
        "80.0 % hit", "15.0 % evicted from ram",
        "15 look-ups/s", "1.5MiB/s restored",  # 60 in 4 s; 6 MiB
        "ram", "50.0 %", "8GiB", "123,456", "512KiB", "256KiB",
        "llama-3-70b", "qwen", "800",
        "claim", "100us", "2ms", "commit disk", "> 1ms",
        "disk arena: smaller", "oldest claims", "1m1s",
    ):  # fmt: skip
        assert words in text, words


def test_restores_are_those_in_between() -> None:
    board = Interval("x")
    board.take(sample(1), [], 10.0)
    board.take(sample(3), [], 14.0)
    between = board.between().usage["llama-3-70b"]
    assert list(between.restore_times) == [2, *[0] * 16, 4]
    assert between.restore_ns == 2 * 10**9


def test_before_the_second_sample_rates_are_averages_since_the_start() -> None:
    board = Interval("x")
    for incarnation in (b"1", b"2"):  # a daemon that was restarted counts from zero
        first = sample(1, incarnation)
        first.uptime_ms = 2_000
        board.take(first, [], 10.0)
        text = shown(board, 100)
        for words in (
            "80.0 % hit, ",
            "15 look-ups/s",
            "1.5MiB/s restored",
            "since the start",
            "50",
        ):
            assert words in text, words
    assert "hit since the start" not in text
    board.take(sample(1, b"2"), [], 12.0)
    text = shown(board, 100)
    assert "0 look-ups/s" in text
    assert "no look-ups (80.0 % hit since the start)" in " ".join(text.split())
    board.note = "it does not answer"
    assert "it does not answer" in shown(board, 100)


def test_two_samples_of_one_moment_have_no_rates() -> None:
    board = Interval("x")
    board.take(sample(1), [], 10.0)
    board.take(sample(3), [], 10.0)
    assert "0 look-ups/s" in shown(board, 100)


def test_the_tiers_in_one_line() -> None:
    board = Interval("x")
    assert board.tiers_line() == ""
    board.take(sample(1), [], 1.0)
    assert board.tiers_line() == "ram 50.0 % full, 100 hits, 0 evicted"


def test_labels_that_nothing_was_counted_under_are_not_shown() -> None:
    first, second = sample(1), sample(3)
    for each in (first, second):
        each.usage["team-a"].CopyFrom(pb.Usage())
    board = Interval("x")
    board.take(first, [], 10.0)
    board.take(second, [], 14.0)
    text = shown(board, 100)
    assert "team-a" not in text
    assert "qwen" in text


def test_an_empty_daemon() -> None:
    board = Interval("x")
    board.take(pb.StatsResponse(incarnation=b"1"), [], 1.0)
    assert "nothing was timed" in shown(board, 80)


def test_quantiles_are_bounds_of_buckets() -> None:
    stage = pb.StageTimes(bounds_ns=[10, 20, 30], times=[5, 4, 0, 1])
    assert [quantile_ns(stage, part) for part in (0.5, 0.51, 0.9, 0.99)] == [
        10, 20, 20, float("inf"),
    ]  # fmt: skip


def test_what_is_shared_is_shown_where_anything_is() -> None:
    def shared(scale: int, state: pb.SharedNodeState.ValueType) -> pb.StatsResponse:
        stats = sample(scale)
        stats.shared.update(
            {
                "fetched_bytes": 2**20 * scale,
                "offered_bytes": 2**21 * scale,
                "waiting_offers": 7,
                "offers_dropped": scale,
                "unanswered": 3 * scale,
                "nodes": 2,
                "nodes_serving": 1,
            }
        )
        stats.shared_nodes.add(name="10.0.0.1:6379", state=pb.SHARED_NODE_STATE_SERVING)
        stats.shared_nodes.add(name="10.0.0.2:6379", state=state, why="it missed 3 deadlines")
        return stats

    board = Interval("unix:/x")
    board.take(sample(1), [], 10.0)
    assert "brought" not in shown(board, 200)
    board.take(shared(1, pb.SHARED_NODE_STATE_RESTING), [], 12.0)
    board.take(shared(3, pb.SHARED_NODE_STATE_RESTING), [], 14.0)
    text = shown(board, 200)
    assert "1MiB/s brought" in text
    assert "2MiB/s offered" in text
    assert "7 wait" in text
    assert "3/s unanswered" in text
    assert "1 of 2 nodes" in text
    assert "it missed 3 deadlines" in text
    board.take(shared(4, pb.SHARED_NODE_STATE_SERVING), [], 15.0)
    assert "10.0.0.1" not in shown(board, 200), "only if something is wrong"
