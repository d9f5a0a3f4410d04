"""Every argument of every adapter, read off the signatures: it has an effect, or it is refused by name. None is left out.

Three may leave the bits alone, and then by their meaning: `deterministic` (of the backward pass), bounds that already hold
(`num_splits` in prefill, which is one part), and `pack_gqa` (how upstream fills its tiles).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat_oracle import FP8, cumulative, int32, normal

from pykernels.compat import flash_attn as fa2
from pykernels.compat import flash_attn_interface as fa3
from pykernels.compat import sdpa
from pykernels.compat import vllm_flash_attn as vllm

HEADS, KV_HEADS, DIM = 4, 2, 32

# As upstream has them (flash-attn 2.8.3, FA3 and vLLM's fork of 2026): names, order, defaults.
SIGNATURES = {
    fa2.flash_attn_func: "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_qkvpacked_func: "qkv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_kvpacked_func: "q kv dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None "
    "causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False "
    "block_table=None",
    fa2.flash_attn_varlen_qkvpacked_func: "qkv cu_seqlens max_seqlen dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False",
    fa2.flash_attn_varlen_kvpacked_func: "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False",
    fa2.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    fa3.flash_attn_func: "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 "
    "return_attn_probs=False",
    fa3.flash_attn_qkvpacked_func: "qkv softmax_scale=None causal=False q_descale=None k_descale=None v_descale=None "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 "
    "return_attn_probs=False",
    fa3.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
    "softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False",
    fa3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None "
    "rotary_seqlens=None q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
    "return_softmax_lse=False",
    fa3.flash_attn_combine: "out_partial lse_partial out=None out_dtype=None",
    vllm.flash_attn_varlen_func: "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=None seqused_k=None q_v=None "
    "dropout_p=0.0 softmax_scale=None causal=False window_size=None softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False block_table=None return_softmax_lse=False out=None scheduler_metadata=None q_descale=None "
    "k_descale=None v_descale=None num_splits=0 fa_version=2 s_aux=None cp_world_size=1 cp_rank=0 cp_tot_seqused_k=None",
    sdpa.scaled_dot_product_attention: "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None "
    "enable_gqa=False",
}
Change = tuple[str, Any]  # ("changes" | "refused" | "same", value or dict of arguments)


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


@pytest.mark.parametrize("function", SIGNATURES, ids=name_of)
def test_signatures_are_upstreams(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    text = [p.name + ("" if p.default is p.empty else f"={p.default!r}".replace(" ", "")) for p in parameters]
    assert " ".join(text) == SIGNATURES[function]


def q(*shape: int, seed: int = 1) -> torch.Tensor:
    return normal(*shape, seed=seed, std=2.0)


def other(x: torch.Tensor) -> Change:
    return "changes", x.flip(0, 1) if x.dim() > 1 else x.flip(0)


MASK: dict[str, Change] = {
    "softmax_scale": ("changes", -0.3),
    "causal": ("changes", True),
    "window_size": ("changes", (2, 1)),
    "softcap": ("changes", 1.0),
}
FA2_MASK = MASK | {
    "alibi_slopes": ("changes", torch.linspace(0.1, 0.5, HEADS)),
    "dropout_p": ("refused", 0.2),
    "deterministic": ("same", True),
    "return_attn_probs": ("changes", True),
}
FA3_MASK = MASK | {
    "attention_chunk": ("changes", 4),
    "deterministic": ("same", True),
    "sm_margin": ("refused", 1),
    "return_attn_probs": ("changes", True),
}
GROUPS: dict[str, Change] = {"pack_gqa": ("same", False), "qv": ("refused", q(2, 5, HEADS, DIM))}
DENSE = {"q": q(2, 5, HEADS, DIM), "k": q(2, 9, KV_HEADS, DIM, seed=2), "v": q(2, 9, KV_HEADS, DIM, seed=3)}
ROWS = {"q": q(9, HEADS, DIM), "k": q(13, KV_HEADS, DIM, seed=2), "v": q(13, KV_HEADS, DIM, seed=3)}
LENGTHS: dict[str, Any] = {
    "cu_seqlens_q": cumulative((4, 5)),
    "cu_seqlens_k": cumulative((7, 6)),
    "max_seqlen_q": 5,
    "max_seqlen_k": 7,
}
TENSORS = {n: other(x) for n, x in DENSE.items()}
RAGGED = {n: other(x) for n, x in ROWS.items()} | {
    "cu_seqlens_q": ("changes", cumulative((5, 4))),
    "cu_seqlens_k": ("changes", cumulative((6, 7))),
    "max_seqlen_q": ("refused", 4),
    "max_seqlen_k": ("refused", 6),
}
POOL = {"k": q(8, 4, KV_HEADS, DIM, seed=2), "v": q(8, 4, KV_HEADS, DIM, seed=3)}
TABLE = torch.tensor([[5, 0, 3], [2, 7, 1]], dtype=torch.int32)
CODES = {n: x.to(FP8) for n, x in DENSE.items()}
LONG = {"q": q(2, 1, HEADS, DIM), "k": q(2, 900, KV_HEADS, DIM, seed=2), "v": q(2, 900, KV_HEADS, DIM, seed=3)}
SCALE = torch.tensor([[0.5, 1.5], [2.0, 0.25]])
DESCALES: dict[str, Change] = {
    f"{n}_descale": ("changes", {"base": CODES, f"{n}_descale": SCALE}) for n in ("q", "k", "v")
}


def cache_base() -> dict[str, Any]:
    angle = normal(24, 8, seed=6)
    return {
        "q": q(2, 5, HEADS, DIM),
        "k_cache": q(2, 24, KV_HEADS, DIM, seed=4),
        "v_cache": q(2, 24, KV_HEADS, DIM, seed=5),
        "k": q(2, 5, KV_HEADS, DIM, seed=2),
        "v": q(2, 5, KV_HEADS, DIM, seed=3),
        "rotary_cos": angle.cos(),
        "rotary_sin": angle.sin(),
        "cache_seqlens": int32(9, 14),
    }


CACHE = cache_base()
PAGED_CACHE = {**CACHE, "k_cache": q(8, 8, KV_HEADS, DIM, seed=4), "v_cache": q(8, 8, KV_HEADS, DIM, seed=5)}
ONE_QUERY = {"q": LONG["q"], "k_cache": LONG["k"], "v_cache": LONG["v"]}
CACHE_CHANGES: dict[str, Change] = MASK | {n: other(x) for n, x in CACHE.items()}
CACHE_CHANGES |= {
    "rotary_interleaved": ("changes", False),
    "cache_batch_idx": ("changes", int32(1, 0)),
    "cache_leftpad": ("changes", int32(3, 0)),
    "num_splits": ("changes", {"base": ONE_QUERY, "num_splits": 7}),
    "return_softmax_lse": ("changes", True),
}
CACHE_CODES = {"q": CODES["q"], "k_cache": CODES["k"], "v_cache": CODES["v"]}
VLLM = {**ROWS, **LENGTHS}
VLLM_PAGED = {
    **{n: x for n, x in VLLM.items() if n != "cu_seqlens_k"},
    **POOL,
    "seqused_k": int32(7, 6),
    "block_table": TABLE,
}
VLLM_CODES = {**VLLM_PAGED, **{n: VLLM_PAGED[n].to(FP8) for n in "qkv"}, "fa_version": 3}
VLLM_DECODE = {
    "q": LONG["q"][:, 0],
    "k": LONG["k"],
    "v": LONG["v"],
    "max_seqlen_q": 1,
    "max_seqlen_k": 900,
    "cu_seqlens_q": int32(0, 1, 2),
    "seqused_k": int32(900, 900),
    "block_table": int32(0, 1).view(2, 1),
}
PACKED = {"qkv": torch.stack([q(2, 6, HEADS, DIM, seed=s) for s in (1, 2, 3)], 2)}
PARTS = {"out_partial": normal(2, 1, 5, HEADS, DIM, seed=1), "lse_partial": normal(2, 1, 5, HEADS, seed=2)}
SDPA = {
    "query": q(2, HEADS, 5, 16),
    "key": q(2, HEADS, 9, 16, seed=2),
    "value": q(2, HEADS, 9, 16, seed=3),
}

# Function -> (arguments of the base call, what becomes of every argument).
CASES: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, Change]]] = {
    fa2.flash_attn_func: (DENSE, TENSORS | FA2_MASK),
    fa2.flash_attn_qkvpacked_func: (PACKED, FA2_MASK | {"qkv": other(PACKED["qkv"])}),
    fa2.flash_attn_kvpacked_func: (
        {"q": DENSE["q"], "kv": torch.stack((DENSE["k"], DENSE["v"]), 2)},
        FA2_MASK | {"q": TENSORS["q"], "kv": other(torch.stack((DENSE["k"], DENSE["v"]), 2))},
    ),
    fa2.flash_attn_varlen_func: (
        {**ROWS, **LENGTHS},
        RAGGED
        | FA2_MASK
        | {
            "block_table": (
                "changes",
                {"base": {**ROWS, **POOL, **LENGTHS, "block_table": TABLE}, "block_table": TABLE.flip(1)},
            )
        },
    ),
    fa2.flash_attn_varlen_qkvpacked_func: (
        {"qkv": PACKED["qkv"][0], "cu_seqlens": int32(0, 2, 6), "max_seqlen": 4},
        FA2_MASK
        | {"qkv": other(PACKED["qkv"][0]), "cu_seqlens": ("changes", int32(0, 3, 6)), "max_seqlen": ("refused", 3)},
    ),
    fa2.flash_attn_varlen_kvpacked_func: (
        {"q": ROWS["q"], "kv": torch.stack((ROWS["k"], ROWS["v"]), 1), **LENGTHS},
        RAGGED | FA2_MASK | {"kv": other(torch.stack((ROWS["k"], ROWS["v"]), 1))},
    ),
    fa2.flash_attn_with_kvcache: (
        CACHE,
        CACHE_CHANGES
        | {
            "alibi_slopes": FA2_MASK["alibi_slopes"],
            "block_table": ("changes", {"base": PAGED_CACHE | {"block_table": TABLE}, "block_table": TABLE.flip(1)}),
        },
    ),
    fa3.flash_attn_func: (
        DENSE,
        TENSORS | FA3_MASK | GROUPS | DESCALES | {"num_splits": ("changes", {"base": LONG, "num_splits": 7})},
    ),
    fa3.flash_attn_qkvpacked_func: (
        PACKED,
        FA3_MASK
        | {"qkv": other(PACKED["qkv"]), "num_heads_q": ("refused", 3)}
        | {
            n: ("changes", {"base": {"qkv": PACKED["qkv"].to(FP8)}, n: torch.tensor([[0.5, 1.5, 1, 2]]).repeat(2, 1)})
            for n in DESCALES
        },
    ),
    fa3.flash_attn_varlen_func: (
        {**ROWS, **LENGTHS},
        RAGGED
        | FA3_MASK
        | GROUPS
        | {"seqused_q": ("changes", int32(2, 5)), "seqused_k": ("changes", int32(3, 6)), "num_splits": ("same", 4)}
        | {
            n: ("changes", {"base": {**{m: x.to(FP8) for m, x in ROWS.items()}, **LENGTHS}, n: SCALE}) for n in DESCALES
        },
    ),
    fa3.flash_attn_with_kvcache: (
        CACHE,
        CACHE_CHANGES
        | GROUPS
        | {
            "page_table": ("changes", {"base": PAGED_CACHE | {"page_table": TABLE}, "page_table": TABLE.flip(1)}),
            "cu_seqlens_q": (
                "changes",
                {"q": CACHE["q"].flatten(0, 1)[:8], "cu_seqlens_q": int32(0, 5, 8), "max_seqlen_q": 5},
            ),
            "cu_seqlens_k_new": (
                "changes",
                {
                    "k": CACHE["k"].flatten(0, 1)[:8],
                    "v": CACHE["v"].flatten(0, 1)[:8],
                    "cu_seqlens_k_new": int32(0, 5, 8),
                },
            ),
            "max_seqlen_q": ("refused", 4),
            "rotary_seqlens": ("changes", int32(1, 2)),
            "scheduler_metadata": ("refused", int32(0)),
            "attention_chunk": FA3_MASK["attention_chunk"],
            "sm_margin": FA3_MASK["sm_margin"],
        }
        | {n: ("changes", {"base": CACHE_CODES, n: SCALE}) for n in DESCALES},
    ),
    fa3.flash_attn_combine: (
        PARTS,
        {n: other(x) for n, x in PARTS.items()}
        | {"out": ("changes", torch.empty(1, 5, HEADS, DIM)), "out_dtype": ("changes", torch.bfloat16)},
    ),
    vllm.flash_attn_varlen_func: (
        VLLM,
        RAGGED
        | MASK
        | {
            "seqused_k": ("changes", {"base": VLLM_PAGED, "seqused_k": int32(4, 6)}),
            "block_table": ("changes", {"base": VLLM_PAGED, "block_table": TABLE.flip(1)}),
            "q_v": ("refused", ROWS["q"]),
            "dropout_p": ("refused", 0.1),
            "alibi_slopes": FA2_MASK["alibi_slopes"],
            "deterministic": ("same", True),
            "return_attn_probs": ("refused", True),
            "return_softmax_lse": ("changes", True),
            "out": ("changes", torch.empty_like(ROWS["q"])),
            "scheduler_metadata": ("refused", int32(0)),
            "num_splits": ("changes", {"base": VLLM_DECODE, "num_splits": 7}),
            "fa_version": (
                "changes",
                {
                    "base": {**VLLM, "causal": True, "cu_seqlens_k": int32(0, 1, 8), "return_softmax_lse": True},
                    "fa_version": 3,
                },
            ),
            "s_aux": ("changes", torch.linspace(-1, 2, HEADS)),
            "cp_world_size": ("refused", 2),
            "cp_rank": ("refused", 1),
            "cp_tot_seqused_k": ("refused", int32(7, 6)),
        }
        | {n: ("changes", {"base": VLLM_CODES, n: SCALE}) for n in DESCALES},
    ),
    sdpa.scaled_dot_product_attention: (
        SDPA,
        {n: other(x) for n, x in SDPA.items()}
        | {
            "attn_mask": ("changes", torch.arange(9) < 4),
            "dropout_p": ("changes", 0.5),
            "is_causal": ("changes", True),
            "scale": ("changes", -0.3),
            "enable_gqa": ("allows", {"key": SDPA["key"][:, :2], "value": SDPA["value"][:, :2], "enable_gqa": True}),
        },
    ),
}


def observed(function: Callable[..., Any], args: dict[str, Any]) -> list[torch.Tensor]:
    """Results, the caches afterwards, and whether the caller's `out` is what was returned."""
    own = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    result = function(**own)
    returned = list(result) if isinstance(result, tuple) else [result]
    into = [torch.tensor(1.0)] if own.get("out") is not None and returned[0] is own["out"] else []
    return [x.clone() for x in returned] + [own[n] for n in ("k_cache", "v_cache") if n in own] + into


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.float(), y.float())
        for x, y in zip(a, b, strict=True)
    )


def test_every_adapter_is_here() -> None:
    ours = [getattr(m, n) for m in (fa2, fa3, vllm) for n in m.__all__ if "attn" in n]
    assert {*ours, sdpa.scaled_dot_product_attention} == {*CASES} == {*SIGNATURES}


@pytest.mark.parametrize(
    ("function", "argument"),
    [(f, p) for f in CASES for p in inspect.signature(f).parameters],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_every_argument_has_an_effect_or_is_refused(function: Callable[..., Any], argument: str) -> None:
    base, changes = CASES[function]
    kind, value = changes[argument]
    change = dict(value) if isinstance(value, dict) else {argument: value}
    base = change.pop("base", base)
    assert argument in change
    if kind == "refused":
        observed(function, base)
        with pytest.raises(RuntimeError, match=argument):
            observed(function, base | change)
    elif kind == "allows":
        with pytest.raises(RuntimeError):
            observed(function, base | {n: x for n, x in change.items() if n != argument})
        observed(function, base | change)
    else:
        assert equal(observed(function, base | change), observed(function, base)) == (kind == "same")


def test_nothing_here_is_random_but_dropout() -> None:
    base, _ = CASES[fa2.flash_attn_func]
    assert equal(observed(fa2.flash_attn_func, base), observed(fa2.flash_attn_func, base))
