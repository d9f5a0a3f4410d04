"""A drawing of `front.rows`: how much of its roof each benchmark reaches, and how its time changed."""

from __future__ import annotations

from collections.abc import Sequence

from pykernels.roofline.svg import Board, Scale
from pykernels.roofline.units import digits, seconds

from .front import Row

WIDTH, LINE, LABELS, RATIOS = 980.0, 22.0, 430.0, 90.0
STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; fill: #1c1f24; }
.grid { stroke: #ddd; } .axis { stroke: #888; } .tick, .label { fill: #666; }
.bar { fill: #3b6fb6; } .was { stroke: #c2571a; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  svg { background: #16181c; fill: #e6e8eb; } .grid { stroke: #333; } .tick, .label { fill: #9aa0a8; } .bar { fill: #6a9fe8; }
}
"""


def svg(rows: Sequence[Row]) -> str:
    """A file of its own: one bar per row, a mark where the baseline was. ValueError when no row has a roof."""
    drawn = [row for row in rows if row.roof_pct is not None]
    if not drawn:
        raise ValueError("no row has a roof: there is nothing to plot")
    board = Board(WIDTH, 40.0 + LINE * len(drawn) + 46.0, "bench", "Percent of the roof, by op, size and backend")
    x = Scale(0.0, 100.0, LABELS, WIDTH - RATIOS)
    board.x_axis(x, 40.0 + LINE * len(drawn), 34.0, "percent of the roof", digits)
    for index, row in enumerate(drawn):
        _bar(board, x, 40.0 + LINE * index, row)
    board.text(x.end + 12, 24.0, "now / before" if any(r.ratio for r in drawn) else "", "label")
    text = board.render().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return text.replace(">", f"><style>{STYLE}</style>", 1) + "\n"


def _bar(board: Board, x: Scale, top: float, row: Row) -> None:
    assert row.roof_pct is not None
    hover = f"{row.op} {row.size} on {row.backend}: {seconds(row.median)}, {row.speed}, {digits(row.roof_pct)} %"
    board.text(x.start - 8, top + 15, f"{row.op} {row.size} {row.backend}", "name", "end")
    width = max(0.5, x(min(row.roof_pct, 100.0)) - x.start)
    board.add("rect", hover, cls="bar", x=x.start, y=top + 3, width=width, height=LINE - 6)
    if row.ratio is not None:
        before = x(min(row.roof_pct * row.ratio, 100.0))
        board.line(before, top + 1, before, top + LINE - 1, "was", f"before: {digits(row.roof_pct * row.ratio)} %")
        board.text(x.end + 12, top + 15, f"{row.ratio:.3f}")
