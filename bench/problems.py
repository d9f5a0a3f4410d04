"""What is measured: heads and widths of real models, scaled so that everything runs in minutes on two cores.

A problem is a row of its op's grid; its columns (model, dtype, kv, context, batch, ...) are the parameters of the suite's
tests. The case tables of the tests are measured too: `tables()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from pykernels.contract import OPS
from pykernels.testing import attention_cases, cache_cases, dense_cases, sampling_cases
from pykernels.testing.attention_cases import Attention
from pykernels.testing.build import Maker
from pykernels.testing.cache_cases import Append
from pykernels.testing.dense_cases import Embedding, Linear, Rows
from pykernels.testing.factories import Case, cases


@dataclass(frozen=True)
class Model:
    """The sizes of a model that its kernels see."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int


MODELS = {
    "smollm2": Model(9, 3, 64, 576, 1536, 49152),
    "llama3_8b": Model(32, 8, 128, 4096, 14336, 128256),
    "qwen2.5_7b": Model(28, 4, 128, 3584, 18944, 152064),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV = {**DTYPES, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


def attention(model: str, dtype: str, kv: str | None, q_lens: Iterable[int], k_lens: Iterable[int]) -> Attention:
    m = MODELS[model]
    return Attention(
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
        heads=m.heads,
        kv_heads=m.kv_heads,
        head_dim=m.head_dim,
        head_dim_v=m.head_dim,
        dtype=DTYPES[dtype],
        cache=KV[kv] if kv in ("int8", "fp8_e4m3") else None,
    )


def decode(make: Maker, model: str, dtype: str, kv: str, context: int, batch: int) -> dict[str, Any]:
    return attention_cases.decode(attention(model, dtype, kv, [1] * batch, [context] * batch), make)


def merge(make: Maker, model: str, dtype: str, batch: int) -> dict[str, Any]:
    m = MODELS[model]
    return attention_cases.merge(make, batch, m.heads, m.head_dim, DTYPES[dtype], "dense")


def prefill(make: Maker, model: str, dtype: str, context: int, batch: int) -> dict[str, Any]:
    return attention_cases.prefill(attention(model, dtype, None, [context] * batch, [context] * batch), make)


def paged_prefill(make: Maker, model: str, dtype: str, kv: str, chunk: int, context: int) -> dict[str, Any]:
    return attention_cases.paged_prefill(attention(model, dtype, kv, [chunk], [context]), make)


def gather(make: Maker, model: str, dtype: str, kv: str, context: int, batch: int) -> dict[str, Any]:
    return cache_cases.gather(attention(model, dtype, kv, [1] * batch, [context] * batch), make)


def copy_pages(make: Maker, model: str, dtype: str, kv: str, context: int) -> dict[str, Any]:
    return cache_cases.copy(attention(model, dtype, kv, [1], [2 * context]), context // 16, False, make)


def swap_pages(make: Maker, model: str, dtype: str, kv: str, context: int) -> dict[str, Any]:
    spec = cache_cases.Swap(attention(model, dtype, kv, [1], [2 * context]), copies=context // 16)
    return cache_cases.swap(spec, make)


def _append(model: str, dtype: str, kv: str, tokens: int) -> Append:
    m = MODELS[model]
    return Append(
        tokens=tokens,
        heads=m.heads,
        kv_heads=m.kv_heads,
        head_dim=m.head_dim,
        head_dim_v=m.head_dim,
        dtype=DTYPES[dtype],
        cache=KV[kv],
        rotary_pairs=m.head_dim // 2,
    )


def append(make: Maker, model: str, dtype: str, kv: str, tokens: int) -> dict[str, Any]:
    return cache_cases.append(_append(model, dtype, kv, tokens), make)


def rope_append(make: Maker, model: str, dtype: str, kv: str, tokens: int) -> dict[str, Any]:
    return cache_cases.rope_append(_append(model, dtype, kv, tokens), make)


def rotary(make: Maker, model: str, dtype: str, tokens: int) -> dict[str, Any]:
    return cache_cases.rotary(_append(model, dtype, dtype, tokens), make)


FILTERS = {
    "greedy": {"temperature": 0.0},
    "top_k_top_p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
}


def sample(make: Maker, model: str, dtype: str, filters: str, batch: int) -> dict[str, Any]:
    spec = sampling_cases.Sampling(batch, MODELS[model].vocab, DTYPES[dtype], use=(), num_logprobs=None)
    args = sampling_cases.sample(spec, make)
    for name, value in FILTERS[filters].items():
        args[name].fill_(value)
    return args


def verify(make: Maker, model: str, dtype: str, drafted: int, batch: int) -> dict[str, Any]:
    spec = sampling_cases.Draft((drafted,) * batch, MODELS[model].vocab, DTYPES[dtype], use=("temperature",))
    args = sampling_cases.verify(spec, make)
    args["temperature"].fill_(0.7)
    return args


def uniform(make: Maker, count: int, batch: int) -> dict[str, Any]:
    return sampling_cases.stream(batch, count, make)


def linear(make: Maker, model: str, matrix: str, format: str, dtype: str, tokens: int) -> dict[str, Any]:
    m = MODELS[model]
    rows, columns = {"attention_out": (m.hidden, m.hidden), "ffn_down": (m.hidden, m.ffn)}[matrix]
    integers = format in ("int8", "q4_0", "q4_1", "q8_0")
    spec = Linear(tokens, rows, columns, DTYPES[dtype], format=format, layout="rows16")
    if make.device != "cpu":  # SIMD lanes are the CPU's; nothing quantises activations on a GPU
        return dense_cases.linear(replace(spec, layout="plain"), make)
    return dense_cases.linear(replace(spec, activations="int8" if integers else "float"), make)


def embedding(make: Maker, model: str, format: str, dtype: str, tokens: int) -> dict[str, Any]:
    layout = "rows16" if make.device == "cpu" else "plain"
    spec = Embedding(tokens, 1024, MODELS[model].hidden, format, layout, out=DTYPES[dtype])
    return dense_cases.embedding(spec, make)


def _rows(model: str, dtype: str, width: int, tokens: int) -> Rows:
    kind = DTYPES[dtype]
    return Rows(tokens, width, kind, weight=kind, residual=True, keep_sum=True)


def norm(make: Maker, model: str, dtype: str, tokens: int) -> dict[str, Any]:
    return dense_cases.norm(_rows(model, dtype, MODELS[model].hidden, tokens), make)


def activation(make: Maker, model: str, dtype: str, tokens: int) -> dict[str, Any]:
    return dense_cases.activation(_rows(model, dtype, MODELS[model].ffn, tokens), make)


# ---- the grids ------------------------------------------------------------------------------------------------------
Row = tuple[Any, ...]
ALL = tuple(MODELS)


def rows(*columns: Iterable[Any]) -> list[Row]:
    return list(product(*columns))


@dataclass(frozen=True)
class Grid:
    """Problems of one op: how to build one, and the rows of its columns."""

    build: Callable[..., dict[str, Any]]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def _grid(build: Callable[..., dict[str, Any]], columns: str, *parts: list[Row]) -> Grid:
    return Grid(build, tuple(columns.split()), tuple(row for part in parts for row in part))


HALF = ["bfloat16"]
GRIDS: dict[str, Grid] = {
    "paged_decode_attention": _grid(
        decode,
        "model dtype kv context batch",
        rows(ALL, HALF, ["bfloat16", "int8", "fp8_e4m3"], [1024], [1, 4]),
        rows(["smollm2"], ["float32"], ["float32", "int8"], [1024], [1]),
        rows(["smollm2"], HALF, ["bfloat16", "int8"], [4096], [1]),
    ),
    "merge_attention_states": _grid(merge, "model dtype batch", rows(ALL, HALF, [1, 256])),
    "prefill_attention": _grid(
        prefill,
        "model dtype context batch",
        rows(ALL, HALF, [128], [1, 4]),
        rows(["smollm2"], ["float32", "bfloat16"], [512], [1]),
    ),
    "paged_prefill_attention": _grid(
        paged_prefill,
        "model dtype kv chunk context",
        rows(ALL, HALF, ["bfloat16", "int8"], [128], [512]),
        rows(["llama3_8b"], HALF, ["bfloat16"], [5], [1024]),
    ),
    "append_kv": _grid(append, "model dtype kv tokens", rows(ALL, HALF, ["bfloat16", "int8", "fp8_e4m3"], [1, 256])),
    "rope_append_kv": _grid(rope_append, "model dtype kv tokens", rows(ALL, HALF, ["bfloat16", "int8"], [1, 256])),
    "gather_kv": _grid(
        gather, "model dtype kv context batch", rows(ALL, HALF, ["bfloat16", "int8", "fp8_e4m3"], [1024], [1])
    ),
    "copy_pages": _grid(copy_pages, "model dtype kv context", rows(ALL, HALF, ["bfloat16", "int8"], [512])),
    "swap_pages": _grid(swap_pages, "model dtype kv context", rows(ALL, HALF, ["bfloat16", "int8"], [512])),
    "sample": _grid(sample, "model dtype filters batch", rows(ALL, ["float32"], FILTERS, [1, 8])),
    "verify_draft": _grid(verify, "model dtype drafted batch", rows(ALL, ["float32"], [4], [1])),
    "philox_uniform": _grid(uniform, "count batch", rows([4096], [1, 64])),
    "linear": _grid(
        linear,
        "model matrix format dtype tokens",
        rows(["smollm2"], ["ffn_down"], ["bfloat16", "int8", "q4_1", "q8_0"], HALF, [1, 8, 128]),
        rows(["llama3_8b"], ["attention_out"], ["bfloat16", "int8"], HALF, [1, 8]),
    ),
    "embedding": _grid(
        embedding, "model format dtype tokens", rows(["smollm2", "llama3_8b"], ["bfloat16", "q8_0"], HALF, [1, 128])
    ),
    "rms_norm": _grid(norm, "model dtype tokens", rows(ALL, ["float32", "bfloat16"], [1, 256])),
    "rotary_embedding": _grid(rotary, "model dtype tokens", rows(ALL, HALF, [1, 256])),
    "gated_activation": _grid(activation, "model dtype tokens", rows(ALL, HALF, [1, 256])),
}

# One row of every op, quick to build and to check.
SMOKE: dict[str, Row] = {
    "paged_decode_attention": ("smollm2", "bfloat16", "int8", 1024, 1),
    "merge_attention_states": ("smollm2", "bfloat16", 1),
    "prefill_attention": ("smollm2", "bfloat16", 128, 1),
    "paged_prefill_attention": ("smollm2", "bfloat16", "int8", 128, 512),
    "append_kv": ("smollm2", "bfloat16", "int8", 1),
    "rope_append_kv": ("smollm2", "bfloat16", "int8", 1),
    "gather_kv": ("smollm2", "bfloat16", "int8", 1024, 1),
    "copy_pages": ("smollm2", "bfloat16", "bfloat16", 512),
    "swap_pages": ("smollm2", "bfloat16", "bfloat16", 512),
    "sample": ("smollm2", "float32", "top_k_top_p", 1),
    "verify_draft": ("smollm2", "float32", 4, 1),
    "philox_uniform": (4096, 1),
    "linear": ("smollm2", "ffn_down", "q4_1", "bfloat16", 1),
    "embedding": ("smollm2", "q8_0", "bfloat16", 1),
    "rms_norm": ("smollm2", "bfloat16", 1),
    "rotary_embedding": ("smollm2", "bfloat16", 1),
    "gated_activation": ("smollm2", "bfloat16", 1),
}

# What the gates on roofs and on instructions take: the smoke rows, but enough tokens that the work outweighs a call.
GATED: dict[str, Row] = SMOKE | {
    "merge_attention_states": ("smollm2", "bfloat16", 256),
    "append_kv": ("smollm2", "bfloat16", "int8", 256),
    "rope_append_kv": ("smollm2", "bfloat16", "int8", 256),
    "embedding": ("smollm2", "q8_0", "bfloat16", 128),
    "rms_norm": ("smollm2", "bfloat16", 256),
    "rotary_embedding": ("smollm2", "bfloat16", 256),
    "gated_activation": ("smollm2", "bfloat16", 256),
}


def gated(op: str) -> Case:
    """The problem of an op that the gates on roofs and instructions take."""
    return problem(op, **dict(zip(GRIDS[op].columns, GATED[op], strict=True)))


def problem(op: str, **columns: Any) -> Case:
    """The case of a row. ValueError for columns that the op's grid does not have."""
    grid = GRIDS[op]
    if set(columns) != set(grid.columns):
        raise ValueError(f"{op} has the columns {', '.join(grid.columns)}, got {', '.join(columns)}")
    return Case(
        op,
        row_name(columns),
        partial(_build, grid.build, columns),
        columns == dict(zip(grid.columns, SMOKE[op], strict=True)),
    )


def columns_of(case: Case) -> dict[str, Any]:
    """The columns of a case of `problem`, with their values."""
    grid = GRIDS[case.op]
    found = (dict(zip(grid.columns, row, strict=True)) for row in grid.rows)
    return next(columns for columns in found if row_name(columns) == case.name)


def _build(build: Callable[..., dict[str, Any]], columns: Mapping[str, Any], make: Maker) -> dict[str, Any]:
    return build(make, **columns)


def row_name(columns: Mapping[str, Any]) -> str:
    """`smollm2-bfloat16-kv_int8-context_1024-batch_1`."""
    plain = ("model", "dtype", "filters", "matrix", "format")
    return "-".join(str(v) if n in plain else f"{n}_{v}" for n, v in columns.items())


def problems(op: str, subset: str = "full") -> list[Case]:
    """All rows of an op's grid; `subset` is "smoke" or "full"."""
    if subset not in ("smoke", "full"):
        raise ValueError(f'subset must be "smoke" or "full", got {subset!r}')
    grid = GRIDS[op]
    chosen = grid.rows if subset == "full" else (SMOKE[op],)
    return [problem(op, **dict(zip(grid.columns, row, strict=True))) for row in chosen]


def tables(family: str, subset: str = "smoke") -> list[Case]:
    """The cases of the tests, but for those without work and those that only test addresses."""
    idle = ("empty", "no_", "none", "vast", "sees_nothing", "length_0")
    found = [c for op in OPS.values() if op.family == family for c in cases(op.name, subset)]
    return [c for c in found if not any(word in c.name for word in idle)]
