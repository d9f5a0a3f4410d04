"""Decode attention over a paged cache, and the merge of two partial attention results."""

from __future__ import annotations

import torch

from ..contract.decode import MERGE_ATTENTION_STATES, PAGED_DECODE_ATTENTION
from ..library import call
from .mask import lse_buffer, mask_arguments


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    split_size: int | None = None,
    workspace: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One new token per sequence over its paged keys and values (PagedAttention: Kwon et al., 2023; Flash-Decoding).

    Args:
        q: `[batch, num_heads, head_dim]` float32, float16 or bfloat16.
        k_cache: `[num_pages, page_size, num_kv_heads, head_dim]`: q's dtype, int8 or float8_e4m3fn; any page size.
        v_cache: `[num_pages, page_size, num_kv_heads, head_dim_v]`, the dtype of k_cache.
        block_table: int32 `[batch, max_pages_per_seq]`; -1 is an unused entry, never dereferenced.
        seqlens_k: int32 `[batch]`, tokens valid in the cache, the new one included.
        k_scale, v_scale: float32, real = stored x scale: `[]`, `[num_kv_heads]` or
            `[num_pages, page_size, num_kv_heads]`; required for a quantised cache.
        split_size: tokens per KV split; None chooses from the sequence's own length, so that its bits do not
            depend on the batch.
        workspace: uint8 memory for partial results; the backend keeps its own when None.
        causal ... lse: as in `prefill_attention`; the query is the last token of its sequence.

    Returns:
        `out` `[batch, num_heads, head_dim_v]`, or `(out, lse)` with lse float32 `[num_heads, batch]`.

    Raises:
        ValueError, TypeError: an argument that cannot be; NotImplementedError: no backend can, with the reasons.
    """
    lse = lse_buffer(q, lse, return_lse)
    args = call(
        PAGED_DECODE_ATTENTION,
        backend,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seqlens_k=seqlens_k,
        k_scale=k_scale,
        v_scale=v_scale,
        **mask_arguments(q, causal, softmax_scale, window_size, softcap, alibi_slopes, sinks),
        split_size=0 if split_size is None else split_size,
        workspace=workspace,
        out=out,
        lse=lse,
    )
    return (args["out"], lse) if return_lse and lse is not None else args["out"]


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the results over each.

    `lse = log(e^lse_a + e^lse_b)`, `out = (e^lse_a out_a + e^lse_b out_b) / e^lse`. A state of lse -inf is the
    identity; two of them stay `(0, -inf)`.

    Args:
        out_a, out_b: `[tokens, num_heads, head_dim_v]`; lse_a, lse_b: float32 `[num_heads, tokens]`, natural log.

    Returns:
        `(out, lse)` of the same shapes.

    Raises:
        ValueError, TypeError: an argument that cannot be.
    """
    args = call(MERGE_ATTENTION_STATES, backend, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    return args["out"], args["lse"]
