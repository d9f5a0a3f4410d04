"""What tells the time of a few calls: the host's clock, or events on a GPU's stream around a replayed graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pykernels import native
from pykernels.contract import OPS
from pykernels.roofline.machine import cache_totals, memory_bytes

Call = Callable[[], None]
SMALL = 1e-4  # seconds: a GPU call shorter than this is replayed from a graph, or its launch would be measured
ASSUMED_CACHE = 32 << 20  # bytes of the last-level cache where the system does not tell


class Clock(Protocol):
    """Times calls on one device."""

    name: str
    shortest: float  # seconds of a sample that this clock can tell apart from its own cost

    def chunk(self, calls: Sequence[Call]) -> Call:
        """One sample's work: `calls` in order."""

    def seconds(self, chunk: Call) -> float:
        """Runs a chunk and returns its time."""

    def flush(self) -> None:
        """Evicts everything from the caches."""

    def settle(self) -> None:
        """Waits until what was started is done."""

    def cache_bytes(self) -> int:
        """Size of the last-level cache."""


class CpuClock:
    """`time.perf_counter` around the calls; a call's few tenths of a microsecond through Python are part of it."""

    name = "perf_counter"
    shortest = 2e-5

    def __init__(self) -> None:
        self._sweep: Call | None = None

    def chunk(self, calls: Sequence[Call]) -> Call:
        if len(calls) == 1:
            return calls[0]

        def run() -> None:
            for call in calls:
                call()

        return run

    def seconds(self, chunk: Call) -> float:
        start = time.perf_counter()
        chunk()
        return time.perf_counter() - start

    def flush(self) -> None:
        """Every thread of the team reads and writes its share of a buffer twice as large as the last-level cache, which
        also leaves the team awake, as it is inside a model."""
        if self._sweep is None:
            self._sweep = _sweep(2 * self.cache_bytes())
        self._sweep()

    def settle(self) -> None:
        """Calls on the CPU are done when they return."""

    def cache_bytes(self) -> int:
        return max(cache_totals(1).get("l3", ASSUMED_CACHE), 1)


def _sweep(size: int) -> Call:
    """A recorded normalisation, in place, of `size` bytes."""
    x, op = torch.ones(-(-size // 16384), 4096), OPS["rms_norm"]
    args = {"x": x, "weight": torch.ones(4096), "eps": 1e-5, "residual": None, "out": x, "residual_out": None}
    with native.record() as plan:
        native.BACKEND.run(op.name, args)

    def run(kept: Any = args) -> None:  # the plan knows addresses alone
        plan.run()

    return run


class GpuClock:
    """CUDA events on the current stream of the current device. Calls shorter than `SMALL` are captured into a graph, replayed as one sample.

    Before each sample the stream is kept busy for a moment, so that the host is ahead of the device and no launch is
    waited for inside the events.
    """

    shortest = 2e-4
    busy_cycles = 200_000  # about a tenth of a millisecond, longer than a launch takes

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"a GPU clock needs a CUDA device, got {device}")
        self.device = device
        self.name = "cuda events"
        self._buffer: torch.Tensor | None = None

    def chunk(self, calls: Sequence[Call]) -> Call:
        def run() -> None:
            for call in calls:
                call()

        run()  # compiles, loads and allocates before the time or a capture starts
        once = statistics.median(self.seconds(run) for _ in range(3)) / len(calls)
        if once >= SMALL:
            return run
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        self.name = "cuda graph"
        replay: Call = graph.replay
        return replay

    def seconds(self, chunk: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(self.busy_cycles)
        start.record()
        chunk()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def flush(self) -> None:
        if self._buffer is None:
            self._buffer = torch.zeros(2 * self.cache_bytes(), dtype=torch.uint8, device=self.device)
        self._buffer.add_(1)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)


def clock_of(device: torch.device) -> Clock:
    """The clock for a device. ValueError for one that has none."""
    return CpuClock() if device.type == "cpu" else GpuClock(device)


def free_bytes(device: torch.device) -> int:
    """Memory that copies of the inputs may take: a quarter of what is free, a GiB where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return (memory_bytes("MemAvailable") or 4 << 30) // 4
