"""Prefill attention by mma.sync in the emulation: rings that wrap many times, chunks with an offset, pages of every kind.

The tables of cases run in test_cuda.py, test_prefill_sm90.py has the kernel for sm_90a; here are problems long enough to go round
the ring of key and value tiles, on a device that has no other kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated_prefill
import pytest
import torch
from emulated_prefill import PAGED, RAGGED, Problems, assert_agrees_under_every_schedule, lengths, problem, table

from pykernels.testing.attention_cases import BF16, F16, FP8, INT8, Attention
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

# At 64 keys a tile: ten key tiles and as many value tiles through a ring of three; then a chunk that begins at key 130.
LONG = Attention(q_lens=(20, 0, 9), k_lens=(600, 30, 139), heads=2, kv_heads=1, dtype=BF16)
WIDE = replace(LONG, head_dim=128, head_dim_v=128, dtype=F16)
WIDEST = replace(LONG, q_lens=(9,), k_lens=(300,), head_dim=256, head_dim_v=256)  # 32 keys a tile
CODES = replace(LONG, cache=INT8)
PROBLEMS: Problems = {
    "long": (RAGGED, LONG),
    "wide_pages_of_3": (PAGED, replace(WIDE, page_size=3)),
    # Spans that begin on a tile's second key or end on its last but one.
    "ends_within_a_tile": (
        RAGGED,
        replace(LONG, q_lens=(1, 1, 1), k_lens=(300, 63, 127), heads=8, kv_heads=2, window=(170, 0)),
    ),
    "int8_static_scales_softcap": (
        PAGED,
        replace(CODES, q_lens=(9,), k_lens=(70,), heads=4, kv_heads=2, scales="head", softcap=8.0),
    ),
    "widest_window": (RAGGED, replace(WIDEST, window=(250, 0))),
    "int8_pages_of_1": (PAGED, replace(CODES, page_size=1)),
    "fp8_wide_pages_of_64": (PAGED, replace(WIDE, cache=FP8, page_size=64, window=(500, 0))),
}
SLOW: Problems = {
    "wide": (RAGGED, WIDE),
    "widest": (RAGGED, WIDEST),
    "full": (RAGGED, replace(LONG, causal=False)),
    "window_both": (RAGGED, replace(LONG, causal=False, window=(260, 140))),
    "all_options": (RAGGED, replace(LONG, window=(400, -1), softcap=8.0, alibi="sequence", sinks=True)),
    "nan": (RAGGED, replace(LONG, logits="nan", window=(580, 0))),
    "odd": (RAGGED, replace(LONG, strides="odd")),
    **{f"pages_of_{n}": (PAGED, replace(LONG, page_size=n)) for n in (1, 3, 16, 64)},
    **{f"fp8_pages_of_{n}": (PAGED, replace(LONG, cache=FP8, page_size=n)) for n in (1, 3, 16, 64)},
    "int8_widest": (PAGED, replace(WIDEST, cache=INT8, dtype=F16)),
    "int8_all_options": (
        PAGED,
        replace(CODES, scales="head", window=(400, -1), softcap=8.0, alibi="head", sinks=True),
    ),
}


@pytest.mark.parametrize(("op", "spec"), table(PROBLEMS, SLOW))
def test_long_problems_agree_and_have_the_same_bits_under_every_schedule(op: str, spec: Attention) -> None:
    assert_agrees_under_every_schedule(op, spec, capability=80)


def run(op: str, args: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return emulated_prefill.run(op, args, 80, **changes)


@pytest.mark.parametrize("cache", [None, INT8])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_chunks(page_size: int, cache: torch.dtype | None) -> None:
    """Chunks end where they like: a row's key tiles are the same, whatever rows share its block."""
    spec = Attention(q_lens=(70, 150, 1), k_lens=(70, 310, 130), heads=2, kv_heads=1, dtype=BF16)
    args = problem(PAGED, replace(spec, page_size=page_size, cache=cache))
    together = run(PAGED, args)
    starts = args["cu_seqlens_q"].tolist()
    for b in range(len(spec.q_lens)):
        for first, last in ((0, spec.q_lens[b]), (0, 1), (13, 61), (150 - 23, 150)):
            if last > spec.q_lens[b]:
                continue
            rows = slice(starts[b] + first, starts[b] + last)
            seen = spec.k_lens[b] - spec.q_lens[b] + last  # the keys that are in the cache when the chunk runs
            own = run(
                PAGED,
                args,
                q=args["q"][rows],
                cu_seqlens_q=lengths(0, last - first),
                seqlens_k=lengths(seen),
                max_seqlen_q=last - first,
                max_seqlen_k=seen,
                block_table=args["block_table"][b : b + 1],
            )
            assert torch.equal(own["out"], together["out"][rows]), (b, first, last)
            assert torch.equal(own["lse"], together["lse"][:, rows]), (b, first, last)


def test_it_multiplies_what_the_algorithm_needs_and_no_more() -> None:
    """128 rows of 128 columns and 64 keys a tile: under a causal mask the first 128 queries see two key tiles, the next four."""
    spec = Attention(q_lens=(256,), k_lens=(256,), heads=1, kv_heads=1, head_dim=128, head_dim_v=128, dtype=BF16)
    args, backend = problem(RAGGED, spec), EmulatedCuda(capability=80)
    backend.run(RAGGED, args)
    assert backend.report.counters["mma"] == (2 + 4) * 2 * (128 * 64 * 128) // (16 * 8 * 16)
