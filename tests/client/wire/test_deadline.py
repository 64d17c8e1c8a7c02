"""Deadlines count from the start of a call; payloads add time."""

from __future__ import annotations

import pytest

from prefixd.client.wire.deadline import MIN_TRANSFER_BYTES_PER_S, Deadline
from prefixd.proto.errors import DeadlineExceeded


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_left_shrinks() -> None:
    clock = Clock()
    deadline = Deadline(500, clock=clock)
    assert deadline.left_s() == pytest.approx(0.5)
    clock.now_s += 0.4
    assert deadline.left_s() == pytest.approx(0.1)


def test_nothing_left_is_an_error() -> None:
    clock = Clock()
    deadline = Deadline(500, clock=clock)
    clock.now_s += 0.5
    with pytest.raises(DeadlineExceeded):
        deadline.left_s()


def test_a_deadline_may_be_over_from_the_start() -> None:
    with pytest.raises(DeadlineExceeded):
        Deadline(0).left_s()
    with pytest.raises(DeadlineExceeded):
        Deadline(-20).left_s()


def test_transfers_have_time_by_their_size() -> None:
    assert Deadline(500, 2 * MIN_TRANSFER_BYTES_PER_S, clock=Clock()).left_s() == pytest.approx(2.5)
