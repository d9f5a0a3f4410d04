"""Single ops against torch's fastest form, sample by sample in turn, outputs checked against float64 first.

Ours is called twice: through the public op, and as a recorded plan (no Python inside, as in a generator's step).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pykernels import native
from pykernels.bench.clocks import Call, CpuClock
from pykernels.bench.harness import Timer

from . import op_cases
from .op_cases import OpCase
from .spread import spread
from .weather import Probe

FAMILIES = ("prefill", "decode", "linear", "sampling")
REST = 0.004  # seconds: torch's threads spin that long after their work, and would take half of our next sample
SHORTEST = 2e-3  # seconds of one sample
PICK = 3  # samples by which torch's fastest form is found


@dataclass
class Turn:
    """One way to compute a case, and its timer."""

    name: str
    timer: Timer
    samples: list[float]

    def sample(self) -> None:
        time.sleep(REST)
        self.timer.sample()  # wakes the threads, and brings caches to what they are between two calls
        self.samples.append(self.timer.sample())


def recorded(call: Call) -> Call:
    """The kernels of a call as a plan that is replayed natively."""
    with native.record() as plan:
        call()

    def run(kept: Call = call) -> None:  # the plan knows addresses alone
        plan.run()

    return run


def turn(name: str, calls: Sequence[Call]) -> Turn:
    return Turn(name, Timer(calls, CpuClock(), shortest=SHORTEST), [])


def measure(case: OpCase, samples: int, probe: Probe) -> dict[str, Any]:
    """One case: check, find torch's fastest form, then all in turn. `Mismatch` when an output is wrong."""
    copies = case.copies()
    errors = case.check(copies[0])
    forms = [turn(name, [form(args) for args in copies]) for name, form in case.torch_forms.items()]
    for _ in range(PICK):
        for form in forms:
            form.sample()
    peer = min(forms, key=lambda f: statistics.median(f.samples))
    tried = {f.name: statistics.median(f.samples) for f in forms}
    peer.samples.clear()
    ours = [case.ours(args) for args in copies]
    turns = [peer, turn("op", ours), turn("plan", [recorded(call) for call in ours])]
    before = probe(case.probe)[case.probe]
    for number in range(samples):
        for one in turns if number % 2 == 0 else turns[::-1]:
            one.sample()
    limit = (before + probe(case.probe)[case.probe]) / 2
    found: dict[str, Any] = {
        "family": case.family,
        "case": case.name,
        "flops": case.flops,
        "bytes": case.bytes,
        "copies": len(copies),
        "torch_form": peer.name,
        "torch_forms": {name: float(f"{s:.4g}") for name, s in tried.items()},
        "probe": {case.probe: float(f"{limit:.4g}")},
        "errors": errors,
    }
    work = case.bytes if case.probe == "dram" else case.flops
    for one in turns:
        name = "torch" if one is peer else one.name
        found[name] = spread(one.samples).to_json()
        if work:
            found[name]["roof_share"] = work / statistics.median(one.samples) / limit
    for one in turns[1:]:
        found[f"{one.name}_ratio"] = spread([t / o for t, o in zip(peer.samples, one.samples, strict=True)]).to_json()
    return found


def run(
    words: str, results: list[dict[str, Any]], samples: int, threads: int, smoke: bool, say: Callable[[str], None]
) -> None:
    """Adds a result per case of the families to `results`; one that is there already is replaced."""
    names = FAMILIES if words == "all" else tuple(w for w in words.split(",") if w)
    if unknown := [n for n in names if n.split("/")[0] not in FAMILIES]:
        raise ValueError(f"unknown family {unknown[0]!r}; families of ops: {', '.join(FAMILIES)}")
    probe = Probe(threads)
    for name in names:
        for case in op_cases.cases(name, smoke=smoke):
            with torch.inference_mode():
                found = measure(case, samples, probe)
            results[:] = [r for r in results if (r["family"], r["case"]) != (found["family"], found["case"])]
            results.append(found)
            ratio = found["plan_ratio"]["median"]
            say(f"{case.family} {case.name}: {ratio:.2f}x torch ({found['torch_form']})")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.mean(math.log(v) for v in values))
