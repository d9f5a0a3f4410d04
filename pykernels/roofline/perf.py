"""Reads the CSV of `perf stat -x,` into counters and a point of the hierarchical roofline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .ceilings import Ceilings
from .levels import LevelPoint, Traffic

EVENTS = (
    "cycles",
    "instructions",
    "L1-dcache-load-misses",
    "LLC-load-misses",
    "task-clock",
    "context-switches",
    "page-faults",
)
LINE = 64  # bytes that a miss fetches
# What misses one level is read from the next. Prefetches and writes are not among these events: bytes are a lower bound.
FETCHED = {"l2": "L1-dcache-load-misses", "dram": "LLC-load-misses"}


def counters(lines: Iterable[str]) -> dict[str, float | None]:
    """Event -> count (task-clock in seconds); None for what this machine does not count, as in most virtual ones."""
    found: dict[str, float | None] = {}
    for line in lines:
        parts = line.strip().split(",")
        if line.startswith("#") or len(parts) < 3:
            continue
        name = parts[2].removesuffix(":u")
        scale = 1e-3 if parts[1] == "msec" else 1.0
        found[name] = None if parts[0].startswith("<") else float(parts[0]) * scale
    if not found:
        raise ValueError("perf: no counter in its output")
    return found


def point(
    counted: Mapping[str, float | None], seconds: float, flops: float, nbytes: float, calls: int, ceilings: Ceilings
) -> LevelPoint:
    """One call: what was fetched, where it was counted; else the contract's bytes, from memory."""
    traffic = {}
    for level, event in FETCHED.items():
        count = counted.get(event)
        if count is not None and level in ceilings.table:
            traffic[level] = Traffic(count * LINE / calls, ceilings.table[level].value)
    if "dram" not in traffic:
        traffic["dram"] = Traffic(nbytes)
    return LevelPoint("call", calls, seconds, flops, "contract", traffic)
