"""The tiers as they fill: rates, lines, and the view that is drawn again and again."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from prefixd.client.ctl.live import Rates, TierBoard, live_view
from prefixd.proto import prefixd_pb2 as pb


def sample(saved_bytes: int = 0, evictions: int = 0, incarnation: bytes = b"1") -> pb.StatsResponse:
    tier = pb.TierStats(
        tier=pb.TIER_RAM,
        budget_bytes=1000,
        published_bytes=500,
        saved_bytes=saved_bytes,
        evictions=evictions,
        hits=7 + saved_bytes,
    )
    return pb.StatsResponse(incarnation=incarnation, tiers=[tier])


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width), file


def test_rates_are_between_the_last_two_samples() -> None:
    board = TierBoard()
    assert board.rates(pb.TIER_RAM) == Rates()
    board.take(sample(), 1.0)
    assert board.rates(pb.TIER_RAM) == Rates()
    board.take(sample(saved_bytes=1000, evictions=4), 3.0)
    assert board.rates(pb.TIER_RAM) == Rates(500.0, 500.0, 2.0)
    board.take(sample(saved_bytes=1000, evictions=4), 4.0)
    assert board.rates(pb.TIER_RAM) == Rates()


def test_a_restarted_daemon_has_no_rates_at_first() -> None:
    board = TierBoard()
    board.take(sample(saved_bytes=1000), 1.0)
    board.take(sample(incarnation=b"2"), 2.0)
    assert board.rates(pb.TIER_RAM) == Rates()


def test_two_samples_of_one_moment_have_no_rates() -> None:
    board = TierBoard()
    board.take(sample(), 1.0)
    board.take(sample(saved_bytes=1000), 1.0)
    assert board.rates(pb.TIER_RAM) == Rates()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_board_fits_the_terminal(width: int) -> None:
    board = TierBoard()
    to, file = console(terminal=False, width=width)
    to.print(board)
    board.take(sample(), 1.0)
    to.print(board)
    assert "ram" in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= width


def test_the_board_in_one_line() -> None:
    board = TierBoard()
    assert board.line() == ""
    board.take(sample(evictions=3), 1.0)
    assert board.line() == "ram 50.0 % full, 7 hits, 3 evicted"


def test_a_terminal_is_drawn_over_and_a_pipe_gets_every_view() -> None:
    texts = ["first", "second", "third"]
    for terminal in (True, False):
        to, file = console(terminal=terminal)
        views = iter(texts)
        with live_view(to, lambda views=views: Text(next(views))) as refresh:  # type: ignore[misc]
            refresh()
            refresh()
        assert all(text in file.getvalue() for text in texts)
        assert ("\x1b[" in file.getvalue()) is terminal
