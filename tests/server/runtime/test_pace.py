"""A transfer goes on while it moves enough, and a byte now and then is not enough."""

from __future__ import annotations

import pytest

from prefixd.proto.errors import LimitReached
from prefixd.server.runtime.quota import MIN_BYTES_PER_S, Pace


def test_enough_bytes_begin_the_time_again_and_few_do_not() -> None:
    now_s = 0.0
    pace = Pace(30.0, lambda: now_s)

    def wait(seconds: float) -> None:
        nonlocal now_s
        with pace.waiting() as left_s:
            assert left_s >= seconds
            now_s += seconds

    for _ in range(29):
        wait(1.0)
        pace.moved(1)
    assert pace.left_s == 1.0, "one byte a second"
    now_s += 1_000.0
    assert pace.left_s == 1.0, "the daemon took that time itself"
    pace.moved(30 * MIN_BYTES_PER_S)
    assert pace.left_s == 30.0
    for _ in range(300):
        wait(1.0)
        pace.moved(MIN_BYTES_PER_S)
    pace.moved(1)

    def wait_in_vain() -> None:
        nonlocal now_s
        with pace.waiting():
            now_s += 30.0
            raise TimeoutError

    with pytest.raises(LimitReached, match="stood still: it moved fewer than 491520 bytes"):
        wait_in_vain()
    with pytest.raises(LimitReached), pace.waiting():
        raise AssertionError
    assert pace.left_s == 0
