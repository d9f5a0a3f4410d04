"""From timed calls to points under the roof: one point per op, phase and shape.

Costs come from the contract alone, `op.cost(dims, args)`, read when the call was made (a decode step's cost depends on
the lengths inside its tensors). Ops that Python runs one by one are timed by a `Recorder` used as the
`library.observed` observer; a recorded native plan is timed by `plan.run_timed()` and handed to `Recorder.add_plan`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..contract import Args, Cost, Dims, Op, bind_dims, dtype_name
from .ceilings import Ceilings, Remeasure, percent_of_roof

PHASES = ("prefill", "decode")


def compute_kind(op: Op, args: Args) -> str:
    """Which peak bounds a call: the fastest arithmetic that its operands allow."""
    if args.get("activations") in ("int8", "int16"):
        return "int8"
    inputs = [args[t.name] for t in op.tensors if t.role == "in"]
    if args.get("weight_format") == "bfloat16" or any(t is not None and t.dtype == torch.bfloat16 for t in inputs):
        return "bfloat16"
    return "float32"


def shape_text(op: Op, args: Args, dims: Dims) -> str:
    """A call's shape in one short line: `512 x 576 -> 1536, q4_1`, `1 x 9 x 64, kv int8`."""
    if "weight_format" in args:
        weight_format = args["weight_format"]
        if weight_format == "dense":
            weight_format = dtype_name(args["weight"].dtype)
        if "in_features" in dims:
            return f"{dims['tokens']} x {dims['in_features']} -> {dims['out_features']}, {weight_format}"
        return f"{dims['tokens']} x {dims['hidden']}, {weight_format}"
    first = next(args[t.name] for t in op.tensors if args[t.name] is not None)
    text = " x ".join(str(n) for n in first.shape)
    cache = args.get("k_cache")
    return text if cache is None else f"{text}, kv {dtype_name(cache.dtype)}"


def reads_once_a_step(op: Op, args: Args, cost: Cost) -> bool:
    """Whether most bytes of a call are weights or cached keys and values, which nothing touches again until the next
    step. Other calls work on activations that the call before has just written."""
    weight = args.get("weight")
    if weight is not None and 2 * weight.numel() * weight.element_size() >= cost.bytes:
        return True
    cache = next((t for t in op.tensors if t.name == "k_cache"), None)
    return cache is not None and cache.role == "in"


@dataclass
class _Call:
    seconds: float
    cost: Cost
    once_a_step: bool
    step_bytes: float = 0.0


Key = tuple[str, str, str, str, str]  # phase, op, label, shape, compute kind


class Recorder:
    """Collects timed calls. Used as an observer inside `step(phase)`, or fed with the times of a plan."""

    def __init__(self, kind: Callable[[Op, Args], str] = compute_kind) -> None:
        self.kind = kind
        self.groups: dict[Key, list[_Call]] = {}
        self._phase: str | None = None
        self._step: list[_Call] = []

    @contextmanager
    def step(self, phase: str) -> Iterator[None]:
        """Calls observed inside belong to one step of `phase`."""
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        if self._phase is not None:
            raise ValueError(f"a {self._phase} step is being recorded already")
        self._phase, self._step = phase, []
        try:
            yield
        finally:
            total = sum(call.cost.bytes for call in self._step)
            for call in self._step:
                call.step_bytes = total
            self._phase = None

    def __call__(self, op: Op, args: Args, run: Callable[[], None]) -> None:
        start = time.perf_counter()
        run()
        self.add(op, args, time.perf_counter() - start)

    def add(self, op: Op, args: Args, seconds: float, label: str = "") -> None:
        """One call of the current step that took `seconds`."""
        if self._phase is None:
            raise ValueError(f"{op.name}: calls are recorded inside Recorder.step(phase)")
        dims = bind_dims(op, args)
        cost = op.cost(dims, args)
        call = _Call(seconds, cost, reads_once_a_step(op, args, cost))
        self._step.append(call)
        key = (self._phase, op.name, label, shape_text(op, args, dims), self.kind(op, args))
        self.groups.setdefault(key, []).append(call)

    def add_plan(
        self,
        phase: str,
        calls: Sequence[tuple[Op, Args]],
        seconds: Sequence[float],
        labels: Sequence[str] | None = None,
    ) -> None:
        """One run of a recorded plan: `seconds` from `plan.run_timed()`, `calls` the (op, args) that were recorded, in
        the same order. Call it before the lengths in the plan's tensors change. `labels`: a word per call (`"qkv"`, `"head"`), for the reader."""
        words = labels if labels is not None else [""] * len(calls)
        if not len(calls) == len(seconds) == len(words):
            raise ValueError(f"a plan of {len(seconds)} ops does not match {len(calls)} calls with {len(words)} labels")
        with self.step(phase):
            for (op, args), spent, label in zip(calls, seconds, words, strict=True):
                self.add(op, args, spent, label)


@dataclass(frozen=True)
class OpPoint:
    """One op, phase and shape. `time`, `flops` and `bytes` are those of the median call; `total` is the seconds of all
    `calls`. `roof` is in FLOP/s over `intensity` FLOP per byte, `roof_bytes` the same limit in bytes per second, and
    `roof_pct` says how much of it was reached. `bound` names the ceiling, `bandwidth` the memory level."""

    name: str
    label: str
    phase: str
    shape: str
    calls: int
    time: float
    quartiles: tuple[float, float]
    total: float
    flops: float
    bytes: float
    intensity: float
    roof: float
    roof_bytes: float
    roof_pct: float
    compute_kind: str
    bound: str
    bandwidth: str

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        out["quartiles"] = list(self.quartiles)
        return out


def _median_cost(calls: Sequence[_Call]) -> Cost:
    return Cost(statistics.median(c.cost.flops for c in calls), statistics.median(c.cost.bytes for c in calls))


def _working_set(calls: Sequence[_Call], cost: Cost) -> float:
    """Bytes touched between two uses of what the call reads: the whole step's for weights and KV, else its own."""
    if calls[0].once_a_step:
        return max(cost.bytes, statistics.median(c.step_bytes for c in calls))
    return cost.bytes


def op_points(recorder: Recorder, ceilings: Ceilings, remeasure: Remeasure | None = None) -> list[OpPoint]:
    """A point per group of calls, longest total first within each phase. `RoofError` when one is above its roof.

    Groups without work (an empty batch) are left out. Ceilings that rise on the way rise for every point.
    """
    groups = [(key, calls, _median_cost(calls)) for key, calls in recorder.groups.items()]
    work = [(key, calls, cost) for key, calls, cost in groups if cost.flops + cost.bytes > 0]

    def judge(key: Key, calls: list[_Call], cost: Cost) -> OpPoint:
        phase, name, label, shape, kind = key
        times = [c.seconds for c in calls]
        median = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
        percent, limit = percent_of_roof(
            f"{name} ({phase}, {shape})",
            cost,
            median,
            kind,
            ceilings,
            working_set=_working_set(calls, cost),
            remeasure=remeasure,
        )
        return OpPoint(
            name=name,
            label=label,
            phase=phase,
            shape=shape,
            calls=len(calls),
            time=median,
            quartiles=(low, high),
            total=sum(times),
            flops=cost.flops,
            bytes=cost.bytes,
            intensity=cost.intensity,
            roof=limit.flops,
            roof_bytes=limit.bytes,
            roof_pct=percent,
            compute_kind=kind,
            bound=limit.bound,
            bandwidth=limit.bandwidth,
        )

    for group in work:
        judge(*group)  # raises the ceilings that must rise, so that all points are then read against the same ones
    points = [judge(*group) for group in work]
    return sorted(points, key=lambda p: (PHASES.index(p.phase), -p.total))
