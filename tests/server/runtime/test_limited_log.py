"""Log lines that clients cause: a bounded number, and none is lost without being counted."""

from __future__ import annotations

from structlog.testing import capture_logs

from prefixd.server.runtime.limited_log import BURST, EVERY_S, LimitedLog, lines_left_out


def test_an_event_leaves_few_lines_however_often_it_happens() -> None:
    now_s = 100.0
    log = LimitedLog("tests", lambda: now_s)
    before = lines_left_out()
    with capture_logs() as lines:
        for number in range(10 * BURST):
            log.warning("flooded", number=number)
        log.info("another")
        now_s += EVERY_S
        log.warning("flooded", number=-1)
        log.warning("flooded", number=-2)
    assert [line["event"] for line in lines] == ["flooded"] * BURST + ["another", "flooded"]
    assert lines[-1]["number"] == -1
    assert lines[-1]["left_out_before"] == 9 * BURST
    assert lines_left_out() - before == 9 * BURST + 1


def test_lines_come_again_with_time_and_no_more_than_at_first() -> None:
    now_s = 0.0
    log = LimitedLog("tests", lambda: now_s)
    with capture_logs() as lines:
        for _ in range(2 * BURST):
            log.error("flooded")
        now_s += 1_000 * BURST * EVERY_S
        for _ in range(2 * BURST):
            log.error("flooded")
    assert len(lines) == 2 * BURST
    assert lines[BURST] == {"event": "flooded", "log_level": "error", "left_out_before": BURST}
