"""An HTML page with its data, style and script inside. It fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

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
