"""Attention over a caller's KV cache: append in place, rotate, then attend, over rows or pages of the same memory.

A contiguous cache `[batch_cache, seqlen_cache, heads, dim]` is used where it lies: each row is one page, and
`cache_batch_idx` is a block table of one column. With `cache_leftpad` each token is a page. Nothing of it is copied, except
where its head dim is no multiple of 8 (upstream copies there too) or where rows with left padding overlap pages unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..contract.schema import KV_CODES
from ..ops.kv_cache import append_kv
from .layout import (
    State,
    attend_paged,
    chunk_segments,
    even_cu_seqlens,
    ragged_queries,
    require,
    require_shape,
    row_table,
)


@dataclass
class Queries:
    """Query tokens `[total, num_heads, dim]`, and which sequence each belongs to."""

    rows: torch.Tensor
    batch: int
    seqlen: int  # of every sequence, or the longest
    cu_seqlens: torch.Tensor | None = None  # None: all have the same length

    def starts(self) -> torch.Tensor:
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return even_cu_seqlens(self.batch, self.seqlen, self.rows.device)

    def sequences(self) -> torch.Tensor:
        """The sequence of each query token."""
        if self.cu_seqlens is not None:
            return ragged_tokens(self.cu_seqlens, self.rows.shape[0])[0]
        return torch.arange(self.batch, device=self.rows.device).repeat_interleave(self.seqlen)

    def positions(self, first: torch.Tensor, upward: bool) -> torch.Tensor:
        """`[tokens]`: `first` of the sequence, counted up within it or not."""
        if self.cu_seqlens is not None:
            sequence, offset = ragged_tokens(self.cu_seqlens, self.rows.shape[0])
            return first[sequence] + offset if upward else first[sequence]
        if self.seqlen == 1:
            return first
        if not upward:
            return first.repeat_interleave(self.seqlen)
        return (first.unsqueeze(1) + torch.arange(self.seqlen, device=first.device)).flatten()


@dataclass
class Cache:
    """A cache as pages: what the block table refers to, and how many tokens a sequence may have."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor  # int32 [batch, pages]
    capacity: int
    table_name: str = "cache_batch_idx"

    def slots(self, new: NewTokens, lengths: torch.Tensor) -> torch.Tensor:
        """Where new tokens go, int64 `[tokens]`, all of them inside or refused.

        Contents are read where that is free, on the CPU. Elsewhere what has no place gets a slot past the end, which
        `append_kv` refuses or never writes.
        """
        position, page_size = new.positions(lengths), self.k.shape[1]
        readable = not torch.compiler.is_compiling() and lengths.device.type == "cpu"
        if readable and position.numel():
            lowest, highest = (int(x) for x in position.aminmax())
            require(lowest >= 0, f"cache_seqlens must be at least 0, got {lowest}")
            require(
                highest < self.capacity,
                f"cache_seqlens with the new tokens is {highest + 1}, but the cache holds {self.capacity}",
            )
        page, offset = self.table, position
        if self.table.shape[1] != 1:
            column = (position // page_size).clamp(0, self.table.shape[1] - 1)
            offset = position % page_size
            page = self.table[new.sequence, column] if new.sequence is not None else torch.gather(self.table, 1, column)
        elif new.sequence is not None:
            page = self.table[new.sequence, 0]
        if readable and page.numel():
            require(
                int(page.min()) >= 0, f"{self.table_name} must name a page for every new token, got {int(page.min())}"
            )
            return torch.add(offset, page, alpha=page_size).flatten()
        inside = (position >= 0) & (position < self.capacity) & (page >= 0)
        return torch.where(inside, offset + page.long() * page_size, self.k.shape[0] * page_size).flatten()


def open_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: int,
    block_table: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    table_name: str,
) -> Cache:
    """The cache as it is written and, without left padding, read."""
    require(k_cache.dim() == 4, f"k_cache must have 4 dimensions, got {tuple(k_cache.shape)}")
    require_shape("v_cache", v_cache, *k_cache.shape[:3], -1)
    if block_table is None:
        if batch_idx is None:
            require(k_cache.shape[0] == batch, f"k_cache must have the batch of q ({batch}), got {k_cache.shape[0]}")
            return Cache(k_cache, v_cache, row_table(batch, k_cache.device), k_cache.shape[1])
        require_indices("cache_batch_idx", batch_idx, batch)
        return Cache(k_cache, v_cache, batch_idx.unsqueeze(1), k_cache.shape[1])
    require(batch_idx is None, "cache_batch_idx is not supported with a paged cache")
    require_shape(table_name, block_table, batch, -1)
    require(block_table.dtype == torch.int32, f"{table_name} must have dtype int32, got {block_table.dtype}")
    return Cache(k_cache, v_cache, block_table, block_table.shape[1] * k_cache.shape[1], table_name)


def require_indices(name: str, x: torch.Tensor, batch: int) -> None:
    require_shape(name, x, batch)
    require(x.dtype == torch.int32, f"{name} must have dtype int32, got {x.dtype}")


def cache_lengths(cache_seqlens: int | torch.Tensor | None, batch: int, cache: Cache) -> torch.Tensor:
    """Tokens in the cache before this call, int32 `[batch]`; all of it when the caller does not say."""
    if isinstance(cache_seqlens, torch.Tensor):
        require_indices("cache_seqlens", cache_seqlens, batch)
        return cache_seqlens
    length = cache.capacity if cache_seqlens is None else int(cache_seqlens)
    return torch.full((batch,), length, dtype=torch.int32, device=cache.k.device)


def require_attention(q: torch.Tensor, cache: Cache, batch: int, mask: dict[str, Any]) -> None:
    """What the attention would refuse, before anything is appended."""
    heads, kv_heads, slopes = q.shape[-2], cache.k.shape[2], mask["alibi_slopes"]
    require(
        kv_heads > 0 and heads % kv_heads == 0, f"k_cache has {kv_heads} heads, which must divide those of q ({heads})"
    )
    dim = cache.k.shape[3]
    require(dim == q.shape[-1], f"k_cache must have the head_dim of q, {q.shape[-1]}, got {dim}")
    require(max(dim, cache.v.shape[3]) <= 256, "head dims must be at most 256")
    require(cache.k.dtype in (q.dtype, *KV_CODES), f"k_cache must have the dtype of q, {q.dtype}, got {cache.k.dtype}")
    require(cache.v.dtype == cache.k.dtype, f"v_cache must have the dtype of k_cache, got {cache.v.dtype}")
    if slopes is not None:
        require(slopes.dtype == torch.float32, f"alibi_slopes must be float32, got {slopes.dtype}")
        require_shape("alibi_slopes", slopes, *([batch] if slopes.dim() == 2 else []), heads)
    for name in ("softmax_scale", "softcap"):
        require(mask[name] == mask[name], f"{name} must be a number, got {mask[name]}")


@dataclass
class NewTokens:
    """Keys and values to append, `[tokens, heads, dim]`: the same number for every sequence, or token i for `sequence[i]`."""

    k: torch.Tensor
    v: torch.Tensor
    counts: int | torch.Tensor  # per sequence
    sequence: torch.Tensor | None = None
    offset: torch.Tensor | None = None  # of a token among the new ones of its sequence

    def positions(self, first: torch.Tensor) -> torch.Tensor:
        """int64, `[batch, count]` or `[tokens]`: where tokens stand if those of sequence b begin at `first[b]`."""
        if self.sequence is not None and self.offset is not None:
            return first[self.sequence].long() + self.offset
        if self.counts == 1:
            return first.long().unsqueeze(1)
        return first.unsqueeze(1) + torch.arange(int(self.counts), device=first.device)


def new_tokens(
    k: torch.Tensor, v: torch.Tensor, batch: int, cache: Cache, cu_seqlens: torch.Tensor | None
) -> NewTokens:
    heads, dim, dim_v = cache.k.shape[2], cache.k.shape[3], cache.v.shape[3]
    if cu_seqlens is None:
        require_shape("k", k, batch, -1, heads, dim)
        require_shape("v", v, batch, k.shape[1], heads, dim_v)
        return NewTokens(ragged_queries(k), ragged_queries(v), k.shape[1])
    require_indices("cu_seqlens_k_new", cu_seqlens, batch + 1)
    require_shape("k", k, -1, heads, dim)
    require_shape("v", v, k.shape[0], heads, dim_v)
    sequence, offset = ragged_tokens(cu_seqlens, k.shape[0])
    return NewTokens(k, v, torch.diff(cu_seqlens), sequence, offset)


def ragged_tokens(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    token = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return sequence, token - cu_seqlens[sequence]


@dataclass
class Rotary:
    """Tables `[positions, rotary_dim / 2]` of cosines and sines, of any angles."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x `[tokens, heads, dim]` with its first `rotary_dim` elements turned by the rows at `positions`.

        Plain torch, on new tokens alone: the ops compute angles from frequencies, and a table may hold anything.
        """
        rows = self.cos.shape[0]
        if not torch.compiler.is_compiling() and positions.device.type == "cpu" and positions.numel():
            require(int(positions.max()) < rows, f"rotary_cos has {rows} rows, row {int(positions.max())} is needed")
        at = positions.clamp(0, rows - 1)
        c, s = (table.index_select(0, at).float().unsqueeze(1) for table in (self.cos, self.sin))
        width = 2 * self.cos.shape[1]
        first = slice(0, width, 2) if self.interleaved else slice(0, width // 2)
        second = slice(1, width, 2) if self.interleaved else slice(width // 2, width)
        a, b = x[..., first].float(), x[..., second].float()
        out = x.clone(memory_format=torch.contiguous_format)
        out[..., first] = a * c - b * s
        out[..., second] = b * c + a * s
        return out


def rotary_of(
    q: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    capacity: int,
    has_new: bool,
) -> Rotary | None:
    require((cos is None) == (sin is None), "rotary_cos and rotary_sin must be given together")
    if cos is None or sin is None:
        return None
    require(has_new, "rotary_cos needs new keys: k and v must be given with it")
    require(cos.dim() == 2, f"rotary_cos must have 2 dimensions, got {tuple(cos.shape)}")
    require_shape("rotary_sin", sin, *cos.shape)
    require(2 * cos.shape[1] <= q.shape[-1], f"rotary_cos turns {2 * cos.shape[1]} of {q.shape[-1]} elements of a head")
    require(
        cos.shape[0] >= capacity, f"rotary_cos must have at least {capacity} rows (the cache's), got {cos.shape[0]}"
    )
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        require(table.dtype == q.dtype, f"{name} must have the dtype of q, {q.dtype}, got {table.dtype}")
    return Rotary(cos, sin, interleaved)


def append(
    new: NewTokens,
    lengths: torch.Tensor,
    cache: Cache,
    rotary: Rotary | None,
    queries: Queries,
    local: bool,
    rotary_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes the new tokens behind those in the cache, keys and queries rotated; returns the lengths afterwards.

    `local` (causal or with a window) counts the queries' rotary positions up; otherwise all stand at the first. What does
    not fit is refused before anything is written.
    """
    total = lengths + new.counts
    slots = cache.slots(new, lengths)
    if rotary is not None:
        first = lengths if rotary_lengths is None else rotary_lengths
        queries.rows = rotary.turn(queries.rows, queries.positions(first, local))
        new.k = rotary.turn(new.k, new.positions(first).flatten())
    if cache.k.dtype.itemsize == 1:  # codes as they come: float8 in bfloat16 and back at scale 1 is exact
        one = torch.ones((), dtype=torch.float32, device=cache.k.device)
        k, v = (x.to(torch.bfloat16) for x in (new.k, new.v))
        append_kv(k, v, cache.k, cache.v, slots, k_scale=one, v_scale=one.clone())
    else:
        append_kv(new.k, new.v, cache.k, cache.v, slots)
    return total


def attend_cache(
    queries: Queries,
    cache: Cache,
    lengths: torch.Tensor,
    leftpad: torch.Tensor | None,
    num_splits: int,
    chunk: int = 0,
    **options: Any,
) -> State:
    """Attention of the queries over `lengths` tokens of each sequence, of which the first `leftpad` do not exist.

    With `chunk` a query sees only the keys between the same two multiples of it.
    """
    if leftpad is not None:
        require_indices("cache_leftpad", leftpad, queries.batch)
        cache, lengths = token_cache(cache, leftpad), (lengths - leftpad).clamp(min=0)
    one_each = queries.seqlen == 1 and queries.rows.shape[0] == queries.batch
    starts = None if one_each else queries.starts()
    if chunk > 0:
        cache = cache if leftpad is not None else token_cache(cache, torch.zeros_like(lengths))
        if starts is None:
            cache, lengths = last_chunks(cache, lengths, chunk)
        else:
            cache, lengths, starts = all_chunks(cache, lengths, starts, chunk)
    return attend_paged(
        queries.rows,
        cache.k,
        cache.v,
        block_table=cache.table,
        seqlens_k=lengths,
        cu_seqlens_q=starts,
        max_seqlen_q=queries.seqlen,
        max_seqlen_k=cache.capacity,
        one_each=one_each,
        split_size=None if num_splits < 1 else max(1, -(-cache.capacity // num_splits)),
        **options,
    )


def token_cache(cache: Cache, first: torch.Tensor) -> Cache:
    """The cache with every token a page of its own, read from token `first[b]` of each sequence on."""
    page_size = cache.k.shape[1]
    k, v = (x.flatten(0, 1).unsqueeze(1) for x in (cache.k, cache.v))  # views, but of a slice of a longer cache copies
    token = torch.arange(cache.capacity, dtype=torch.int32, device=first.device) + first.unsqueeze(1)
    column = (token // page_size).clamp(max=cache.table.shape[1] - 1).long()
    page = torch.gather(cache.table, 1, column)
    table = torch.where((token < cache.capacity) & (page >= 0), page * page_size + token % page_size, -1)
    return Cache(k, v, table, cache.capacity)


def last_chunks(cache: Cache, lengths: torch.Tensor, chunk: int) -> tuple[Cache, torch.Tensor]:
    """Of each sequence the chunk that its last token is in: what one query sees."""
    first = (lengths - 1).clamp(min=0) // chunk * chunk
    column = first.unsqueeze(1) + torch.arange(min(chunk, cache.capacity), device=first.device)
    table = torch.gather(cache.table, 1, column.clamp(max=cache.capacity - 1).long())
    return Cache(cache.k, cache.v, table, table.shape[1]), lengths - first


def all_chunks(
    cache: Cache, lengths: torch.Tensor, starts: torch.Tensor, chunk: int
) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    """Every chunk a sequence, as `chunk_segments` cuts them."""
    cu_k = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
    starts, cu_k = chunk_segments(starts, cu_k, chunk, cache.capacity)
    count = -(-cache.capacity // chunk)
    width = min(chunk, cache.capacity)
    table = torch.nn.functional.pad(cache.table, (0, count * chunk - cache.capacity), value=-1)
    table = table.unflatten(1, (count, chunk))[:, :, :width]
    before = table.new_full((table.shape[0], 1, width), -1)  # queries before the first key
    table = torch.cat((before, table), 1).flatten(0, 1)
    return Cache(cache.k, cache.v, table, width), torch.diff(cu_k), starts
