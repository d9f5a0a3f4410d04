"""Times one case on one backend, and refuses to tell a time that means nothing.

A call is warmed up on its own shapes, timed until a stop rule is met, and its outputs, poisoned before the timed calls,
are compared with the reference afterwards. Inputs are made afresh for every measurement. "cold": every call finds its
inputs outside of the caches, as a layer of a model does; "warm": the same call again and again.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from pykernels import native
from pykernels.contract import OPS, Op, bind_dims, check
from pykernels.registry import resolve
from pykernels.roofline.ceilings import Ceilings, Remeasure, percent_of_roof
from pykernels.roofline.points import compute_kind, shape_text
from pykernels.testing.compare import Mismatch, Snapshot, judge, same_bits
from pykernels.testing.factories import Case

from .clocks import Call, Clock, clock_of, free_bytes
from .gpu_state import gpu_state
from .inputs import Args, copies_of, poison_outputs
from .machine import machine

MAX_COPIES = 64
Prepare = Callable[[str, Args], Call]


@dataclass(frozen=True)
class StopRule:
    """When to stop: enough samples and little noise, or too many samples, or too much time.

    `noise` is the half width of the median's 95 % interval, relative to the median; `seconds` includes what is not
    timed, such as flushing caches.
    """

    min_samples: int = 10
    max_samples: int = 2000
    seconds: float = 0.5
    noise: float = 0.005

    def __post_init__(self) -> None:
        if not 2 <= self.min_samples <= self.max_samples or not self.seconds > 0 or not self.noise >= 0:
            raise ValueError(
                f"a stop rule needs 2 <= min_samples <= max_samples, seconds > 0 and noise >= 0, got {self}"
            )

    def reason(self, samples: Sequence[float], elapsed: float) -> str:
        """Why to stop after these samples; empty to go on."""
        if len(samples) >= self.max_samples:
            return f"{self.max_samples} samples"
        if len(samples) < self.min_samples:
            return ""
        if elapsed >= self.seconds:
            return f"{self.seconds:g} s"
        due = len(samples) == self.min_samples or len(samples) % 16 == 0  # sorting after each sample would cost more
        if due and (found := noise(samples)) <= self.noise:
            return f"noise {100 * found:.2g} % <= {100 * self.noise:g} %"
        return ""


def noise(samples: Sequence[float]) -> float:
    """Half width of the 95 % interval of the median (order statistics, no distribution assumed), over the median."""
    ordered, n = sorted(samples), len(samples)
    reach = 1.96 * math.sqrt(n) / 2
    low, high = ordered[max(0, math.floor(n / 2 - reach))], ordered[min(n - 1, math.ceil(n / 2 + reach))]
    return (high - low) / 2 / statistics.median(ordered)


@dataclass
class Timing:
    """Seconds per call. `samples` are raw, in order; each is the mean of `calls_per_sample` calls in a row."""

    samples: list[float]
    calls_per_sample: int
    clock: str
    stopped: str
    warm_up_calls: int
    median: float = field(init=False)
    quartiles: tuple[float, float] = field(init=False)
    noise: float = field(init=False)

    def __post_init__(self) -> None:
        if len(self.samples) < 2 or not all(s > 0 for s in self.samples):
            raise ValueError(f"a timing needs at least two positive samples, got {self.samples[:5]}")
        low, self.median, high = statistics.quantiles(self.samples, n=4)
        self.quartiles = (low, high)
        self.noise = noise(self.samples)


def time_calls(calls: Sequence[Call], clock: Clock, rule: StopRule | None = None, *, flush: bool = False) -> Timing:
    """Times `calls`, which do the same work on different data, in turn. `flush` evicts the caches before each call.

    Warms up with at least three calls and one of each. Short calls are timed several in a row.
    """
    return Timer(calls, clock, flush=flush).run(rule or StopRule())


class Timer:
    """Calls that are warmed up and cut into samples: `sample()` takes one, for whoever decides what comes between."""

    def __init__(self, calls: Sequence[Call], clock: Clock, *, flush: bool = False, shortest: float = 0.0) -> None:
        if not calls:
            raise ValueError("there is no call to time")
        self.clock, self.flush = clock, flush
        self.warm_up_calls = max(3, len(calls))
        for i in range(self.warm_up_calls):
            calls[i % len(calls)]()
        clock.settle()
        once = min(clock.seconds(calls[i % len(calls)]) for i in range(3))
        self.warm_up_calls += 3
        wanted = max(shortest, clock.shortest)
        self.calls_per_sample = 1 if flush else max(1, math.ceil(wanted / max(once, 1e-9)))
        turns = len(calls) // math.gcd(len(calls), self.calls_per_sample)  # samples until the rotation starts anew
        self._chunks = [self._chunk(calls, turn) for turn in range(turns)]
        self._next = 0

    def _chunk(self, calls: Sequence[Call], turn: int) -> Call:
        first = turn * self.calls_per_sample
        return self.clock.chunk([calls[(first + i) % len(calls)] for i in range(self.calls_per_sample)])

    def sample(self) -> float:
        """Seconds per call of the next few calls."""
        if self.flush:
            self.clock.flush()
        chunk = self._chunks[self._next % len(self._chunks)]
        self._next += 1
        return self.clock.seconds(chunk) / self.calls_per_sample

    def run(self, rule: StopRule) -> Timing:
        """Samples until the rule says stop, but at least one of each call."""
        samples: list[float] = []
        stopped = ""
        start = time.perf_counter()
        while not stopped or len(samples) < len(self._chunks):
            samples.append(self.sample())
            stopped = rule.reason(samples, time.perf_counter() - start)
        return Timing(samples, self.calls_per_sample, self.clock.name, stopped, self.warm_up_calls)


# ---- one case -------------------------------------------------------------------------------------------------------
@dataclass
class Measurement:
    """One case on one backend. `temperature` is "cold" or "warm" and `how` says by which means; `roof_pct` and `bound`
    are None without ceilings. `clocks` holds a GPU's state before and after, or the reason why there is none."""

    op: str
    case: str
    backend: str
    entry: str
    shape: str
    compute_kind: str
    temperature: str
    how: str
    timing: Timing
    flops: float
    bytes: float
    roof_pct: float | None
    bound: str | None
    roof_seconds: float | None
    output_hash: str
    machine: dict[str, Any]
    clocks: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.op}[{self.case}] on {self.backend}"

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        out["timing"]["quartiles"] = list(self.timing.quartiles)
        return out


def kernel_call(backend: str) -> Prepare:
    """Calls that go to the backend without the op's checks: a recorded plan on `cpu`, the launcher elsewhere."""

    def prepare(op_name: str, args: Args) -> Call:
        op = OPS[op_name]
        check(op, args)
        chosen = resolve(op, args, backend)
        if chosen.name != "cpu":
            return lambda: chosen.run(op_name, args)
        with native.record() as plan:
            chosen.run(op_name, args)

        def run(kept: Args = args) -> None:  # the plan knows addresses alone
            plan.run()

        return run

    return prepare


def op_call(backend: str) -> Prepare:
    """Calls of the registered op, checks and dispatch included, as a user's program makes them."""

    def prepare(op_name: str, args: Args) -> Call:
        flat = [args[a.name] for a in OPS[op_name].args]
        registered = getattr(torch.ops.pykernels, op_name)
        return lambda: registered(*flat, backend)

    return prepare


ENTRIES: dict[str, Callable[[str], Prepare]] = {"kernel": kernel_call, "op": op_call}


@dataclass
class Prepared:
    """A case that is ready to be timed: calls on `copies` of the same inputs, and what they must compute."""

    case: Case
    backend: str
    device: torch.device
    before: Snapshot
    copies: list[Args]
    calls: list[Call]
    flush: bool

    @property
    def op(self) -> Op:
        return OPS[self.case.op]

    def poison(self) -> None:
        """Makes sure that what is judged was written by the timed calls."""
        for args in self.copies:
            poison_outputs(self.op, args)

    def outputs(self, args: Args) -> dict[str, torch.Tensor]:
        return {t.name: args[t.name] for t in self.op.tensors if t.mutated and args[t.name] is not None}

    def verify(self) -> str:
        """Compares the outputs with the reference, and those of every copy with each other. `Mismatch` with the reasons,
        else the output's hash."""
        what = f"{self.case.op}[{self.case.name}] on {self.backend}"
        reasons = [v.reason for v in judge(self.case.op, self.before, self.copies[0]) if not v.ok]
        if reasons:
            raise Mismatch(f"{what} is not timed, it is wrong: {'; '.join(reasons)}")
        first = self.outputs(self.copies[0])
        for number, args in enumerate(self.copies[1:], 2):
            for name, value in self.outputs(args).items():
                if name != "workspace" and not same_bits(value, first[name]).all():
                    raise Mismatch(f"{what} is not timed: {name} of copy {number} has other bits than that of copy 1")
        return output_hash({n: v for n, v in first.items() if n != "workspace"})


def output_hash(outputs: dict[str, torch.Tensor]) -> str:
    """16 hex digits over names, shapes and bits."""
    digest = hashlib.sha256()
    for name, value in outputs.items():
        raw = value.detach().cpu().contiguous()
        digest.update(f"{name} {list(raw.shape)} {raw.dtype};".encode())
        digest.update(raw.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def prepare(
    case: Case, backend: str, clock: Clock, device: torch.device, *, cold: bool = True, call: Prepare | None = None
) -> Prepared:
    """Builds a case's inputs and its calls. NotImplementedError with the reasons when the backend refuses the case.

    Cold inputs are copied until one turn over the copies touches twice the last-level cache; when that takes too many
    copies, one is kept and the caches are flushed before each call.
    """
    args = case.args(str(device))
    op = OPS[case.op]
    before = Snapshot(args)
    touched = op.cost(bind_dims(op, args), args).bytes
    if touched <= 0:
        raise ValueError(f"{case.op}[{case.name}] moves no bytes: there is nothing to time")
    wanted = 1 + math.ceil(2 * clock.cache_bytes() / touched) if cold else 1
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(args)}.values())
    flush = wanted > MAX_COPIES or wanted * held > free_bytes(device)
    copies = [args, *copies_of(args, 0 if flush else wanted - 1)]
    make = call or kernel_call(backend)
    calls = [make(case.op, each) for each in copies]
    return Prepared(case, backend, device, before, copies, calls, flush and cold)


def tensors(args: Args) -> list[torch.Tensor]:
    return [v for v in args.values() if isinstance(v, torch.Tensor)]


def measure(
    case: Case,
    backend: str = "auto",
    *,
    device: str = "cpu",
    cold: bool = True,
    rule: StopRule | None = None,
    ceilings: Ceilings | None = None,
    remeasure: Remeasure | None = None,
    entry: str = "kernel",
    call: Prepare | None = None,
    clock: Clock | None = None,
) -> Measurement:
    """Times one case; FLOPs and bytes are the contract's.

    `entry`: "kernel" leaves out the op's Python (checks, dispatch), "op" is the registered op; `call` replaces both with
    a caller's own, for peers: from the op's name and arguments it makes a call that writes into the outputs, or puts
    its own in their place; `clock` is the device's by default. `ceilings` of this machine put the point under its roof. Raises `Mismatch` when the outputs are wrong, `RoofError` when the
    point is above its roof, NotImplementedError when the backend refuses the case.
    """
    if entry not in ENTRIES:
        raise ValueError(f"entry must be one of {', '.join(ENTRIES)}, got {entry!r}")
    where = torch.device(device)
    clock = clock or clock_of(where)
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        ready = prepare(case, backend, clock, where, cold=cold, call=call or ENTRIES[entry](backend))
        clocks = {"before": gpu_state(where)}
        timer = Timer(ready.calls, clock, flush=ready.flush)
        ready.poison()
        timing = timer.run(rule or StopRule())
        clocks["after"] = gpu_state(where)
        digest = ready.verify()

    op, args = ready.op, ready.copies[0]
    dims = bind_dims(op, args)
    cost, kind = op.cost(dims, args), compute_kind(op, args)
    percent = bound = seconds = None
    if ceilings is not None:
        working_set = max(cost.bytes * len(ready.copies), 4.0 * clock.cache_bytes() if cold else 0.0)
        percent, limit = percent_of_roof(
            f"{case.op}[{case.name}] on {backend}",
            cost,
            timing.median,
            kind,
            ceilings,
            working_set=working_set,
            remeasure=remeasure,
        )
        bound, seconds = limit.bound, limit.seconds
    return Measurement(
        op=case.op,
        case=case.name,
        backend=backend,
        entry="own" if call else entry,
        shape=shape_text(op, args, dims),
        compute_kind=kind,
        temperature="cold" if cold else "warm",
        how=_how(ready, cold),
        timing=timing,
        flops=cost.flops,
        bytes=cost.bytes,
        roof_pct=percent,
        bound=bound,
        roof_seconds=seconds,
        output_hash=digest,
        machine=machine(where),
        clocks=clocks,
    )


def _how(ready: Prepared, cold: bool) -> str:
    if not cold:
        return "the same buffers in every call"
    return "caches flushed before each call" if ready.flush else f"{len(ready.copies)} copies of the inputs in turn"
