"""Is B slower than A? A verdict from paired log ratios, with the interval that it rests on.

The interval is that of the median, by order statistics (the sign test turned round): it assumes no distribution, which
timings do not have, and one wild repetition moves it by one rank and no more. Who looks again and again is wrong more often
than once in a hundred: repetitions are judged at `LOOKS` only, whose shares of error add up to one per cent. Two files of
unpaired samples get a bootstrap interval of the ratio of medians instead.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SAME, FASTER, SLOWER, AMBIGUOUS = "SAME", "FASTER", "SLOWER", "AMBIGUOUS"
CONFIDENCE = 0.99  # a gate judges many benchmarks at once
MIN_REPETITIONS = 9  # the fewest whose extremes hold the median with 99 %: 1 - 2 / 2^9 = 99.6 %
LOOKS = {1: 0.996, 2: 0.998, 4: 0.998, 8: 0.998}  # times the least repetitions -> confidence of its interval


@dataclass(frozen=True)
class Verdict:
    """`ratio` is B's time over A's, `low` and `high` its interval."""

    kind: str
    ratio: float
    low: float
    high: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics that holds the median with at least `confidence`."""
    n = len(values)
    if n < MIN_REPETITIONS:
        raise ValueError(f"a verdict needs at least {MIN_REPETITIONS} repetitions, got {n}")
    tail, rank = 0.0, 0
    while 2 * (tail + math.comb(n, rank) / 2**n) <= 1 - confidence:
        tail += math.comb(n, rank) / 2**n
        rank += 1
    ordered = sorted(values)
    return ordered[rank - 1], ordered[n - rank]


def judge(ratio: float, low: float, high: float, margin: float) -> Verdict:
    """SLOWER or FASTER when the whole interval lies beyond the margin, SAME when it lies within, else AMBIGUOUS."""
    if not margin > 0:
        raise ValueError(f"a margin must be positive, got {margin}")
    if low > 1 + margin:
        kind = SLOWER
    elif high < 1 / (1 + margin):
        kind = FASTER
    else:
        kind = SAME if low >= 1 / (1 + margin) and high <= 1 + margin else AMBIGUOUS
    return Verdict(kind, ratio, low, high)


def look(log_ratios: Sequence[float], least: int, margin: float) -> Verdict | None:
    """The verdict over repetitions, each log(time of B / time of A), where this many are judged; None to go on.

    AMBIGUOUS is told at the last look only, when there are eight times `least` repetitions.
    """
    confidence = LOOKS.get(len(log_ratios) // least) if len(log_ratios) % least == 0 else None
    if confidence is None:
        return None
    low, high = median_interval(log_ratios, confidence)
    found = judge(math.exp(statistics.median(log_ratios)), math.exp(low), math.exp(high), margin)
    return found if found.kind != AMBIGUOUS or len(log_ratios) == least * max(LOOKS) else None


def of_samples(a: Sequence[float], b: Sequence[float], margin: float, rounds: int = 2000) -> Verdict:
    """The verdict over two unpaired sets of samples; the bootstrap is seeded, so that it says the same twice."""
    if min(len(a), len(b)) < MIN_REPETITIONS:
        raise ValueError(f"a verdict needs at least {MIN_REPETITIONS} samples of each, got {len(a)} and {len(b)}")
    rng = random.Random(0)

    def resampled(values: Sequence[float]) -> float:
        return statistics.median(rng.choices(values, k=len(values)))

    ratios = sorted(resampled(b) / resampled(a) for _ in range(rounds))
    cut = int(rounds * (1 - CONFIDENCE) / 2)
    return judge(statistics.median(b) / statistics.median(a), ratios[cut], ratios[-1 - cut], margin)
