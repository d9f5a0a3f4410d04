"""A report's document made by hand, of realistic size: SmolLM2-135M on a two-core machine."""

from __future__ import annotations

import random
from typing import Any

from pykernels.contract import Cost
from pykernels.roofline import Ceiling, Ceilings, Environment, RequestRecord, StepRecord, document, metrics
from pykernels.roofline.ceilings import roof
from pykernels.roofline.points import OpPoint

RATES = {
    "l1": 390e9,
    "l2": 210e9,
    "l3": 170e9,
    "dram": 31e9,
    "copy": 44e9,
    "float32": 230e9,
    "bfloat16": 463e9,
    "int8": 915e9,
}


def spread(value: float, seed: int) -> list[float]:
    """Samples whose upper quartile is near `value`."""
    draw = random.Random(seed)
    return [value * (1.0 - abs(draw.gauss(0.0, 0.03))) for _ in range(48)]


def ceilings() -> Ceilings:
    table = {
        name: Ceiling("B/s" if name in ("l1", "l2", "l3", "dram", "copy") else "FLOP/s", spread(rate, i))
        for i, (name, rate) in enumerate(RATES.items())
    }
    caches = {"l1": 64 << 10, "l2": 2 << 20, "l3": 32 << 20}
    return Ceilings({"cpu": "AMD EPYC"}, "avx512", 2, "0-1", caches, table)


# op, label, shape, compute kind, FLOPs and bytes of a call, calls in a step, share of the roof that it reached
PREFILL = (
    ("linear", "gate up", "512 x 576 -> 3072, q4_1", "int8", 2 * 512 * 576 * 3072, 8.6e6, 30, 64),
    ("linear", "down", "512 x 1536 -> 576, q4_1", "int8", 2 * 512 * 576 * 1536, 5.0e6, 30, 61),
    ("linear", "qkv", "512 x 576 -> 960, q4_1", "int8", 2 * 512 * 576 * 960, 3.5e6, 30, 57),
    ("linear", "o", "512 x 576 -> 576, q4_1", "int8", 2 * 512 * 576 * 576, 2.6e6, 30, 52),
    ("linear", "head", "1 x 576 -> 49152, q8_0", "int8", 2 * 576 * 49152, 30.3e6, 1, 81),
    ("prefill_attention", "", "512 x 9 x 64", "bfloat16", 2 * 512 * 513 * 9 * 64, 1.6e6, 30, 44),
    ("rms_norm", "", "512 x 576", "float32", 4 * 512 * 576, 2.4e6, 61, 38),
    ("gated_activation", "", "512 x 3072", "float32", 5 * 512 * 1536, 9.4e6, 30, 47),
    ("rope_append_kv", "", "512 x 9 x 64", "bfloat16", 6 * 512 * 12 * 64, 2.1e6, 30, 29),
    ("embedding", "", "512 x 576, q8_0", "float32", 512 * 576, 1.5e6, 1, 22),
)
DECODE = (
    ("linear", "head", "1 x 576 -> 49152, q8_0", "int8", 2 * 576 * 49152, 30.3e6, 1, 97),
    ("linear", "gate up", "1 x 576 -> 3072, q4_1", "int8", 2 * 576 * 3072, 1.12e6, 30, 95),
    ("linear", "down", "1 x 1536 -> 576, q4_1", "int8", 2 * 576 * 1536, 0.56e6, 30, 91),
    ("linear", "qkv", "1 x 576 -> 960, q4_1", "int8", 2 * 576 * 960, 0.35e6, 30, 88),
    ("linear", "o", "1 x 576 -> 576, q4_1", "int8", 2 * 576 * 576, 0.21e6, 30, 82),
    ("paged_decode_attention", "", "1 x 9 x 64, kv bfloat16", "bfloat16", 4 * 540 * 9 * 64, 0.42e6, 30, 66),
    ("rms_norm", "", "1 x 576", "float32", 4 * 576, 7e3, 61, 6),
    ("gated_activation", "", "1 x 3072", "float32", 5 * 1536, 18e3, 30, 7),
    ("rope_append_kv", "", "1 x 9 x 64", "bfloat16", 6 * 12 * 64, 5e3, 30, 4),
    ("sample", "", "1 x 49152", "float32", 2 * 49152, 0.2e6, 1, 35),
    ("copy_pages", "", "1", "float32", 0, 0.1e6, 1, 30),
)


def ops(limits: Ceilings) -> list[OpPoint]:
    points = []
    for phase, rows, steps in (("prefill", PREFILL, 1), ("decode", DECODE, 63)):
        for name, label, shape, kind, flops, nbytes, calls, percent in rows:
            cost = Cost(float(flops), float(nbytes))
            once = name in ("linear", "paged_decode_attention")
            limit = roof(cost, kind, limits, 97e6 if once else nbytes)
            time = limit.seconds * 100 / percent
            points.append(
                OpPoint(
                    name,
                    label,
                    phase,
                    shape,
                    calls * steps,
                    time,
                    (time * 0.97, time * 1.06),
                    time * calls * steps * 1.02,
                    cost.flops,
                    cost.bytes,
                    cost.intensity,
                    limit.flops,
                    limit.bytes,
                    float(percent),
                    kind,
                    limit.bound,
                    limit.bandwidth,
                )
            )
    return sorted(points, key=lambda p: (p.phase != "prefill", -p.total))


def run(limits: Ceilings) -> tuple[list[StepRecord], list[RequestRecord], dict[str, Any]]:
    draw = random.Random(7)
    request = RequestRecord(100.0, prompt_tokens=512, output_tokens=64, finish_reason="length")
    steps = [StepRecord("prefill", 512, 1, 512, 100.004, 0.231, 0.222, 105e6, 1.5e11)]
    now = steps[0].start + steps[0].seconds
    request.first_token = now
    request.deliveries = [now]
    for i in range(63):
        took = 0.0043 + 2e-6 * i + abs(draw.gauss(0, 0.0002)) + (0.004 if i == 40 else 0.0)
        steps.append(StepRecord("decode", 1, 1, 513 + i, now + 2e-5, took, took * 0.965, 108e6, 3.1e8))
        now += took + 4e-5
        request.deliveries.append(now)
    values = metrics(steps, [request], token_ids=[list(range(64))], ceilings=limits, compute_kind="int8")
    return steps, [request], values


def sample_document() -> dict[str, Any]:
    limits = ceilings()
    steps, requests, values = run(limits)
    environment = Environment(
        "AMD EPYC 9B14", 2, "0-1", "avx512", ["avx512", "avx2", "scalar"], 2, dict(limits.caches), 8 << 30, "Linux 6.8",
        "x86_64", "3.11.7", "2.13.0+cpu", "0.1.0", "ba7c83f01234", 0.08, 1.12,
    )  # fmt: skip
    return document(
        model={"name": "SmolLM2-135M-Instruct", "weights": "Q4_1", "kv": "bfloat16"},
        generation={
            "prompt": "What is a KV cache, and why does decoding need one?",
            "text": "A KV cache keeps the keys and values of every token that the model has already seen. Without it, each "
            "new token would have to compute them all again.\n\nThat is why decoding is bound by memory: the cache is read "
            "once per token.",
        },
        ceilings=limits,
        ops=ops(limits),
        metrics=values,
        environment=environment,
        steps=steps,
        requests=requests,
        kv_memory={
            "weights_bytes": 98_400_000,
            "max_context": 8192,
            "bytes_per_token": {"float32": 46080, "bfloat16": 23040, "int8": 12240},
        },
        no_cache={
            "context": [32, 64, 128, 256, 512, 1024],
            "cached_seconds": [0.0041, 0.0041, 0.0042, 0.0043, 0.0045, 0.0049],
            "recomputed_seconds": [0.018, 0.034, 0.066, 0.129, 0.262, 0.55],
        },
        command="pykernels roofline --model smollm2 --threads 2",
        runs=[
            {"name": "short", "repeats": 5, "prompt_tokens": 38, "output_tokens": 64, "ttft": 0.0238, "itl": 0.00412}
            | {"prefill_tokens_per_s": 1710.0, "prefill_tokens_per_s_range": [1622.0, 1744.0], "prefill_roof_pct": 55.2}
            | {"decode_tokens_per_s": 243.0, "decode_tokens_per_s_range": [231.0, 246.0], "decode_roof_pct": 80.1},
            {"name": "long", "repeats": 5, "prompt_tokens": 512, "output_tokens": 64, "ttft": 0.2353, "itl": 0.0046}
            | {"prefill_tokens_per_s": 2216.0, "prefill_tokens_per_s_range": [2105.0, 2241.0], "prefill_roof_pct": 71.6}
            | {"decode_tokens_per_s": 219.0, "decode_tokens_per_s_range": [207.0, 223.0], "decode_roof_pct": 77.0},
        ],
    )
