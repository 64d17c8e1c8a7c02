"""Tables that fit a terminal, bars, and numbers as people write them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from prefixd.client.ctl.views import text_tables
from prefixd.client.ctl.views.text_tables import TierBar
from prefixd.proto import prefixd_pb2 as pb


def drawn(
    view: RenderableType,
    width: int = 100,
    *,
    encoding: str = "utf-8",
    force_terminal: bool = False,
) -> str:
    """The view as a terminal of that width shows it, with or without colours and styles."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(
        file=file, width=width, no_color=not force_terminal, force_terminal=force_terminal
    ).print(view)
    file.flush()
    file.seek(0)
    return file.read()


def tier_stats(tier: pb.Tier.ValueType = pb.TIER_RAM, **numbers: int) -> pb.TierStats:
    return pb.TierStats(
        tier=tier, policy=pb.EVICTION_POLICY_LRU, budget_bytes=1000, secured_bytes=1000, **numbers
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (4096, "4KiB"), (33_492_000, "31.9MiB"), (2**40, "1TiB"),
     (1000 * 2**30, "0.977TiB"), (2**50, "1PiB")],
)  # fmt: skip
def test_sizes_are_short(count: int, text: str) -> None:
    assert text_tables.size(count) == text


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (850_900_000, "850ms"),
        (1_000_000_000, "1s"),
        (184 * 1_000_000_000 + 7, "3m4s"),
    ],
)
def test_ages_are_rough(duration_ns: int, text: str) -> None:
    assert text_tables.age(duration_ns) == text


def test_nothing_of_nothing_has_no_percentage() -> None:
    assert text_tables.percent(0, 0) == "-"
    assert text_tables.percent(1, 8) == "12.5 %"


def cells(bar: TierBar, width: int, full: str = "━") -> int:
    return drawn(bar, width).count(full)


@pytest.mark.parametrize(
    ("part", "expected"), [(0, 0), (1, 1), (500, 5), (501, 6), (999, 10), (1000, 10), (2000, 10)]
)
def test_a_bar_shows_how_full(part: int, expected: int) -> None:
    """A single byte is visible, and a tier looks full only when it nearly is."""
    assert cells(TierBar(tier_stats(published_bytes=part)), 10) == expected


def test_the_parts_of_a_bar_add_up() -> None:
    tier = tier_stats(published_bytes=600, pinned_bytes=200, reserved_bytes=100)
    assert cells(TierBar(tier), 10) == 7
    assert cells(TierBar(tier_stats()), 10) == 0


def test_a_bar_fits_where_it_is_put_and_needs_no_unicode() -> None:
    bar = TierBar(tier_stats(published_bytes=500))
    assert drawn(bar, 8).strip("\n") == "━━━━────"
    assert drawn(bar, 8, encoding="ascii").strip("\n") == "####----"


def test_a_narrow_table_keeps_every_column_whole() -> None:
    """Columns that do not fit come below, after the first column again."""
    names = [f"column {number}" for number in range(9)]
    caption = "what is below a table is as wide as the terminal"
    table = text_tables.make_table("key|>" + "|>".join(names), caption=caption)
    cells = [f"{number}" * 12 for number in range(9)]
    table.add_row("k" * 16, *cells)
    for width in (40, 80, 100, 200):
        text = drawn(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(cell in text for cell in [*names, *cells])
        assert "…" not in text
        assert caption in " ".join(text.split())
        assert width < len(caption) or caption in text
    assert drawn(table, 200).count("k" * 16) == 1
    assert drawn(table, 80).count("k" * 16) > 1
