"""How much of its roof an op reaches, the roof being probed beside each sample: a ratio that a shared machine leaves alone.

A neighbour that takes bandwidth or clock takes it from the probe and from the op, so the shares of a slow minute are those of
a fast one, and may be held against a committed minimum. A probe and the op run on the same number of threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pykernels.contract import bind_dims
from pykernels.roofline.ceilings import Ceiling, Ceilings, Prober, RoofError, percent_of_roof, roof
from pykernels.roofline.points import compute_kind
from pykernels.testing.compare import Mismatch

from .clocks import clock_of
from .gate import ABOVE_ROOF, CHANGED, MISSING, SAME, SLOWER, Line, name_of
from .harness import Timer, prepare
from .problems import gated
from .verdict import MIN_REPETITIONS, median_interval

MARGIN = 0.25  # that a share may lie below its minimum: what differs between runs and processors of one ISA level
ROUNDS, MOST = MIN_REPETITIONS, 36
PROBES = 2  # samples of the probe on either side of the op's


@dataclass(frozen=True)
class Share:
    """Percent of the roof: the median over rounds and its interval. `bound` names the ceiling that was probed."""

    percent: float
    low: float
    high: float
    bound: str


def name(op: str) -> str:
    """The benchmark of an op, as the table has it."""
    return name_of((op, gated(op).name))


def measure(op: str, ceilings: Ceilings, prober: Prober, wanted: float = 0.0) -> Share:
    """The share of an op's gated problem. Goes on, up to `MOST` rounds, while the interval does not clear `wanted`.

    `Mismatch` when the outputs are wrong, `RoofError` when the share is above the roof.
    """
    device = torch.device("cpu")
    clock, case = clock_of(device), gated(op)
    ready = prepare(case, "cpu", clock, device)
    timer = Timer(ready.calls, clock, flush=ready.flush, shortest=3e-4)
    ready.poison()
    for _ in ready.calls:
        timer.sample()
    args = ready.copies[0]
    cost, kind = ready.op.cost(bind_dims(ready.op, args), args), compute_kind(ready.op, args)
    touched = max(cost.bytes * len(ready.copies), 4.0 * clock.cache_bytes())
    bound = roof(cost, kind, ceilings, touched).bound

    def probe() -> list[float]:
        return prober.samples(bound, PROBES, touched)

    shares: list[float] = []
    times: list[float] = []
    before = probe()
    while len(shares) < ROUNDS or (len(shares) < MOST and not _clear(shares, wanted)):
        times.append(min(timer.sample() for _ in range(3)))
        after = probe()
        limit = Ceiling(ceilings.table[bound].unit, [max(*before, *after)])
        beside = replace(ceilings, table=ceilings.table | {bound: limit})
        shares.append(100 * roof(cost, kind, beside, touched).seconds / times[-1])
        before = after
    ready.verify()
    percent_of_roof(
        f"{name(op)} on cpu",
        cost,
        statistics.median(times),
        kind,
        ceilings,
        working_set=touched,
        remeasure=prober.remeasure,
    )
    low, high = median_interval(shares)
    return Share(statistics.median(shares), low, high, bound)


def _clear(shares: list[float], wanted: float) -> bool:
    low, high = median_interval(shares)
    return low >= wanted or high < wanted


def compare(op: str, table: Mapping[str, float], ceilings: Ceilings, prober: Prober, margin: float = MARGIN) -> Line:
    """SLOWER when the whole interval lies more than the margin below the op's minimum in the table (percent)."""
    label = name(op)
    if label not in table:
        return Line(label, MISSING, note="not in the table: --update adds it")
    least = table[label] * (1 - margin)
    try:
        found = measure(op, ceilings, prober, least)
    except RoofError as error:
        return Line(label, ABOVE_ROOF, note=str(error))
    except Mismatch as error:
        return Line(label, CHANGED, note=str(error))
    kind = SLOWER if found.high < least else SAME
    note = f"{found.percent:.1f} % of {found.bound}, minimum {table[label]:.1f} %"
    ratio, low, high = (x / table[label] for x in (found.percent, found.low, found.high))
    return Line(label, kind, ratio, low, high, margin, note)
