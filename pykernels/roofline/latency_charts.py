"""The report's charts of latency: when steps ran and tokens came, and how TTFT and the gaps between tokens spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from .charts import NARROW, WIDE, Document, board, tick_text
from .points import PHASES
from .records import percentile
from .svg import Board, Scale
from .units import seconds


def gaps_of(data: Document) -> list[float]:
    """Seconds between deliveries, all requests."""
    return [b - a for r in data["requests"] for a, b in zip(r["deliveries"], r["deliveries"][1:], strict=False)]


def itl_histogram(data: Document, width: float) -> Board:
    """Gaps between deliveries, with their percentiles."""
    gaps = sorted(gaps_of(data))
    out = board(width, 260.0, "Distribution of the time between tokens")
    limit = max(percentile(gaps, 99) * 1.1, gaps[0] * 1.05)  # stragglers share the last bar instead of half the chart
    low = gaps[0] * 0.97
    bins = 60 if width == WIDE else 30
    step = (limit - low) / bins
    counts = [0] * bins
    for gap in gaps:
        counts[min(bins - 1, int((gap - low) / step))] += 1
    x = Scale(low * 1e3, limit * 1e3, 40.0, width - 12)
    y = Scale(0.0, float(max(counts)), out.height - 46, 66.0)
    out.x_axis(x, y.start, y.end, "ms between tokens", tick_text)
    out.y_axis(y, x.start, x.end, "", lambda v: f"{v:.0f}", 4)
    for i, count in enumerate(counts):
        if count:
            left, right = x((low + i * step) * 1e3), x((low + (i + 1) * step) * 1e3)
            more = " and above" if i == bins - 1 and gaps[-1] > limit else ""
            hover = f"{count} gaps from {seconds(low + i * step)}{more}"
            out.add(
                "rect",
                hover,
                x=left + 0.5,
                y=y(count),
                width=right - left - 1,
                height=y.start - y(count),
                cls="bar decode",
            )
    for row, name in enumerate(("p50", "p90", "p99")):
        value = data["metrics"][f"icl_{name}"]
        at, top = x(value * 1e3), 54.0 - 18 * row
        out.line(at, y.start, at, top - 10, "percentile")
        left = at > width - 110
        out.text(at - 5 if left else at + 5, top, f"{name} {seconds(value)}", "label", "end" if left else "start")
    return out


def first_request(data: Document) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Steps and requests that overlap the life of the first request: one run, or one batch."""
    first = min(data["requests"], key=lambda r: r["submitted"])
    start, end = first["submitted"], max(first["deliveries"], default=first["submitted"])
    requests = [r for r in data["requests"] if start <= r["submitted"] <= end]
    end = max([end, *(d for r in requests for d in r["deliveries"])])
    steps = [s for s in data["steps"] if start <= s["start"] <= end]
    return steps, requests


def timeline(data: Document, width: float) -> Board:
    """When each step of the first request ran, and when each token was handed over."""
    steps, requests = first_request(data)
    origin = min([r["submitted"] for r in requests] + [s["start"] for s in steps])
    ends = [s["start"] + s["seconds"] for s in steps] + [d for r in requests for d in r["deliveries"]]
    total = max([*ends, origin + 1e-6]) - origin
    out = board(width, 190.0, "Steps and tokens over time")
    x = Scale(0.0, total * 1e3, 66.0, width - 12)
    out.x_axis(x, 148.0, 12.0, "ms since the request was submitted", tick_text)
    for row, phase in enumerate(PHASES):
        top = 16.0 + 44 * row
        out.text(58, top + 19, phase, f"lane {phase}", "end")
        for step in steps:
            if step["phase"] == phase:
                left = x((step["start"] - origin) * 1e3)
                right = x((step["start"] + step["seconds"] - origin) * 1e3)
                hover = f"{phase}: {step['tokens']} tokens, context {step['context']}, {seconds(step['seconds'])}"
                out.add(
                    "rect", hover, x=left, y=top, width=max(right - left - 0.4, 0.6), height=30.0, cls=f"step {phase}"
                )
    out.text(58, 120, "tokens", "lane", "end")
    for request in requests:
        for moment in request["deliveries"]:
            at = x((moment - origin) * 1e3)
            out.line(at, 106, at, 126, "delivery")
    return out


def ttfts_of(data: Document) -> list[float]:
    """Seconds to the first token, request by request."""
    return [r["first_token"] - r["submitted"] for r in data["requests"] if r["first_token"] is not None]


def ttft_strip(data: Document, width: float) -> Board:
    """Every request's time to its first token: one dot each, those that would touch on top of each other."""
    values = ttfts_of(data)
    low, high = min(values), max(values)
    air = max((high - low) * 0.08, low * 0.02)
    out = board(width, 150.0, "Distribution of the time to first token")
    x = Scale((low - air) * 1e3, (high + air) * 1e3, 40.0, width - 12)
    base, size = out.height - 46, 11.0
    out.x_axis(x, base, 34.0, "ms to the first token", tick_text, 4 if width == NARROW else 8)
    ends: list[float] = []  # of each row of dots
    for number, value in sorted(enumerate(values, 1), key=lambda v: v[1]):
        at = x(value * 1e3)
        row = next((i for i, end in enumerate(ends) if at - end >= size), len(ends))
        ends[row : row + 1] = [at]
        height = min(row, 5)
        out.add(
            "circle", f"request {number}: {seconds(value)}", cx=at, cy=base - 9 - height * size, r=5.0, cls="dot ttft"
        )
    median = statistics.median(values)
    at = x(median * 1e3)
    out.line(at, base, at, 20.0, "percentile")
    left = at > width - 130
    out.text(at - 5 if left else at + 5, 26, f"median {seconds(median)}", "label", "end" if left else "start")
    return out
