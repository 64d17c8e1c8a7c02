"""What `prefixctl stats` shows."""

from __future__ import annotations

import pytest

from prefixd.client.ctl.views.stats import stats_view
from prefixd.proto import prefixd_pb2 as pb
from tests.client.ctl.views.test_text_tables import drawn, tier_stats


def stats() -> pb.StatsResponse:
    return pb.StatsResponse(
        daemon_version="1.2.3",
        pid=7,
        health="serving",
        tiers=[
            tier_stats(entries=3, published_bytes=500, saves=3, max_entries=9),
            tier_stats(pb.TIER_SHM, recovered_entries=5, dropped_at_start=2, corrupt=1),
        ],
        usage={
            "llama": pb.Usage(
                lookups=10,
                hits=9,
                misses={"absent": 1},
                missed=[
                    pb.Missed(
                        reason=pb.MISS_REASON_EVICTED,
                        tier=pb.TIER_RAM,
                        cause=pb.EVICTION_CAUSE_SAVE,
                        tokens=500,
                    ),
                    pb.Missed(reason=pb.MISS_REASON_NEVER_SAVED, tokens=400, lookups=1),
                ],
                failures={"lost": 2},
                lookup_tokens=5000,
                restored_tokens=4000,
                tiers=[pb.TierUsage(tier=pb.TIER_RAM, hit_tokens=4100, restored_bytes={"copy": 7})],
            ),
            "qwen": pb.Usage(
                lookups=10,
                hits=1,
                misses={"absent": 2, "unavailable": 7},
                missed=[
                    pb.Missed(reason=pb.MISS_REASON_NEVER_SAVED, lookups=2),
                    pb.Missed(reason=pb.MISS_REASON_UNAVAILABLE, lookups=7),
                ],
            ),
        },
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_statistics_fit_the_terminal(width: int) -> None:
    lines = drawn(stats_view(stats(), "unix:/x"), width).splitlines()
    assert max(map(len, lines)) <= width


def test_the_statistics_say_what_there_is() -> None:
    text = drawn(stats_view(stats(), "unix:/x"), 120)
    for word in ("1.2.3  serving", "serving", "pid 7", "unix:/x", "50.0 %", "3 of 9"):
        assert word in text
    assert "shm: recovered 5 entries (0B) at the start, dropped 2" in text
    assert "shm: 1 entries were damaged and dropped" in text
    lines = [line.split() for line in text.splitlines()]
    assert text.splitlines()[1] == "tokens     82.0 % hit, 18.0 % missed of 5,000 looked up"
    assert ["evicted", "from", "ram", "500", "10.0", "%"] in lines
    assert ["never", "saved", "400", "8.0", "%"] in lines
    assert "look-ups   20, of which 10 found nothing: 7 no daemon answered, 3 never saved" in text
    assert "restored   4,000 tokens: 7B by copy" in text
    assert ["llama", "82.0", "%", "10", "4,100", "10.0", "%", "evicted", "from", "ram"] in lines
    assert ["qwen", "-", "10", "0"] in lines, "there is no ratio without tokens"
    assert [line[:2] for line in lines if line[:1] == ["lost"]] == [["lost", "2"]]


def test_labels_that_nothing_was_counted_under_are_not_shown() -> None:
    """The daemon lists every namespace of a token, even before its first look-up."""
    told = stats()
    told.usage["team-a"].CopyFrom(pb.Usage())
    assert "team-a" not in drawn(stats_view(told, "unix:/x"), 120)
    del told.usage["qwen"]
    text = drawn(stats_view(told, "unix:/x"), 120)
    assert "llama" not in text, "there is but one"


def test_what_was_read_back_is_said_in_a_sentence() -> None:
    told = pb.StatsResponse(tiers=[tier_stats(pb.TIER_DISK, entries=1, saves=1)])
    told.tiers[0].scrub.CopyFrom(
        pb.ScrubStats(entries=3, payload_bytes=2**20, passes=2, progress_permille=250)
    )
    text = drawn(stats_view(told, "unix:/x"), 120)
    assert "disk: scrubber read 1MiB, 2 passes complete, current pass at 25%" in text


def test_without_look_ups_there_is_no_ratio() -> None:
    assert "no look-ups were reported yet" in drawn(stats_view(pb.StatsResponse(), "unix:/x"))


def test_what_is_less_than_it_could_be_is_shown() -> None:
    recovering = tier_stats(pb.TIER_DISK)
    recovering.state = pb.TIER_STATE_RECOVERING
    said = {"disk tier": "recovers: 240,000 entries adopted"}
    stats = pb.StatsResponse(tiers=[tier_stats(), recovering], notices=said, health="serving")
    shown = drawn(stats_view(stats, "unix:/s"), 120)
    assert "disk tier: recovers: 240,000 entries adopted" in shown
    assert shown.count("(recovering)") == 1


@pytest.mark.parametrize("width", [80, 100, 200])
def test_what_namespaces_take_is_shown(width: int) -> None:
    stats = pb.StatsResponse()
    tier = stats.tiers.add(tier=pb.TIER_RAM, policy=pb.EVICTION_POLICY_LRU, budget_bytes=2**30)
    tier.namespaces.add(used_bytes=2**20, entries=12_345)
    tier.namespaces.add(
        namespace="n" * 32, share_bytes=2**29, used_bytes=2**28, fixed_bytes=2**20, entries=7
    )
    text = drawn(stats_view(stats, "unix:/x"), width)
    assert "(no share)" in text
    assert "n" * 32 in text
    for number in ("512MiB", "256MiB", "12,345"):
        assert number in text
