"""The interface of vLLM's fork of flash-attention (`vllm_flash_attn`): what vLLM's attention backend calls.

Its order of arguments is its own (`max_seqlen_q` before `cu_seqlens_q`). `fa_version` says whose convention a row that
sees no key follows: lse is +inf for version 2 and -inf after it; sinks (`s_aux`), ALiBi and descales work with every
version. `num_splits` is an upper bound, as the fork's scheduler treats it. With `max_seqlen_q == 1` and as many rows as
sequences, row i is the query of sequence i.

vLLM passes descales in every call: for tensors that are not float8 they mean nothing, as in the fork, and must be 1 where
reading them costs nothing (on the CPU). Refused: `q_v`, `dropout_p > 0`, `scheduler_metadata`, `return_attn_probs`, context
parallelism, tensors that require grad.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .cache import ragged_tokens, require_indices
from .descale import descale_of
from .flash_attn_interface import get_scheduler_metadata, split_of
from .layout import (
    attend_paged,
    attend_ragged,
    last_dense,
    mask_options,
    raises_runtime_error,
    refuse_given,
    require,
    require_shape,
    require_tensors,
    token_pages,
    with_unseen,
)

__version__ = "2.7.2"
__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

DEFAULT_FA_VERSION = 2
_VERSIONS = (2, 3, 4)


def is_fa_version_supported(fa_version: int, device: Any = None) -> bool:
    """Every version's interface is served, on any device that a backend serves."""
    return fa_version_unsupported_reason(fa_version, device) is None


def fa_version_unsupported_reason(fa_version: int, device: Any = None) -> str | None:
    del device  # the ops refuse by themselves, with reasons
    return None if fa_version in _VERSIONS else f"Unsupported FA version: {fa_version}"


@raises_runtime_error
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = DEFAULT_FA_VERSION,
    s_aux: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
) -> Any:
    """Attention of packed queries over packed or paged keys.

    Args:
        q: `[total_q, num_heads, head_dim]`; k, v: `[total_k, num_kv_heads, head_dim]` with `cu_seqlens_k` (int32 `[batch +
            1]`), or with `block_table` (int32 `[batch, max_blocks]`) and `seqused_k` (int32 `[batch]`) `[num_blocks, page_size,
            num_kv_heads, head_dim]`.
        alibi_slopes: float32 `[num_heads]` or `[batch, num_heads]`; s_aux: `[num_heads]`, a sink per head.
        out: where to write, like q.

    Returns:
        `out`, or `(out, lse)` with lse float32 `[num_heads, total_q]`.

    Raises:
        RuntimeError: an argument that cannot be or is refused; NotImplementedError: no backend can.
    """
    require(fa_version in _VERSIONS, f"Unsupported FA version: {fa_version}")
    require((cu_seqlens_k is None) != (seqused_k is None), "one of cu_seqlens_k and seqused_k must be given")
    require(block_table is None or seqused_k is not None, "seqused_k must be given with block_table")
    require(block_table is not None or cu_seqlens_k is not None, "block_table or cu_seqlens_k must be given")
    refuse_given("pass it as a part of q and v as a part of k, where the head dim allows", q_v=q_v)
    refuse_given("these kernels serve inference, which drops nothing", dropout_p=dropout_p)
    refuse_given("ask for return_softmax_lse", return_attn_probs=return_attn_probs)
    refuse_given("the kernels plan for themselves: leave it out", scheduler_metadata=scheduler_metadata)
    parallel = {"cp_world_size": cp_world_size - 1, "cp_rank": cp_rank, "cp_tot_seqused_k": cp_tot_seqused_k}
    refuse_given("merge the parts with merge_attention_states", **parallel)
    require_tensors(q=q, k=k, v=v)
    require_shape("q", q, -1, -1, -1)
    batch = cu_seqlens_q.shape[0] - 1
    mask = mask_options(q, causal, softmax_scale, window_size, softcap, alibi_slopes, s_aux)
    q, k, v = (last_dense(x) for x in (q, k, v))
    descales = _descales_of_codes(q, k, {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale})
    descale = descale_of(q, k, batch, *descales)
    sequence = ragged_tokens(cu_seqlens_q, q.shape[0])[0] if descale.per_sequence else None
    q = descale.queries(q, sequence)
    own = None if descale.per_sequence else out
    rest: Any = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "out": own}
    rest |= {"return_lse": return_softmax_lse, **mask, **(descale.scales or {})}
    if block_table is not None and seqused_k is not None:
        require_indices("seqused_k", seqused_k, batch)
        rest |= {"block_table": last_dense(block_table), "seqlens_k": seqused_k}
        rest["one_each"] = max_seqlen_q == 1 and q.shape[0] == batch and _has_no_padding(cu_seqlens_q, batch)
        rest["split_size"] = split_of(num_splits, block_table.shape[1] * k.shape[1])
        result, lse = attend_paged(q, k, v, **rest)
    elif descale.scales is not None and cu_seqlens_k is not None:
        rest |= {"block_table": token_pages(cu_seqlens_k, max_seqlen_k), "seqlens_k": torch.diff(cu_seqlens_k)}
        result, lse = attend_paged(q, k.unsqueeze(1), v.unsqueeze(1), one_each=False, **rest)
    else:
        result, lse = attend_ragged(q, k, v, cu_seqlens_k=cu_seqlens_k, **rest)
    result = descale.output(result, sequence)
    if out is not None and own is None:
        result = out.copy_(result)
    lse = with_unseen(lse, math.inf if fa_version == 2 else -math.inf)
    return (result, lse) if return_softmax_lse else result


def _has_no_padding(cu_seqlens_q: torch.Tensor, batch: int) -> bool:
    """Whether every row belongs to a sequence; believed where reading the lengths would wait for the device."""
    if torch.compiler.is_compiling() or cu_seqlens_q.device.type != "cpu":
        return True
    return int(cu_seqlens_q[-1]) == batch


def _descales_of_codes(
    q: torch.Tensor, k: torch.Tensor, given: dict[str, torch.Tensor | None]
) -> list[torch.Tensor | None]:
    kept = []
    for name, x in given.items():
        codes = (q if name == "q_descale" else k).dtype.itemsize == 1
        if x is not None and not codes and x.device.type == "cpu" and not torch.compiler.is_compiling():
            require(bool((x == 1).all()), f"{name} must be 1 for {k.dtype} tensors, which have no scale")
        kept.append(x if codes else None)
    return kept
