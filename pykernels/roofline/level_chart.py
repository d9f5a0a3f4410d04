"""The hierarchical roofline: a kernel as one point per memory level, all at its speed, each under its level's slope."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .charts import BOLD, LABEL, LEVEL_NAMES, WIDE, Document, board, rate_tick, tick_text
from .levels import LEVELS
from .svg import Board, Box, Scale, place
from .units import digits, rate, seconds

Point = tuple[str, Mapping[str, Any]]  # what it is, and the point of a profile


def level_points(data: Document) -> list[Point]:
    """Points of all profiles that can be drawn: with FLOPs, and bytes at one level at least."""
    return list(_points(data))


def _points(data: Document) -> Iterator[Point]:
    for profile in data.get("profiles", ()):
        for point in profile["points"]:
            if point["flops"] and any(level["bytes"] for level in point["levels"].values()):
                name = profile["op"] if point["name"] == "call" else short_kernel(point["name"])
                yield f"{name} ({profile['backend']})", point


def levels_of(data: Document) -> list[str]:
    """The levels that any profile has, nearest to the cores first."""
    seen = {level for _, point in level_points(data) for level in point["levels"]}
    return [level for level in LEVELS if level in seen]


def short_kernel(name: str) -> str:
    """`void pk::cuda::<unnamed>::decode_kernel<__nv_bfloat16, 128>(...)` -> `decode_kernel`."""
    plain = name.removeprefix("void ").replace("<unnamed>", "")
    return plain.split("<", 1)[0].split("(", 1)[0].rsplit("::", 1)[-1]


def _roofs(data: Document, found: list[Point]) -> tuple[dict[str, float], float]:
    """Bandwidth of each level and the highest peak: the profile's own where it has them, else the machine's."""
    slopes: dict[str, float] = {}
    for _, point in found:
        for name, level in point["levels"].items():
            if level["roof"]:
                slopes[name] = max(level["roof"], slopes.get(name, 0.0))
    peaks = [point["peak"] for _, point in found if point["peak"]]
    table = data["ceilings"]["table"]
    if not slopes:
        slopes = {name: table[name]["value"] for name in LEVEL_NAMES if name in table}
    return slopes, max(peaks or [c["value"] for c in table.values() if c["unit"] == "FLOP/s"])


def level_roofline(data: Document, width: float) -> Board:
    found = level_points(data)
    slopes, peak = _roofs(data, found)
    speeds = [point["flops"] / point["seconds"] for _, point in found]
    spots = [lv["intensity"] for _, p in found for lv in p["levels"].values() if lv["intensity"]]
    out = board(width, 420.0, "Hierarchical roofline: work per byte at every memory level against speed")
    high = max([peak, *speeds])
    low_x = 10 ** math.floor(math.log10(min(spots) / 1.5))
    high_x = 10 ** math.ceil(math.log10(max([*spots, 2 * peak / min(slopes.values())])))
    low_y = 10 ** math.floor(math.log10(min([*speeds, low_x * min(slopes.values())]) / 1.3))
    x = Scale(low_x, high_x, 58.0, width - 14, log=True)
    y = Scale(low_y, high * 2.2, out.height - 46, 34.0, log=True)
    out.x_axis(x, y.start, y.end, "FLOP per byte at the level", tick_text)
    out.y_axis(y, x.start, x.end, "FLOP/s", rate_tick)
    taken: list[Box] = []
    for name, value in sorted(slopes.items(), key=lambda s: -s[1]):
        _slope(out, x, y, name, value, peak, taken)
    ridge = peak / max(slopes.values())
    out.line(x(max(x.low, ridge)), y(peak), x.end, y(peak), "roof peak float32", f"peak: {rate(peak, 'FLOP/s')}")
    out.text(x.end - 4, y(peak) - 6, f"peak {rate(peak, 'FLOP/s')}", "roof-label float32", "end")
    _draw(out, x, y, found, taken, width == WIDE)
    return out


def _slope(out: Board, x: Scale, y: Scale, name: str, value: float, peak: float, taken: list[Box]) -> None:
    """Draws a bandwidth up to the peak, its name along the lower end, where few kernels are."""
    start, end = max(x.low, y.low / value), min(x.high, peak / value)
    a, b = (x(start), y(start * value)), (x(end), y(end * value))
    words = f"{LEVEL_NAMES[name]} {rate(value, 'B/s')}"
    out.path([a, b], f"roof slope {name}", f"{LEVEL_NAMES[name]}: {rate(value, 'B/s')}")
    turn = math.atan2(b[1] - a[1], b[0] - a[0])
    px, py = a[0] + 8 * math.cos(turn) + 6 * math.sin(turn), a[1] + 8 * math.sin(turn) - 6 * math.cos(turn)
    out.text(px, py, words, f"roof-label {name}", "start", math.degrees(turn))
    for step in range(8):
        along = len(words) * LABEL * BOLD * step / 7
        taken.append(Box(px + along * math.cos(turn) - 6, py + along * math.sin(turn) - 9, 12, 12))


def _draw(out: Board, x: Scale, y: Scale, found: list[Point], taken: list[Box], wide: bool) -> None:
    frame = Box(x.start, y.end, x.end - x.start, y.start - y.end)
    for name, point in found:
        speed = point["flops"] / point["seconds"]
        drawn = {n: lv for n, lv in point["levels"].items() if lv["intensity"]}
        xs = [x(lv["intensity"]) for lv in drawn.values()]
        if len(xs) > 1:
            out.line(min(xs), y(speed), max(xs), y(speed), "leader")
        for level, lv in drawn.items():
            share = (
                ""
                if lv["roof_pct"] is None
                else f"\n{digits(lv['roof_pct'])} % of the level's {rate(lv['roof'], 'B/s')}"
            )
            hover = f"{name}\n{LEVEL_NAMES[level]}: {rate(lv['bytes'], 'B')} a call, {rate(lv['bytes'] / point['seconds'], 'B/s')}{share}\n"
            hover += f"{rate(speed, 'FLOP/s')} ({point['flops_from']}), {seconds(point['seconds'])}"
            out.add("circle", hover, cx=x(lv["intensity"]), cy=y(speed), r=7.0, cls=f"level {level}")
            taken.append(Box(x(lv["intensity"]) - 7, y(speed) - 7, 14, 14))
        size = 12.0 if wide else 11.0
        box = place((max(xs), y(speed)), 7.0, name, size, frame, taken)
        if box is not None:
            taken.append(box)
            out.text(box.x, box.y + size * 0.88, name, "point-label")
