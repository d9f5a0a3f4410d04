"""`torch.nn.functional.scaled_dot_product_attention` on our kernels, with torch's signature and semantics.

Other than in the ops, `is_causal` is aligned to the top left, tensors are `[batch, heads, seqlen, dim]`, batch and heads
broadcast, and a bool mask is True where a query may look. Masks that are bands (full, causal in either alignment, padding,
sliding windows, these together) run on the kernels; everything else goes to torch, and `fallback_reason` says why.

Keys and values are read where they lie. Queries are copied where `[batch, seqlen, heads, dim]` is no even layout of their
memory, as in a contiguous `[batch, heads, seqlen, dim]` of a batch above 1. Reading a mask waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..ops.decode import paged_decode_attention
from ..ops.prefill import paged_prefill_attention, prefill_attention
from .band import Band, band_of, full_band
from .layout import even_cu_seqlens, ragged, ragged_queries, result_rows

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_torch_sdpa = torch._C._nn.scaled_dot_product_attention


@dataclass
class Problem:
    """q, k, v `[batch, seqlen, heads, dim]` (views where they can be), what is visible, and the shape to return."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    band: Band
    scale: float
    shape: torch.Size


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch's: softmax(scale query key^T + mask) value.

    Args:
        query: `[..., heads, seqlen_q, dim]`; key, value: `[..., kv_heads, seqlen_k, dim]`; leading dimensions broadcast, and
            with `enable_gqa` kv_heads divides heads.
        attn_mask: bool or additive, broadcastable to `[..., heads, seqlen_q, seqlen_k]`.

    Returns:
        `[..., heads, seqlen_q, dim_v]`.

    Raises:
        what torch raises: arguments that cannot be are its to refuse.
    """
    problem = _problem(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(problem, Problem):
        try:
            return _attend(problem)
        except NotImplementedError:  # no backend has this type or head dim: fallback_reason tells
            pass
    return _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def fallback_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why a call goes to torch, or None when our kernels serve it. Runs the attention to find out what backends say."""
    problem = _problem(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(problem, str):
        return problem
    try:
        _attend(problem)
    except NotImplementedError as error:
        return str(error)
    return None


@contextmanager
def replaced() -> Iterator[None]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is ours; restored afterwards."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Problem | str:
    tensors = (query, key, value)
    if reason := _unserved(tensors, attn_mask, dropout_p, is_causal):
        return reason
    lead = query.shape[:-3]
    if not lead == key.shape[:-3] == value.shape[:-3]:
        lead = torch.broadcast_shapes(lead, key.shape[:-3], value.shape[:-3])
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if key.shape[-2] != value.shape[-2]:  # torch 2.13 on a CPU reads past the shorter one
        raise RuntimeError(f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}")
    if value.shape[-3] != kv_heads or key.shape[-1] != query.shape[-1]:
        return "shapes of query, key and value do not match: torch decides"
    grouped = kv_heads > 0 and heads % kv_heads == 0 and (enable_gqa or kv_heads in (1, heads))
    if not grouped:
        return f"{heads} heads over {kv_heads} kv heads, enable_gqa={enable_gqa}: torch decides"
    shape = torch.Size((*lead, heads, query.shape[-2], value.shape[-1]))
    q, k, v = (_batched(x, lead) for x in tensors)
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    band: Band | str = full_band(batch, seqlen_k)
    if is_causal:
        band = Band([0] * batch, [seqlen_k] * batch, right=0)
    elif attn_mask is not None:
        mask = _mask_of(attn_mask, (*lead, heads, seqlen_q, seqlen_k))
        band = mask if isinstance(mask, str) else band_of(mask, batch, seqlen_q, seqlen_k)
    if isinstance(band, str):
        return band
    return Problem(q, k, v, band, query.shape[-1] ** -0.5 if scale is None else scale, shape)


def _unserved(
    tensors: tuple[torch.Tensor, ...], attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool
) -> str | None:
    """What needs no look at shapes."""
    query = tensors[0]
    if dropout_p > 0:
        return "dropout_p is above 0"
    if attn_mask is not None and is_causal:
        return "attn_mask and is_causal together"
    if torch.is_grad_enabled() and any(
        x.requires_grad for x in (*tensors, *([] if attn_mask is None else [attn_mask]))
    ):
        return "a tensor requires grad, and only the forward pass is here"
    if any(x.is_nested or x.layout != torch.strided for x in tensors):
        return "a tensor is nested or sparse"
    if query.dtype not in _DTYPES or any(x.dtype != query.dtype for x in tensors):
        return f"dtypes {[str(x.dtype) for x in tensors]}"
    if query.device.type not in ("cpu", "cuda") or any(x.device != query.device for x in tensors):
        return f"devices {[str(x.device) for x in tensors]}"
    if any(x.dim() < 3 for x in tensors):
        return "a tensor has no dimension of heads"
    if any(x.shape[-1] % 8 or not 0 < x.shape[-1] <= 256 for x in tensors):
        return "a head dim is no multiple of 8 up to 256"
    if any(x.stride(-1) != 1 for x in tensors):
        return "a last dimension is not contiguous"
    if any(x.numel() == 0 for x in tensors):
        return "a tensor is empty"
    if attn_mask is not None and torch.compiler.is_compiling():
        return "the contents of attn_mask cannot be read while a graph is traced"
    if attn_mask is not None and attn_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the contents of attn_mask cannot be read while a graph is captured"
    return None


def _batched(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """`[..., heads, seqlen, dim]` as `[batch, seqlen, heads, dim]`; a view for up to one leading dimension."""
    x = x.expand(*lead, *x.shape[-3:])
    return (x.flatten(0, -4) if len(lead) > 1 else x if lead else x.unsqueeze(0)).transpose(1, 2)


def _mask_of(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | str:
    """The mask as `[batch, heads, seqlen_q, seqlen_k]`, broadcast dimensions with stride 0."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"attn_mask is {mask.dtype}"
    try:
        mask = mask.expand(shape)
    except RuntimeError:
        return f"attn_mask {tuple(mask.shape)} does not broadcast to {shape}: torch refuses"
    return mask.flatten(0, -4) if len(shape) > 4 else mask if len(shape) == 4 else mask.unsqueeze(0)


def _attend(p: Problem) -> torch.Tensor:
    band = p.band
    aligned = band.left is None and band.right is None
    if aligned or len(set(band.end)) == 1:
        out = _attend_together(p.q, p.k, p.v, band, p.scale)
    else:  # the diagonals lie elsewhere in every sequence
        parts = []
        for b in range(p.q.shape[0]):
            own = Band([band.start[b]], [band.end[b]], band.left, band.right)
            parts.append(_attend_together(p.q[b : b + 1], p.k[b : b + 1], p.v[b : b + 1], own, p.scale))
        out = torch.cat(parts)
    return out.transpose(1, 2).reshape(p.shape)


def _attend_together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scale: float) -> torch.Tensor:
    """One call for a band whose diagonals have the same place, from the bottom right, in all sequences."""
    batch, seqlen_q, heads = q.shape[:3]
    end = band.end[0] if band.right is None else min(band.end[0], seqlen_q + band.right)  # nobody sees past it
    last = end - 1 if band.left is None else min(seqlen_q - 1, end - 1 + band.left)  # row that sees something
    bounded = band.left is not None or band.right is not None
    if bounded and (end <= 0 or last < 0):
        return q.new_zeros(batch, seqlen_q, heads, v.shape[-1])
    if band.left is not None and last < seqlen_q - 1:
        seen = _attend_together(q[:, : last + 1], k, v, band, scale)
        return torch.cat((seen, seen.new_zeros(batch, seqlen_q - 1 - last, heads, v.shape[-1])), 1)
    window = (
        -1 if band.left is None else band.left + end - seqlen_q,
        -1 if band.right is None else band.right - end + seqlen_q,
    )
    ends = [end] * batch if bounded else band.end
    return _run(q, k, v, band.start, ends, {"causal": False, "softmax_scale": scale, "window_size": window})


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], ends: list[int], mask: dict[str, Any]
) -> torch.Tensor:
    batch, seqlen_q = q.shape[:2]
    first, past = min(starts), max(ends)
    k, v = k[:, first:past], v[:, first:past]
    starts, ends = [s - first for s in starts], [e - first for e in ends]
    sizes: dict[str, Any] = {"max_seqlen_q": seqlen_q, "max_seqlen_k": past - first}
    rows, flat_k, flat_v = ragged_queries(q), ragged(k), ragged(v)
    mask["out"] = result_rows(rows, v.shape[-1])
    if flat_k is not None and flat_v is not None and seqlen_q > 1 and not any(starts) and set(ends) == {past - first}:
        cu_q, cu_k = (even_cu_seqlens(batch, n, q.device) for n in (seqlen_q, past - first))
        out = prefill_attention(rows, flat_k, flat_v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **sizes, **mask)
    else:
        k, v, table = _pages(k, v, starts)
        lengths = torch.tensor([e - s for s, e in zip(starts, ends, strict=True)], dtype=torch.int32, device=q.device)
        mask |= {"block_table": table, "seqlens_k": lengths}
        if seqlen_q == 1:
            out = paged_decode_attention(rows, k, v, **mask)
        else:
            cu_q = even_cu_seqlens(batch, seqlen_q, q.device)
            out = paged_prefill_attention(rows, k, v, cu_seqlens_q=cu_q, **sizes, **mask)
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (batch, seqlen_q))


def _pages(k: torch.Tensor, v: torch.Tensor, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row a page; where sequences begin at different keys, the rows are cut into pages that begin there too.

    A page of one row of `k[b]` cannot be told from another by strides alone, so the second case needs even rows, and copies
    keys that are not.
    """
    batch, seqlen = k.shape[:2]
    if not any(starts):
        return k, v, torch.arange(batch, dtype=torch.int32, device=k.device).unsqueeze(1)
    k, v = (x.flatten(0, 1).unsqueeze(1) for x in (k, v))
    token = torch.arange(seqlen, dtype=torch.int32, device=k.device)
    begin = torch.tensor(starts, dtype=torch.int32, device=k.device).unsqueeze(1)
    row = torch.arange(batch, dtype=torch.int32, device=k.device).unsqueeze(1) * seqlen
    return k, v, torch.where(token + begin < seqlen, row + begin + token, -1)
