"""A report with everything in it, made by hand: the run of `roofline_data`, benchmarks, profiles, a run before."""

from __future__ import annotations

import copy
import random
from typing import Any

import roofline_data

from pykernels.bench.problems import GRIDS, row_name
from pykernels.roofline.attach import attach
from pykernels.roofline.levels import LevelPoint, Traffic

OPS = ("paged_decode_attention", "prefill_attention", "linear", "rms_norm", "append_kv", "sample")


def suite(seed: int = 0, slower: str = "") -> dict[str, Any]:
    """A pytest-benchmark file with the suite's grids on two backends; the sizes of one op are left out on the second."""
    draw = random.Random(seed)
    benchmarks = []
    for op in OPS:
        for row in GRIDS[op].rows:
            params = dict(zip(GRIDS[op].columns, row, strict=True))
            for backend in ("cpu", "triton"):
                if (op, backend) == ("sample", "triton"):
                    continue
                percent = random.Random(f"{op}{row}{backend}").uniform(3, 97)
                roof = 1e-5 + 1e-4 * random.Random(f"{op}{row}").random()
                median = roof * 100 / percent * draw.uniform(0.97, 1.03) * (1.5 if op == slower else 1.0)
                info = {
                    "op": op,
                    "case": row_name(params),
                    "backend": backend,
                    "temperature": "cold",
                    "shape": "1 x 576",
                    "flops": 1e6,
                    "bytes": 1e5,
                    "roof_pct": 100 * roof / median,
                    "bound": "dram",
                    "output_hash": "0123456789abcdef",
                    "machine_key": backend,
                }
                stats = {"median": median, "q1": 0.97 * median, "q3": 1.04 * median}
                name = f"test_{op}[{row_name(params)}-{backend}]"
                benchmarks.append(
                    {"name": name, "params": {"backend": backend, **params}, "extra_info": info, "stats": stats}
                )
    return {"benchmarks": benchmarks}


def profile() -> dict[str, Any]:
    """A document of `pykernels profile --tool ncu`."""
    roofs = {"l1": 25.3e12, "l2": 9.2e12, "dram": 3.33e12}

    def traffic(l1: float, l2: float, dram: float) -> dict[str, Traffic]:
        return {name: Traffic(size, roofs[name]) for name, size in (("l1", l1), ("l2", l2), ("dram", dram))}

    points = [
        LevelPoint("call", 2, 22e-6, 2.7e8, "contract", traffic(146e6, 73e6, 65e6), 51e12),
        LevelPoint("void pk::cuda::<unnamed>::decode_kernel<128>(Decode)", 2, 20e-6, 1.1e8, "counted", traffic(140e6, 70e6, 64e6), 51e12),
        LevelPoint("void pk::cuda::<unnamed>::merge_splits_kernel(Decode)", 2, 2e-6, 2.1e6, "counted", traffic(6e6, 3e6, 1e6), 51e12),
    ]  # fmt: skip
    return {
        "tool": "ncu",
        "command": "ncu --nvtx --nvtx-include pykernels@paged_decode_attention/ ...",
        "op": "paged_decode_attention",
        "case": "llama3_8b-bfloat16-kv_bfloat16-context_1024-batch_4",
        "backend": "cuda",
        "temperature": "cold",
        "points": [point.to_json() for point in points],
    }


def several_requests(document: dict[str, Any]) -> dict[str, Any]:
    """The same request five times, at intervals, as `pykernels roofline` measures it."""
    out = copy.deepcopy(document)
    first = out["requests"][0]
    for number, late in enumerate((0.013, 0.003, 0.0032, 0.041), 1):
        again = copy.deepcopy(first)
        again["submitted"] += 5.0 * number
        again["first_token"] += 5.0 * number + late
        again["deliveries"] = [d + 5.0 * number + late for d in again["deliveries"]]
        out["requests"].append(again)
    out["metrics"]["requests"] = len(out["requests"])
    return out


def full_document() -> dict[str, Any]:
    now = several_requests(roofline_data.sample_document())
    old = copy.deepcopy(now)
    for name, factor in (("ttft", 1.12), ("itl", 1.06), ("decode_tokens_per_s", 0.94), ("prefill_tokens_per_s", 0.91)):
        old["metrics"][name] *= factor
    old["environment"]["git_revision"] = "1a74ac1b5e02"
    occupancy = [
        {"kernel": "decode_kernel<128>", "registers": 128, "shared": 73728, "warps per SM": 12, "occupancy %": 18.75},
        {"kernel": "merge_splits_kernel", "registers": 40, "shared": 0, "warps per SM": 48, "occupancy %": 75.0},
    ]
    return attach(
        now,
        bench=[suite(0)],
        profiles=[profile()],
        occupancy=occupancy,
        before=attach(old, bench=[suite(1, slower="rms_norm")]),
        command="pykernels report report/roofline.json --bench now.json --before old/roofline.json",
    )
