"""Paged KV cache: append (and quantise, and rotate), gather (and dequantise), copy and swap pages."""

from __future__ import annotations

import torch

from .attention import cached, taken
from .rope import rotate

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantise(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x [..., head_dim], and the scale of each row [...]; real = code x scale.

    Everything is float32, so that codes are the same bits everywhere: scale = max|x| / 127 or / 448 (1 where that is 0)
    unless given, code = x / scale rounded to the nearest, ties to even, saturated to [-128, 127] or [-448, 448]. NaN
    stays NaN in float8; int8 has none and stores 0, but a scale that was computed from a NaN is NaN, and so is what is
    read back.
    """
    x = x.to(torch.float32)
    if scale is None:
        scale = x.abs().amax(dim=-1) / LARGEST_CODE[dtype]
        scale = torch.where(scale == 0, 1.0, scale)
    ratio = x / scale[..., None]
    if dtype == torch.int8:
        codes = torch.nan_to_num(torch.round(ratio).clamp(-128, 127), nan=0.0).to(torch.int8)
    else:
        codes = ratio.clamp(-448.0, 448.0).to(dtype)
    return codes, scale


def append_kv(
    *,
    k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [tokens, num_kv_heads, head_dim_v]
    k_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], written
    v_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_v], written
    slot_mapping: torch.Tensor,  # [tokens]
    k_scale: torch.Tensor | None,  # [num_pages, page_size, num_kv_heads] written; [num_kv_heads] or [] read
    v_scale: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[()]:
    """Stores token t in slot `slot_mapping[t]` = page * page_size + offset; a negative slot skips the token.

    Codes and scales are defined bit for bit in float32 (see `quantise`), so `compute_dtype` changes nothing here.
    """
    del compute_dtype
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        kept = slot_mapping >= 0
        page, offset = slot_mapping[kept] // cache.shape[1], slot_mapping[kept] % cache.shape[1]
        if scale is None:
            cache[page, offset] = new[kept].to(cache.dtype)
            continue
        dynamic = scale.dim() == 3
        codes, scales = quantise(new[kept], cache.dtype, None if dynamic else scale)
        cache[page, offset] = codes
        if dynamic:
            scale[page, offset] = scales
    return ()


def rope_append_kv(
    *,
    q: torch.Tensor,  # [tokens, num_heads, head_dim]
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,  # [tokens]
    inv_freq: torch.Tensor,  # [rotary_pairs]
    interleaved: bool,
    rope_scale: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor]:
    """`rotary_embedding`, then `append_kv` of the rotated k (rounded to its own dtype) and of v -> q_out."""
    q_out, k_out = (rotate(x, positions, inv_freq, interleaved, rope_scale, compute_dtype) for x in (q, k))
    append_kv(
        k=k_out.to(k.dtype),
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return (q_out,)


def gather_kv(
    *,
    k_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_v]
    block_table: torch.Tensor,  # [batch, max_pages_per_seq]
    seqlens_k: torch.Tensor,  # [batch]
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of all sequences in turn, dequantised -> k, v [sum(seqlens_k), num_kv_heads, head_dim (or _v)]."""
    gathered = []
    for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
        parts = [cached(cache, scale, block_table[b], n, compute_dtype) for b, n in enumerate(seqlens_k.tolist())]
        gathered.append(torch.cat([torch.empty(0, *cache.shape[2:], dtype=compute_dtype), *parts]))
    return gathered[0], gathered[1]


def copy_pages(
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    src_pages: torch.Tensor,  # [num_copies]
    dst_pages: torch.Tensor,  # [num_copies]
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[()]:
    """Copies whole pages, dynamic scales included, bit for bit (so `compute_dtype` changes nothing).

    Every source is read before any destination is written. No page may be a destination twice.
    """
    del compute_dtype
    for pool in (k_cache, v_cache, k_scale, v_scale):
        if pool is not None and pool.dim() >= 3:
            pool[dst_pages] = pool[src_pages].clone()
    return ()


def swap_pages(
    *,
    k_from: torch.Tensor,
    v_from: torch.Tensor,
    k_to: torch.Tensor,  # written
    v_to: torch.Tensor,  # written
    src_pages: torch.Tensor,  # [num_copies], pages of k_from and v_from
    dst_pages: torch.Tensor,  # [num_copies], pages of k_to and v_to
    k_scale_from: torch.Tensor | None,
    v_scale_from: torch.Tensor | None,
    k_scale_to: torch.Tensor | None,  # written where dynamic
    v_scale_to: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[()]:
    """Copies whole pages between two caches, dynamic scales included, bit for bit (so `compute_dtype` changes nothing)."""
    del compute_dtype
    pairs = ((k_from, k_to), (v_from, v_to), (k_scale_from, k_scale_to), (v_scale_from, v_scale_to))
    for source, target in pairs:
        if source is not None and target is not None and source.dim() >= 3:
            pages = taken(source, src_pages.to(source.device))
            target[dst_pages.to(target.device)] = pages.to(target.device)
    return ()
