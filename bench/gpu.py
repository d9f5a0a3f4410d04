"""The table of GPU benchmarks: our backends and their peers on the shapes that people serve, under the GPU's own roof.

    python -m pykernels.bench.gpu --list                       what would be measured; needs no GPU
    python -m pykernels.bench.gpu --out bench/results          everything, one JSON document per GPU type
    python -m pykernels.bench.gpu --only decode --seconds 0.2

Every result is checked before it counts: some of its rows are computed again by the reference in float64, since the
reference over a whole call of this size would take minutes. A peer is held to the same rows; sampling peers draw other
numbers, and are held to the support of the distribution. The document is written after each benchmark, so that a run that
is cut short leaves what it has. Exit codes: 0 done, 1 something was wrong or failed, 2 no GPU or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pykernels.contract import OPS, bind_dims
from pykernels.registry import backends
from pykernels.roofline.ceilings import Ceilings, Remeasure, percent_of_roof
from pykernels.roofline.environment import git_revision
from pykernels.roofline.gpu_ceilings import measure_gpu
from pykernels.roofline.points import compute_kind, shape_text
from pykernels.testing import attention_cases, sampling_cases
from pykernels.testing.attention_cases import Attention
from pykernels.testing.build import Maker
from pykernels.testing.factories import Case
from pykernels.triton import tuned

from . import spot_check
from .clocks import Clock, clock_of, free_bytes
from .gpu_peers import Peer, peers_of
from .gpu_state import gpu_state
from .harness import MAX_COPIES, StopRule, Timer, kernel_call
from .inputs import Args, copies_of, poison_outputs
from .machine import machine

BACKENDS = ("cuda", "triton")
BF16 = torch.bfloat16
KV = {"bfloat16": None, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


@dataclass(frozen=True)
class Benchmark:
    """One row of the table: a call, and what a peer must know of it besides its arguments."""

    name: str
    case: Case
    traits: dict[str, Any]


def _llama(**changes: Any) -> Attention:
    return Attention(heads=32, kv_heads=8, head_dim=128, head_dim_v=128, dtype=BF16, lse=False, **changes)


def _prefill(tokens: int) -> Benchmark:
    def build(make: Maker) -> Args:
        return attention_cases.prefill(_llama(q_lens=(tokens,), k_lens=(tokens,)), make)

    name = f"prefill-causal-{tokens // 1024}k"
    return Benchmark(name, Case("prefill_attention", name, build, False), {"tokens": tokens})


def _decode(batch: int, context: int, kv: str) -> Benchmark:
    def build(make: Maker) -> Args:
        return attention_cases.decode(_llama(q_lens=(1,) * batch, k_lens=(context,) * batch, cache=KV[kv]), make)

    name = f"decode-batch_{batch}-{context // 1024}k-kv_{kv}"
    traits = {"batch": batch, "context": context, "kv": kv}
    return Benchmark(name, Case("paged_decode_attention", name, build, False), traits)


def _sample(filters: str) -> Benchmark:
    def build(make: Maker) -> Args:
        spec = sampling_cases.Sampling(64, 128256, torch.float32, use=(), num_logprobs=None)
        args = sampling_cases.sample(spec, make)
        for name, value in FILTERS[filters].items():
            args[name].fill_(value)
        return args | {"logprob": None}

    name = f"sample-batch_64-{filters}"
    return Benchmark(name, Case("sample", name, build, False), {"filters": filters, **FILTERS[filters]})


def table() -> list[Benchmark]:
    """Every benchmark, those that answer most first: a run that is cut short keeps them."""
    return [
        *(_prefill(k * 1024) for k in (8, 16, 1, 4, 2)),
        *(_decode(b, c * 1024, "bfloat16") for c in (8, 1) for b in (64, 8, 1)),
        *(_sample(name) for name in FILTERS),
        *(_decode(b, c * 1024, kv) for kv in ("fp8_e4m3", "int8") for c in (8, 1) for b in (64, 8, 1)),
    ]


class DeviceMaker(Maker):
    """Draws on the device: gigabytes of random numbers from the host would take longer than what is measured."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed, device)
        self.own = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.own, device=self.device) * std).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.own, device=self.device)


def build(benchmark: Any, device: torch.device) -> Args:
    """The arguments of a call, in the contract's order; `benchmark` is anything that has a case."""
    made = benchmark.case.build(DeviceMaker(1, str(device)))
    return {arg.name: made[arg.name] for arg in OPS[benchmark.case.op].args}


# ---- one measurement ---------------------------------------------------------------------------------------------------
@dataclass
class Bench:
    """What every measurement of a run shares."""

    device: torch.device
    clock: Clock
    ceilings: Ceilings | None
    remeasure: Remeasure | None
    rule: StopRule

    def measure(self, benchmark: Benchmark, copies: list[Args], name: str, peer: Peer | None) -> dict[str, Any]:
        """Times a backend, or a peer on the same inputs, cold. AssertionError when it is wrong, `RoofError` above the roof."""
        op, args = OPS[benchmark.case.op], copies[0]
        dims = bind_dims(op, args)
        cost = op.cost(dims, args)
        results: Args = args
        if peer is None:
            calls = [kernel_call(name)(op.name, each) for each in copies]
        else:
            made = [peer.prepare(each) for each in copies]
            calls = [call for call, _ in made]
        clocks = {"before": gpu_state(self.device)}
        timer = Timer(calls, self.clock)
        if peer is None:
            for each in copies:
                poison_outputs(op, each)
        timing = timer.run(self.rule)
        clocks["after"] = gpu_state(self.device)
        if peer is not None:
            results = {**args, **made[0][1]()}
        exact = peer is None or peer.exact
        error = spot_check.verify(op, results, exact=exact, what=f"{benchmark.name} on {name}")
        found = {
            "benchmark": benchmark.name,
            "implementation": name,
            "peer": peer is not None,
            "op": op.name,
            "shape": shape_text(op, args, dims),
            "seconds": timing.median,
            "quartiles": list(timing.quartiles),
            "noise": timing.noise,
            "samples": len(timing.samples),
            "calls_per_sample": timing.calls_per_sample,
            "clock": timing.clock,
            "stopped": timing.stopped,
            "copies": len(copies),
            "flops": cost.flops,
            "bytes": cost.bytes,
            "tflop_per_s": cost.flops / timing.median / 1e12,
            "gb_per_s": cost.bytes / timing.median / 1e9,
            "error": error,
            "clocks": clocks,
            **({"note": peer.note} if peer and peer.note else {}),
        }
        if self.ceilings is not None:
            percent, roof = percent_of_roof(
                f"{benchmark.name} on {name}",
                cost,
                timing.median,
                compute_kind(op, args),
                self.ceilings,
                working_set=max(cost.bytes * len(copies), 4.0 * self.clock.cache_bytes()),
                remeasure=self.remeasure,
            )
            found |= {"roof_pct": percent, "bound": roof.bound, "roof_seconds": roof.seconds}
        return found

    def alive(self) -> bool:
        """Whether the device still answers: an illegal access ends all work of a process."""
        try:
            self.clock.settle()
        except RuntimeError:
            return False
        return True

    def copies(self, benchmark: Benchmark) -> list[Args]:
        """The inputs, and as many copies as one turn over them needs to touch twice the last-level cache, if there is room."""
        op, args = OPS[benchmark.case.op], build(benchmark, self.device)
        touched = op.cost(bind_dims(op, args), args).bytes
        wanted = min(1 + int(2 * self.clock.cache_bytes() / max(touched, 1.0)), MAX_COPIES)
        held = sum(t.untyped_storage().nbytes() for t in args.values() if isinstance(t, torch.Tensor))
        room = max(1, int(free_bytes(self.device) / max(held, 1)))
        return [args, *copies_of(args, min(wanted, room) - 1)]


# ---- a run -------------------------------------------------------------------------------------------------------------
Implementation = tuple[str, Peer | None, str]  # name, peer or None for ours, why it cannot be measured here


def implementations(benchmark: Benchmark, usable: tuple[str, ...]) -> Iterator[Implementation]:
    for name in BACKENDS:
        yield name, None, "" if name in usable else f"backend {name} is not available"
    for peer in peers_of(benchmark.case.op):
        yield peer.name, peer, peer.missing(benchmark.traits)


def schedule(chosen: list[Benchmark], usable: tuple[str, ...]) -> Iterator[tuple[Benchmark, list[Implementation]]]:
    """Ours and the peers that start at once; then, for what time is left, those that compile first."""
    for compiling in (False, True):
        for benchmark in chosen:
            every = implementations(benchmark, usable)
            found = [i for i in every if (i[1] is not None and i[1].compiles) == compiling]
            if found:
                yield benchmark, found


def run(
    bench: Bench,
    document: dict[str, Any],
    chosen: list[Benchmark],
    usable: tuple[str, ...],
    keep: Callable[[], None],
    deadline: float,
) -> bool:
    """Measures into `document`, calling `keep` after each benchmark. True when nothing was wrong."""
    good, lost = True, ""
    for benchmark, implementing in schedule(chosen, usable):
        inputs: list[Args] = []
        for name, peer, reason in implementing:
            label = {"benchmark": benchmark.name, "implementation": name}
            if not reason and time.monotonic() > deadline:
                reason = "the time budget was spent"
            if reason := reason or lost:
                document["skipped"].append({**label, "reason": reason})
                continue
            try:
                inputs = inputs or bench.copies(benchmark)
                document["results"].append(bench.measure(benchmark, inputs, name, peer))
                print(_line(document["results"][-1]), flush=True)
            except (NotImplementedError, torch.OutOfMemoryError) as error:
                document["skipped"].append({**label, "reason": _one_line(error)})
            except Exception as error:  # a peer may raise anything; ours too, and the others are still measured
                document["failed"].append({**label, "error": f"{type(error).__name__}: {_one_line(error)}"})
                print(f"{benchmark.name} on {name}: {_one_line(error)}", file=sys.stderr)
                if not bench.alive():
                    lost = f"the device was lost when {name} ran {benchmark.name}"
                good = good and peer is not None and not lost  # a peer that fails is not our failure, but is said
        keep()
        inputs.clear()
        if bench.device.type == "cuda" and not lost:
            torch.cuda.empty_cache()
    return good


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _line(found: dict[str, Any]) -> str:
    rate = (
        f"{found['tflop_per_s']:7.1f} TFLOP/s"
        if found["op"] == "prefill_attention"
        else f"{found['gb_per_s']:7.0f} GB/s"
    )
    roof = f"{found['roof_pct']:5.1f} % of {found['bound']}" if "roof_pct" in found else ""
    spread = f"+- {100 * found['noise']:.1f} %"
    return f"{found['benchmark']:34s} {found['implementation']:22s} {1e6 * found['seconds']:10.1f} us {spread:9s} {rate} {roof}"


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda or torch.version.hip)}
    for name in ("torch", "triton", "flash-attn", "flash-attn-3", "flashinfer-python"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def new_document(device: torch.device, ceilings: Ceilings | None, command: str, checks: str) -> dict[str, Any]:
    return {
        "machine": machine(device),
        "versions": _versions(),
        "revision": git_revision(Path(__file__).resolve().parents[1]),
        "command": command,
        "checks": dict(word.split("=", 1) for word in checks.split()),
        "ceilings": None if ceilings is None else ceilings.to_json(),
        "results": [],
        "skipped": [],
        "failed": [],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pykernels.bench.gpu", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print the table and what is missing here; needs no GPU")
    parser.add_argument("--only", default="", help="benchmarks whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.3, help="timed seconds of one measurement (default: 0.3)")
    parser.add_argument(
        "--budget", type=float, default=240.0, help="seconds after which nothing is started (default: 240)"
    )
    parser.add_argument(
        "--checks", default="", help='what went before, for the document: "build=ok correctness=failed"'
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the document")
    return parser


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(words)
    chosen = [b for b in table() if options.only in b.name]
    if not chosen:
        print(f"pykernels.bench.gpu: no benchmark's name contains {options.only!r}", file=sys.stderr)
        return 2
    states = backends()
    usable = tuple(n for n in BACKENDS if states[n] and torch.cuda.is_available())
    if options.list:
        for benchmark in chosen:
            parts = [f"{n} ({why})" if why else n for n, _, why in implementations(benchmark, usable)]
            print(f"{benchmark.name:34s} {', '.join(parts)}")
        return 0
    if not torch.cuda.is_available():
        print("pykernels.bench.gpu: there is no GPU (--list prints the table without one)", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.budget
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings, remeasure = measure_gpu(device)
    document = new_document(
        device, ceilings, shlex.join(["python", "-m", "pykernels.bench.gpu", *words]), options.checks
    )
    path = options.out / f"{tuned.slug(str(document['machine']['gpu']))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        document["ceilings"] = ceilings.to_json()  # a ceiling may have risen
        path.write_text(json.dumps(document, indent=1) + "\n")

    rule = StopRule(min_samples=10, seconds=options.seconds, noise=0.005)
    bench = Bench(device, clock_of(device), ceilings, remeasure, rule)
    good = run(bench, document, chosen, usable, keep, deadline)
    print(f"written: {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
