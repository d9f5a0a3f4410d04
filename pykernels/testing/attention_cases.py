"""Cases of prefill, paged prefill and decode attention, all made from one description."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .build import Maker, cumulative

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}


@dataclass(frozen=True)
class Attention:
    """One attention problem. Lengths are per sequence; decode has one query token per sequence, whatever `q_lens`."""

    q_lens: tuple[int, ...] = (129, 1, 0, 33)
    k_lens: tuple[int, ...] = (129, 70, 5, 97)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: torch.dtype = F32
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "head": slopes [num_heads]; "sequence": [batch, num_heads]
    sinks: bool = False
    scale: float = 0.9  # of the logits, in units of 1 / sqrt(head_dim)
    lse: bool = True
    strides: str = "dense"
    padding: int = 0  # rows of q that belong to no sequence
    logits: str = "sharp"  # "huge": of the order of 1e5; "nan": NaN in one q, one k and one v
    page_size: int = 16
    cache: torch.dtype | None = None  # None: the dtype of q
    scales: str = "token"  # "token": dynamic; "head", "tensor": static
    # "halves" of one [pages, 2, ...] buffer; "heads_first" in memory, "mixed": v alone; "apart": rows begin on 16 elements;
    # "vast": past 2^31 elements
    pool: str = "dense"
    split: int = 0


def queries(spec: Attention, make: Maker, rows: int) -> torch.Tensor:
    """Queries whose logits have a standard deviation of about 4: a few keys carry each row."""
    std = {"sharp": 4.0, "nan": 4.0, "huge": 1e5 if spec.dtype != F16 else 6e3}[spec.logits]
    q = make.normal(rows, spec.heads, spec.head_dim, dtype=spec.dtype, std=std)
    if spec.logits == "nan" and rows > 2:
        q[2, 0, 3] = torch.nan
    return q


def spoil(spec: Attention, k: torch.Tensor, v: torch.Tensor) -> None:
    """One NaN among the keys and one among the values, which the rows that see them must show."""
    if spec.logits == "nan" and k.shape[0] > 12:
        k[9, 0, 1] = torch.nan
        v[11, -1, 2] = torch.nan


def mask_args(spec: Attention, make: Maker, batch: int) -> dict[str, Any]:
    slopes = {"": None, "head": (spec.heads,), "sequence": (batch, spec.heads)}[spec.alibi]
    return {
        "causal": spec.causal,
        "softmax_scale": spec.scale / spec.head_dim**0.5,
        "window_left": spec.window[0],
        "window_right": spec.window[1],
        "softcap": spec.softcap,
        "alibi_slopes": None if slopes is None else make.uniform(*slopes, low=0.01, high=0.3),
        "sinks": make.normal(spec.heads, std=6.0) if spec.sinks else None,
    }


def outputs(spec: Attention, make: Maker, rows: int) -> dict[str, Any]:
    strides = "guarded" if spec.strides == "dense" else spec.strides
    return {
        "out": make.output(rows, spec.heads, spec.head_dim_v, dtype=spec.dtype, strides=strides),
        "lse": make.output(spec.heads, rows, dtype=F32, strides="gaps") if spec.lse else None,
    }


def prefill(spec: Attention, make: Maker) -> dict[str, Any]:
    """Arguments of `prefill_attention`; padding rows hold NaN."""
    total_q, total_k = sum(spec.q_lens), sum(spec.k_lens)
    q = make.poison(total_q + spec.padding, spec.heads, spec.head_dim, dtype=spec.dtype)
    q[:total_q] = queries(spec, make, total_q)
    k = make.poison(total_k + spec.padding, spec.kv_heads, spec.head_dim, dtype=spec.dtype)
    v = make.poison(total_k + spec.padding, spec.kv_heads, spec.head_dim_v, dtype=spec.dtype)
    k[:total_k] = make.normal(total_k, spec.kv_heads, spec.head_dim, dtype=spec.dtype)
    v[:total_k] = make.normal(total_k, spec.kv_heads, spec.head_dim_v, dtype=spec.dtype)
    spoil(spec, k, v)
    if spec.strides == "fused":  # three slices of one projection
        fused = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        widths = [x.shape[1] * x.shape[2] for x in (q, k, v)]
        q, k, v = (
            part.unflatten(1, x.shape[1:]) for part, x in zip(fused.split(widths, dim=1), (q, k, v), strict=True)
        )
    else:
        q, k, v = (make.placed(x, spec.strides) for x in (q, k, v))
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": make.tensor(cumulative(list(spec.q_lens)), torch.int32),
        "cu_seqlens_k": make.tensor(cumulative(list(spec.k_lens)), torch.int32),
        "max_seqlen_q": max(spec.q_lens, default=0),
        "max_seqlen_k": max(spec.k_lens, default=0),
        **mask_args(spec, make, len(spec.q_lens)),
        **outputs(replace(spec, strides="dense" if spec.strides == "fused" else spec.strides), make, q.shape[0]),
    }


def empty_pool(spec: Attention, make: Maker, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned k and v caches [pages, page_size, kv_heads, dim] with the strides that `spec.pool` asks for."""
    dtype = spec.cache or spec.dtype
    shapes = [(pages, spec.page_size, spec.kv_heads, d) for d in (spec.head_dim, spec.head_dim_v)]
    if spec.pool == "halves":
        k, v = make.poison(pages, 2, *shapes[0][1:], dtype=dtype).unbind(1)
        return k, v
    if spec.pool in ("heads_first", "mixed"):
        k, v = (make.poison(n, h, p, d, dtype=dtype).transpose(1, 2) for n, p, h, d in shapes)
        return k.contiguous() if spec.pool == "mixed" else k, v
    allocate = {"vast": make.vast, "apart": make.apart}.get(spec.pool, make.poison)
    k, v = (allocate(*shape, dtype=dtype) for shape in shapes)
    return k, v


def static_scale(spec: Attention, make: Maker) -> torch.Tensor:
    """A scale that puts values of a normal distribution into most of the code's range, saturating a few."""
    shape = (spec.kv_heads,) if spec.scales == "head" else ()
    return make.uniform(*shape, low=2.5, high=3.5) / LARGEST[spec.cache or INT8]


def stored(
    spec: Attention, make: Maker, tokens: int, dim: int, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (or numbers) [tokens, kv_heads, dim] and scales [tokens, kv_heads], of about unit variance when read."""
    real = make.normal(tokens, spec.kv_heads, dim)
    if spec.cache is None:
        return real.to(spec.dtype), real.new_ones(tokens, spec.kv_heads)
    per_row = real.abs().amax(-1) / LARGEST[spec.cache] if scale is None else scale.expand(tokens, spec.kv_heads)
    codes = (real / per_row[..., None]).clamp(-LARGEST[spec.cache], LARGEST[spec.cache])
    return (codes.round() if spec.cache == INT8 else codes).to(spec.cache), per_row


def paged(spec: Attention, make: Maker) -> dict[str, Any]:
    """Caches, scales, block table and lengths: pages in random order, tails and three unused pages poisoned."""
    needed = [-(-n // spec.page_size) for n in spec.k_lens]
    pages = sum(needed) + 3
    order = make.permutation(pages).to(make.device)
    width = max(needed, default=0) + 2
    table = make.tensor([[-1] * width] * len(needed), torch.int32).view(len(needed), width)
    token_slots = []
    for b, (count, length) in enumerate(zip(needed, spec.k_lens, strict=True)):
        own = order[sum(needed[:b]) : sum(needed[:b]) + count]
        table[b, :count] = own.to(torch.int32)
        slots = own[:, None] * spec.page_size + torch.arange(spec.page_size, device=make.device)
        token_slots.append(slots.flatten()[:length])
    slots = torch.cat([order[:0], *token_slots])
    page, offset = slots // spec.page_size, slots % spec.page_size

    k_cache, v_cache = empty_pool(spec, make, pages)
    args: dict[str, Any] = {"k_scale": None, "v_scale": None}
    contents = []
    for name, cache in (("k_scale", k_cache), ("v_scale", v_cache)):
        static = static_scale(spec, make) if spec.cache and spec.scales != "token" else None
        codes, per_row = stored(spec, make, len(slots), cache.shape[-1], static)
        contents.append(codes)
        if spec.cache:
            args[name] = static
        if spec.cache and static is None:
            table_of_scales = make.poison(pages, spec.kv_heads, spec.page_size, dtype=F32).transpose(1, 2)
            heads_first = spec.pool == "heads_first" or (spec.pool, name) == ("mixed", "v_scale")
            args[name] = table_of_scales if heads_first else table_of_scales.contiguous()
            args[name][page, offset] = per_row
    if spec.cache is None:
        spoil(spec, *contents)
    k_cache[page, offset], v_cache[page, offset] = contents
    seqlens = make.tensor(list(spec.k_lens), torch.int32)
    return {"k_cache": k_cache, "v_cache": v_cache, "block_table": table, "seqlens_k": seqlens, **args}


def paged_prefill(spec: Attention, make: Maker) -> dict[str, Any]:
    """Arguments of `paged_prefill_attention`."""
    total_q = sum(spec.q_lens)
    q = make.poison(total_q + spec.padding, spec.heads, spec.head_dim, dtype=spec.dtype)
    q[:total_q] = queries(spec, make, total_q)
    return {
        "q": make.placed(q, spec.strides),
        "cu_seqlens_q": make.tensor(cumulative(list(spec.q_lens)), torch.int32),
        "max_seqlen_q": max(spec.q_lens, default=0),
        "max_seqlen_k": max(spec.k_lens, default=0),
        **paged(spec, make),
        **mask_args(spec, make, len(spec.q_lens)),
        **outputs(spec, make, q.shape[0]),
    }


def decode(spec: Attention, make: Maker) -> dict[str, Any]:
    """Arguments of `paged_decode_attention`."""
    batch = len(spec.k_lens)
    return {
        "q": make.placed(queries(spec, make, batch), spec.strides),
        **paged(spec, make),
        **mask_args(spec, make, batch),
        "split_size": spec.split,
        "workspace": None,
        **outputs(spec, make, batch),
    }


def merge(make: Maker, tokens: int, heads: int, dim: int, dtype: torch.dtype, strides: str) -> dict[str, Any]:
    """Arguments of `merge_attention_states`: sides of very different weight, empty on the left, the right, and both."""
    args: dict[str, Any] = {}
    for side in "ab":
        args[f"out_{side}"] = make.placed(make.normal(tokens, heads, dim, dtype=dtype), strides)
        args[f"lse_{side}"] = make.placed(
            make.normal(heads, tokens, std=8.0), "gaps" if strides != "dense" else "dense"
        )
    for side, rows in (("a", (0, 2)), ("b", (1, 2))):
        for row in rows:
            if row < tokens:
                args[f"lse_{side}"][:, row] = -torch.inf
                args[f"out_{side}"][row] = 0
    args["out"] = make.output(tokens, heads, dim, dtype=dtype, strides="guarded" if strides == "dense" else strides)
    args["lse"] = make.output(heads, tokens, dtype=F32, strides="guarded")
    return args
