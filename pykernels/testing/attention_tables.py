"""Which attention problems are tried: (name, description) pairs, the quick ones first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .attention_cases import BF16, F16, F32, FP8, INT8, Attention

Table = dict[str, Attention]

RATIOS = ((2, 2), (4, 2), (3, 1), (9, 3), (4, 1), (7, 1), (14, 2), (8, 1), (12, 1), (71, 1))
HEAD_DIMS = ((8, 8), (32, 32), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (64, 128), (128, 64), (256, 256))

# Every mask option alone, then together.
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "window_left": {"window": (20, -1)},
    "window_own_token": {"window": (0, 0)},
    "window_both": {"causal": False, "window": (17, 9)},
    "window_right": {"causal": False, "window": (-1, 3)},
    "window_right_causal": {"window": (-1, 3)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": "head"},
    "alibi_sequence": {"alibi": "sequence"},
    "alibi_full": {"alibi": "head", "causal": False},
    "sinks": {"sinks": True},
    "window_sinks": {"window": (15, 0), "sinks": True},
    "softcap_alibi": {"softcap": 10.0, "alibi": "head"},
    "softcap_window": {"softcap": 10.0, "window": (31, 0)},
    "scale_negative": {"scale": -0.9},
    "scale_zero": {"scale": 0.0, "window": (20, 0)},
    "all": {"window": (40, -1), "softcap": 8.0, "alibi": "sequence", "sinks": True},
    "all_full": {"causal": False, "window": (40, 12), "softcap": 8.0, "alibi": "head", "sinks": True},
}

# Small enough for an interpreter: one of each kind.
SMOKE: Table = {
    "ragged": Attention(q_lens=(33, 1, 0, 17), k_lens=(33, 21, 5, 40)),
    "bfloat16": Attention(q_lens=(19,), k_lens=(37,), dtype=BF16, heads=3, kv_heads=1),
    "float16": Attention(q_lens=(19,), k_lens=(37,), dtype=F16, heads=8, kv_heads=2),
    "all_masks": Attention(q_lens=(33, 9), k_lens=(33, 60), **MASKS["all"]),
    "sees_nothing": Attention(q_lens=(20, 4), k_lens=(3, 0), heads=2, kv_heads=2, head_dim=32, head_dim_v=32),
}


def paged_smoke() -> Table:
    codes = Attention(q_lens=(21, 5, 1, 3), k_lens=(50, 33, 64, 19))
    return {
        **SMOKE,
        "page_1": replace(SMOKE["ragged"], page_size=1, pool="halves"),
        "page_3": replace(SMOKE["bfloat16"], page_size=3, strides="gaps"),
        "int8": replace(codes, cache=INT8),
        "fp8": replace(codes, cache=FP8, dtype=BF16),
        "int8_per_head": replace(codes, cache=INT8, scales="head", dtype=F16),
        "fp8_per_tensor": replace(codes, cache=FP8, scales="tensor"),
    }


def decode_smoke() -> Table:
    """Decode takes one query a sequence, so it needs more sequences."""
    return {name: replace(spec, k_lens=(*spec.k_lens, 37, 1, 20, 45, 9, 31)) for name, spec in paged_smoke().items()}


def prefill_table() -> Table:
    base = Attention()
    table: Table = {f"length_{n}": Attention(q_lens=(n,), k_lens=(n,)) for n in (1, 2, 63, 64, 65, 127, 128, 129, 239)}
    table |= {
        "empty_batch": Attention(q_lens=(), k_lens=()),
        "only_empty": Attention(q_lens=(0, 0), k_lens=(0, 7)),
        "no_keys": Attention(q_lens=(5, 3), k_lens=(0, 3)),
        "more_keys": Attention(q_lens=(5, 64, 1), k_lens=(239, 129, 200)),
        "more_queries": Attention(q_lens=(129, 70), k_lens=(31, 69)),
        "more_queries_full": Attention(q_lens=(129, 70), k_lens=(31, 69), causal=False),
        "padded_rows": replace(base, padding=7),
        "no_lse": replace(base, lse=False),
        "huge_logits": replace(base, logits="huge"),
        "nan_seen": Attention(q_lens=(40,), k_lens=(40,), logits="nan"),
        "nan_window": Attention(q_lens=(40,), k_lens=(40,), logits="nan", window=(5, 0)),
    }
    # One query head a group: the rows of a tile reach so far that its first keys are hidden from some rows altogether.
    ungrouped = Attention(q_lens=(70,), k_lens=(97,), heads=2, kv_heads=2, window=(20, 0))
    table |= {
        "hidden_keys_softcap": replace(ungrouped, softcap=8.0),
        "hidden_keys_bfloat16": replace(ungrouped, dtype=BF16),
        "more_queries_bfloat16": Attention(q_lens=(70,), k_lens=(31,), heads=2, kv_heads=2, dtype=BF16),
    }
    table |= {f"heads_{h}_{g}": replace(base, heads=h, kv_heads=g) for h, g in RATIOS}
    table |= {f"dim_{d}_{e}": replace(base, head_dim=d, head_dim_v=e) for d, e in HEAD_DIMS}
    table |= {f"mask_{name}": replace(base, **options) for name, options in MASKS.items()}
    table |= {f"strides_{s}": replace(base, strides=s) for s in ("gaps", "odd", "outer")}
    for dtype, name in ((BF16, "bfloat16"), (F16, "float16")):
        half = replace(base, dtype=dtype)
        table |= {
            f"{name}": half,
            f"{name}_239": Attention(q_lens=(239,), k_lens=(239,), dtype=dtype, heads=9, kv_heads=3),
            f"{name}_dim_128": replace(half, head_dim=128, head_dim_v=128, strides="gaps"),
            f"{name}_all": replace(half, **MASKS["all"]),
            f"{name}_huge_logits": replace(half, logits="huge"),
            f"{name}_nan_seen": Attention(q_lens=(40,), k_lens=(40,), dtype=dtype, logits="nan"),
        }
    return {**SMOKE, **table}


def ragged_table() -> Table:
    return {**prefill_table(), "fused_projection": Attention(q_lens=(40, 25), k_lens=(40, 25), strides="fused")}


def page_table(base: Attention) -> Table:
    """Page sizes, formats of the cache, kinds of scale, memory orders."""
    table: Table = {f"pages_of_{p}": replace(base, page_size=p) for p in (1, 3, 16, 64)}
    table |= {f"pool_{p}": replace(base, pool=p) for p in ("halves", "heads_first")}
    table["int8_vast"] = replace(base, cache=INT8, pool="vast")
    for cache, name in ((INT8, "int8"), (FP8, "fp8")):
        coded = replace(base, cache=cache)
        for dtype, suffix in ((F32, ""), (BF16, "_bfloat16"), (F16, "_float16")):
            table |= {f"{name}_{s}{suffix}": replace(coded, scales=s, dtype=dtype) for s in ("token", "head", "tensor")}
        table |= {
            f"{name}_pages_of_3": replace(coded, page_size=3),
            f"{name}_heads_first": replace(coded, pool="heads_first", page_size=64),
            f"{name}_mixed": replace(coded, pool="mixed"),
            f"{name}_halves": replace(coded, pool="halves", scales="head"),
            f"{name}_dim_128": replace(coded, head_dim=128, head_dim_v=128),
            f"{name}_dim_72_104": replace(coded, head_dim=72, head_dim_v=104),
            f"{name}_apart": replace(coded, head_dim=72, head_dim_v=64, pool="apart"),
            f"{name}_apart_v": replace(coded, head_dim=64, head_dim_v=72, pool="apart"),
            f"{name}_all": replace(coded, **MASKS["all"]),
        }
    return table


def paged_prefill_table() -> Table:
    chunk = Attention(q_lens=(64, 5, 0, 33), k_lens=(129, 70, 5, 97))
    draft = Attention(q_lens=(5, 4, 3), k_lens=(239, 4, 128), heads=9, kv_heads=3)
    ragged = {n: replace(s, q_lens=chunk.q_lens) if n.startswith("mask_") else s for n, s in prefill_table().items()}
    return {
        **paged_smoke(),
        **ragged,
        **page_table(chunk),
        "draft": draft,
        "draft_bfloat16": replace(draft, dtype=BF16),
    }


def decode_table() -> Table:
    # Batches are large enough for a fair sample of rounding errors: lse has only batch x heads elements.
    base = Attention(k_lens=(129, 1, 0, 239, 64, 33, 128, 200), heads=8, kv_heads=4)
    long = Attention(k_lens=(1025, 3, 600, 512, 777, 1, 1000), heads=9, kv_heads=3)
    table: Table = {f"length_{n}": replace(base, k_lens=(n,) * 8) for n in (0, 1, 2, 127, 128, 129, 239)}
    table |= {f"heads_{h}_{g}": replace(base, heads=h, kv_heads=g) for h, g in RATIOS}
    table |= {f"dim_{d}_{e}": replace(base, head_dim=d, head_dim_v=e) for d, e in HEAD_DIMS}
    table |= {f"mask_{name}": replace(base, **options) for name, options in MASKS.items()}
    table |= {f"strides_{s}": replace(base, strides=s) for s in ("gaps", "odd", "outer")}
    table |= {f"split_{n}": replace(long, split=n) for n in (1, 16, 100, 256, 4096)}
    table |= {
        "empty_batch": Attention(k_lens=()),
        "no_lse": replace(base, lse=False),
        "huge_logits": replace(base, logits="huge"),
        "nan_seen": replace(base, logits="nan"),
        "nan_window": replace(base, k_lens=(40, 12, 33, 21, 9, 50), logits="nan", window=(5, 0)),
        "long": long,
        "long_window": replace(long, window=(300, 0), split=64),
        "long_window_sinks": replace(long, window=(300, 0), sinks=True, split=128),
        "long_int8": replace(long, cache=INT8, split=128),
        "long_fp8": replace(long, cache=FP8, dtype=BF16),
        "long_bfloat16": replace(long, dtype=BF16, split=100),
        "long_all": replace(long, split=100, **MASKS["all"]),
    }
    for dtype, name in ((BF16, "bfloat16"), (F16, "float16")):
        half = replace(base, dtype=dtype)
        table |= {
            name: half,
            f"{name}_all": replace(half, **MASKS["all"]),
            f"{name}_pages_of_3": replace(half, page_size=3, pool="halves"),
            f"{name}_dim_128": replace(half, head_dim=128, head_dim_v=128),
            f"{name}_huge_logits": replace(half, logits="huge"),
        }
    return {**decode_smoke(), **table, **page_table(base)}
