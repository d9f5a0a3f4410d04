"""The chart of a result for a README: how many times as fast as each other engine, job by job. A file of its own, with its
own style sheet, readable on light and dark pages."""

from __future__ import annotations

from pykernels.roofline.svg import Board, Scale

from . import document
from .document import Document
from .report import job_order, job_title
from .spread import Spread

WIDTH, LABELS, ROW, BAR, GAP = 880.0, 250.0, 15.0, 11.0, 13.0
TOP, BOTTOM = 64.0, 44.0
SERIES = 5
STYLE = """
svg { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
.paper { fill: #ffffff; } text { fill: #1d2126; } .tick, .label { fill: #5c6470; } .title { font-size: 15px; font-weight: 600; }
.grid { stroke: #eceae4; } .axis { stroke: #8b929c; } .one { stroke: #1d2126; stroke-dasharray: 3 3; }
.spread { stroke: #1d2126; stroke-width: 1.2; } .value { font-size: 11px; }
.s0 { fill: #0072b2; } .s1 { fill: #d55e00; } .s2 { fill: #009e73; } .s3 { fill: #cc79a7; } .s4 { fill: #e69f00; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #1b1f24; } text { fill: #e8e6e1; } .tick, .label { fill: #a6adb7; }
  .grid { stroke: #272c32; } .axis { stroke: #7d858f; } .one, .spread { stroke: #e8e6e1; }
  .s0 { fill: #3f97d0; } .s1 { fill: #e0762f; } .s2 { fill: #2db58c; } .s3 { fill: #d58fb6; } .s4 { fill: #e0a92e; }
}
"""


def bars(data: Document) -> dict[str, dict[str, Spread]]:
    """job -> peer -> ours / theirs, of the jobs that both have."""
    names = document.measured(data)
    peers = [n for n in names if not n.startswith("pykernels")]
    found: dict[str, dict[str, Spread]] = {}
    for job in job_order(data) if "pykernels" in names else ():
        for peer in peers:
            ratio = document.ratio(data, "pykernels", peer, job)
            if ratio is not None:
                found.setdefault(job, {})[peer] = ratio
    return found


def draw(data: Document) -> str:
    """An SVG file. Bars are medians of ratios within a round, whiskers their quartiles."""
    groups = bars(data)
    peers = list(dict.fromkeys(p for group in groups.values() for p in group))
    height = TOP + BOTTOM + sum(len(group) * ROW + GAP for group in groups.values())
    machine = data["machine"]
    title = f"pykernels against other engines: {data['model']}, {machine['cores']} cores of {machine['cpu']}"
    out = Board(WIDTH, height, "wide", title)
    out.add("rect", width=WIDTH, height=height, cls="paper")
    out.text(16, 24, "Times as fast as each engine", "title")
    _legend(out, peers)
    most = max((r.high for group in groups.values() for r in group.values()), default=1.0)
    x = Scale(0.0, 1.12 * max(most, 1.0), LABELS, WIDTH - 24)
    out.x_axis(x, height - BOTTOM, TOP - 8, title, lambda v: f"{v:g}x")
    out.line(x(1.0), height - BOTTOM, x(1.0), TOP - 8, "one")
    top = TOP
    for job, group in groups.items():
        middle = top + len(group) * ROW / 2 + 3
        out.text(LABELS - 10, middle, job_title(data["jobs"][job]), "", "end")
        for peer, ratio in group.items():
            _bar(out, x, top, ratio, f"s{min(peers.index(peer), SERIES - 1)}", f"{job}: {ratio.median:.2f}x {peer}")
            top += ROW
        top += GAP
    svg = out.render().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    start = svg.index(">") + 1
    return f"{svg[:start]}<style>{STYLE}</style>{svg[start:]}\n"


def _bar(out: Board, x: Scale, top: float, ratio: Spread, cls: str, hover: str) -> None:
    out.add("rect", hover, x=x.start, y=top, width=x(ratio.median) - x.start, height=BAR, rx=1.5, cls=cls)
    out.line(x(ratio.low), top + BAR / 2, x(ratio.high), top + BAR / 2, "spread")
    out.text(x(max(ratio.high, ratio.median)) + 5, top + BAR - 1, f"{ratio.median:.1f}x", "value")


def _legend(out: Board, peers: list[str]) -> None:
    left = LABELS
    for number, peer in enumerate(peers):
        out.add("rect", x=left, y=34.0, width=BAR, height=BAR, rx=1.5, cls=f"s{min(number, SERIES - 1)}")
        out.text(left + 16, 44, peer, "label")
        left += 32 + 7.0 * len(peer)
