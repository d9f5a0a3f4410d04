"""Cases of linear, embedding, normalisation and activation, with packed weights made from random codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .attention_cases import BF16, F16, F32
from .build import Maker
from .packing import Codes, pack, random_codes


@dataclass(frozen=True)
class Linear:
    """x [tokens, k] times a weight [n, k] of some format."""

    tokens: int = 5
    n: int = 40
    k: int = 96
    dtype: torch.dtype = F32
    out: torch.dtype | None = None  # None: the dtype of x
    weight: torch.dtype = F32  # of a dense weight
    format: str = "dense"
    layout: str = "plain"
    activations: str = "float"
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    in_place: bool = False  # the residual is the output
    strides: str = "dense"
    zeros: bool = False  # some groups of x are all zero


def packed(make: Maker, weight_format: str, layout: str, rows: int, columns: int) -> torch.Tensor:
    """A weight of random codes in the bytes of `weight_format`; scales differ from group to group."""
    codes: Codes = random_codes(make, weight_format, rows, columns)
    return pack(codes, weight_format, layout).to(make.device)


def linear(spec: Linear, make: Maker) -> dict[str, Any]:
    """Arguments of `linear`."""
    x = make.normal(spec.tokens, spec.k) * torch.exp2(make.uniform(1, spec.k, low=-2, high=2))
    if spec.zeros:
        x[::2, :32] = 0
    if spec.format == "dense":
        weight = make.placed(make.normal(spec.n, spec.k, dtype=spec.weight, std=spec.k**-0.5), spec.strides)
    else:
        weight = packed(make, spec.format, spec.layout, spec.n, spec.k)
    strides = "guarded" if spec.strides == "dense" else spec.strides
    residual = None
    if spec.residual:
        residual = make.placed(make.normal(spec.tokens, spec.n, dtype=spec.residual), spec.strides)
    out = residual if spec.in_place else make.output(spec.tokens, spec.n, dtype=spec.out or spec.dtype, strides=strides)
    return {
        "x": make.placed(x.to(spec.dtype), spec.strides),
        "weight": weight,
        "weight_format": spec.format,
        "layout": spec.layout,
        "activations": spec.activations,
        "bias": make.normal(spec.n, dtype=spec.bias) if spec.bias else None,
        "residual": residual,
        "out": out,
    }


@dataclass(frozen=True)
class Embedding:
    tokens: int = 9
    rows: int = 40
    hidden: int = 96
    format: str = "dense"
    layout: str = "plain"
    weight: torch.dtype = F32
    out: torch.dtype = F32
    index_dtype: torch.dtype = torch.int64
    strides: str = "dense"


def embedding(spec: Embedding, make: Maker) -> dict[str, Any]:
    """Arguments of `embedding`; the first and the last row are always asked for."""
    ids = make.integers(spec.tokens, low=0, high=spec.rows, dtype=spec.index_dtype)
    if spec.tokens > 1:
        ids[0], ids[-1] = 0, spec.rows - 1
    if spec.format == "dense":
        weight = make.placed(make.normal(spec.rows, spec.hidden, dtype=spec.weight), spec.strides)
    else:
        weight = packed(make, spec.format, spec.layout, spec.rows, spec.hidden)
    strides = "guarded" if spec.strides == "dense" else spec.strides
    return {
        "ids": ids,
        "weight": weight,
        "num_embeddings": spec.rows,
        "weight_format": spec.format,
        "layout": spec.layout,
        "out": make.output(spec.tokens, spec.hidden, dtype=spec.out, strides=strides),
    }


@dataclass(frozen=True)
class Rows:
    """Rows of a normalisation (width = hidden) or an activation (width = half of the last dimension)."""

    tokens: int = 7
    width: int = 576
    dtype: torch.dtype = F32
    out: torch.dtype | None = None
    weight: torch.dtype = F32
    residual: bool = False
    keep_sum: bool = False
    in_place: bool = False  # the sum is written over the residual
    std: float = 1.0
    kind: str = "silu"
    strides: str = "dense"


def norm(spec: Rows, make: Maker) -> dict[str, Any]:
    """Arguments of `rms_norm`."""
    shape = (spec.tokens, spec.width)
    strides = "guarded" if spec.strides == "dense" else spec.strides
    residual = make.placed(make.normal(*shape, dtype=spec.dtype), spec.strides) if spec.residual else None
    kept = make.output(*shape, dtype=spec.dtype, strides=strides) if spec.keep_sum else None
    return {
        "x": make.placed(make.normal(*shape, dtype=spec.dtype, std=spec.std), spec.strides),
        "weight": make.normal(spec.width, dtype=spec.weight),
        "eps": 1e-5,
        "residual": residual,
        "out": make.output(*shape, dtype=spec.out or spec.dtype, strides=strides),
        "residual_out": residual if spec.in_place else kept,
    }


def activation(spec: Rows, make: Maker) -> dict[str, Any]:
    """Arguments of `gated_activation`; gates reach far into both tails."""
    strides = "guarded" if spec.strides == "dense" else spec.strides
    x = make.normal(spec.tokens, 2 * spec.width, std=4.0)
    if spec.tokens and spec.width > 3:
        x[0, :4] = make.tensor([-100.0, 100.0, -88.5, 0.0], F32)
    return {
        "x": make.placed(x.to(spec.dtype), spec.strides),
        "kind": spec.kind,
        "out": make.output(spec.tokens, spec.width, dtype=spec.out or spec.dtype, strides=strides),
    }


PACKED = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3", "q4_0", "q4_1", "q8_0")


def linear_table() -> dict[str, Linear]:
    base = Linear()
    table = {
        "dense": base,
        "dense_odd": Linear(tokens=3, n=17, k=33),
        "dense_one": Linear(tokens=1, n=1, k=1),
        "dense_no_tokens": Linear(tokens=0),
        "dense_many": Linear(tokens=129, n=127, k=239),
        "dense_bfloat16": replace(base, dtype=BF16, weight=BF16, bias=BF16, residual=BF16),
        "dense_float16": replace(base, dtype=F16, weight=F16, bias=F32),
        "dense_mixed": replace(base, dtype=BF16, weight=F32, out=F32),
        "dense_bias": replace(base, bias=F32, residual=F32),
        "dense_gaps": replace(base, strides="gaps", residual=F32),
        "dense_in_place": replace(base, residual=F32, in_place=True),
        "bfloat16_in_place": Linear(8, 41, 672, dtype=BF16, weight=BF16, residual=BF16, in_place=True, strides="gaps"),
        "q4_1_in_place": Linear(8, 41, 672, dtype=F16, format="q4_1", residual=F16, in_place=True),
        "q4_1_in_place_many": Linear(67, 33, 160, format="q4_1", residual=F32, in_place=True),
        "dense_odd_strides": replace(base, strides="odd", dtype=BF16, weight=BF16),
    }
    for fmt in PACKED:
        for layout in ("plain", "rows16"):
            one = replace(base, format=fmt, layout=layout)
            table[f"{fmt}_{layout}"] = one
            table[f"{fmt}_{layout}_bfloat16"] = replace(one, dtype=BF16, tokens=1, n=48, k=128, residual=BF16)
            table[f"{fmt}_{layout}_many"] = replace(one, tokens=67, n=33, k=160, bias=F32, strides="gaps")
            table[f"{fmt}_{layout}_int8"] = replace(one, activations="int8", zeros=True)
            table[f"{fmt}_{layout}_int8_float16"] = replace(one, activations="int8", dtype=F16, tokens=1, n=64, k=128)
            table[f"{fmt}_{layout}_int8_many"] = replace(
                one, activations="int8", dtype=BF16, tokens=19, n=100, k=160, bias=BF16, residual=BF16, out=F32
            )
            table[f"{fmt}_{layout}_int16"] = replace(one, activations="int16", zeros=True)
            table[f"{fmt}_{layout}_int16_many"] = replace(
                one, activations="int16", dtype=BF16, tokens=19, n=100, k=160, bias=BF16, residual=BF16, out=F32
            )
            if fmt in PACKED[:5]:
                table[f"{fmt}_{layout}_odd"] = replace(one, tokens=4, n=19, k=37)
        # Rows of many tiles with a ragged last one, in both 16-bit types.
        table[f"{fmt}_plain_long"] = Linear(8, 41, 1376, dtype=F16, format=fmt, bias=F16)
        table[f"{fmt}_plain_long_bfloat16"] = Linear(3, 18, 672, dtype=BF16, format=fmt, out=F32, residual=BF16)
    table |= {
        f"dense_long_{n}": Linear(6, 23, 1000, dtype=d, weight=d, strides="gaps")
        for d, n in ((BF16, "bfloat16"), (F16, "float16"), (F32, "float32"))
    }
    table |= {
        f"tokens_{t}": replace(base, format="q4_1", layout="rows16", tokens=t) for t in (1, 2, 3, 4, 7, 8, 9, 16, 17)
    }
    return table


LINEAR_SMOKE = (
    "dense_odd",
    "dense_bfloat16",
    "bfloat16_plain",
    *(f"{f}_rows16_int8" for f in ("int8", "q4_0", "q4_1", "q8_0")),
)


def embedding_table() -> dict[str, Embedding]:
    base = Embedding()
    table = {
        "dense": base,
        "dense_int32": replace(base, index_dtype=torch.int32, strides="gaps"),
        "dense_bfloat16": replace(base, weight=BF16, out=BF16, hidden=33),
        "dense_no_tokens": replace(base, tokens=0),
    }
    for fmt in PACKED:
        for layout in ("plain", "rows16"):
            table[f"{fmt}_{layout}"] = replace(base, format=fmt, layout=layout)
            table[f"{fmt}_{layout}_float16"] = replace(base, format=fmt, layout=layout, out=F16, hidden=160, rows=17)
    return table


EMBEDDING_SMOKE = ("dense", "bfloat16_plain", "int8_rows16", "q8_0_rows16", "q4_1_plain")


def norm_table() -> dict[str, Rows]:
    base = Rows()
    # Narrow rows come in numbers: a few elements are no fair sample of rounding errors.
    table = {f"width_{n}": replace(base, width=n, tokens=max(7, 128 // n)) for n in (1, 7, 127, 128, 129, 576, 4099)}
    return table | {
        "one_row": replace(base, tokens=1),
        "no_rows": replace(base, tokens=0),
        "many_rows": replace(base, tokens=239, width=64),
        "residual": replace(base, residual=True),
        "residual_kept": replace(base, residual=True, keep_sum=True),
        "tiny": replace(base, std=1e-4),
        "large": replace(base, std=1e4),
        "in_place": replace(base, residual=True, in_place=True),
        "in_place_bfloat16": replace(base, dtype=BF16, residual=True, in_place=True, width=1536),
        "in_place_odd": replace(base, dtype=F16, residual=True, in_place=True, strides="odd", width=129),
        "bfloat16": replace(base, dtype=BF16, weight=BF16, residual=True, keep_sum=True),
        "bfloat16_to_float32": replace(base, dtype=BF16, out=F32),
        "float16": replace(base, dtype=F16, weight=F16, residual=True, keep_sum=True),
        "gaps": replace(base, strides="gaps", residual=True, keep_sum=True),
        "odd": replace(base, strides="odd", dtype=BF16, width=129),
    }


def activation_table() -> dict[str, Rows]:
    table: dict[str, Rows] = {}
    for kind in ("silu", "gelu_tanh"):
        base = Rows(kind=kind)
        table |= {f"{kind}_width_{n}": replace(base, width=n, tokens=max(7, 128 // n)) for n in (1, 7, 127, 129, 1536)}
        table |= {
            f"{kind}_no_rows": replace(base, tokens=0),
            f"{kind}_bfloat16": replace(base, dtype=BF16),
            f"{kind}_float16": replace(base, dtype=F16, strides="gaps"),
            f"{kind}_mixed": replace(base, dtype=BF16, out=F32),
            f"{kind}_odd": replace(base, strides="odd", width=65),
        }
    return table
