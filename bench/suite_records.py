"""Between the harness and pytest-benchmark: samples that are played back to its clock, and what is kept beside them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from pykernels.contract import OPS
from pykernels.library import call
from pykernels.testing.compare import Run

from .harness import Measurement


class Playback:
    """A clock that the plugin reads and samples that make it advance: the plugin's statistics are those of the harness."""

    def __init__(self) -> None:
        self._time = 0.0
        self._samples: Iterator[float] = iter(())

    def load(self, samples: Sequence[float]) -> None:
        self._samples = iter(samples)

    def now(self) -> float:
        return self._time

    def advance(self) -> None:
        """One sample passes. The plugin calls its target once more after the last round, which takes no time."""
        self._time += next(self._samples, 0.0)


def runner(backend: str) -> Run:
    """Runs an op of a case without timing it."""

    def run(op_name: str, args: dict[str, Any]) -> None:
        call(OPS[op_name], backend, **args)

    return run


def extra_info(found: Measurement) -> dict[str, Any]:
    """What a benchmark's entry says besides its times."""
    timing = found.timing
    return {
        "op": found.op,
        "family": OPS[found.op].family,
        "case": found.case,
        "backend": found.backend,
        "entry": found.entry,
        "shape": found.shape,
        "temperature": found.temperature,
        "how": found.how,
        "flops": found.flops,
        "bytes": found.bytes,
        "roof_seconds": found.roof_seconds,
        "roof_pct": found.roof_pct,
        "bound": found.bound,
        "compute_kind": found.compute_kind,
        "output_hash": found.output_hash,
        "machine": found.machine,
        "machine_key": found.machine["key"],
        "clocks": found.clocks,
        "clock": timing.clock,
        "stopped": timing.stopped,
        "noise": timing.noise,
        "calls_per_sample": timing.calls_per_sample,
    }


def entry(found: Measurement, params: dict[str, Any], control_seconds: float) -> dict[str, Any]:
    """A measurement of a grid's row as the plugin would have written it: same names, so that files can be compared."""
    samples = found.timing.samples
    low, high = found.timing.quartiles
    name = f"test_{found.op}[{found.backend}-{found.case}]"
    return {
        "name": name,
        "fullname": f"bench/suite/test_{OPS[found.op].family}.py::{name}",
        "group": f"test_{found.op}",
        "params": {"backend": found.backend, **params},
        "extra_info": {**extra_info(found), "control_seconds": control_seconds},
        "stats": {
            "min": min(samples),
            "max": max(samples),
            "mean": statistics.fmean(samples),
            "stddev": statistics.stdev(samples),
            "median": found.timing.median,
            "q1": low,
            "q3": high,
            "rounds": len(samples),
            "data": samples,
        },
    }
