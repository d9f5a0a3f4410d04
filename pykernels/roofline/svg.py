"""A small drawing board: scales, axes and shapes that become one inline `<svg>`. Colours are CSS classes of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

CHAR = 0.56  # mean width of a character, in font sizes: enough to place labels without measuring text


@dataclass(frozen=True)
class Scale:
    """Maps `[low, high]` of the data to `[start, end]` of the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range: powers of ten on a log scale, steps of 1, 2, 2.5 or 5 else."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**e for e in range(first, last + 1)]
        raw = (self.high - self.low) / max(count, 1)
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass
class Box:
    """A rectangle that a label takes up."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: Box) -> float:
        across = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        down = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return max(0.0, across) * max(0.0, down)

    def inside(self, other: Box) -> bool:
        return (
            self.x >= other.x
            and self.y >= other.y
            and self.x + self.width <= other.x + other.width
            and self.y + self.height <= other.y + other.height
        )


@dataclass
class Board:
    """An svg of `width` x `height`. `variant` is the CSS class that shows it on wide or narrow screens."""

    width: float
    height: float
    variant: str
    title: str
    parts: list[str] = field(default_factory=list)

    def add(self, tag: str, title: str = "", content: str = "", **attributes: object) -> None:
        """An element; `title` is its hover text. Attribute names: `cls` for class, `_` for `-`; floats are rounded."""
        words = []
        for name, value in attributes.items():
            shown = number(value) if isinstance(value, float) else escape(str(value))
            words.append(f'{"class" if name == "cls" else name.replace("_", "-")}="{shown}"')
        inner = (f"<title>{escape(title)}</title>" if title else "") + escape(content)
        self.parts.append(f"<{tag} {' '.join(words)}>{inner}</{tag}>" if inner else f"<{tag} {' '.join(words)}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str, title: str = "") -> None:
        self.add("line", title, x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), cls=cls)

    def text(self, x: float, y: float, content: str, cls: str = "", anchor: str = "start", turn: float = 0) -> None:
        extra = {"transform": f"rotate({number(turn)} {number(x)} {number(y)})"} if turn else {}
        self.add("text", "", content, x=float(x), y=float(y), cls=cls, text_anchor=anchor, **extra)

    def path(self, points: Sequence[tuple[float, float]], cls: str, title: str = "") -> None:
        d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.add("path", title, d=d, cls=cls)

    def render(self) -> str:
        return (
            f'<svg class="chart {self.variant}" viewBox="0 0 {number(self.width)} {number(self.height)}" '
            f'role="img" aria-label="{escape(self.title)}">{"".join(self.parts)}</svg>'
        )

    def x_axis(
        self, scale: Scale, y: float, top: float, label: str, show: Callable[[float], str], count: int = 6
    ) -> None:
        for value in scale.ticks(count):
            self.line(scale(value), y, scale(value), top, "grid")
            self.text(scale(value), y + 16, show(value), "tick", "middle")
        self.line(scale.start, y, scale.end, y, "axis")
        if label:
            self.text((scale.start + scale.end) / 2, y + 34, label, "label", "middle")

    def y_axis(
        self, scale: Scale, x: float, right: float, label: str, show: Callable[[float], str], count: int = 5
    ) -> None:
        for value in scale.ticks(count):
            self.line(x, scale(value), right, scale(value), "grid")
            self.text(x - 7, scale(value) + 4, show(value), "tick", "end")
        if label:  # above the axis, unrotated: readable on a phone
            self.text(x, scale.end - 12, label, "label", "start")


def place(
    anchor: tuple[float, float], radius: float, text: str, size: float, frame: Box, taken: Sequence[Box]
) -> Box | None:
    """Where a label fits beside a point without touching anything in `taken`: right, left, above, below, then further
    away; None when nowhere."""
    width, height = len(text) * size * CHAR, size * 1.15
    x, y = anchor
    for gap in (radius + 4, radius + 16, radius + 30):
        spots = [
            (x + gap, y - height / 2),
            (x - gap - width, y - height / 2),
            (x - width / 2, y - gap - height),
            (x - width / 2, y + gap),
            (x + gap * 0.8, y - gap * 0.8 - height),
            (x + gap * 0.8, y + gap * 0.8),
            (x - gap * 0.8 - width, y - gap * 0.8 - height),
            (x - gap * 0.8 - width, y + gap * 0.8),
        ]
        for left, top in spots:
            box = Box(left, top, width, height)
            if box.inside(frame) and not any(box.overlap(t) for t in taken):
                return box
    return None
