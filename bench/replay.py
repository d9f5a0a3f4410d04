"""Runs a benchmark's call again, the same call on the same inputs, for a profiler to look at.

    python -m pykernels.bench.replay paged_decode_attention --backend cpu --ranges torch --trace trace.json --facts facts.json

`pykernels profile` writes such a line after the profiler's own. Inputs, copies, warm-up and the check of the outputs are
the harness's; each call is one range that carries the op's name, and what comes between calls (evicting the caches) lies
outside of it. A GPU's calls are launched one by one, not from a graph, so that every kernel lies in its range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pykernels.contract import OPS, bind_dims
from pykernels.ranges import Nvtx, TorchRanges, annotated, span
from pykernels.roofline.points import compute_kind, shape_text
from pykernels.testing.factories import Case, cases

from .clocks import Clock, clock_of
from .harness import ENTRIES, Prepared, Timer, prepare
from .machine import machine
from .problems import GRIDS, problems

RANGES: dict[str, Callable[[], Any]] = {"nvtx": Nvtx, "torch": TorchRanges}


def case_named(op: str, name: str | None = None) -> Case:
    """A row of the op's grid, or a case of its tests; without a name the row of the smoke run. ValueError lists the rows."""
    if op not in GRIDS:
        raise ValueError(f"op must be one of {', '.join(GRIDS)}, got {op!r}")
    if name is None:
        return problems(op, "smoke")[0]
    rows = problems(op)
    found = next((c for c in [*rows, *cases(op)] if c.name == name), None)
    if found is None:
        raise ValueError(f"{op} has no case {name!r}; the suite measures {', '.join(c.name for c in rows)}")
    return found


class PerfControl:
    """Switches perf's counters: `perf stat --delay=-1 --control=fifo:CTL,ACK` waits for a word and answers each."""

    def __init__(self, control: str, answer: str) -> None:
        self._control = os.open(control, os.O_WRONLY)
        self._answer = os.open(answer, os.O_RDONLY)

    def say(self, word: str) -> None:
        os.write(self._control, f"{word}\n".encode())
        if not os.read(self._answer, 16).startswith(b"ack"):
            raise OSError(f"perf did not answer {word!r}")


@contextmanager
def traced(path: str | None) -> Iterator[None]:
    """Writes a Chrome trace of what runs inside; Perfetto opens it too."""
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as found:
        yield
    found.export_chrome_trace(path)


def replay(ready: Prepared, clock: Clock, count: int, control: PerfControl | None) -> list[float]:
    """Seconds of `count` calls, each in its range and with perf counting. The copies whose turn is not among them run
    before, unseen, so that all of them are written and the caches are what they are in the benchmark."""
    copies = len(ready.calls)
    for call in ready.calls[: max(copies - count, 0)]:
        call()
    seconds = []
    for number in range(max(copies - count, 0), max(copies, count)):
        if ready.flush:
            clock.flush()
        clock.settle()
        if control:
            control.say("enable")
        start = time.perf_counter()
        with span(ready.case.op):
            ready.calls[number % copies]()
            clock.settle()
        seconds.append(time.perf_counter() - start)
        if control:
            control.say("disable")
    return seconds


def facts(ready: Prepared, seconds: Sequence[float], entry: str, cold: bool, digest: str) -> dict[str, Any]:
    """What was replayed: the contract's work of one call, and its time under the profiler."""
    op, args = ready.op, ready.copies[0]
    dims = bind_dims(op, args)
    cost = op.cost(dims, args)
    return {
        "op": op.name,
        "case": ready.case.name,
        "backend": ready.backend,
        "entry": entry,
        "temperature": "cold" if cold else "warm",
        "shape": shape_text(op, args, dims),
        "compute_kind": compute_kind(op, args),
        "flops": cost.flops,
        "bytes": cost.bytes,
        "calls": len(seconds),
        "seconds": statistics.median(seconds),
        "output_hash": digest,
        "machine": machine(ready.device),
    }


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m pykernels.bench.replay", description=__doc__.splitlines()[0])
    top.add_argument("op", choices=sorted(OPS))
    top.add_argument("--case", help="a row of the op's grid, or a case of its tests (default: the smoke run's row)")
    top.add_argument("--backend", default="cpu")
    top.add_argument("--entry", choices=tuple(ENTRIES), default="kernel")
    top.add_argument("--warm", action="store_true", help="the same buffers in every call")
    top.add_argument("--calls", type=int, default=3)
    top.add_argument("--ranges", choices=tuple(RANGES))
    top.add_argument("--trace", help="write a Chrome trace here")
    top.add_argument("--perf-control", nargs=2, metavar=("CTL", "ACK"), help="perf's two pipes")
    top.add_argument("--facts", required=True, help="write what was replayed here, as JSON")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch.set_num_threads(1)  # as in the suite: torch's pool does not fight with ours
    device = torch.device("cuda" if args.backend in ("cuda", "triton") else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"replay: {args.backend} needs a GPU, and torch finds none", file=sys.stderr)
        return 2
    case, clock = case_named(args.op, args.case), clock_of(device)
    call = ENTRIES[args.entry](args.backend)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        ready = prepare(case, args.backend, clock, device, cold=not args.warm, call=call)
        Timer(ready.calls, clock, flush=ready.flush)  # warms up every copy
        if ready.flush:
            clock.flush()  # makes its buffer
        ready.poison()
        clock.settle()
        control = PerfControl(*args.perf_control) if args.perf_control else None
        ranges = annotated(RANGES[args.ranges](), ops=args.ranges == "torch") if args.ranges else nullcontext()
        with traced(args.trace), ranges:
            seconds = replay(ready, clock, args.calls, control)
        digest = ready.verify()
    found = facts(ready, seconds, args.entry, not args.warm, digest)
    Path(args.facts).write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
