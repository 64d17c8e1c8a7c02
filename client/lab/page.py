"""An HTML page with its data, style and script inside, which fetches nothing; and its charts as
SVG: in the page, with its colours, or as a file.

A chart is drawn for one width in CSS pixels; the page shows the wide or the narrow one. The
`data-figure` of a mark is the path of its value in the report's data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...proto.units import format_bytes, percent
from .optimal import OPTIMAL

#: The style of a chart. Its colours are variables of the page's style.
CHART_STYLE = """
.grid { stroke: var(--line); stroke-width: 1; }
.base, .tickmark { stroke: var(--soft); stroke-width: 1; }
.tick, .axis, .note { fill: var(--soft); font-size: 12px; }
.note { fill: var(--ink); paint-order: stroke; stroke: var(--bg); stroke-width: 3px; }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round; stroke: var(--lru); }
.sampled { stroke-width: 1.5; stroke-dasharray: 5 4; stroke: var(--soft); }
.ceiling { stroke: var(--good); stroke-width: 1.5; stroke-dasharray: 7 5; }
line.knee { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
circle.knee { fill: none; stroke: var(--ink); stroke-width: 1.8; }
.mark { stroke: var(--bg); stroke-width: 1; }
.cursor line { stroke: var(--soft); stroke-width: 1; }
.cursor circle { fill: var(--accent); stroke: var(--bg); stroke-width: 1.5; }
.p-lru { fill: var(--lru); background: var(--lru); }
.p-s3fifo { fill: var(--s3fifo); background: var(--s3fifo); }
.p-arc { fill: var(--arc); background: var(--arc); }
.p-lfu { fill: var(--lfu); background: var(--lfu); }
.p-fifo { fill: var(--fifo); background: var(--fifo); }
.p-optimal { fill: var(--soft); background: var(--soft); }
.line.optimal { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 2 4; }
"""


STYLE = (
    CHART_STYLE
    + """
:root {
  color-scheme: light dark;
  --bg: #ffffff; --panel: #f6f7f9; --ink: #16191d; --soft: #59636e; --line: #d8dde3;
  --accent: #0b62a8; --good: #0a7d55;
  --lru: #0b62a8; --s3fifo: #c8500a; --arc: #0a7d55; --lfu: #a8408c; --fifo: #a87400;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #0f1318; --panel: #171d24; --ink: #e8ecf1; --soft: #9aa7b4; --line: #2c3540;
    --accent: #62b5f5; --good: #4fcf9f;
    --lru: #62b5f5; --s3fifo: #ff9450; --arc: #4fcf9f; --lfu: #e58fcb; --fifo: #e8b83a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 940px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 6px; }
p { margin: 6px 0; max-width: 70ch; }
.soft { color: var(--soft); }
.answer { font-size: 17px; margin: 18px 0; }
.answer span[data-figure] { white-space: nowrap; }
.answer .soft { font-size: 14px; display: block; margin-top: 6px; }
.cards {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(max(160px, 30%), 1fr));
  gap: 10px; margin: 20px 0;
}
.card {
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px;
}
.card b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.card span.name { color: var(--soft); font-size: 13px; }
figure { margin: 14px 0; position: relative; }
svg.chart { display: block; width: 100%; height: auto; }
.narrow { display: none; }
@media (max-width: 620px) {
  .wide { display: none; } .narrow { display: block; }
  main { padding: 20px 14px 36px; }
}
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 8px 0 0;
  font-size: 13px; color: var(--soft); list-style: none;
}
.legend li { display: flex; align-items: center; gap: 6px; }
output.tip {
  position: absolute; top: 26px; left: 64px; padding: 4px 10px; font-size: 13px;
  background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  font-variant-numeric: tabular-nums; pointer-events: none;
}
output.tip:empty { display: none; }
.scroll {
  overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin: 12px 0 4px;
  background:
    linear-gradient(90deg, var(--bg) 30%, transparent) 0 0 / 40px 100% no-repeat local,
    linear-gradient(270deg, var(--bg) 30%, transparent) 100% 0 / 40px 100% no-repeat local,
    linear-gradient(90deg, var(--line), transparent) 0 0 / 12px 100% no-repeat scroll,
    linear-gradient(270deg, var(--line), transparent) 100% 0 / 12px 100% no-repeat scroll;
}
.more { color: var(--soft); font-size: 13px; margin: 0 0 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
table { font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; background: var(--panel); }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
td.best { color: var(--good); font-weight: 700; }
td small { color: var(--soft); font-size: 12px; display: block; }
td.meter { width: 34%; min-width: 130px; }
.bar { background: var(--line); border-radius: 3px; height: 10px; overflow: hidden; }
.bar i { display: block; height: 100%; }
.bar.stack { display: flex; height: 18px; }
.from-local { background: var(--lru); }
.from-shared { background: var(--arc); }
.from-peer { background: var(--s3fifo); }
i.from { display: inline-block; width: 12px; height: 12px; border-radius: 3px; }
footer {
  margin-top: 44px; padding-top: 14px; border-top: 1px solid var(--line);
  font-size: 13px; color: var(--soft);
}
footer a { color: var(--accent); }
@media print { .scroll { overflow: visible; } output.tip, .more { display: none; } }
"""
)


#: Shows values under the pointer on a curve, marks tables that are wider than the window as
#: scrollable, and saves the data as a file. The page is complete without it.
SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
for (const chart of document.querySelectorAll("svg.chart")) {
  const tip = chart.parentElement.querySelector("output.tip");
  const cursor = chart.querySelector(".cursor");
  const at = Object.fromEntries(Object.entries(chart.dataset).map(([k, v]) => [k, Number(v)]));
  const box = chart.viewBox.baseVal;
  const span = Math.log2(at.xMax / at.xMin);
  const wide = box.width - at.left - at.right, high = box.height - at.top - at.bottom;
  const x = (blocks) => at.left + Math.log2(blocks / at.xMin) / span * wide;
  const y = (rate) => at.top + (1 - rate / at.yMax) * high;
  const points = data.curve.points;
  const shown = points.filter((p) => p.capacity_blocks >= at.xMin && p.capacity_blocks <= at.xMax);
  chart.addEventListener("pointermove", (event) => {
    const seen = chart.getBoundingClientRect();
    const here = (event.clientX - seen.left) * box.width / seen.width;
    const away = (p) => Math.abs(x(p.capacity_blocks) - here);
    const best = shown.reduce((a, b) => away(b) < away(a) ? b : a);
    const [line, dot] = cursor.children;
    const at_x = x(best.capacity_blocks);
    line.setAttribute("x1", at_x);
    line.setAttribute("x2", at_x);
    line.setAttribute("y1", at.top);
    line.setAttribute("y2", at.top + high);
    dot.setAttribute("cx", at_x);
    dot.setAttribute("cy", y(best.hit_rate));
    cursor.setAttribute("visibility", "visible");
    const blocks = best.capacity_blocks.toLocaleString("en");
    tip.textContent = blocks + " blocks: " + (100 * best.hit_rate).toFixed(2) + " %";
  });
  chart.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tip.textContent = "";
  });
}
for (const box of document.querySelectorAll("div.scroll")) {
  const more = box.nextElementSibling;
  const look = () => { more.hidden = box.scrollWidth <= box.clientWidth; };
  new ResizeObserver(look).observe(box);
}
const save = document.getElementById("save");
const text = JSON.stringify(data, null, 2);
save.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
save.download = "report.json";
save.hidden = false;
"""

Json = Mapping[str, Any]
Format = Callable[[Any], str]


def count(value: float) -> str:
    """`182,790`."""
    return f"{value:,.0f}"


def render_page(data: Json, subtitle: str, parts: Sequence[str], footer: str) -> str:
    """A page around its parts, with the data in it.

    `data` has a `title` and a `prefixd_version`; `parts` and `footer` are HTML.
    """
    title = escape(str(data["title"]))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Makes the browser enforce that nothing is fetched.
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">",
            '<link rel="icon" href="data:,">',
            f"<title>{title}: prefix-cache report</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{title}</h1>",
            f'<p class="soft">{escape(subtitle)}</p>',
            *parts,
            f"<footer>prefixd {escape(str(data['prefixd_version']))}. {footer} "
            '<a id="save" hidden>Save the data (JSON)</a></footer></main>',
            f'<script type="application/json" id="data">{_embedded(data)}</script>',
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _embedded(data: Json) -> str:
    # No string may close the script element or open a comment in it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def figure(data: Json, path: str, form: Format) -> str:
    """The value at a dotted path as HTML, with the path."""
    return f'<span data-figure="{path}">{escape(form(value_at(data, path)))}</span>'


def cards(data: Json, figures: Sequence[tuple[str, str, Format]]) -> str:
    """The main figures; each is a name, the path of its value and how to format it."""
    inside = "".join(
        f'<div class="card"><b>{figure(data, path, form)}</b><span class="name">{name}</span></div>'
        for name, path, form in figures
    )
    return f'<div class="cards">{inside}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table from the HTML of its column names and cells. A cell with attributes is a whole
    `<td ...>...</td>`."""
    names = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        '<p class="more" hidden>There are more columns: scroll the table sideways.</p>'
    )


def _cell(html: str) -> str:
    return html if html.startswith("<td") else f"<td>{html}</td>"


def value_at(data: Any, path: str) -> Any:
    """The value at a dotted path. Raises KeyError or IndexError if there is none."""
    for step in path.split("."):
        data = data[int(step)] if isinstance(data, list) else data[step]
    return data


# ---- charts

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
        size = format_bytes(blocks * (block_bytes or 1))
        text = size if block_bytes else size.removesuffix("B")  # such as 512, 4Ki
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
