"""`prefixctl curve-live`: what the tiers of a running daemon would hit at other budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...proto import prefixd_pb2 as pb
from ...proto.units import percent
from ...proto.vocabulary import Tier
from . import render

if TYPE_CHECKING:
    from .connection import AdminConnection

Json = Mapping[str, Any]


def live_curves(
    daemon: AdminConnection, tiers: Sequence[Tier], budgets_bytes: Sequence[int] = ()
) -> dict[str, Any]:
    """The curve of each of `tiers` (empty: of all there are), as JSON.

    `budgets_bytes`: where to estimate; empty: a quarter, half, once, twice and four times what
    each tier has. Rates are null until something was looked for. Raises CurveDisabled when the
    daemon keeps no sample, UnknownTier for a tier that it does not have.
    """
    stats = daemon.stats()
    policies = {Tier(each.tier): each.policy for each in stats.tiers}
    return {
        "address": daemon.address,
        "uptime_ms": stats.uptime_ms,
        "tiers": [
            {
                "tier": tier.label,
                "policy": policies.get(tier),
                **_curve(daemon.curve(tier, budgets_bytes)),
            }
            for tier in tiers or policies
        ],
    }


def _curve(answer: pb.CurveResponse) -> dict[str, Any]:
    total_tokens = answer.total_tokens
    return {
        "budget_bytes": answer.budget_bytes,
        "total_tokens": total_tokens,
        "hit_tokens": answer.hit_tokens,
        "hit_rate": _share(answer.hit_tokens, total_tokens),
        "sampled_keys": answer.sampled_keys,
        "sampled_tokens": answer.sampled_tokens,
        "sample_rate": _share(answer.sampled_tokens, total_tokens),
        "points": [
            {
                "budget_bytes": point.budget_bytes,
                "times_budget": _share(point.budget_bytes, answer.budget_bytes),
                "hit_tokens": point.hit_tokens,
                "hit_rate": _share(point.hit_tokens, total_tokens),
            }
            for point in answer.points
        ],
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def live_view(data: Json, *, by_size: bool = False) -> RenderableType:
    """A line for each tier: what it hits now, and what it would at other budgets, which are
    named `by_size` or as multiples of what the tier has."""
    tiers = data["tiers"]
    label = _size if by_size else _times
    labels = [label(point) for point in tiers[0]["points"]]
    right = ["budget", "looked for", "hit rate now"]
    columns = ["tier", "policy", *right]
    right += [*labels, "sampled"]
    table = render.make_table(*columns, *labels, "sampled", right=right)
    for tier in tiers:
        share = tier["sample_rate"]
        table.add_row(
            render.tier_name(Tier[tier["tier"].upper()]),
            tier["policy"],
            render.size(tier["budget_bytes"]),
            f"{tier['total_tokens']:,} tokens",
            percent(tier["hit_rate"], 1),
            *[percent(point["hit_rate"], 1) for point in tier["points"]],
            f"{tier['sampled_keys']:,} keys" + (f", {100 * share:.3g} %" if share else ""),
        )
    note = (
        "Estimated: what LRU would have hit since the daemon started, had it had that budget "
        "all the time. How far the estimate at the budget that there is lies from the hit rate "
        "now says how good it is."
    )
    return Group(table, Text(note, style="dim"))


def _times(point: Json) -> str:
    return f"at {point['times_budget'] or 0:.3g}x"


def _size(point: Json) -> str:
    return f"at {render.size(point['budget_bytes'])}"
