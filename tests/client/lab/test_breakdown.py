"""Hits over time, after a warm-up, by owner; and what they are worth."""

import pytest

from prefixd.client.lab.breakdown import Prices, Requests
from prefixd.client.lab.trace import Request


def watched() -> tuple[Requests, list[int], list[int]]:
    given = [Request(at * 1000, 100, 1, (1,), model="ab"[at % 2]) for at in range(10)]
    requests = Requests(given)
    assert list(requests) == given
    return requests, [100] * 10, [0] * 5 + [50] * 5


def test_over_time_and_after_a_warm_up() -> None:
    requests, prompt, hit = watched()
    assert requests.duration_s == 9
    parts = requests.over_time(prompt, hit, 3)
    assert [part["requests"] for part in parts] == [3, 3, 4]
    assert [part["hit_rate"] for part in parts] == [0, pytest.approx(50 / 300), 0.5]
    assert (parts[1]["from_s"], parts[1]["to_s"]) == (3, 6)
    assert requests.after(prompt, hit, 5)["hit_rate"] == 0.5
    assert requests.after(prompt, hit, 99)["requests"] == 0


def test_by_owner() -> None:
    requests, prompt, hit = watched()
    prompt[1] = 200
    rows = requests.by_owner(prompt, hit)
    assert [(row["model"], row["requests"], row["hit_tokens"]) for row in rows] == [
        ("b", 5, 150), ("a", 5, 100),
    ]  # fmt: skip


def test_an_owner_may_come_late() -> None:
    given = [Request(at, 100, 1, (1,), tenant="late" if at >= 7 else "") for at in range(10)]
    requests = Requests(given)
    list(requests)
    rows = requests.by_owner([100] * 10, [0] * 7 + [10] * 3)
    assert [(row["tenant"], row["requests"], row["hit_tokens"]) for row in rows] == [
        ("", 7, 0), ("late", 3, 30),
    ]  # fmt: skip


def test_worth() -> None:
    found = Prices(1000, gpu_hour=2.0, gpus=4).worth(3_600_000, requests=100, duration_s=3600)
    assert found == {
        "ttft_saved_s": 36.0,
        "gpu_hours_saved": 4.0,
        "money_saved": 8.0,
        "money_saved_per_month": pytest.approx(8.0 * 730),
    }
    assert Prices(1000).worth(1000, 0, 0)["money_saved"] is None
    for bad in ((0, None, 1), (1, -1, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match=r"must be above 0|at least one GPU"):
            Prices(*bad)
