"""Reads `nsys stats --report cuda_gpu_kern_sum --format csv`: how often each kernel ran, and for how long."""

from __future__ import annotations

import csv
from collections.abc import Iterable

from .levels import LevelPoint, Traffic


def points(lines: Iterable[str], flops: float, nbytes: float, calls: int) -> list[LevelPoint]:
    """A point for the whole call, with the contract's work and GPU time alone, then one per kernel, slowest first.

    A kernel of its own has neither FLOPs nor bytes: nsys counts none.
    """
    kept = [line for line in lines if line.strip()]
    start = next((i for i, line in enumerate(kept) if "Total Time (ns)" in line), None)
    rows = [] if start is None else list(csv.DictReader(kept[start:]))
    if not rows:
        raise ValueError("nsys: no kernel in its summary")
    total = sum(float(row["Total Time (ns)"]) for row in rows) * 1e-9
    kernels = [
        LevelPoint(row["Name"], int(row["Instances"]), float(row["Med (ns)"]) * 1e-9, 0.0, "counted", {})
        for row in rows
    ]
    whole = LevelPoint("call", calls, total / calls, flops, "contract", {"dram": Traffic(nbytes)})
    return [whole, *sorted(kernels, key=lambda p: -p.seconds)]
