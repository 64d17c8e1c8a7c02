"""The curve and the residency as a PNG or SVG picture. Needs matplotlib (`prefixd[plots]`).

Input is the data of the HTML report. The same data gives the same SVG, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .charts import label, short_blocks, short_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = Mapping[str, Any]

#: Told apart without colour too; blue, orange and green differ for the colour-blind.
COLOURS = {
    "lru": "#0b62a8",
    "s3fifo": "#c8500a",
    "arc": "#0a7d55",
    "lfu": "#a8408c",
    "fifo": "#a87400",
}
MARKERS = {"lru": "o", "s3fifo": "s", "arc": "D", "lfu": "^", "fifo": "P"}
_OTHER_COLOUR, _OTHER_MARKER = "#59636e", "v"
_INK, _SOFT, _LINE = "#16191d", "#59636e", "#d8dde3"
_SETTINGS: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "svg.fonttype": "none",
    "svg.hashsalt": "prefixd",
}


class PlotsUnavailable(ValueError):
    """matplotlib is not installed; says how to get it."""

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'prefixd[plots]'")


def write_plot(data: Json, path: Path | str, kind: Literal["png", "svg"]) -> None:
    """Draw the data into a file. Raises PlotsUnavailable without matplotlib, OSError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsUnavailable from None

    has_results = bool(data["results"])
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(9, 7.2 if has_results else 4.8), dpi=160, layout="constrained")
        if has_results:
            upper, lower = figure.subplots(2, 1, height_ratios=(3, 1.25))
            _residency(lower, data)
        else:
            upper = figure.subplots()
        _curve(upper, data)
        # No date inside: the same data, the same file.
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(path, format=kind, metadata=metadata)


def _curve(axes: Axes, data: Json) -> None:
    points = data["curve"]["points"]
    capacities = [result["capacity_blocks"] for result in data["results"]]
    largest = max([points[-1]["capacity_blocks"], *capacities, 2])
    smallest = max(1, min([largest / 4096, *(c for c in capacities if c)]))
    ceiling = data["trace"]["infinite_hit_rate"]
    axes.axhline(100 * ceiling, color=COLOURS["arc"], linestyle=(0, (6, 4)), linewidth=1.2)
    axes.annotate(
        f"unlimited {100 * ceiling:.2f} %",
        (smallest, 100 * ceiling),
        xytext=(4, 4),
        textcoords="offset points",
        color=_INK,
        fontsize=9,
    )
    _line(
        axes,
        points,
        "LRU, estimated" if "sample_rate" in data["curve"] else "LRU, every capacity",
        color=COLOURS["lru"],
        linewidth=2.2,
        zorder=2.5,
    )
    for sampled in data["sampled"]:
        name = f"sampled, {100 * sampled['sample_rate']:.4g} % of the blocks"
        _line(axes, sampled["points"], name, color=_SOFT, linewidth=1.2, linestyle="--")
    _knee(axes, data["curve"]["knee"])
    for policy in dict.fromkeys(result["policy"] for result in data["results"]):
        of_policy = [r for r in data["results"] if r["policy"] == policy]
        axes.plot(
            [r["capacity_blocks"] for r in of_policy],
            [100 * r["overall_hit_rate"] for r in of_policy],
            linestyle="none",
            marker=MARKERS.get(policy, _OTHER_MARKER),
            markersize=7,
            markeredgecolor="white",
            markeredgewidth=0.8,
            color=COLOURS.get(policy, _OTHER_COLOUR),
            label=label(policy),
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(smallest, largest * 1.05)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("prompt tokens hit, %")
    axes.set_title(str(data["title"]), loc="left", fontsize=13, fontweight="bold", color=_INK)
    block_bytes = data.get("block_bytes")
    axes.set_xlabel("cache capacity" if block_bytes else "cache capacity, blocks")
    axes.xaxis.set_major_formatter(
        lambda blocks, _: (
            short_bytes(blocks * block_bytes) if block_bytes else short_blocks(int(blocks))
        )
    )
    axes.grid(axis="y", color=_LINE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9), fontsize=9)


def _line(axes: Axes, points: Sequence[Json], name: str, **style: Any) -> None:
    capacities = [point["capacity_blocks"] for point in points]
    axes.plot(capacities, [100 * point["hit_rate"] for point in points], label=name, **style)


def _knee(axes: Axes, knee: Json | None) -> None:
    if knee is None:
        return
    blocks, rate = knee["capacity_blocks"], 100 * knee["hit_rate"]
    axes.plot([blocks, blocks], [0, rate], color=_INK, linewidth=0.9, linestyle=":")
    axes.plot(blocks, rate, marker="o", markersize=11, markerfacecolor="none", color=_INK)
    axes.annotate(
        f"knee {blocks:,} blocks",
        (blocks, 0),
        xytext=(-5, 5),
        textcoords="offset points",
        ha="right",
        color=_INK,
        fontsize=9,
    )


def _residency(axes: Axes, data: Json) -> None:
    """What each policy kept at the end, as a share of each capacity, in groups."""
    results = data["results"]
    policies = list(dict.fromkeys(result["policy"] for result in results))
    capacities = sorted({result["capacity_blocks"] for result in results})
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        kept = {
            r["capacity_blocks"]: 100 * r["final_cache_blocks"] / r["capacity_blocks"]
            for r in results
            if r["policy"] == policy and r["capacity_blocks"]
        }
        places = [capacities.index(c) + (number + 0.5) * width - 0.4 for c in kept]
        axes.bar(places, list(kept.values()), width * 0.9, color=COLOURS.get(policy, _OTHER_COLOUR))
    axes.set_xticks(range(len(capacities)), [f"{c:,} blocks" for c in capacities])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 105)
    axes.set_ylabel("resident at\nthe end, %")
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_LINE)
    axes.spines[["top", "right"]].set_visible(False)
