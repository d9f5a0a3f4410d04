"""Medians with spread, and ratios that compare two engines round by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Round = tuple[int, int]  # slice, round in it


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles and extremes, over `count` samples."""

    median: float
    low: float
    high: float
    least: float
    most: float
    count: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """ValueError for no values."""
    if not values:
        raise ValueError("there is no value to summarise")
    ordered = sorted(values)
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Spread(median, low, high, ordered[0], ordered[-1], len(ordered))


def ratios(ours: Mapping[Round, float], theirs: Mapping[Round, float]) -> Spread | None:
    """ours / theirs, taken within each round that has both; None when no round has.

    The machine changes its speed by half for seconds at a time: the ratio of two medians would compare two weathers.
    """
    both = [ours[r] / theirs[r] for r in ours if r in theirs]
    return spread(both) if both else None
