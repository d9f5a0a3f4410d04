"""Paged KV cache: append (and quantise, and rotate), gather (and dequantise), copy and swap pages.

A cache is `[num_pages, page_size, num_kv_heads, head_dim]` of the model's type ("auto"), int8 or float8_e4m3fn. The
last two need scales, float32, real = stored x scale: `[num_pages, page_size, num_kv_heads]` is dynamic (append computes
and writes it), `[num_kv_heads]` and `[]` are static (append reads it).
"""

from __future__ import annotations

import torch

from ..contract.kv_cache import APPEND_KV, COPY_PAGES, GATHER_KV, ROPE_APPEND_KV, SWAP_PAGES
from ..library import call


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Writes new keys and values into their slots, converted or quantised to the cache's type.

    Quantising: per (token, kv head) `scale = max|x| / 127` (int8) or `/ 448` (float8), in float32, 1 for a row of 0;
    `code = x / scale` rounded to nearest, ties to even, saturated. A static scale is taken as given.

    Args:
        k: `[tokens, num_kv_heads, head_dim]` float32, float16 or bfloat16; v: `[tokens, num_kv_heads, head_dim_v]`.
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, head_dim]` and `head_dim_v`; written.
        slot_mapping: int64 `[tokens]`, `page * page_size + offset`; a negative slot skips the token. Slots must differ.
        k_scale, v_scale: float32 scales, for an int8 or float8_e4m3fn cache and only for one.

    Raises:
        ValueError: shape, dtype, device, stride, or a slot outside the cache, before anything is written.
    """
    call(
        APPEND_KV,
        backend,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def rope_append_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    scale: float = 1.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`rotary_embedding` of q and k, then `append_kv` of the rotated k and of v, in one pass and with the same bits.

    Args:
        q: `[tokens, num_heads, head_dim]`; k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale: as in `append_kv`.
        positions: int32 or int64 `[tokens]`, at least 0.
        inv_freq: float32 `[rotary_pairs]`, at most half of head_dim; what lies past the rotated elements is kept.
        interleaved: pairs are elements (2p, 2p + 1) instead of (p, p + rotary_pairs).
        scale: multiplies cos and sin.
        q_out: where to write the rotated q (may be q itself); any float type.

    Returns:
        The rotated q, `[tokens, num_heads, head_dim]`, q's dtype when allocated here.

    Raises:
        ValueError: as `append_kv`, or a negative position, before anything is written.
    """
    args = call(
        ROPE_APPEND_KV,
        backend,
        q=q,
        k=k,
        v=v,
        positions=positions,
        inv_freq=inv_freq,
        interleaved=interleaved,
        rope_scale=scale,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        q_out=q_out,
    )
    return args["q_out"]


def gather_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of all sequences, one sequence after the other, out of their pages and dequantised.

    Args:
        k_cache, v_cache, k_scale, v_scale: as in `append_kv`; read.
        block_table: int32 `[batch, max_pages_per_seq]`; entries past a sequence's length are not read.
        seqlens_k: int32 `[batch]`, tokens of each sequence.
        dtype: float32, float16 or bfloat16, of what is returned.
        k, v: where to write, `[sum(seqlens_k), num_kv_heads, head_dim]` and `head_dim_v`.

    Returns:
        (k, v), ragged.

    Raises:
        ValueError: shape, dtype, or a length or page outside the cache, before anything is written.
    """
    if isinstance(k_cache, torch.Tensor) and isinstance(v_cache, torch.Tensor) and (k is None or v is None):
        total = int(seqlens_k.clamp(min=0).sum())

        def rows(cache: torch.Tensor) -> torch.Tensor:
            return torch.empty((total, *cache.shape[2:]), dtype=dtype, device=cache.device)

        k = rows(k_cache) if k is None else k
        v = rows(v_cache) if v is None else v
    args = call(
        GATHER_KV,
        backend,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seqlens_k=seqlens_k,
        k_scale=k_scale,
        v_scale=v_scale,
        k=k,
        v=v,
    )
    return args["k"], args["v"]


def copy_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Copies whole pages inside the caches, dynamic scales with them, bit for bit.

    Every source is read before any destination is written, so chains and swaps are legal.

    Args:
        k_cache, v_cache, k_scale, v_scale: as in `append_kv`; written.
        src_pages, dst_pages: int64 `[num_copies]`; no page is a destination twice.

    Raises:
        ValueError: shape, dtype, or a page outside the cache or written twice, before anything is written.
    """
    call(
        COPY_PAGES,
        backend,
        k_cache=k_cache,
        v_cache=v_cache,
        src_pages=src_pages,
        dst_pages=dst_pages,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def swap_pages(
    k_from: torch.Tensor,
    v_from: torch.Tensor,
    k_to: torch.Tensor,
    v_to: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    *,
    k_scale_from: torch.Tensor | None = None,
    v_scale_from: torch.Tensor | None = None,
    k_scale_to: torch.Tensor | None = None,
    v_scale_to: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Copies whole pages from one cache into another, dynamic scales with them, bit for bit.

    The call runs on the device of `src_pages`; caches and scales are there or in pinned host memory, which the device
    reads and writes itself. So pages leave for the host and come back in the order of the stream, without waiting: the
    host may look at its side once the stream is synchronised.

    Args:
        k_from, v_from: `[num_pages_from, page_size, num_kv_heads, head_dim]` and `head_dim_v`; read.
        k_to, v_to: the same with `num_pages_to` pages, of k_from's dtype and other memory; written.
        src_pages, dst_pages: int64 `[num_copies]`, pages of the one and of the other; no page is a destination twice.
        k_scale_from, v_scale_from, k_scale_to, v_scale_to: scales as in `append_kv`, of one kind on both sides. A
            static scale is not copied: it must be the same number on both sides.

    Raises:
        ValueError: shape, dtype, device, memory that is not pinned or that both sides share, or a page outside its
            cache or written twice, before anything is written.
    """
    call(
        SWAP_PAGES,
        backend,
        k_from=k_from,
        v_from=v_from,
        k_to=k_to,
        v_to=v_to,
        src_pages=src_pages,
        dst_pages=dst_pages,
        k_scale_from=k_scale_from,
        v_scale_from=v_scale_from,
        k_scale_to=k_scale_to,
        v_scale_to=v_scale_to,
    )
