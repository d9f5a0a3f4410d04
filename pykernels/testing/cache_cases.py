"""Cases of append, rotate-and-append, gather, copy and swap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .attention_cases import BF16, F16, F32, FP8, INT8, LARGEST, Attention, paged
from .build import Maker, cumulative

BOTH = ((INT8, "int8"), (FP8, "fp8"))


@dataclass(frozen=True)
class Append:
    """New tokens for a paged cache; every third slot is negative (padding), the rest are scattered over the pool."""

    tokens: int = 37
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: torch.dtype = F32
    cache: torch.dtype = F32
    page_size: int = 16
    scales: str = "token"  # "token": dynamic; "head", "tensor": static
    strides: str = "dense"
    pool: str = "dense"
    values: str = "normal"  # "zeros": some rows are zero; "edges": halves and saturation; "nonfinite": NaN and inf
    rotary_pairs: int = 32
    interleaved: bool = False
    in_place: bool = False  # what is rotated is written over
    index_dtype: torch.dtype = torch.int64


def new_tokens(spec: Append, make: Maker, dim: int) -> torch.Tensor:
    """Values [tokens, kv_heads, dim]; before they are quantised, their magnitude changes from row to row."""
    x = make.normal(spec.tokens, spec.kv_heads, dim)
    if spec.cache in LARGEST:
        x = x * torch.exp2(make.uniform(spec.tokens, spec.kv_heads, 1, low=-6, high=6))
    if spec.values == "zeros":
        x[::2] = 0
    if spec.values == "edges":  # with amax 127 (or 448) every half is a tie
        x = make.integers(spec.tokens, spec.kv_heads, dim, low=-254, high=255).to(F32) / 2
        x[..., 0] = LARGEST.get(spec.cache, 127.0)
    if spec.values == "nonfinite" and spec.tokens > 5:
        x[2, 0, 3], x[3, -1, 0], x[5, 0, 7] = torch.nan, torch.inf, -torch.inf  # every third from 1 on is padding
    return x.to(spec.dtype)


def pool_args(spec: Append, make: Maker) -> dict[str, Any]:
    """Poisoned caches, slots and scales. Static scales are small enough that some values saturate."""
    pages = -(-spec.tokens // spec.page_size) + 3
    shapes = [(pages, spec.page_size, spec.kv_heads, d) for d in (spec.head_dim, spec.head_dim_v)]
    if spec.pool == "halves":
        k_cache, v_cache = make.poison(pages, 2, *shapes[0][1:], dtype=spec.cache).unbind(1)
    elif spec.pool == "heads_first":
        k_cache, v_cache = (make.poison(n, h, p, d, dtype=spec.cache).transpose(1, 2) for n, p, h, d in shapes)
    elif spec.pool == "vast":
        k_cache, v_cache = (make.vast(*s, dtype=spec.cache) for s in shapes)
    else:
        k_cache, v_cache = (make.placed(make.poison(*s, dtype=spec.cache), spec.strides) for s in shapes)
    slots = make.permutation(pages * spec.page_size)[: spec.tokens].to(make.device)
    slots[1::3] = -1
    args: dict[str, Any] = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": slots,
        "k_scale": None,
        "v_scale": None,
    }
    if spec.cache in LARGEST:
        for name in ("k_scale", "v_scale"):
            if spec.scales == "token":
                scale = make.poison(pages, spec.kv_heads, spec.page_size, dtype=F32).transpose(1, 2)
                args[name] = scale if spec.pool == "heads_first" else scale.contiguous()
            else:
                shape = (spec.kv_heads,) if spec.scales == "head" else ()
                args[name] = make.uniform(*shape, low=1.0, high=4.0) / LARGEST[spec.cache]
    return args


def append(spec: Append, make: Maker) -> dict[str, Any]:
    """Arguments of `append_kv`."""
    new = {
        n: make.placed(new_tokens(spec, make, d), spec.strides)
        for n, d in (("k", spec.head_dim), ("v", spec.head_dim_v))
    }
    return {**new, **pool_args(spec, make)}


def rotation(spec: Append, make: Maker) -> dict[str, Any]:
    """Positions (not in order, some large), frequencies of base 10,000, and the way pairs are laid out."""
    exponent = torch.arange(spec.rotary_pairs, device=make.device, dtype=F32) / max(spec.rotary_pairs, 1)
    return {
        "positions": make.integers(spec.tokens, low=0, high=4096, dtype=spec.index_dtype),
        "inv_freq": 10000.0**-exponent,
        "interleaved": spec.interleaved,
        "rope_scale": 1.0 if spec.dtype == F16 else 1.25,
    }


def rope_append(spec: Append, make: Maker) -> dict[str, Any]:
    """Arguments of `rope_append_kv`."""
    q = make.placed(make.normal(spec.tokens, spec.heads, spec.head_dim, dtype=spec.dtype), spec.strides)
    q_out = make.output(*q.shape, dtype=spec.dtype, strides="guarded" if spec.strides == "dense" else spec.strides)
    return {"q": q, **append(spec, make), **rotation(spec, make), "q_out": q if spec.in_place else q_out}


def rotary(spec: Append, make: Maker) -> dict[str, Any]:
    """Arguments of `rotary_embedding`."""
    strides = "guarded" if spec.strides == "dense" else spec.strides
    args = rotation(spec, make)
    for name, heads in (("q", spec.heads), ("k", spec.kv_heads)):
        x = make.placed(make.normal(spec.tokens, heads, spec.head_dim, dtype=spec.dtype), spec.strides)
        out = make.output(*x.shape, dtype=spec.dtype, strides=strides)
        args |= {name: x, f"{name}_out": x if spec.in_place else out}
    return args


def gather(spec: Attention, make: Maker) -> dict[str, Any]:
    """Arguments of `gather_kv`; the outputs have `spec.dtype`."""
    args = paged(spec, make)
    total = cumulative(list(spec.k_lens))[-1]
    strides = "guarded" if spec.strides == "dense" else spec.strides
    args["k"] = make.output(total, spec.kv_heads, spec.head_dim, dtype=spec.dtype, strides=strides)
    args["v"] = make.output(total, spec.kv_heads, spec.head_dim_v, dtype=spec.dtype, strides=strides)
    return args


def copy(spec: Attention, copies: int, cycle: bool, make: Maker) -> dict[str, Any]:
    """Arguments of `copy_pages`: the unused, poisoned pages are written too. `cycle`: each page is both read and written."""
    args = paged(spec, make)
    pages = args["k_cache"].shape[0]
    order = make.permutation(pages).to(make.device)
    kept = {n: args[n] for n in ("k_cache", "v_cache", "k_scale", "v_scale")}
    target = order[:copies].roll(1) if cycle else order[copies : 2 * copies].clone()
    return {**kept, "src_pages": order[:copies].clone(), "dst_pages": target}


@dataclass(frozen=True)
class Swap:
    """Pages of one pool into another with more pages and its own layout; every page of the target is poison."""

    source: Attention
    copies: int = 5
    pool: str = "dense"  # of the target, as `source.pool` is of the source
    strides: str = "dense"  # of the target
    host: str = ""  # the side that is in host memory: "from", "to"
    repeated: bool = False  # one source page goes to every destination


def swap(spec: Swap, make: Maker) -> dict[str, Any]:
    """Arguments of `swap_pages`."""
    args = paged(spec.source, make)
    pages = args["k_cache"].shape[0]
    target = pool_args(
        Append(
            tokens=(pages + 2) * spec.source.page_size,
            kv_heads=spec.source.kv_heads,
            head_dim=spec.source.head_dim,
            head_dim_v=spec.source.head_dim_v,
            cache=args["k_cache"].dtype,
            page_size=spec.source.page_size,
            scales=spec.source.scales,
            pool=spec.pool,
            strides=spec.strides,
        ),
        make,
    )
    sources = make.permutation(pages)[: spec.copies].to(make.device)
    made = {
        "src_pages": sources[:1].expand(spec.copies).clone() if spec.repeated else sources,
        "dst_pages": make.permutation(target["k_cache"].shape[0])[: spec.copies].to(make.device),
    }
    for side, caches in (("from", args), ("to", target)):
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            value = caches[name]
            if value is not None and spec.host == side:
                value = make.pinned(value)
            made[f"{name.removesuffix('_cache')}_{side}"] = value
    return made


def append_table() -> dict[str, Append]:
    base = Append()
    table = {
        "one_token": Append(tokens=1),
        "no_tokens": Append(tokens=0),
        "halves": Append(pool="halves"),
        "heads_first": Append(pool="heads_first"),
        "uneven_dims": Append(head_dim=192, head_dim_v=128, rotary_pairs=32),
        "cast_to_bfloat16": Append(cache=BF16),
        "widen_bfloat16": Append(dtype=BF16),
        "bfloat16": Append(dtype=BF16, cache=BF16),
        "float16": Append(dtype=F16, cache=F16, page_size=3),
        "nonfinite": Append(values="nonfinite"),
        "int8_vast": Append(cache=INT8, pool="vast", page_size=3),
    }
    table |= {f"strides_{s}": replace(base, strides=s) for s in ("gaps", "odd", "outer")}
    table |= {f"pages_of_{p}": replace(base, page_size=p) for p in (1, 3, 64)}
    for cache, name in BOTH:
        coded = replace(base, cache=cache)
        for dtype, suffix in ((F32, ""), (BF16, "_bfloat16"), (F16, "_float16")):
            table |= {f"{name}_{s}{suffix}": replace(coded, dtype=dtype, scales=s) for s in ("token", "head", "tensor")}
        table |= {
            f"{name}_zeros": replace(coded, values="zeros"),
            f"{name}_edges": replace(coded, values="edges"),
            f"{name}_edges_static": replace(coded, values="edges", scales="head"),
            f"{name}_nonfinite": replace(coded, values="nonfinite"),
            f"{name}_halves": replace(coded, pool="halves", page_size=3),
            f"{name}_heads_first": replace(coded, pool="heads_first"),
            f"{name}_gaps": replace(coded, strides="gaps", head_dim=80, head_dim_v=80),
            f"{name}_odd": replace(coded, strides="odd", dtype=BF16),
            f"{name}_dim_256": replace(coded, head_dim=256, head_dim_v=128),
        }
    return table


APPEND_SMOKE = (
    "halves",
    "bfloat16",
    "int8_token",
    "fp8_token_bfloat16",
    "int8_head_float16",
    "fp8_tensor",
    "int8_zeros",
    "fp8_edges",
)


SWAP_SMOKE = ("halves", "into_heads_first", "bfloat16", "int8_token", "fp8_out", "int8_in")


def rope_append_table() -> dict[str, Append]:
    """`append_table` without non-finite values (what a rotation of inf gives is no promise), and rotations."""
    table = {n: s for n, s in append_table().items() if s.values != "nonfinite"}
    return table | rotary_table()


def rotary_table() -> dict[str, Append]:
    base = Append()
    return {
        "half_split": base,
        "interleaved": replace(base, interleaved=True),
        "one_token": replace(base, tokens=1),
        "no_tokens": replace(base, tokens=0),
        "partial": replace(base, rotary_pairs=12),
        "partial_interleaved": replace(base, rotary_pairs=5, interleaved=True),
        "no_pairs": replace(base, rotary_pairs=0),
        "odd_head_dim": replace(base, head_dim=80, head_dim_v=80, rotary_pairs=40),
        "int32_positions": replace(base, index_dtype=torch.int32),
        "heads_9_3": replace(base, heads=9, kv_heads=3, tokens=129),
        "dim_256": replace(base, head_dim=256, head_dim_v=256, rotary_pairs=128, heads=4, kv_heads=1),
        "rotary_in_place": replace(base, in_place=True),
        "rotary_in_place_interleaved": replace(base, in_place=True, interleaved=True, dtype=BF16, cache=BF16),
        "rotary_in_place_odd": replace(base, in_place=True, strides="odd", rotary_pairs=24),
        "rotary_gaps": replace(base, strides="gaps"),
        "rotary_odd": replace(base, strides="odd", interleaved=True),
        "rotary_outer": replace(base, strides="outer"),
        "rotary_bfloat16": replace(base, dtype=BF16, cache=BF16),
        "rotary_bfloat16_interleaved": replace(base, dtype=BF16, cache=BF16, interleaved=True),
        "rotary_float16": replace(base, dtype=F16, cache=F16),
        "rotary_float16_interleaved": replace(base, dtype=F16, cache=F16, interleaved=True),
    }


def gather_table() -> dict[str, Attention]:
    base = Attention(k_lens=(33, 0, 129, 1))
    table = {
        "float32": base,
        "bfloat16": replace(base, dtype=BF16),
        "float16": replace(base, dtype=F16, strides="gaps"),
        "empty_batch": replace(base, k_lens=()),
        "only_empty": replace(base, k_lens=(0, 0)),
        "many_sequences": replace(base, k_lens=(2, 0, 1) * 45, page_size=1, head_dim=32, head_dim_v=32),
        "halves": replace(base, pool="halves"),
        "heads_first": replace(base, pool="heads_first"),
        "odd_output": replace(base, strides="odd"),
        "int8_vast": replace(base, cache=INT8, pool="vast"),
        "uneven_dims": replace(base, head_dim=192, head_dim_v=128),
    }
    table |= {f"pages_of_{p}": replace(base, page_size=p) for p in (1, 3, 64)}
    for cache, name in BOTH:
        for dtype, suffix in ((F32, ""), (BF16, "_bfloat16"), (F16, "_float16")):
            for scales in ("token", "head", "tensor"):
                table[f"{name}_{scales}{suffix}"] = replace(base, cache=cache, dtype=dtype, scales=scales)
        table[f"{name}_heads_first"] = replace(base, cache=cache, pool="heads_first", page_size=3)
    return table


def copy_table() -> dict[str, tuple[Attention, int, bool]]:
    """What is copied, how many pages, and whether in a cycle."""
    base = Attention(k_lens=(33, 0, 129, 1))
    table = {
        "float32": (base, 3),
        "none": (base, 0),
        "int8_vast": (replace(base, cache=INT8, pool="vast"), 6),
        "one": (base, 1),
        "bfloat16": (replace(base, dtype=BF16), 4),
        "halves": (replace(base, pool="halves", page_size=3), 9),
        "heads_first": (replace(base, pool="heads_first"), 3),
        "uneven_dims": (replace(base, head_dim=192, head_dim_v=128), 3),
    }
    for cache, name in BOTH:
        table |= {f"{name}_{s}": (replace(base, cache=cache, scales=s), 5) for s in ("token", "head", "tensor")}
        table[f"{name}_heads_first"] = (replace(base, cache=cache, pool="heads_first"), 5)
    cycles = {"cycle": (base, 5, True), "cycle_int8": (replace(base, cache=INT8), 5, True)}
    return cycles | {name: (*spec, False) for name, spec in table.items()}


def swap_table() -> dict[str, Swap]:
    base = Swap(Attention(k_lens=(33, 0, 129, 1)))
    table = {
        "float32": base,
        "none": replace(base, copies=0),
        "one": replace(base, copies=1),
        "repeated": replace(base, repeated=True),
        "int8_vast": replace(base, source=replace(base.source, cache=INT8, pool="vast")),
        "into_vast": replace(base, source=replace(base.source, cache=INT8), pool="vast"),
        "bfloat16": replace(base, source=replace(base.source, dtype=BF16)),
        "halves": replace(base, source=replace(base.source, pool="halves", page_size=3), copies=9),
        "into_halves": replace(base, source=replace(base.source, page_size=1), pool="halves"),
        "into_heads_first": replace(base, pool="heads_first"),
        "into_odd": replace(base, strides="odd"),
        "int8_into_odd": replace(base, source=replace(base.source, cache=INT8), strides="odd"),
        "uneven_dims": replace(base, source=replace(base.source, head_dim=192, head_dim_v=128, pool="heads_first")),
        "out": replace(base, source=replace(base.source, dtype=BF16, pool="halves"), host="to"),
        "in": replace(base, source=replace(base.source, dtype=BF16), host="from", pool="halves"),
    }
    for cache, name in BOTH:
        coded = replace(base, source=replace(base.source, cache=cache))
        table |= {
            f"{name}_{s}": replace(coded, source=replace(coded.source, scales=s)) for s in ("token", "head", "tensor")
        }
        table[f"{name}_out"] = replace(coded, host="to", pool="heads_first")
        table[f"{name}_in"] = replace(coded, host="from")
    return table
