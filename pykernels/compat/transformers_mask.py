"""What a transformers mask lets every query see, without a [query, key] matrix where the pattern is known.

transformers describes a mask by a function of indices, `mask_function(batch, head, q, kv) -> bool`, and a padding mask
`[batch, tokens]`. `visible_keys`, the mask function that `register` hands to transformers, turns them into one of:

- `Runs`: one run of keys per row, under a causal or windowed band: prompts, chunks, left and right padding, static caches;
- `Pages`: one query per row over keys 0, 1, ... of its row: decode without left padding;
- `Table`: the list of visible keys of every query: decode with left padding or holes, and every pattern not known;
- `Segments`: several sequences packed one after another in a row.

The band is found by calling `mask_function` with symbolic indices, so what counts is what it computes, not its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask


class Band(NamedTuple):
    """Keys `q - left <= kv <= q + right`; None is unbounded. Also what a mask function computes with: `&`, `to`."""

    left: int | None = None
    right: int | None = None

    @property
    def device(self) -> None:
        return None

    def to(self, device: object) -> Band:
        return self

    def __and__(self, other: Band) -> Band:
        return Band(_least(self.left, other.left), _least(self.right, other.right))

    @property
    def window(self) -> tuple[int, int]:
        return (-1 if self.left is None else self.left, -1 if self.right is None else self.right)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


class _UnknownPattern(Exception):
    """A mask function did something with its indices that is not a band."""


class _Index:
    """The symbolic integer `q * Q + kv * KV + constant`, where Q and KV are the indices of a query and a key."""

    device = None

    def __init__(self, q: int = 0, kv: int = 0, constant: int = 0) -> None:
        self.q, self.kv, self.constant = q, kv, constant

    def new_ones(self, *size: object, **options: object) -> Band:
        return Band()

    def __sub__(self, other: Any) -> _Index:
        if isinstance(other, int):
            return _Index(self.q, self.kv, self.constant - other)
        if isinstance(other, _Index):
            return _Index(self.q - other.q, self.kv - other.kv, self.constant - other.constant)
        raise _UnknownPattern

    def __add__(self, other: Any) -> _Index:
        if isinstance(other, int):
            return _Index(self.q, self.kv, self.constant + other)
        raise _UnknownPattern

    def __abs__(self) -> _Distance:
        return _Distance(self)

    def not_positive(self) -> Band:
        """Where this expression is <= 0."""
        if (self.q, self.kv) == (-1, 1):
            return Band(right=-self.constant)
        if (self.q, self.kv) == (1, -1):
            return Band(left=-self.constant)
        if (self.q, self.kv) in ((-1, 0), (0, -1)) and self.constant <= 0:
            return Band()  # an index is never negative
        raise _UnknownPattern

    def __le__(self, other: Any) -> Band:
        return (self - other).not_positive()

    def __lt__(self, other: Any) -> Band:
        return (self - other + 1).not_positive()

    def __ge__(self, other: Any) -> Band:
        return (_Index() - self + other if isinstance(other, int) else other - self).not_positive()

    def __gt__(self, other: Any) -> Band:
        return (_Index() - self + other + 1 if isinstance(other, int) else other - self + 1).not_positive()


class _Distance:
    """`abs` of a symbolic integer."""

    def __init__(self, of: _Index) -> None:
        self.of = of

    def __le__(self, other: Any) -> Band:
        return (self.of <= other) & (self.of >= -other)


def band_of(mask_function: Callable[..., Any]) -> Band | None:
    """The band that a mask function draws, or None when it draws something else."""
    try:
        band = mask_function(0, 0, _Index(q=1), _Index(kv=1))
    except (_UnknownPattern, TypeError, AttributeError, IndexError, RuntimeError):
        return None
    return band if isinstance(band, Band) and min(band.window) >= -1 and -1 not in band else None


Memo = dict[Any, Any]  # what the layers of one forward pass compute alike from a mask, by rows between two sequences


def once(memo: Memo, key: Any, make: Callable[[], Any]) -> Any:
    if torch.compiler.is_compiling():
        return make()  # the compiler merges what is the same; a graph cannot fill a dictionary outside of it
    if key not in memo:
        memo[key] = make()
    return memo[key]


class Runs(NamedTuple):
    """Row b: queries `[0, q_last)` over keys `[k_first, k_last)`, the last query aligned with the last key.

    Queries from `q_last` on are padding that comes after the keys: `late` tells by how many tokens, and is None where there
    are no such queries, or where a compiler cannot know: then they see nothing. int32 `[batch]` each; `padded` says that a
    padding mask was given.
    """

    q_last: torch.Tensor
    k_first: torch.Tensor
    k_last: torch.Tensor
    band: Band
    q_length: int
    kv_length: int
    padded: bool
    memo: Memo
    late: torch.Tensor | None = None

    @property
    def ndim(self) -> int:
        return 4  # transformers takes what has two dimensions for a padding mask

    def starts(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`cu_seqlens_q` and `cu_seqlens_k` over rows of keys, `step` of them from one sequence to the next."""
        return once(self.memo, step, lambda: self._starts(step))

    def _starts(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = torch.arange(self.q_last.shape[0], dtype=torch.int32, device=self.q_last.device)
        q0, k0 = number * self.q_length, number * step
        # Three sequences a row: the keys that nobody sees, the queries with their keys, the queries that are padding.
        starts_q = _cumulative(q0, q0 + self.q_last, q0 + self.q_length)
        return starts_q, _cumulative(k0 + self.k_first, k0 + self.k_last, k0 + self.k_last)

    def late_parts(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """`cu_seqlens_q`, `cu_seqlens_k` and left window of calls that show the late queries the keys that they see.

        All keys without a window. In one, query d of those sees `left - late - d` of the last keys; what rows have as many of
        such queries is aligned alike.
        """
        return once(self.memo, ("late", step), lambda: self._late_parts(step))

    def _late_parts(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        if self.late is None:
            return []
        number = torch.arange(self.q_last.shape[0], dtype=torch.int32, device=self.q_last.device)
        q0, k0, left = number * self.q_length, number * step, self.band.left
        count = self.q_length - self.q_last
        if left is not None:
            count = torch.minimum(count, (left - self.late).clamp(min=0))
        reach = torch.full_like(count, -1) if left is None else left - self.late - count
        parts = []
        for window in reach[count > 0].unique().tolist():
            last = torch.where((count > 0) & (reach == window), self.k_last, self.k_first)
            first_q, first_k = q0 + self.q_last, k0 + self.k_first
            starts_q = _cumulative(q0, first_q, first_q + count, q0 + self.q_length)
            parts.append((starts_q, _cumulative(first_k, first_k, k0 + last, k0 + last), window))
        return parts


def _cumulative(*ends: torch.Tensor) -> torch.Tensor:
    """Cumulative lengths from where each sequence ends, `[batch]` each, several per row."""
    return torch.nn.functional.pad(torch.stack(ends, dim=1).flatten(), (1, 0))


class Pages(NamedTuple):
    """Row b: one query over keys `[0, seqlens[b])`, of which a window sees the last ones. int32 `[batch]`, `[batch, 1]`."""

    seqlens: torch.Tensor
    rows: torch.Tensor
    band: Band
    kv_length: int

    @property
    def ndim(self) -> int:
        return 4


class Table(NamedTuple):
    """Query i (of batch x queries) sees the first `seqlens[i]` keys that `keys[i]` lists, int32 `[queries, kv_length]`."""

    keys: torch.Tensor
    seqlens: torch.Tensor
    kv_length: int
    memo: Memo

    @property
    def ndim(self) -> int:
        return 4

    def rows(self, batch: int, step: int) -> torch.Tensor:
        """The keys as rows, `step` of them from one sequence to the next: int32 `[queries, kv_length]`."""
        return once(self.memo, step, lambda: self._rows(batch, step))

    def _rows(self, batch: int, step: int) -> torch.Tensor:
        first = torch.arange(0, batch * step, step, dtype=torch.int32, device=self.keys.device)
        return (self.keys.view(batch, -1, self.kv_length) + first.view(-1, 1, 1)).view(self.keys.shape)


class Segments(NamedTuple):
    """Sequences packed in rows of equally many queries and keys: int32 `cu_seqlens` over `batch x tokens`."""

    cu_seqlens: torch.Tensor
    band: Band
    longest: int
    kv_length: int

    @property
    def ndim(self) -> int:
        return 4


Visibility = Runs | Pages | Table | Segments


def table_of(visible: torch.Tensor) -> Table:
    """The keys that a boolean mask `[batch, 1, queries, keys]` shows, query by query."""
    if visible.shape[1] != 1:
        raise NotImplementedError(
            f"pykernels: a mask must be the same for all heads, got one for {visible.shape[1]} heads"
        )
    length = visible.shape[-1]
    rows = visible.reshape(-1, length)
    keys = torch.where(rows, torch.arange(length, dtype=torch.int32, device=rows.device), length)
    return Table(keys.sort(dim=-1).values, rows.sum(dim=-1, dtype=torch.int32), length, {})


# Beside what the pattern is: hints by which other masks are skipped, and how they are made.
HINTS = frozenset(
    ["allow_is_bidirectional_skip", "allow_is_causal_skip", "config", "device", "dtype", "local_size", "use_vmap"]
)


def visible_keys(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | Visibility | None = None,
    **options: Any,
) -> Visibility:
    """The entry of transformers' `AttentionMaskInterface`: which keys the queries of this forward pass see.

    Args:
        batch_size, q_length, kv_length: sizes; 4.x gives `cache_position` `[q_length]` instead of q_length and q_offset.
        q_offset, kv_offset: the absolute index of the first query and of the first key.
        mask_function: which (query, key) pairs see each other, by absolute indices.
        attention_mask: bool `[batch, tokens]`, False is padding; or what this function returned earlier, then returned.
        options: `cache_position`, and names in `HINTS`, none of which changes what is visible; else must be None.

    Raises:
        NotImplementedError: an option that is not known; a mask that differs by head.
        RuntimeError: under `torch.compile`, a padding mask with a hole (checked when the compiled forward runs).
    """
    if isinstance(attention_mask, (Runs, Pages, Table, Segments)):
        return attention_mask  # made by generate() ahead of a forward pass
    unknown = [n for n, given in options.items() if given is not None and n not in HINTS and n != "cache_position"]
    if unknown:
        raise NotImplementedError(f"pykernels: the mask does not know {', '.join(unknown)}")
    given: dict[str, Any] = {
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
    }
    position = options.get("cache_position")
    if position is None:
        device = torch.device(options.get("device", "cpu"))
        given |= {"q_length": q_length, "q_offset": q_offset}
    else:
        device, q_length, q_offset = position.device, position.shape[0], position[0]
    sizes = _Sizes(batch_size, q_length, kv_length, q_offset, kv_offset, device)

    band = band_of(mask_function) if not torch.compiler.is_compiling() or _holds_no_tensor(options) else None
    if band is not None and sizes.allow(band):
        known = _known_pattern(sizes, band, attention_mask)
        if known is not None:
            return known
    given |= options | {"batch_size": batch_size, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    visible: Any = sdpa_mask(**given)
    packed = _packed(sizes, visible, options.get("local_size")) if attention_mask is None and band is None else None
    return table_of(visible) if packed is None else packed


class _Sizes(NamedTuple):
    batch: int
    queries: int
    keys: int
    q_offset: int | torch.Tensor
    kv_offset: int
    device: torch.device

    def allow(self, band: Band) -> bool:
        """Whether rows under this band can be aligned at their last query and last key."""
        if band == Band() or isinstance(self.q_offset, torch.Tensor):
            return band == Band() or band.right == 0
        beyond = self.q_offset + self.queries - self.kv_offset - self.keys  # queries that come after the last key
        return beyond <= 0 if band.right == 0 else beyond == 0

    def per_row(self, value: int | torch.Tensor) -> torch.Tensor:
        if isinstance(value, int):
            return torch.full((self.batch,), value, dtype=torch.int32, device=self.device)
        return torch.as_tensor(value, device=self.device).to(torch.int32).repeat(self.batch)


def _holds_no_tensor(options: dict[str, Any]) -> bool:
    """Whether transformers added nothing to a plain pattern: what holds a tensor cannot be called symbolically in a trace."""
    chunked = getattr(options.get("config"), "attention_chunk_size", None) is not None
    return not chunked and bool(options.get("allow_is_causal_skip") or options.get("allow_is_bidirectional_skip"))


def _known_pattern(sizes: _Sizes, band: Band, padding: torch.Tensor | None) -> Runs | Pages | None:
    """Runs, or Pages for a single query; None for padding that leaves a hole, or that comes first for a single query."""
    causal = band.right is not None
    last_key = sizes.per_row(sizes.q_offset + sizes.queries - sizes.kv_offset if causal else sizes.keys)
    if padding is None and sizes.queries == 1:
        return _one_query(sizes, band, last_key)
    first = torch.zeros_like(last_key)
    q_last, late = sizes.per_row(sizes.queries), None
    if padding is not None:
        if sizes.queries == 1 and torch.compiler.is_compiling():
            return None
        real = _real_keys(sizes, padding)
        first = real.to(torch.int8).argmax(dim=-1).to(torch.int32)
        count = real.sum(dim=-1, dtype=torch.int32)
        holes = real & (torch.arange(sizes.keys, device=sizes.device) >= (first + count)[:, None])
        if torch.compiler.is_compiling():
            torch._assert_async(~holes.any(), "pykernels: a padding mask with holes cannot be compiled")
        else:
            has_holes, starts_late = torch.stack((holes.any(), (first > 0).any())).tolist()
            if has_holes or (sizes.queries == 1 and starts_late):
                return None
        stop = first + count
        if causal or band.left is not None:
            aligned = (stop + (sizes.kv_offset - sizes.q_offset)).to(torch.int32)
            q_last = aligned.clamp(0, sizes.queries)
            if not torch.compiler.is_compiling() and bool((aligned < sizes.queries).any()):
                late = q_last - aligned
        last_key = torch.minimum(last_key, stop)
    if sizes.queries == 1:
        return None if late is not None and band.left is not None else _one_query(sizes, band, last_key)
    last_key = torch.maximum(last_key, first)
    return Runs(q_last, first, last_key, band, sizes.queries, sizes.keys, padding is not None, {}, late)


def _one_query(sizes: _Sizes, band: Band, last_key: torch.Tensor) -> Pages:
    rows = torch.arange(sizes.batch, dtype=torch.int32, device=sizes.device)[:, None]
    return Pages(last_key, rows, band, sizes.keys)


def _real_keys(sizes: _Sizes, padding: torch.Tensor) -> torch.Tensor:
    """The padding mask of the keys at hand, bool `[batch, keys]`; what it does not reach is padding."""
    missing = sizes.kv_offset + sizes.keys - padding.shape[-1]
    padding = torch.nn.functional.pad(padding, (0, missing)) if missing > 0 else padding
    return padding[:, sizes.kv_offset : sizes.kv_offset + sizes.keys]


def _packed(sizes: _Sizes, visible: torch.Tensor, local_size: int | None) -> Segments | None:
    """Segments when the mask is causal (in a window) within sequences packed one after another, and nothing else."""
    if torch.compiler.is_compiling() or sizes.queries != sizes.keys or visible.shape[1] != 1:
        return None
    seen = visible[:, 0]
    starts = torch.ones((sizes.batch, sizes.queries), dtype=torch.bool, device=sizes.device)
    starts[:, 1:] = ~seen.diagonal(-1, 1, 2)  # a token that does not see the one before begins a sequence
    segment = starts.cumsum(-1)
    expected = (segment[:, :, None] == segment[:, None, :]) & torch.ones_like(seen).tril()
    if local_size is not None:
        expected &= torch.ones_like(seen).triu(1 - local_size)
    if not torch.equal(seen, expected):
        return None
    begins = starts.flatten().nonzero().flatten()
    ends = torch.tensor([starts.numel()], device=sizes.device)
    cu_seqlens = torch.cat((begins, ends)).to(torch.int32)
    band = Band(None if local_size is None else local_size - 1, 0)
    return Segments(cu_seqlens, band, int(cu_seqlens.diff().max()), sizes.keys)
