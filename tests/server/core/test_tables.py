"""The methods of the tables: stamps and timers."""

from __future__ import annotations

from prefixd.server.core.sessions import Claim, Session
from prefixd.server.core.tables import StateConfig, Tables, Timer


def tables(stamp_ns: int = 0) -> Tables:
    return Tables(StateConfig(), {}, stamp_ns)


def test_a_stamp_is_the_time_where_that_is_new() -> None:
    t = tables(100)
    assert [t.stamp(now_ns) for now_ns in (150, 200, 200, 200)] == [150, 200, 201, 202]


def test_a_stamp_is_never_given_out_twice_whatever_the_clock_does() -> None:
    t = tables(100)
    stamps = [t.stamp(now_ns) for now_ns in (0, 50, 100, 101, 90, 103, 103, 1)]
    assert stamps == sorted(set(stamps))
    assert stamps[0] > 100


def test_every_kind_of_timer_has_its_table() -> None:
    t = tables()
    held = [t.timed[timer] for timer in Timer]
    assert [id(one) for one in held] == [
        id(t.sessions),
        id(t.claims),
        id(t.reservations),
        id(t.waiting),
    ]


def test_stale_timers_may_be_as_many_as_live_ones_and_some() -> None:
    t = tables()
    assert t.max_timers == 64
    t.sessions[1] = Session(1, "alice", 0, 0)
    t.claims |= {number: Claim(number, 1, (), 0, 1) for number in range(10)}
    assert t.max_timers == 64 + 22
