"""What prefill and decode share: the mask arguments, their rules, and the count of visible (query, key) pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .schema import F32, Args, Dims, Rule, Scalar, Tensor

MASK = (
    Scalar("causal", bool),
    Scalar("softmax_scale", float),
    Scalar("window_left", int, minimum=-1),
    Scalar("window_right", int, minimum=-1),
    Scalar("softcap", float, minimum=0.0),
    Tensor("alibi_slopes", "num_heads | batch num_heads", F32, optional=True),
    Tensor("sinks", "num_heads", F32, optional=True),
)

KV_SCALES = (
    Tensor("k_scale", "num_pages page_size num_kv_heads | num_kv_heads |", F32, optional=True, layout="any"),
    Tensor("v_scale", "num_pages page_size num_kv_heads | num_kv_heads |", F32, optional=True, layout="any"),
)


def _groups(dims: Dims, _: Args) -> bool:
    return dims["num_kv_heads"] > 0 and dims["num_heads"] % dims["num_kv_heads"] == 0


def _head_dims(dims: Dims, _: Args) -> bool:
    return all(0 < dims[d] <= 256 and dims[d] % 8 == 0 for d in ("head_dim", "head_dim_v"))


def _scales_for_codes(_: Dims, args: Args) -> bool:
    quantised = args["k_cache"].dtype.itemsize == 1
    return all((args[name] is not None) == quantised for name in ("k_scale", "v_scale"))


def _cache_dtype(_: Dims, args: Args) -> bool:
    cache = args["k_cache"].dtype
    return cache.itemsize == 1 or cache == args["q"].dtype


GROUPS = Rule(_groups, "num_heads ({num_heads}) must be a multiple of num_kv_heads ({num_kv_heads})")
HEAD_DIMS = Rule(_head_dims, "head dims must be multiples of 8 up to 256, got {head_dim} (q, k) and {head_dim_v} (v)")
CACHE_DTYPE = Rule(_cache_dtype, "k_cache must have the dtype of q, or be int8 or float8_e4m3fn")
SCALES = Rule(
    _scales_for_codes, "k_scale and v_scale must be given for an int8 or float8_e4m3fn cache, and only for one"
)


def lengths(cumulative: torch.Tensor) -> list[int]:
    """Sequence lengths of a `cu_seqlens` tensor, on the host."""
    return torch.diff(cumulative.cpu()).tolist()


def visible_pairs(q_len: int, k_len: int, causal: bool, left: int, right: int) -> int:
    """How many (query, key) pairs a bottom-right aligned mask leaves visible."""
    if causal:
        right = 0
    if left < 0 and right < 0:
        return q_len * k_len
    if q_len == 1:  # a decode step asks for it once a token
        return k_len if left < 0 else min(k_len, left + 1)
    rows = torch.arange(q_len) + (k_len - q_len)
    last = (rows + right).clamp(max=k_len - 1) if right >= 0 else torch.full_like(rows, k_len - 1)
    first = (rows - left).clamp(min=0) if left >= 0 else torch.zeros_like(rows)
    return int((last - first + 1).clamp(min=0).sum())


def visible_keys(q_len: int, k_len: int, left: int) -> int:
    """How many keys at least one query row sees: what must be read."""
    return min(k_len, q_len + left) if left >= 0 and q_len else (k_len if q_len else 0)


def attention_flops(pairs: int, dims: Dims) -> float:
    return 2.0 * pairs * dims["num_heads"] * (dims["head_dim"] + dims["head_dim_v"])


def kv_bytes(keys: int, dims: Dims, args: Args, k: str, v: str) -> float:
    """Bytes of K and V for `keys` tokens, dynamic scales included."""
    per_head = dims["head_dim"] * args[k].element_size() + dims["head_dim_v"] * args[v].element_size()
    for name in ("k_scale", "v_scale"):
        scale = args.get(name)
        if scale is not None and scale.dim() == 3:
            per_head += scale.element_size()
    return float(keys) * dims["num_kv_heads"] * per_head


def tensor_bytes(args: Args, names: Sequence[str]) -> float:
    return float(sum(args[n].numel() * args[n].element_size() for n in names if args[n] is not None))
