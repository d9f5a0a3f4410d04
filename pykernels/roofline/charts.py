"""The report's charts. Each takes the document of `report.document` and draws what is in it, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .points import PHASES
from .svg import Board, Box, Scale, place
from .units import digits, rate, seconds, text

Document = Mapping[str, Any]
WIDE, NARROW = 880.0, 380.0
PEAK_NAMES = {"float32": "float32", "bfloat16": "bfloat16 dot", "int8": "int8 dot", "int8_pairs": "int8 pairs"}
SLOPES = ("l1", "l2", "l3", "dram")
LEVEL_NAMES = {"l1": "L1", "l2": "L2", "l3": "L3", "dram": "DRAM"}
LABEL = 12.0  # font size of labels, in drawing units
BOLD = 0.64  # mean width of a bold character, in font sizes


def board(width: float, height: float, title: str) -> Board:
    return Board(width, height, "wide" if width == WIDE else "narrow", title)


def both(chart: Callable[[Document, float], Board], data: Document) -> str:
    """The chart for wide and for narrow screens; the style sheet shows one of them."""
    return chart(data, WIDE).render() + chart(data, NARROW).render()


def short_name(op: Mapping[str, Any]) -> str:
    """What tells an op from its siblings: its label, a matrix's columns and rows, else its name."""
    if op["label"]:
        return str(op["label"])
    if " -> " in op["shape"]:
        return str(op["shape"]).split(" x ", 1)[1].split(",")[0].replace(" -> ", " → ")
    return str(op["name"])


def display_name(op: Mapping[str, Any]) -> str:
    return str(op["name"]) if short_name(op) == op["name"] else f"{op['name']} · {short_name(op)}"


def tick_text(value: float) -> str:
    """The shortest writing of a round number: `0.1`, `25`, `8,000`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def rate_tick(value: float) -> str:
    """A power of ten of FLOP/s: `100 G`."""
    power = min(int(math.log10(value) + 1e-9) // 3, 4)
    return f"{value / 1000.0**power:.0f} {' kMGT'[power]}".strip()


# ---- roofline -------------------------------------------------------------------------------------------------------
def _ranges(ops: Sequence[Mapping[str, Any]], peak: float, slope: float) -> tuple[float, float, float, float]:
    """Axis ranges that hold every point, the ridge and some air."""
    intensities = [op["intensity"] for op in ops]
    rates = [op["flops"] / op["time"] for op in ops]
    low_x = 10 ** math.floor(math.log10(min([*intensities, 1.0]) / 1.3))
    high_x = 10 ** math.ceil(math.log10(max([*intensities, 2 * peak / slope])))
    low_y = 10 ** math.floor(math.log10(min([*rates, low_x * slope]) / 1.3))
    return low_x, high_x, low_y, peak * 2.2


def roofline(data: Document, width: float) -> Board:
    """Log-log: FLOP per byte against FLOP/s; slopes are bandwidths, roofs are peaks, a point is an op."""
    table = data["ceilings"]["table"]
    ops = [op for op in data["ops"] if op["flops"] > 0 and op["bytes"] > 0]
    wide = width == WIDE
    out = board(width, 520.0 if wide else 460.0, "Roofline: work per byte against speed, both phases")
    peaks = {n: table[n]["value"] for n in PEAK_NAMES if n in table}
    slopes = {n: table[n]["value"] for n in SLOPES if n in table}
    low_x, high_x, low_y, high_y = _ranges(ops, max(peaks.values()), slopes["dram"])
    x = Scale(low_x, high_x, 58.0, width - 14, log=True)
    y = Scale(low_y, high_y, out.height - 46, 34.0, log=True)
    out.x_axis(x, y.start, y.end, "FLOP per byte", tick_text)
    out.y_axis(y, x.start, x.end, "FLOP/s", rate_tick)
    marks = _marks(x, y, ops, 1.0 if wide else 0.75)
    taken: list[Box] = []
    labels = [_peak(out, x, y, name, value, max(slopes.values()), taken) for name, value in peaks.items()]
    for name, value in slopes.items():
        labels.append(_slope(out, x, y, name, value, max(peaks.values()), taken, [mark.body for mark in marks]))
    for px, py, words, cls, turn in labels:  # over all lines, under all points
        out.text(px, py, words, cls, "start", turn)
    _points(out, marks, Box(x.start, y.end, x.end - x.start, y.start - y.end), taken, wide)
    return out


Label = tuple[float, float, str, str, float]  # x, y, words, class, turn


def _slope(
    out: Board, x: Scale, y: Scale, name: str, value: float, top: float, taken: list[Box], bodies: list[Box]
) -> Label:
    """Draws a bandwidth and returns its label: along the line, where it covers the fewest points."""
    start, end = max(x.low, y.low / value), min(x.high, top / value)
    a, b = (x(start), y(start * value)), (x(end), y(end * value))
    out.path([a, b], f"roof slope {name}", f"{LEVEL_NAMES[name]}: {rate(value, 'B/s')}")
    avoid = [*bodies, *taken]
    taken += [Box(a[0] + i / 23 * (b[0] - a[0]) - 2, a[1] + i / 23 * (b[1] - a[1]) - 2, 4, 4) for i in range(24)]
    words = f"{LEVEL_NAMES[name]} {rate(value, 'B/s')}"
    turn = math.atan2(b[1] - a[1], b[0] - a[0])
    side = 16 if name == "dram" else -7  # DRAM below its line, faster levels above: two slopes never share a place
    dx, dy = -math.sin(turn) * side, math.cos(turn) * side

    def boxes(along: float) -> list[Box]:
        px, py = a[0] + along * (b[0] - a[0]) + dx, a[1] + along * (b[1] - a[1]) + dy
        steps = [len(words) * LABEL * BOLD * i / 7 for i in range(8)]
        return [Box(px + s * math.cos(turn) - 6, py + s * math.sin(turn) - 9, 12, 12) for s in steps]

    spots = [boxes(i / 20) for i in range(1, 14)]
    best = min(spots, key=lambda spot: sum(box.overlap(other) for box in spot for other in avoid))
    taken += best
    return best[0].x + 6, best[0].y + 9, words, f"roof-label {name}", math.degrees(turn)


def _peak(out: Board, x: Scale, y: Scale, name: str, value: float, fastest: float, taken: list[Box]) -> Label:
    """Draws a compute roof and returns its label: by the ridge, since the points of prefill crowd the other end."""
    start = max(x.low, value / fastest)
    out.line(x(start), y(value), x.end, y(value), f"roof peak {name}", f"{PEAK_NAMES[name]}: {rate(value, 'FLOP/s')}")
    words = f"{PEAK_NAMES[name]} {rate(value, 'FLOP/s')}" if out.width == WIDE else f"{name} {rate(value, '')}"
    box = Box(x(start) + 30, y(value) - 18, len(words) * LABEL * BOLD, 14)
    if any(box.overlap(t) for t in taken):  # two peaks close together: the second name goes under its line
        box.y = y(value) + 4
    taken += [box, Box(x(start), y(value) - 2, x.end - x(start), 4)]
    return box.x, box.y + 12, words, f"roof-label {name}", 0.0


@dataclass(frozen=True)
class Mark:
    """A point of the roofline: where it is, how large, what it says."""

    x: float
    y: float
    radius: float
    share: float  # of the phase's op time
    op: Mapping[str, Any]

    @property
    def body(self) -> Box:
        return Box(self.x - self.radius * 0.8, self.y - self.radius * 0.8, self.radius * 1.6, self.radius * 1.6)

    @property
    def hover(self) -> str:
        op = self.op
        return (
            f"{display_name(op)} ({op['phase']})\n{op['shape']}\n{digits(100 * self.share)} % of the phase's op time\n"
            f"{rate(op['flops'] / op['time'], 'FLOP/s')}, {rate(op['bytes'] / op['time'], 'B/s')}\n"
            f"{digits(op['roof_pct'])} % of the roof ({op['bound']})"
        )


def _marks(x: Scale, y: Scale, ops: Sequence[Mapping[str, Any]], size: float) -> list[Mark]:
    """Points, largest first, so that small ones are drawn last and stay visible."""
    spans = {p: sum(op["total"] for op in ops if op["phase"] == p) for p in PHASES}
    marks = []
    for op in ops:
        share = op["total"] / spans[op["phase"]]
        radius = (3.5 + 15 * math.sqrt(share)) * size
        marks.append(Mark(x(op["intensity"]), y(op["flops"] / op["time"]), radius, share, op))
    return sorted(marks, key=lambda m: -m.share)


def _points(out: Board, marks: Sequence[Mark], frame: Box, taken: list[Box], wide: bool) -> None:
    for mark in marks:
        if mark.op["phase"] == "prefill":
            out.add("circle", mark.hover, cx=mark.x, cy=mark.y, r=mark.radius, cls="point prefill")
        else:
            side = mark.radius * 1.7
            left, top = mark.x - side / 2, mark.y - side / 2
            out.add("rect", mark.hover, x=left, y=top, width=side, height=side, rx=2.0, cls="point decode")
    size = LABEL if wide else LABEL - 1
    for mark in marks:
        if mark.share < (0.02 if wide else 0.08):
            continue
        words = f"{short_name(mark.op)} {mark.op['roof_pct']:.0f} %"
        others = [m.body for m in marks if m is not mark]
        box = place((mark.x, mark.y), mark.radius, words, size, frame, [*taken, *others])
        if box is not None:
            taken.append(box)
            near = min(max(mark.x, box.x), box.x + box.width), min(max(mark.y, box.y), box.y + box.height)
            if math.dist(near, (mark.x, mark.y)) > mark.radius + 10:
                out.line(mark.x, mark.y, near[0], near[1], "leader")
            out.text(box.x, box.y + size * 0.88, words, f"point-label {mark.op['phase']}")


# ---- where the time goes --------------------------------------------------------------------------------------------
SERIES = 8  # colours that stay apart for every kind of colour vision


def time_groups(data: Document) -> dict[str, list[tuple[str, float]]]:
    """phase -> (op name, share of the phase's wall time), largest first; what is outside of ops last."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for phase in PHASES:
        totals: dict[str, float] = {}
        for op in data["ops"]:
            if op["phase"] == phase:
                totals[display_name(op)] = totals.get(display_name(op), 0.0) + op["total"]
        outside = data["metrics"].get(f"{phase}_overhead_pct") or 0.0
        inside = sum(totals.values())
        shares = sorted(((n, t / inside * (100 - outside)) for n, t in totals.items()), key=lambda s: -s[1])
        if shares:
            groups[phase] = [*shares, ("outside ops", outside)]
    return groups


def series_of(data: Document) -> dict[str, int]:
    """Colour number of each op name, the same in both phases. The names with the largest share get their own, all
    others the last one."""
    best: dict[str, float] = {}
    for shares in time_groups(data).values():
        for name, share in shares[:-1]:
            best[name] = max(best.get(name, 0.0), share)
    order = sorted(best, key=lambda n: -best[n])
    return {name: min(i, SERIES - 1) for i, name in enumerate(order)}


def time_bars(data: Document, width: float) -> Board:
    """One stacked bar per phase: the share of every op."""
    groups, colours = time_groups(data), series_of(data)
    out = board(width, 74.0 * len(groups) - 10, "Share of the time that each op takes, per phase")
    for row, (phase, shares) in enumerate(groups.items()):
        top = 26.0 + 74.0 * row
        per_step = data["metrics"][f"{phase}_seconds"] / data["metrics"][f"{phase}_steps"]
        out.text(0, top - 8, phase, f"bar-title {phase}")
        out.text(width, top - 8, f"{seconds(per_step)} per step", "tick", "end")
        left = 0.0
        for name, share in shares:
            wide = share / 100 * width
            cls = "segment outside" if name == "outside ops" else f"segment s{colours[name]}"
            out.add(
                "rect", f"{name}: {digits(share)} %", x=left, y=top, width=max(wide - 1.0, 0.4), height=34.0, cls=cls
            )
            words = f"{name.split(' · ')[-1]} {share:.0f} %"
            label = "segment-label" if cls == "segment outside" else f"segment-label on{colours[name]}"
            if len(words) * LABEL * BOLD < wide - 10:
                out.text(left + 6, top + 22, words, label)
            elif wide > 34:
                out.text(left + 6, top + 22, f"{share:.0f} %", label)
            left += wide
    return out


# ---- memory, and the price of doing without -------------------------------------------------------------------------
def kv_memory(data: Document, width: float) -> Board:
    """Bytes of KV cache against context, per format, beside the weights."""
    memory = data["kv_memory"]
    formats, longest = memory["bytes_per_token"], memory["max_context"]
    weights = memory["weights_bytes"]
    out = board(width, 300.0, "KV memory against context")
    high = 1.12 * max([weights, *(b * longest for b in formats.values())])
    x = Scale(0.0, float(longest), 54.0, width - 96)
    y = Scale(0.0, high / 1e6, out.height - 46, 34.0)
    out.x_axis(x, y.start, y.end, "tokens in context", tick_text, 4 if width == NARROW else 8)
    out.y_axis(y, x.start, x.end, "MB", tick_text)
    ends: list[float] = []

    def label(value: float, words: str, cls: str) -> None:
        at = y(value / 1e6) + 4
        while any(abs(at - other) < 13 for other in ends):
            at -= 1
        ends.append(at)
        out.text(x.end + 6, at, words, cls)

    out.line(x.start, y(weights / 1e6), x.end, y(weights / 1e6), "line weights", f"weights: {rate(weights, 'B')}")
    label(weights, "weights", "line-label weights")
    for name, per_token in sorted(formats.items(), key=lambda f: f[1]):
        hover = f"{name}: {rate(per_token, 'B')} per token, {rate(per_token * longest, 'B')} at {longest:,}"
        out.path([(x(0), y(0)), (x(longest), y(per_token * longest / 1e6))], f"line kv-{name}", hover)
        label(per_token * longest, name, f"line-label kv-{name}")
    return out


def no_cache(data: Document, width: float) -> Board:
    """Milliseconds per token with the cache, and when everything is computed again for each token."""
    rows = data["no_cache"]
    contexts, cached, again = rows["context"], rows["cached_seconds"], rows["recomputed_seconds"]
    out = board(width, 300.0, "Time per token with and without a KV cache")
    low, high = min(cached + again) * 1e3, max(cached + again) * 1e3
    x = Scale(min(contexts) / 1.15, max(contexts) * 1.15, 54.0, width - 96, log=True)
    y = Scale(10 ** math.floor(math.log10(low)), high * 1.6, out.height - 46, 34.0, log=True)
    out.y_axis(y, x.start, x.end, "ms per token", tick_text)
    for context in contexts:
        out.line(x(context), y.start, x(context), y.end, "grid")
        out.text(x(context), y.start + 16, tick_text(context), "tick", "middle")
    out.line(x.start, y.start, x.end, y.start, "axis")
    out.text((x.start + x.end) / 2, y.start + 34, "tokens in context", "label", "middle")
    for values, name, cls in ((again, "no cache", "again"), (cached, "KV cache", "cached")):
        points = [(x(c), y(v * 1e3)) for c, v in zip(contexts, values, strict=True)]
        out.path(points, f"line {cls}")
        for (px, py), context, value in zip(points, contexts, values, strict=True):
            out.add(
                "circle",
                f"{name} at {tick_text(context)} tokens: {seconds(value)}",
                cx=px,
                cy=py,
                r=4.5,
                cls=f"dot {cls}",
            )
        out.text(points[-1][0] + 10, points[-1][1] - 2, name, f"line-label {cls}")
        out.text(points[-1][0] + 10, points[-1][1] + 12, text(values[-1], "s"), "tick")
    return out
