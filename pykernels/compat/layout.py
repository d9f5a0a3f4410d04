"""From the layouts that other packages use to the ragged and paged forms of the ops: views wherever strides allow.

A dense `[batch, seqlen, heads, dim]` tensor is ragged when its rows lie evenly in memory, and always paged: row b is the
one page of sequence b. So keys and values are never copied; queries are when they cannot be seen as rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from ..ops.decode import paged_decode_attention
from ..ops.prefill import paged_prefill_attention, prefill_attention

Function = TypeVar("Function", bound=Callable[..., Any])
State = tuple[torch.Tensor, torch.Tensor | None]  # out, and lse [num_heads, rows] where it was asked for


def raises_runtime_error(function: Function) -> Function:
    """flash-attention's callers expect RuntimeError, with the argument's name, where the ops raise ValueError."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    return call  # type: ignore[return-value]


def require(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(text)


def require_shape(name: str, x: torch.Tensor | None, *shape: int) -> None:
    """Refuses another shape; -1 stands for any size."""
    if x is not None and not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x is not None and not (len(shape) == x.dim() and all(n in (-1, m) for n, m in zip(shape, x.shape, strict=True))):
        wanted = ", ".join("any" if n < 0 else str(n) for n in shape)
        raise RuntimeError(f"{name} must have shape ({wanted}), got {tuple(x.shape)}")


def require_tensors(optional: tuple[str, ...] = (), /, **tensors: torch.Tensor | None) -> None:
    """Before anything is written: refuses what is no tensor, and what requires grad, as there is no backward here."""
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires grad, and only the forward pass is here: call it under torch.no_grad()"
            )


def refuse_given(why: str, **arguments: Any) -> None:
    """Refuses arguments that are not at their neutral value (None, 0 or False)."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) or (value is not None and value != 0):
            raise RuntimeError(f"{name} is not supported: {why}")


def window_pair(window_size: Any) -> tuple[int, int]:
    """A tuple, list or tensor of two, any negative number unbounded, as (left, right) with -1."""
    if window_size is None:
        return -1, -1
    if not hasattr(window_size, "__len__") or len(window_size) != 2:
        raise RuntimeError(f"window_size must be a pair (left, right), got {window_size!r}")
    left, right = (-1 if w is None else max(int(w), -1) for w in window_size)
    return left, right


def mask_options(
    q: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_size: Any,
    softcap: float,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The ops' mask options. The default scale is that of the head dim before padding; a soft cap below 0 is off."""
    return {
        "causal": bool(causal),
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        "window_size": window_pair(window_size),
        "softcap": max(float(softcap), 0.0),
        "alibi_slopes": alibi_slopes,
        "sinks": None if sinks is None else sinks.float(),
    }


def last_dense(x: torch.Tensor) -> torch.Tensor:
    """As upstream: a tensor whose last dimension is not contiguous is copied."""
    return x.contiguous() if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1 else x


def dense_or_none(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else last_dense(x)


def padded_head(x: torch.Tensor) -> torch.Tensor:
    """The head dim filled up to a multiple of 8 with zeros, as upstream does; a copy where there is something to fill."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


def unpadded(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if x.shape[-1] == dim else x[..., :dim]


def ragged(x: torch.Tensor) -> torch.Tensor | None:
    """`[batch, seqlen, heads, dim]` seen as `[batch * seqlen, heads, dim]`, or None where strides do not allow it."""
    if x.shape[0] == 1:
        return x[0]
    if x.shape[1] == 1:
        return x[:, 0]
    return x.flatten(0, 1) if x.stride(0) == x.shape[1] * x.stride(1) else None


def ragged_queries(q: torch.Tensor) -> torch.Tensor:
    """The same for queries, which are copied where strides do not allow it."""
    rows = ragged(q)
    return q.reshape(-1, *q.shape[2:]) if rows is None else rows


def even_cu_seqlens(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
    if seqlen == 0:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=device)


def row_table(batch: int, device: torch.device) -> torch.Tensor:
    """The block table that makes row b of a dense cache the only page of sequence b."""
    return torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    split_size: int | None = None,
    scales: dict[str, torch.Tensor] | None = None,
    return_lse: bool,
    **mask: Any,
) -> State:
    """q `[batch, seqlen_q, num_heads, dim]`, k, v `[batch, seqlen_k, num_kv_heads, dim]` -> out like q, lse
    `[num_heads, batch * seqlen_q]`. One query each is a decode step; `scales` are `k_scale` and `v_scale` of codes."""
    batch, seqlen_q, seqlen_k, dim = q.shape[0], q.shape[1], k.shape[1], v.shape[-1]
    rows, keys, values = ragged_queries(padded_head(q)), padded_head(k), padded_head(v)
    mask |= {"return_lse": return_lse, "out": result_rows(rows, values.shape[-1])}
    sizes: dict[str, Any] = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    flat_k, flat_v = ragged(keys), ragged(values)
    if scales is None and flat_k is not None and flat_v is not None and (seqlen_q != 1 or seqlen_k == 0):
        cu_q = even_cu_seqlens(batch, seqlen_q, q.device)
        cu_k = cu_q if seqlen_k == seqlen_q else even_cu_seqlens(batch, seqlen_k, q.device)
        state = _state(prefill_attention(rows, flat_k, flat_v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **sizes, **mask))
    else:
        lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device)
        pages: dict[str, Any] = {"block_table": row_table(batch, q.device), "seqlens_k": lengths, **(scales or {})}
        if seqlen_q == 1:
            state = _state(paged_decode_attention(rows, keys, values, split_size=split_size, **pages, **mask))
        else:
            cu_q = even_cu_seqlens(batch, seqlen_q, q.device)
            state = _state(paged_prefill_attention(rows, keys, values, cu_seqlens_q=cu_q, **pages, **sizes, **mask))
    return unpadded(state[0], dim).view(batch, seqlen_q, q.shape[2], dim), state[1]


def attend_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool,
    out: torch.Tensor | None = None,
    **options: Any,
) -> State:
    """q, k, v `[total, heads, dim]`; `options` are lengths and mask of `prefill_attention`."""
    rows, keys, values = padded_head(q), padded_head(k), padded_head(v)
    dim = v.shape[-1]
    direct = out if out is not None and dim % 8 == 0 else result_rows(rows, values.shape[-1])
    state = _state(prefill_attention(rows, keys, values, out=direct, return_lse=return_lse, **options))
    return _delivered(state, dim, out)


def attend_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    one_each: bool,
    split_size: int | None = None,
    return_lse: bool,
    out: torch.Tensor | None = None,
    **options: Any,
) -> State:
    """q `[total, num_heads, dim]` over pages; `one_each` says that row i is the only query of sequence i."""
    rows, keys, values = padded_head(q), padded_head(k_cache), padded_head(v_cache)
    dim = v_cache.shape[-1]
    direct = out if out is not None and dim % 8 == 0 else result_rows(rows, values.shape[-1])
    options |= {"out": direct, "return_lse": return_lse}
    if one_each or cu_seqlens_q is None:
        state = _state(paged_decode_attention(rows, keys, values, split_size=split_size, **options))
    else:
        sizes: dict[str, Any] = {
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
        }
        state = _state(paged_prefill_attention(rows, keys, values, **sizes, **options))
    return _delivered(state, dim, out)


def result_rows(rows: torch.Tensor, dim_v: int) -> torch.Tensor:
    """Where an op writes; given to it, because finding the shape itself costs it tens of microseconds."""
    return rows.new_empty(rows.shape[0], rows.shape[1], dim_v)


def _state(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> State:
    return result if isinstance(result, tuple) else (result, None)


def _delivered(state: State, dim: int, out: torch.Tensor | None) -> State:
    """The result without padded elements, in the caller's `out` where there is one."""
    computed = unpadded(state[0], dim)
    return (computed if out is None or out is computed else out.copy_(computed)), state[1]


def batched_lse(lse: torch.Tensor | None, batch: int, seqlen: int, unseen: float) -> torch.Tensor | None:
    """`[num_heads, batch * seqlen]` as upstream's dense `[batch, num_heads, seqlen]`."""
    if lse is None:
        return None
    return with_unseen(lse.unflatten(1, (batch, seqlen)).transpose(0, 1).contiguous(), unseen)


def with_unseen(lse: torch.Tensor | None, unseen: float) -> torch.Tensor | None:
    """What lse is where a row sees no key: -inf in the ops and in FA3, +inf in flash-attention 2."""
    if lse is None or unseen == -torch.inf:
        return lse
    return lse.masked_fill_(lse == -torch.inf, unseen)


def token_pages(cu_k: torch.Tensor, max_seqlen_k: int) -> torch.Tensor:
    """The block table of ragged keys `[total, 1, heads, dim]`: every token a page. For codes, which only pages may hold."""
    token = cu_k[:-1, None] + torch.arange(max_seqlen_k, dtype=torch.int32, device=cu_k.device)
    return torch.where(token < cu_k[1:, None], token, -1)


def used_segments(
    cu_q: torch.Tensor, cu_k: torch.Tensor, seqused_q: torch.Tensor | None, seqused_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of which only the first `seqused` queries and keys count, as three ragged sequences each.

    What is used attends to what is used; unused queries to nothing (they give 0); nobody to unused keys. No copy.
    """
    used_q = cu_q[1:] if seqused_q is None else cu_q[:-1] + seqused_q
    used_k = cu_k[1:] if seqused_k is None else cu_k[:-1] + seqused_k
    ends_q = torch.stack((used_q, cu_q[1:], cu_q[1:]), 1).flatten()
    ends_k = torch.stack((used_k, used_k, cu_k[1:]), 1).flatten()
    return torch.cat((cu_q[:1], ends_q)), torch.cat((cu_k[:1], ends_k))


def chunk_segments(
    cu_q: torch.Tensor, cu_k: torch.Tensor, chunk: int, max_seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences cut where keys are multiples of `chunk`, as ragged sequences of which each sees its own chunk alone.

    The first of a sequence has the queries before its first key, which see nothing. Every other one ends with the key of
    its last query, so that masks stay aligned to the bottom right. No copy.
    """
    seqlens_q, seqlens_k = (torch.diff(x).unsqueeze(1) for x in (cu_q, cu_k))
    edges = torch.arange(-(-max_seqlen_k // chunk) + 1, dtype=torch.int32, device=cu_q.device) * chunk
    ends_k = torch.minimum(edges, seqlens_k)
    ends_q = (ends_k + seqlens_q - seqlens_k).clamp(min=0)
    starts_q, starts_k = cu_q[:-1].unsqueeze(1), cu_k[:-1].unsqueeze(1)
    return torch.cat((cu_q[:1], (starts_q + ends_q).flatten())), torch.cat((cu_k[:1], (starts_k + ends_k).flatten()))
