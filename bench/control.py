"""The control workload: arithmetic and memory traffic of fixed size in numpy, which no change of ours can speed up."""

from __future__ import annotations

import time

import numpy as np


class Control:
    """About a third of a millisecond of element-wise arithmetic in the caches and a sum over what they do not hold."""

    def __init__(self) -> None:
        self._small = np.linspace(0.5, 1.5, 1 << 13, dtype=np.float32)
        self._large = np.ones(1 << 18, dtype=np.float64)

    def seconds(self) -> float:
        """The faster of two runs: what interrupts one is no speed of the machine."""
        return min(self._once(), self._once())

    def _once(self) -> float:
        start = time.perf_counter()
        x = self._small
        for _ in range(12):
            x = x * self._small + self._small
        self._large.sum()
        return time.perf_counter() - start
