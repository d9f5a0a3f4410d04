"""The measurements of `pykernels roofline`: requests with their steps, ops one by one, and the price of no cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract import Cost
from ..kv_cache import FORMATS, bytes_per_token
from ..roofline.ceilings import Ceilings, Remeasure, percent_of_roof
from ..roofline.points import Recorder
from ..roofline.records import RequestRecord, StepRecord
from .generator import Generator
from .request import SamplingParams

FILLER = (
    "Prefill runs the whole prompt through the model at once and is bound by arithmetic; decode makes one token at a "
    "time, reads every weight and the whole cache for it, and is bound by memory. "
)
CACHE_FORMATS = ("float32", "bfloat16", "int8")


@dataclass
class Run:
    """Repeated requests of one shape."""

    name: str
    prompt_tokens: int
    steps: list[StepRecord]
    requests: list[RequestRecord]
    token_ids: list[tuple[int, ...]]

    def phase_seconds(self, phase: str) -> list[float]:
        """Seconds of the phase, request by request."""
        spans: list[float] = []
        for request in self.requests:
            end = request.deliveries[-1]
            inside = [s for s in self.steps if s.phase == phase and request.submitted <= s.start <= end]
            spans.append(sum(s.seconds for s in inside))
        return spans

    def summary(self, ceilings: Ceilings, remeasure: Remeasure) -> dict[str, Any]:
        """Medians over the repeats, with the slowest and fastest, and the share of the roof that each phase reached."""
        out: dict[str, Any] = {
            "name": self.name,
            "repeats": len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.requests[0].output_tokens,
            "ttft": statistics.median(r.ttft for r in self.requests if r.ttft is not None),
            "itl": statistics.median(r.itl for r in self.requests if r.itl is not None),
        }
        for phase in ("prefill", "decode"):
            steps = [s for s in self.steps if s.phase == phase]
            tokens = sum(s.tokens for s in steps) / len(self.requests)
            seconds = self.phase_seconds(phase)
            median = statistics.median(seconds)
            work = Cost(
                sum(s.flops for s in steps) / len(self.requests), sum(s.bytes for s in steps) / len(self.requests)
            )
            percent, limit = percent_of_roof(
                f"the {phase} phase of {self.name}",
                work,
                median,
                "int8",
                ceilings,
                working_set=statistics.median(s.bytes for s in steps),
                remeasure=remeasure,
            )
            out |= {
                f"{phase}_tokens_per_s": tokens / median,
                f"{phase}_tokens_per_s_range": [tokens / max(seconds), tokens / min(seconds)],
                f"{phase}_roof_pct": percent,
                f"{phase}_roof_bound": limit.bound,
            }
        return out


def filler_ids(generator: Generator, count: int) -> list[int]:
    """A prompt of exactly `count` tokens of ordinary text."""
    ids = generator.tokenizer.encode(FILLER)
    return (ids * (count // len(ids) + 1))[:count]


def measure_requests(
    generator: Generator, name: str, prompt: Sequence[int], new_tokens: int, repeats: int, tick: Callable[[], None]
) -> Run:
    """The same request `repeats` times, alone, after one that is not counted."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    engine = generator.engine
    run = Run(name, len(prompt), [], [], [])
    for repeat in range(repeats + 1):
        engine.steps.clear()
        request = generator.request(prompt, params)
        for _ in generator.pieces(request):
            pass
        if repeat:
            run.steps += engine.steps
            run.requests.append(request.record())
            run.token_ids.append(tuple(request.output_ids))
        tick()
    return run


def measure_ops(generator: Generator, prompt: Sequence[int], new_tokens: int) -> Recorder:
    """Every op of a request timed on its own. Its steps are not kept: timing each op slows them."""
    engine = generator.engine
    engine.recorder = Recorder()
    try:
        for _ in generator.pieces(
            generator.request(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
        ):
            pass
        return engine.recorder
    finally:
        engine.recorder = None
        engine.steps.clear()


def measure_no_cache(
    generator: Generator, contexts: Sequence[int], repeats: int, tick: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of one more token at each context: with the cache, and by computing the whole context again."""
    engine = generator.engine
    cached, recomputed = [], []
    for context in contexts:
        prompt = filler_ids(generator, context)
        again, steps = [], []
        for _ in range(repeats):
            engine.steps.clear()
            started = time.perf_counter()
            pieces = generator.request(prompt, SamplingParams(max_new_tokens=4, ignore_eos=True))
            for _ in generator.pieces(pieces):
                pass
            again.append(pieces.deliveries[0] - started)
            steps += [s.seconds for s in engine.steps if s.phase == "decode"]
            tick()
        cached.append(statistics.median(steps))
        recomputed.append(statistics.median(again))
    engine.steps.clear()
    return {"context": [float(c) for c in contexts], "cached_seconds": cached, "recomputed_seconds": recomputed}


def kv_memory(generator: Generator) -> dict[str, Any]:
    """Bytes of the weights, and of the cache per token in each format."""
    config = generator.config
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
    return {
        "weights_bytes": generator.decoder.weight_bytes,
        "max_context": config.max_context,
        "bytes_per_token": {name: bytes_per_token(*sizes, FORMATS[name]) for name in CACHE_FORMATS},
    }
