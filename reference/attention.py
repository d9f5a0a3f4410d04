"""Attention of one sequence, and keys and values out of a paged cache: what prefill and decode have in common."""

from __future__ import annotations

import torch


def wide_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float32 for half types, otherwise the compute type itself."""
    return torch.promote_types(compute_dtype, torch.float32)


def taken(x: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """x[index]. Older torch cannot index 8-bit floats, so their bytes are."""
    if x.dtype.itemsize > 1 or not x.is_floating_point():
        return x[index]
    return x.view(torch.uint8)[index].view(x.dtype)


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.einsum of two tensors that sums over one index.

    In float32 terms are added one after the other: an error budget must not hang on the luck of a library's order, and
    this is the plainest order that a kernel may choose.
    """
    if a.dtype == torch.float64:
        return torch.einsum(equation, a, b)
    left, right, out = equation.replace("->", ",").split(",")
    (summed,) = set(left) & set(right) - set(out)
    term = f"{left.replace(summed, '')},{right.replace(summed, '')}->{out}"
    pairs = zip(a.unbind(left.index(summed)), b.unbind(right.index(summed)), strict=True)
    return sum((torch.einsum(term, x, y) for x, y in pairs), start=a.new_zeros(()))


def visible(q_len: int, k_len: int, causal: bool, window_left: int, window_right: int) -> torch.Tensor:
    """Which keys each query sees, bool [q_len, k_len], aligned to the bottom right corner.

    Query i stands at absolute position i + k_len - q_len. A window is inclusive on both sides, -1 is unbounded, and
    causal means that nothing to the right is seen.
    """
    offset = torch.arange(k_len)[None, :] - (torch.arange(q_len)[:, None] + k_len - q_len)
    mask = torch.ones(q_len, k_len, dtype=torch.bool)
    if causal:
        mask &= offset <= 0
    elif window_right >= 0:
        mask &= offset <= window_right
    if window_left >= 0:
        mask &= offset >= -window_left
    return mask


def attend(
    q: torch.Tensor,  # [q_len, num_heads, head_dim]
    k: torch.Tensor,  # [k_len, num_kv_heads, head_dim]
    v: torch.Tensor,  # [k_len, num_kv_heads, head_dim_v]
    *,
    causal: bool,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,  # [num_heads]
    sinks: torch.Tensor | None,  # [num_heads]
    compute_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(mask(softcap(scale q k^T) + alibi)) v -> out [q_len, num_heads, head_dim_v], lse [num_heads, q_len].

    A query that sees nothing gives out = 0 and lse = -inf. A sink adds exp(sink) to the denominator and not to lse. The
    weights are rounded to `compute_dtype` before they multiply v, as a kernel that feeds a matrix unit rounds them.
    """
    q_len, num_heads, _ = q.shape
    k_len, num_kv_heads, head_dim_v = v.shape
    wide = wide_dtype(compute_dtype)
    if k_len == 0:
        out = torch.zeros(q_len, num_heads, head_dim_v, dtype=compute_dtype)
        return out, torch.full((num_heads, q_len), -torch.inf, dtype=wide)
    q, k, v = (x.to(compute_dtype).to(wide) for x in (q, k, v))
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))

    scores = einsum("ihd,jhd->hij", q, k) * softmax_scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = torch.arange(q_len)[:, None] + k_len - q_len - torch.arange(k_len)[None, :]
        scores = scores - alibi_slopes.to(wide)[:, None, None] * distance.abs()
    seen = visible(q_len, k_len, causal, window_left, window_right)
    scores = torch.where(seen, scores, -torch.inf)

    peak = scores.amax(dim=-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # a row that sees nothing must not compute inf - inf
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True)
    lse = (peak + torch.log(total)).squeeze(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.to(wide)[:, None, None] - peak)
    weights = torch.where(total == 0, 0.0, weights / total).to(compute_dtype).to(wide)
    return weigh(weights, v, seen).to(compute_dtype), lse


def weigh(weights: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """sum_j weights[h, i, j] v[j, h, :] over seen keys only -> [q_len, num_heads, head_dim_v].

    A value that is not finite reaches exactly the rows that see it: 0 x NaN is NaN, so hidden ones must not be
    multiplied.
    """
    finite = torch.isfinite(v)
    out = einsum("hij,jhd->ihd", weights, torch.where(finite, v, 0.0))
    for j in torch.nonzero(~finite.flatten(1).all(dim=1)).flatten().tolist():
        term = weights[:, :, j].T[:, :, None] * torch.where(finite[j], 0.0, v[j])  # [q_len, num_heads, head_dim_v]
        out += torch.where(seen[:, j, None, None], term, 0.0)
    return out


def cached(
    cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    scale: torch.Tensor | None,  # [num_pages, page_size, num_kv_heads], [num_kv_heads] or []
    pages: torch.Tensor,  # [max_pages_per_seq]
    length: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The first `length` tokens of one sequence, as real values [length, num_kv_heads, head_dim] in `dtype`.

    real = stored x scale, rounded once. A negative page is never dereferenced: its tokens read as NaN, so that a mask
    which should have hidden them shows.
    """
    token = torch.arange(length)
    page, offset = pages.long()[token // cache.shape[1]], token % cache.shape[1]
    live = page >= 0
    tokens = taken(cache, page[live], offset[live]).to(wide_dtype(dtype))
    if scale is not None:
        per_head = scale[page[live], offset[live]] if scale.dim() == 3 else scale
        tokens = tokens * per_head.to(tokens.dtype)[..., None]
    real = torch.full((length, *cache.shape[2:]), torch.nan, dtype=dtype)
    real[live] = tokens.to(dtype)
    return real


def slopes_of(alibi_slopes: torch.Tensor | None, sequence: int) -> torch.Tensor | None:
    """The slopes [num_heads] of one sequence, from slopes for all ([num_heads]) or for each ([batch, num_heads])."""
    if alibi_slopes is None or alibi_slopes.dim() == 1:
        return alibi_slopes
    return alibi_slopes[sequence]
