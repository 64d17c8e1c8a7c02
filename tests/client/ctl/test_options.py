"""How values are written on the command line."""

from __future__ import annotations

import pytest
import typer

from prefixd.client.ctl.options import chosen, parse_reason, parse_seconds, parse_size, parse_tier
from prefixd.proto.vocabulary import SaveReason, Tier


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("1", 1), ("4KiB", 4096), ("1.5MiB", 3 * 2**19), (4096, 4096)]
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "8GB", "many", "0.2B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("500ms", 0.5), ("2m", 120.0), (60.0, 60.0)]
)
def test_times(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "nan", "inf", "1e10", "5 parsecs"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_seconds(text)


def test_tiers_and_reasons_go_by_the_names_of_the_vocabulary() -> None:
    assert [parse_tier(tier.label) for tier in Tier] == [*Tier]
    assert [parse_reason(reason.label) for reason in SaveReason] == [*SaveReason]
    assert chosen([Tier.SHM, Tier.RAM, Tier.SHM]) == [Tier.SHM, Tier.RAM]
    assert chosen(None) == []
    with pytest.raises(typer.BadParameter, match="none of ram, shm, disk"):
        parse_tier("tape")
