"""The limits of a GPU, measured through torch: bytes per second from memory and from the L2 cache, FLOP/s of matrices.

Reading is a large reduction, copying counts both ways, and the faster of the two is the memory's ceiling: a kernel may do
either. Arithmetic is `torch.matmul` on square matrices, the vendor library's best case; float32 without TF32, torch's default. As on the CPU, a ceiling is the
upper quartile of short samples, measured in the same run as what is held against it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from .ceilings import Ceiling, Ceilings, Remeasure

SAMPLES, ROUNDS = 12, 3
MEMORY_BYTES = 1 << 30  # of the buffer that is read: twenty times the largest L2
MATRIX = {"bfloat16": 8192, "float32": 4096}
REPEATS = {"l2": 20}  # an L2 sample is a few passes over the buffer, or its launch would be measured
Seconds = Callable[[Callable[[], Any]], float]


def event_seconds(work: Callable[[], Any]) -> float:
    """Seconds of `work` on the current stream, which is kept busy first so that the host runs ahead."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(400_000)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


class GpuProber:
    """Runs the probes on one device. `seconds` times a piece of work there; `memory_bytes` is the size of the read."""

    def __init__(
        self,
        device: torch.device,
        seconds: Seconds = event_seconds,
        *,
        l2_bytes: int | None = None,
        memory_bytes: int = MEMORY_BYTES,
        matrix: dict[str, int] | None = None,
    ) -> None:
        self.device, self.seconds, self.matrix = device, seconds, matrix or MATRIX
        if l2_bytes is None:
            l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self.l2_bytes, self.memory_bytes = l2_bytes, memory_bytes
        self._memory = torch.ones(memory_bytes // 4, device=device)
        self._target = torch.empty_like(self._memory[: len(self._memory) // 2])

    def names(self) -> list[str]:
        return ["dram", "copy", "l2", *self.matrix]

    def samples(self, name: str, count: int = SAMPLES) -> list[float]:
        """Raw samples of a ceiling, after two calls that are not timed."""
        work, amount = self._work(name)
        for _ in range(2):
            work()
        return [amount / self.seconds(work) for _ in range(count)]

    def _work(self, name: str) -> tuple[Callable[[], Any], float]:
        """A probe, and the bytes or FLOPs that one call of it counts for."""
        if name in self.matrix:
            n = self.matrix[name]
            a, b = (torch.randn(n, n, device=self.device).to(getattr(torch, name)) for _ in range(2))
            out = torch.empty_like(a)
            return lambda: torch.matmul(a, b, out=out), 2.0 * n**3
        if name == "copy":
            source = self._memory[: len(self._target)]
            return lambda: self._target.copy_(source), 2.0 * self._target.nbytes
        if name == "l2":
            part, repeats = self._memory[: max(self.l2_bytes // 8, 1)], REPEATS["l2"]  # half of the cache

            def read() -> None:
                for _ in range(repeats):
                    part.sum()

            return read, float(part.nbytes * repeats)
        return lambda: self._memory.sum(), float(self._memory.nbytes)

    def remeasure(self, name: str, working_set: float) -> list[float]:
        """More samples of a ceiling: the larger of reading and copying for memory. `working_set` changes nothing here."""
        del working_set
        if name != "dram":
            return self.samples(name, 2 * SAMPLES)
        return max((self.samples(n, 2 * SAMPLES) for n in ("dram", "copy")), key=statistics.median)

    def measure(self) -> Ceilings:
        """Every ceiling, the probes visited in turn."""
        raw: dict[str, list[float]] = {name: [] for name in self.names()}
        for _ in range(ROUNDS):
            for name, samples in raw.items():
                samples += self.samples(name)
        table = {n: Ceiling("FLOP/s" if n in self.matrix else "B/s", samples) for n, samples in raw.items()}
        if table["copy"].value > table["dram"].value:
            table["dram"] = table["copy"]
        if table["l2"].value < table["dram"].value:
            del table["l2"]  # small reads are bound by their launches here, so the probe says nothing about the cache
        caches = {"l2": self.l2_bytes} if "l2" in table else {}
        return Ceilings(self._machine(), "gpu", self._processors(), str(self.device), caches, table)

    def _machine(self) -> dict[str, Any]:
        if self.device.type != "cuda":
            return {"gpu": str(self.device)}
        properties = torch.cuda.get_device_properties(self.device)
        return {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}

    def _processors(self) -> int:
        return torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 1


def measure_gpu(device: torch.device) -> tuple[Ceilings, Remeasure]:
    """The ceilings of a GPU, measured now (a few seconds), and what measures one of them again."""
    with torch.cuda.device(device):
        prober = GpuProber(device)
        return prober.measure(), prober.remeasure
