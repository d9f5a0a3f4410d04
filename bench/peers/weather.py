"""What the machine was doing beside a sample: how fast it was, and how much of it others took."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from pykernels import native
from pykernels.roofline.ceilings import Prober

PROBES = ("dram", "int8", "bfloat16", "float32")
SAMPLES = 10


class Probe:
    """Short runs of the roofline's own probes: B/s read from DRAM, FLOP/s of `vpdpbusd` (or what the level has)."""

    def __init__(self, threads: int) -> None:
        self._prober = Prober(native.chosen_level(), threads)
        self.names = tuple(n for n in PROBES if n in self._prober.names())

    def __call__(self, *names: str) -> dict[str, float]:
        wanted = names or tuple(n for n in ("dram", "int8") if n in self.names)
        return {name: statistics.median(self._prober.samples(name, SAMPLES)) for name in wanted}


def mean(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of the probes on both sides of a sample."""
    return {name: (before[name] + after[name]) / 2 for name in before}


@dataclass(frozen=True)
class Usage:
    """Seconds of CPU time: of everybody, stolen by the hypervisor, and of the processes that are ours."""

    at: float
    everybody: float
    stolen: float
    own: float


TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def usage(pids: list[int]) -> Usage:
    """Now. Zeros where the system does not tell."""
    at = time.perf_counter()
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return Usage(at, 0.0, 0.0, 0.0)
    own = sum(_process_ticks(pid) for pid in [*pids, os.getpid()])
    idle, stolen = fields[3] + fields[4], fields[7]
    return Usage(at, (sum(fields) - idle - stolen) / TICK, stolen / TICK, own / TICK)


def _process_ticks(pid: int) -> int:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])


def others(before: Usage, after: Usage) -> dict[str, float]:
    """CPUs that other processes, and the hypervisor, took between the two."""
    seconds = max(after.at - before.at, 1e-9)
    taken = (after.everybody - before.everybody) - (after.own - before.own)
    return {
        "others": round(max(0.0, taken / seconds), 3),
        "stolen": round(max(0.0, (after.stolen - before.stolen) / seconds), 3),
    }
