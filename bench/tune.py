"""Searches tiles for the Triton attention kernels on the GPU at hand and writes the table that `configs.py` prefers.

Candidates that do not fit are pruned by arithmetic; each of the others is checked against the reference, and those that are
right are timed in turn, so that a slow second meets all of them. A tile goes into the table only where it beats the analytic
choice by more than the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from pykernels.contract import OPS
from pykernels.registry import load
from pykernels.testing import attention_cases
from pykernels.testing.attention_cases import Attention
from pykernels.testing.build import Maker
from pykernels.testing.factories import Case
from pykernels.triton import tuned

from . import spot_check
from .clocks import Call, Clock
from .harness import Timer, noise
from .inputs import Args

BF16 = torch.bfloat16
GAIN = 0.02  # a tile must be this much faster than the analytic choice: less is what two runs differ by
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """A call whose tile is searched for; `kind` is "prefill" or "decode"."""

    name: str
    kind: str
    case: Case
    shape: dict[str, int]  # what a tile is chosen for, but for what depends on strides


def _problem(kind: str, name: str, spec: Attention) -> Problem:
    build = attention_cases.prefill if kind == "prefill" else attention_cases.decode
    op = "prefill_attention" if kind == "prefill" else "paged_decode_attention"

    def arguments(make: Maker) -> Args:
        return build(spec, make)

    shape = {"head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v, "group": spec.heads // spec.kv_heads}
    shape |= {"q_bytes": spec.dtype.itemsize, "kv_bytes": (spec.cache or spec.dtype).itemsize}
    return Problem(name, kind, Case(op, name, arguments, False), shape)


def problems() -> list[Problem]:
    """Head dims, groups and cache formats of the models that people run."""
    found = []
    for dim, heads, kv_heads in ((128, 32, 8), (64, 32, 8), (256, 16, 8)):
        sizes: dict[str, Any] = {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
            "head_dim_v": dim,
            "dtype": BF16,
        }
        spec = Attention(q_lens=(4096,), k_lens=(4096,), lse=False, **sizes)
        found.append(_problem("prefill", f"prefill-d{dim}", spec))
        for kv, cache in (("bfloat16", None), ("int8", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)):
            spec = Attention(q_lens=(1,) * 16, k_lens=(4096,) * 16, lse=False, cache=cache, **sizes)
            found.append(_problem("decode", f"decode-d{dim}-kv_{kv}", spec))
    return found


@dataclass
class Found:
    """What a search came to. Times are medians in seconds; `dropped` says why a candidate was not timed."""

    analytic: Any
    best: Any
    seconds: dict[Any, float]
    noise: float
    dropped: dict[Any, str] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        return 1 - self.seconds[self.best] / self.seconds[self.analytic]

    @property
    def better(self) -> bool:
        """Whether the best tile beats the analytic one by more than the noise."""
        return self.best != self.analytic and self.gain > max(GAIN, 2 * self.noise)


def search(
    analytic: Any,
    candidates: Sequence[Any],
    prepare: Callable[[Any], Call],
    verify: Callable[[], None],
    clock: Clock,
    *,
    rounds: int = 15,
    progress: Progress = lambda _: None,
) -> Found:
    """Times the candidates that run and are right, in turn. `prepare(tile)` gives its call, `verify()` raises
    AssertionError when the outputs of the last call are wrong. The analytic choice must be right: its error is raised."""
    timers: dict[Any, Timer] = {}
    dropped: dict[Any, str] = {}
    for tile in [analytic, *(c for c in candidates if c != analytic)]:
        progress(str(tile))
        try:
            call = prepare(tile)
            call()
            clock.settle()
            verify()
            timers[tile] = Timer([call], clock)
        except (RuntimeError, AssertionError) as error:  # too large after all, or wrong
            if tile == analytic:
                raise
            dropped[tile] = " ".join(str(error).split())[:200]
    samples: dict[Any, list[float]] = {tile: [] for tile in timers}
    for _ in range(rounds):
        for tile, timer in timers.items():
            samples[tile].append(timer.sample())
    seconds = {tile: statistics.median(values) for tile, values in samples.items()}
    best = min(seconds, key=seconds.__getitem__)
    spread = max(noise(samples[tile]) for tile in (analytic, best))
    return Found(analytic, best, seconds, spread, dropped)


def tune(problem: Problem, args: Args, clock: Clock, *, rounds: int = 15, progress: Progress = lambda _: None) -> Any:
    """An entry of the table for a problem, `{"kind", "shape", "tile", ...}`; `tile` is None where the analytic choice stays."""
    from pykernels.triton.candidates import search_space, why_not
    from pykernels.triton.common import target_of
    from pykernels.triton.configs import AttentionShape, Tile, decode_tile, prefill_tile

    backend, op = load("triton"), OPS[problem.case.op]
    with tuned.scope() as asked:
        backend.run(op.name, args)
    kind, fields = next((k, f) for k, f in asked.asked if k == problem.kind)
    shape, tma_ok = AttentionShape(**{n: v for n, v in fields.items() if n != "tma_ok"}), fields["tma_ok"]
    target = target_of(args["q"])
    with tuned.scope():
        analytic = prefill_tile(target, shape, tma_ok) if kind == "prefill" else decode_tile(target, shape)
    space = search_space(kind, shape, tma_ok)
    fitting = [tile for tile in space if not why_not(target, shape, tile)]

    def prepare(tile: Tile) -> Call:
        def call() -> None:
            with tuned.scope(tile):
                backend.run(op.name, args)

        return call

    def verify() -> None:
        spot_check.verify(op, args, exact=True, what=problem.name)
        args["out"].fill_(torch.nan)  # what the next candidate is judged by, it must have written

    found = search(analytic, fitting, prepare, verify, clock, rounds=rounds, progress=progress)
    return {
        "kind": kind,
        "shape": fields,
        "problem": problem.name,
        "tile": asdict(found.best) if found.better else None,
        "analytic": asdict(analytic),
        "seconds": found.seconds[found.best],
        "analytic_seconds": found.seconds[analytic],
        "gain": found.gain if found.better else 0.0,
        "noise": found.noise,
        "tried": len(found.seconds),
        "pruned": len(space) - len(fitting),
        "dropped": {str(tile): reason for tile, reason in found.dropped.items()},
    }


def document(gpu: str, found: Sequence[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """The table of a GPU: entries with a tile of their own, and all that was tried."""
    chosen = ("kind", "shape", "tile", "problem", "gain", "noise", "seconds", "analytic_seconds")
    kept = [{name: entry[name] for name in chosen} for entry in found if entry["tile"] is not None]
    return {"gpu": gpu, **facts, "entries": kept, "tried": list(found)}
