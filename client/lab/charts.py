"""Charts as SVG: in the HTML report, with the colours of the page, or as a file.

A chart is drawn for one width in CSS pixels; the page shows the wide or the narrow one. The
`data-figure` of a mark is the path of its value in the report's data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ...proto.units import format_bytes, percent
from .optimal import OPTIMAL
from .page import CHART_STYLE, STYLE, Json, value_at

#: Policy -> mark, which tells policies apart without colour.
MARKS = {
    "lru": "circle",
    "s3fifo": "square",
    "arc": "diamond",
    "lfu": "triangle",
    "fifo": "cross",
    "optimal": "star",
}


LABELS = {"lru": "LRU", "s3fifo": "S3-FIFO", "arc": "ARC", "lfu": "LFU", "fifo": "FIFO",
          "optimal": "optimum"}  # fmt: skip


#: Values of a sampled curve in the legend.
SAMPLED = ("sample_rate", "mean_absolute_error")


def label(policy: str) -> str:
    """The display name of a policy."""
    return LABELS.get(policy, policy)


@dataclass(frozen=True, slots=True)
class Frame:
    """A plot area: maps values to pixels. The x axis is logarithmic."""

    width: int
    height: int
    x_min: float
    x_max: float
    y_max: float
    left: int = 52
    right: int = 16
    top: int = 14
    bottom: int = 46

    def x(self, value: float) -> float:
        span = math.log2(self.x_max / self.x_min)
        share = math.log2(max(value, self.x_min) / self.x_min) / span
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        return self.top + (1 - value / self.y_max) * (self.height - self.top - self.bottom)


def nice_steps(top: float, most: int = 6) -> list[float]:
    """Round axis values from 0 to at least `top`, at most `most` besides 0."""
    exponent = math.floor(math.log10(top)) - 1
    for digits in (1, 2, 5, 10, 20, 50, 100):
        step = digits * 10.0**exponent
        count = math.ceil(top / step - 1e-9)
        if count <= most:
            return [round(step * n, 12) for n in range(count + 1)]
    raise AssertionError("100 times the decade below is always enough")


def powers_between(low: float, high: float, most: int) -> list[int]:
    """Powers of two in a range: every n-th, so that there are at most `most`."""
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    stride = max(1, -(-len(exponents) // most))
    return [2**exponent for exponent in exponents if not exponent % stride]


def mark(policy: str, x: float, y: float, size: float = 4.5, extra: str = "") -> str:
    """The mark of a policy, centred."""
    shape = MARKS.get(policy, "circle")
    attributes = f'class="mark p-{escape(policy)}" {extra}'.rstrip()
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" {attributes}/>'
    half = (
        size * {"square": 0.9, "diamond": 1.25, "triangle": 1.2, "cross": 1.0, "star": 1.5}[shape]
    )
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1), (1, 0), (0, 1), (-1, 0)),
        "triangle": ((0, -1), (1, 0.8), (-1, 0.8)),
        "star": (
            (0, -1), (0.3, -0.3), (1, 0), (0.3, 0.3), (0, 1), (-0.3, 0.3), (-1, 0), (-0.3, -0.3),
        ),
        "cross": (
            (-1, -0.4), (-0.4, -0.4), (-0.4, -1), (0.4, -1), (0.4, -0.4), (1, -0.4),
            (1, 0.4), (0.4, 0.4), (0.4, 1), (-0.4, 1), (-0.4, 0.4), (-1, 0.4),
        ),
    }[shape]  # fmt: skip
    points = " ".join(f"{x + half * dx:.1f},{y + half * dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {attributes}/>'


def curve_chart(data: Json, width: int, height: int) -> str:
    """Hit rate by capacity: the LRU curve with its knee and ceiling, sampled curves, and a mark for
    every replay."""
    frame = _curve_frame(data, width, height)
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="Hit rate by cache capacity" data-x-min="{frame.x_min}" '
        f'data-x-max="{frame.x_max}" data-y-max="{frame.y_max}" data-left="{frame.left}" '
        f'data-right="{frame.right}" data-top="{frame.top}" data-bottom="{frame.bottom}">',
        *_axes(frame, data.get("block_bytes")),
        *_ceiling(frame, data["trace"]["infinite_hit_rate"]),
    ]
    for index, sampled in enumerate(data.get("sampled", ())):
        parts.append(_line(frame, sampled["points"], f"sampled s-{index}"))
    best = sorted(
        (
            {"capacity_blocks": r["capacity_blocks"], "hit_rate": r["overall_hit_rate"]}
            for r in data.get("results", ())
            if r["policy"] == OPTIMAL
        ),
        key=lambda point: point["capacity_blocks"],
    )
    if best:
        parts.append(_line(frame, best, "optimal"))
    parts.append(_line(frame, data["curve"]["points"], "lru-curve"))
    knee = data["curve"].get("knee")
    if knee is not None:
        parts += _knee(frame, knee)
    for index, result in enumerate(data.get("results", ())):
        if not frame.x_min <= result["capacity_blocks"] <= frame.x_max:
            continue
        text = (
            f"{label(result['policy'])}, {result['capacity_blocks']:,} blocks: "
            f"{100 * result['overall_hit_rate']:.2f} %"
        )
        point = mark(
            result["policy"],
            frame.x(result["capacity_blocks"]),
            frame.y(result["overall_hit_rate"]),
            extra=f'data-figure="results.{index}.overall_hit_rate"',
        )
        parts.append(f"<g>{point}<title>{escape(text)}</title></g>")
    parts.append('<g class="cursor" visibility="hidden"><line/><circle r="4"/></g></svg>')
    return "".join(parts)


def curve_picture(data: Json, width: int = 900, height: int = 430) -> str:
    """The chart as an SVG file of its own, with title, legend and the light colours."""
    colours = dict(reversed(re.findall(r"--(\w+): (#\w+);", STYLE)))  # the first of each: light
    style = re.sub(r"var\(--(\w+)\)", lambda name: colours[name[1]], CHART_STYLE)
    top, bottom = 40, 34
    drawn = curve_chart(data, width, height).removesuffix("</svg>").partition(">")[2]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-top} {width} '
        f'{height + top + bottom}" width="{width}" height="{height + top + bottom}" '
        'font-family="system-ui, sans-serif">',
        f'<style>{style}</style><rect width="100%" height="100%" y="{-top}" fill="white"/>',
        f'<text x="16" y="-12" font-size="18" font-weight="bold">{escape(data["title"])}</text>',
        drawn,
    ]
    x, y = 52.0, height + bottom / 2
    for sign, text in curve_legend(data, lambda path: percent(value_at(data, path))):
        parts.append(f'<g transform="translate({x:.0f} {y - 7})">{sign}</g>')
        parts.append(_text("note", x + 32, y + 4, "start", text))
        x += 56 + 6.5 * len(text)
    return "".join([*parts, "</svg>\n"])


def curve_legend(data: Json, shown: Callable[[str], str]) -> list[tuple[str, str]]:
    """(sign, name) of each line and mark: an SVG of 26 x 14 pixels, and HTML. `shown` formats the
    share at a path in the data."""
    line = '<line class="line {}" x1="0" x2="26" y1="7" y2="7"/>'
    estimated = "sample_rate" in data["curve"]
    found = [(line.format(""), "LRU, estimated" if estimated else "LRU, every capacity")]
    for index in range(len(data["sampled"])):
        rate, error = (shown(f"sampled.{index}.{name}") for name in SAMPLED)
        found.append((line.format("sampled"), f"sampled, {rate} of the blocks, error {error}"))
    policies = dict.fromkeys(result["policy"] for result in data["results"])
    return [*found, *((mark(policy, 19, 7, 5), escape(label(policy))) for policy in policies)]


def _curve_frame(data: Json, width: int, height: int) -> Frame:
    capacities = [result["capacity_blocks"] for result in data.get("results", ())]
    points = data["curve"]["points"]
    largest = max([points[-1]["capacity_blocks"], *capacities, 2])
    # Twelve octaves show every bend. The capacities of replays are never cut off.
    smallest = max(1, min([largest / 4096, *(c for c in capacities if c)]))
    rates = [point["hit_rate"] for point in points]
    rates += [result["overall_hit_rate"] for result in data.get("results", ())]
    top = max(*rates, data["trace"]["infinite_hit_rate"], 0.01)
    return Frame(width, height, smallest, largest, nice_steps(top * 1.04)[-1])


def _axes(frame: Frame, block_bytes: int | None) -> list[str]:
    left, right, base = frame.left, frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for rate in nice_steps(frame.y_max):
        y = frame.y(rate)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("tick", left - 7, y + 4, "end", f"{100 * rate:.4g} %"))
    for blocks in powers_between(frame.x_min, frame.x_max, (right - left) // 56):
        x = frame.x(blocks)
        parts.append(
            f'<line class="tickmark" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 5}"/>'
        )
        text = format_bytes(blocks * block_bytes) if block_bytes else short_blocks(blocks)
        parts.append(_text("tick", x, base + 19, "middle", text))
    name = "cache capacity" if block_bytes else "cache capacity, blocks"
    parts.append(_text("axis", (left + right) / 2, frame.height - 8, "middle", name))
    parts.append(f'<line class="base" x1="{left}" x2="{right}" y1="{base}" y2="{base}"/>')
    return parts


def _text(style: str, x: float, y: float, anchor: str, text: str, figure: str = "") -> str:
    about = f' data-figure="{figure}"' if figure else ""
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{about}>'
        f"{escape(text)}</text>"
    )


def _ceiling(frame: Frame, rate: float) -> list[str]:
    y = frame.y(rate)
    left, right = frame.left, frame.width - frame.right
    text = f"unlimited {100 * rate:.2f} %"
    return [
        f'<line class="ceiling" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>',
        _text("note", left + 6, y - 6, "start", text, "trace.infinite_hit_rate"),
    ]


def _knee(frame: Frame, knee: Json) -> list[str]:
    x, y = frame.x(knee["capacity_blocks"]), frame.y(knee["hit_rate"])
    base = frame.height - frame.bottom
    anchor, shift = ("end", -10) if x > frame.width * 0.6 else ("start", 10)
    text = f"knee {knee['capacity_blocks']:,} blocks"
    return [
        f'<line class="knee" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{base}"/>',
        f'<circle class="knee" cx="{x:.1f}" cy="{y:.1f}" r="6"/>',
        _text("note", x + shift, base - 10, anchor, text, "curve.knee.capacity_blocks"),
    ]


def _line(frame: Frame, points: Sequence[Json], style: str) -> str:
    inside = [p for p in points if frame.x_min <= p["capacity_blocks"] <= frame.x_max]
    steps = " ".join(
        f"{frame.x(p['capacity_blocks']):.1f},{frame.y(p['hit_rate']):.1f}" for p in inside
    )
    return f'<polyline class="line {style}" points="{steps}"/>'


def short_blocks(count: int) -> str:
    """A power of two on an axis: `512`, `4Ki`, `1Mi`."""
    for shift, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if count >= 1 << shift:
            return f"{count >> shift}{suffix}"
    return str(count)
