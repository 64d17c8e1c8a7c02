"""Outcomes of requests and their sum."""

from __future__ import annotations

import json
from collections import Counter

from prefixd.client.lab.live_replay import MAX_DESCRIBED, Totals
from prefixd.client.lab.replayer import STEPS, RequestOutcome


def test_totals_add_up_what_the_outcomes_say() -> None:
    totals = Totals()
    totals.add(
        RequestOutcome(
            prompt_tokens=1000,
            hit_tokens=512,
            blocks=2,
            hit_blocks=1,
            verified_bytes=4096,
            saves=Counter(saved=1),
            saved_bytes=4096,
            durations_ns={"walk": 1_000_000, "claim": 2_000_000},
        )
    )
    totals.add(
        RequestOutcome(
            prompt_tokens=1000,
            blocks=2,
            lost_blocks=1,
            unavailable=True,
            saves=Counter(saved=1, no_room=1),
            mismatches=["block 1 at 0 has other bytes"],
            durations_ns={"walk": 3_000_000},
        )
    )
    data = totals.as_dict()
    assert data["requests"] == 2
    assert data["requests_with_hit"] == 1
    assert data["unavailable_requests"] == 1
    assert data["hit_rate_tokens"] == 512 / 2000
    assert data["hit_rate_requests"] == 0.5
    assert data["blocks"] == 4
    assert data["hit_blocks"] == 1
    assert data["lost_blocks"] == 1
    assert data["verified_bytes"] == 4096
    assert data["saves"] == {"no_room": 1, "saved": 2}
    assert data["mismatches"] == 1
    assert data["mismatches_described"] == ["block 1 at 0 has other bytes"]
    assert [data["latency_ms"][step]["count"] for step in STEPS] == [2, 1, 0, 0, 0]
    assert data["latency_ms"]["save"] == {"count": 0, "p50": None, "p99": None}
    assert json.loads(json.dumps(data)) == data


def test_nothing_replayed_has_no_hits() -> None:
    totals = Totals()
    assert totals.good
    assert totals.as_dict()["hit_rate_tokens"] == 0.0
    assert totals.as_dict()["hit_rate_requests"] == 0.0


def test_mismatches_are_all_counted_and_some_described() -> None:
    totals = Totals()
    for number in range(MAX_DESCRIBED + 5):
        totals.add(RequestOutcome(mismatches=[f"{number}"]))
    assert totals.mismatches == MAX_DESCRIBED + 5
    assert totals.described == [f"{number}" for number in range(MAX_DESCRIBED)]
    assert not totals.good


def test_a_lost_worker_and_giving_up_are_not_good() -> None:
    assert not Totals(workers_lost=1).good
    assert not Totals(gave_up=True).good
    assert Totals(interrupted=True).good
