"""Prefill attention on sm_90a in the emulation: rings that wrap, pages, edges, and what it leaves to the other kernel.

The tables of cases run in test_cuda.py; here are problems long enough to go round every ring of buffers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import emulated_prefill
import pytest
import torch
from emulated_prefill import PAGED, RAGGED, Problems, assert_agrees_under_every_schedule, lengths, problem, table

from pykernels.contract import OPS, native_arguments
from pykernels.testing.attention_cases import BF16, F16, F32, FP8, Attention
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

LONG = Attention(q_lens=(130, 0, 9), k_lens=(1000, 30, 420), heads=5, kv_heads=1, dtype=BF16)  # two rows are idle
WIDE = replace(LONG, head_dim=128, head_dim_v=128, dtype=F16, heads=2)
PROBLEMS: Problems = {
    "long": (RAGGED, LONG),
    "wide_pages_of_16": (PAGED, replace(WIDE, page_size=16)),
    # Spans that begin on a tile's second key or end on its last but one.
    "ends_within_a_tile": (RAGGED, replace(LONG, q_lens=(1, 1, 1), k_lens=(300, 127, 255), heads=1, window=(170, 0))),
    # Edges on both sides, in one buffer after another, with NaN that only some rows see.
    "nan_at_the_edges": (RAGGED, replace(LONG, q_lens=(70,), k_lens=(810,), heads=2, window=(760, 0), logits="nan")),
}
SLOW: Problems = {
    "wide": (RAGGED, WIDE),
    "full": (RAGGED, replace(LONG, causal=False)),
    "wide_full": (RAGGED, replace(WIDE, causal=False)),
    "window": (RAGGED, replace(LONG, window=(300, 0))),
    "wide_window_both": (RAGGED, replace(WIDE, causal=False, window=(260, 140))),
    "nan": (RAGGED, replace(LONG, logits="nan")),
    "wide_nan": (RAGGED, replace(WIDE, logits="nan", window=(700, 0))),
    "all_options": (RAGGED, replace(LONG, window=(400, -1), softcap=8.0, alibi="sequence", sinks=True)),
    "wide_all_options": (RAGGED, replace(WIDE, window=(400, -1), softcap=8.0, alibi="head", sinks=True)),
    "group_of_192": (RAGGED, replace(LONG, q_lens=(3,), k_lens=(300,), heads=192)),
    "group_of_128": (RAGGED, replace(WIDE, q_lens=(3,), k_lens=(300,), heads=128)),
    "dim_72": (RAGGED, replace(WIDE, head_dim=72, head_dim_v=104, dtype=BF16)),
    "gaps": (RAGGED, replace(WIDE, strides="gaps")),
    "padded": (RAGGED, replace(LONG, padding=300)),
    **{f"pages_of_{n}": (PAGED, replace(LONG, page_size=n)) for n in (8, 24, 48, 128, 160, 256)},
    "pages_nan": (PAGED, replace(WIDE, page_size=32, logits="nan")),
    "heads_first": (PAGED, replace(WIDE, page_size=64, pool="heads_first", kv_heads=2)),
    "halves": (PAGED, replace(LONG, page_size=16, pool="halves", heads=6, kv_heads=3)),
}


def chosen(op: str, args: dict[str, Any], capability: int = 90) -> bool:
    return getattr(EmulatedCuda().native(), f"{op}_on_wgmma")(*native_arguments(OPS[op], args), capability)


@pytest.mark.parametrize(("op", "spec"), table(PROBLEMS, SLOW))
def test_long_problems_agree_and_have_the_same_bits_under_every_schedule(op: str, spec: Attention) -> None:
    assert chosen(op, problem(op, spec))
    assert_agrees_under_every_schedule(op, spec, capability=90)


def run(op: str, args: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return emulated_prefill.run(op, args, 90, **changes)


def alone(args: dict[str, Any], b: int, last: int | None = None) -> dict[str, Any]:
    """Sequence b of a ragged call by itself, or only its last queries."""
    q, k = (args[n].tolist() for n in ("cu_seqlens_q", "cu_seqlens_k"))
    q_from = q[b] if last is None else q[b + 1] - last
    parts = {"q": args["q"][q_from : q[b + 1]], "k": args["k"][k[b] : k[b + 1]], "v": args["v"][k[b] : k[b + 1]]}
    q_len, k_len = parts["q"].shape[0], parts["k"].shape[0]
    sizes = {"max_seqlen_q": q_len, "max_seqlen_k": k_len}
    return run(RAGGED, args, **parts, **sizes, cu_seqlens_q=lengths(0, q_len), cu_seqlens_k=lengths(0, k_len))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_request_has_the_same_bits_alone_in_a_batch_and_in_chunks(head_dim: int) -> None:
    spec = Attention(q_lens=(70, 200, 1), k_lens=(70, 430, 260), heads=2, kv_heads=1, dtype=BF16)
    args = problem(RAGGED, replace(spec, head_dim=head_dim, head_dim_v=head_dim))
    together = run(RAGGED, args)
    starts = args["cu_seqlens_q"].tolist()
    for b, end in enumerate(starts[1:]):
        for last in (None, 1, 45):
            if last is not None and last > spec.q_lens[b]:
                continue
            own = alone(args, b, last)
            first = starts[b] if last is None else end - last
            assert torch.equal(own["out"], together["out"][first:end]), (b, last)
            assert torch.equal(own["lse"], together["lse"][:, first:end]), (b, last)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_what_other_sequences_hold_does_not_reach_a_request(head_dim: int, special: float) -> None:
    spec = Attention(q_lens=(60, 5, 40), k_lens=(150, 140, 40), heads=2, kv_heads=1, dtype=F16)
    args = problem(RAGGED, replace(spec, head_dim=head_dim, head_dim_v=head_dim))
    clean = run(RAGGED, args)
    spoiled = {name: args[name].clone() for name in ("q", "k", "v")}
    for name, x in spoiled.items():
        x[slice(60, 65) if name == "q" else slice(150, 290)] = special
    out = run(RAGGED, args, **spoiled)["out"]
    assert torch.equal(out[:60], clean["out"][:60])
    assert torch.equal(out[65:], clean["out"][65:])
    assert out[60:65].isnan().all()


def test_it_multiplies_and_fetches_what_the_algorithm_needs_and_no_more() -> None:
    """128 rows of 128 columns: under a causal mask the first 128 queries see one key tile and the next 128 two."""
    spec = Attention(q_lens=(256,), k_lens=(256,), heads=1, kv_heads=1, head_dim=128, head_dim_v=128, dtype=BF16)
    args, backend = problem(RAGGED, spec), EmulatedCuda()
    backend.run(RAGGED, args)
    tiles = 1 + 2
    assert backend.report.counters["wgmma"] == tiles * 2 * (128 * 128 * 128) // (64 * 128 * 16)
    assert backend.report.counters["tma_bytes"] == (2 + 2 * tiles) * 128 * 128 * 2


SERVED = {
    "ragged": (RAGGED, LONG, 90),
    "wide": (RAGGED, WIDE, 90),
    "dims": (RAGGED, replace(LONG, head_dim=32, head_dim_v=96), 90),
    "softcap_alibi_sinks": (RAGGED, replace(LONG, softcap=5.0, alibi="head", sinks=True), 90),
    "pages_of_8": (PAGED, replace(LONG, page_size=8), 90),
    "pages_of_48": (PAGED, replace(LONG, page_size=48), 90),
}
LEFT = {
    "older_device": (RAGGED, LONG, 80),
    "another_older_device": (RAGGED, LONG, 89),
    "newer_device": (RAGGED, LONG, 100),
    "dim": (RAGGED, replace(LONG, head_dim=192, head_dim_v=128), 90),
    "dim_v": (RAGGED, replace(LONG, head_dim=64, head_dim_v=256), 90),
    "alignment": (RAGGED, replace(LONG, strides="odd"), 90),
    "large_group": (RAGGED, replace(WIDE, heads=129), 90),
    "pages_of_1": (PAGED, replace(LONG, page_size=1), 90),
    "pages_of_12": (PAGED, replace(LONG, page_size=12), 90),
    "codes": (PAGED, replace(LONG, cache=FP8), 90),
    "no_keys": (RAGGED, replace(LONG, k_lens=(0, 0, 0)), 90),
}


@pytest.mark.parametrize("name", [*SERVED, *LEFT])
def test_the_choice_of_kernel_is_by_device_and_layout(name: str) -> None:
    op, spec, capability = (SERVED | LEFT)[name]
    assert chosen(op, problem(op, spec), capability) == (name in SERVED)


def test_the_choice_is_obeyed() -> None:
    for capability, kernel, other in ((90, "wgmma", "mma"), (80, "mma", "wgmma"), (100, "mma", "wgmma")):
        args, backend = problem(RAGGED, replace(LONG, q_lens=(3,), k_lens=(9,))), EmulatedCuda(capability=capability)
        backend.run(RAGGED, args)
        assert backend.report.counters[kernel] > 0
        assert backend.report.counters[other] == 0


def test_float32_is_left_to_no_kernel() -> None:
    args = problem(RAGGED, replace(LONG, dtype=F32))
    assert EmulatedCuda().refuses(RAGGED, args)
