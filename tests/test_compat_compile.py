"""The adapters under `torch.compile(fullgraph=True)`: one graph, the numbers of the eager call, caches written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compat_oracle import FP8, cumulative, int32, normal

from pykernels.compat import flash_attn as fa2
from pykernels.compat import flash_attn_interface as fa3
from pykernels.compat import sdpa
from pykernels.compat import vllm_flash_attn as vllm

HEADS, KV_HEADS, DIM = 6, 2, 32
Q_LENS, K_LENS = (3, 0, 17, 1, 6), (9, 4, 17, 30, 2)


def dense(seqlen_q: int, seqlen_k: int, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(2, seqlen_q, HEADS, dim, seed=1)
    return q, *(normal(2, seqlen_k, KV_HEADS, dim, seed=s) for s in (2, 3))


def ragged() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(sum(Q_LENS), HEADS, DIM, seed=1)
    return q, *(normal(sum(K_LENS), KV_HEADS, DIM, seed=s) for s in (2, 3))


def cache(seqlen_q: int, seqlen_new: int) -> dict[str, torch.Tensor]:
    q, k, v = dense(seqlen_q, seqlen_new)
    angle = normal(40, 8, seed=6)
    pools = {f"{n}_cache": normal(2, 40, KV_HEADS, DIM, seed=s) for n, s in (("k", 4), ("v", 5))}
    return {"q": q, "k": k, "v": v, "rotary_cos": angle.cos(), "rotary_sin": angle.sin(), **pools}


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]:
    """Name -> function, tensors (inputs of the graph), other arguments."""
    lengths = {"cu_seqlens_q": cumulative(Q_LENS), "cu_seqlens_k": cumulative(K_LENS)}
    bounds = {"max_seqlen_q": 17, "max_seqlen_k": 30}
    slopes = torch.linspace(0.1, 0.4, 2 * HEADS).view(2, HEADS)
    named = ("q", "k", "v")

    def of(tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        return dict(zip(named, tensors, strict=True))

    both: dict[str, Any] = {"causal": True, "return_attn_probs": True}
    step = {"cache_seqlens": int32(23, 7), "cache_batch_idx": int32(1, 0), "cache_leftpad": int32(2, 0)}
    pages = {"k": normal(12, 8, KV_HEADS, DIM, seed=2), "v": normal(12, 8, KV_HEADS, DIM, seed=3)}
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    codes = of(tuple(x.to(FP8) for x in dense(5, 9)))
    return {
        "fa2 dense": (fa2.flash_attn_func, of(dense(7, 11)), both | {"window_size": (4, 0), "softcap": 2.0}),
        "fa2 dense, alibi": (fa2.flash_attn_func, of(dense(7, 11)) | {"alibi_slopes": slopes}, both),
        "fa2 dense, one query": (fa2.flash_attn_func, of(dense(1, 11)), both),
        "fa2 dense, padded head": (fa2.flash_attn_func, of(dense(7, 11, 59)), both),
        "fa2 packed": (fa2.flash_attn_qkvpacked_func, {"qkv": normal(2, 7, 3, HEADS, DIM, seed=1)}, both),
        "fa2 ragged": (fa2.flash_attn_varlen_func, of(ragged()) | lengths, both | bounds),
        "fa2 kvcache, decode": (fa2.flash_attn_with_kvcache, cache(1, 1) | step, {"causal": True}),
        "fa2 kvcache, chunk": (
            fa2.flash_attn_with_kvcache,
            cache(5, 5) | step,
            {"causal": True, "return_softmax_lse": True},
        ),
        "fa2 kvcache, int length": (fa2.flash_attn_with_kvcache, cache(1, 1), {"cache_seqlens": 9}),
        "fa3 dense": (fa3.flash_attn_func, of(dense(7, 11)), both),
        "fa3 float8": (
            fa3.flash_attn_func,
            codes
            | {f"{n}_descale": torch.rand(2, KV_HEADS, generator=torch.Generator().manual_seed(1)) for n in named},
            {},
        ),
        "fa3 ragged, used": (
            fa3.flash_attn_varlen_func,
            of(ragged()) | lengths | {"seqused_k": int32(4, 4, 9, 30, 1)},
            both | bounds,
        ),
        "fa3 kvcache": (fa3.flash_attn_with_kvcache, cache(5, 3) | step, {"causal": True, "return_softmax_lse": True}),
        "fa3 chunks": (fa3.flash_attn_varlen_func, of(ragged()) | lengths, both | bounds | {"attention_chunk": 5}),
        "fa3 kvcache, chunks": (
            fa3.flash_attn_with_kvcache,
            cache(5, 3) | step,
            {"causal": True, "attention_chunk": 6},
        ),
        "vllm decode": (
            vllm.flash_attn_varlen_func,
            {"q": normal(2, HEADS, DIM, seed=1), **pages, "block_table": table, "cu_seqlens_q": int32(0, 1, 2)}
            | {"seqused_k": int32(40, 13), "out": torch.zeros(2, HEADS, DIM), "s_aux": normal(HEADS, seed=4)},
            {"max_seqlen_q": 1, "max_seqlen_k": 48, "causal": True},
        ),
        "vllm chunk": (
            vllm.flash_attn_varlen_func,
            {"q": normal(9, HEADS, DIM, seed=1), **pages, "block_table": table, "cu_seqlens_q": int32(0, 4, 9)}
            | {"seqused_k": int32(40, 13), "out": torch.zeros(9, HEADS, DIM)},
            {"max_seqlen_q": 5, "max_seqlen_k": 48, "causal": True, "return_softmax_lse": True},
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_one_graph_and_the_same_bits(name: str) -> None:
    torch._dynamo.reset()
    function, tensors, options = calls()[name]
    copies = [{n: x.clone() for n, x in tensors.items()} for _ in range(2)]
    compiled = torch.compile(lambda given: function(**given, **options), fullgraph=True, backend="aot_eager")
    results = [call(given) for call, given in zip((lambda g: function(**g, **options), compiled), copies, strict=True)]
    flat = [r if isinstance(r, tuple) else (r,) for r in results]
    for a, b in zip(*flat, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)
    for n, x in copies[0].items():
        assert torch.equal(x.float(), copies[1][n].float()), n
    if "kvcache" in name:
        assert not torch.equal(copies[0]["k_cache"], tensors["k_cache"])


def test_inductor_compiles_a_decode_step() -> None:
    torch._dynamo.reset()
    given = cache(1, 1) | {"cache_seqlens": int32(23, 7)}
    copies = [{n: x.clone() for n, x in given.items()} for _ in range(2)]
    compiled = torch.compile(lambda g: fa2.flash_attn_with_kvcache(**g, causal=True) * 2, fullgraph=True)
    eager = fa2.flash_attn_with_kvcache(**copies[0], causal=True) * 2
    torch.testing.assert_close(compiled(copies[1]), eager)
    torch.testing.assert_close(copies[0]["k_cache"], copies[1]["k_cache"])


def test_what_does_not_fit_is_refused_by_the_compiled_call_too() -> None:
    """The lengths cannot be read while tracing: the slots past the end are refused where they are written."""
    torch._dynamo.reset()
    given = cache(1, 1) | {"cache_seqlens": int32(40, 7)}
    before = given["k_cache"].clone()
    compiled = torch.compile(lambda g: fa2.flash_attn_with_kvcache(**g), fullgraph=True, backend="aot_eager")
    with pytest.raises((RuntimeError, ValueError), match="slot_mapping"):
        compiled(given)
    assert torch.equal(given["k_cache"], before)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3, "enable_gqa": True}], ids=str)
def test_sdpa(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v = (normal(2, h, n, 16, seed=h + n) for h, n in ((4, 6), (4, 9), (4, 9)))
    seen = []
    real = torch.ops.pykernels.prefill_attention
    compiled = torch.compile(
        lambda *x: sdpa.scaled_dot_product_attention(*x, **options), fullgraph=True, backend=_counting(seen)
    )
    assert torch.equal(compiled(q, k, v), sdpa.scaled_dot_product_attention(q, k, v, **options))
    assert any("pykernels" in name for name in seen), (seen, real)


def test_sdpa_with_a_mask_goes_to_torch_without_a_graph_break() -> None:
    torch._dynamo.reset()
    q, k, v = (normal(2, 4, n, 16, seed=n) for n in (6, 9, 9))
    mask = torch.arange(9) <= torch.arange(6)[:, None]
    seen: list[str] = []
    compiled = torch.compile(sdpa.scaled_dot_product_attention, fullgraph=True, backend=_counting(seen))
    torch.testing.assert_close(compiled(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    assert not any("pykernels" in name for name in seen)


def _counting(seen: list[str]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    return backend
