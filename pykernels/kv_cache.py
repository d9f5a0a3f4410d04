"""`PagedKVCache`: pages, block tables, reference counts, formats, and memory accounting.

Keys and values of a token live in one slot of a page; a sequence is a list of pages. Pages are reference-counted: a fork
shares them, and the first append into a shared page copies it (PagedAttention: Kwon et al., 2023).

A sequence that waits can be swapped out: its pages move to a pool in host memory and their places are free for others. A
page that a running sequence reads too stays where it is, so that every page exists once, on one side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import memory
from .ops.kv_cache import copy_pages, swap_pages

FORMATS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
SCALE_BYTES = 4  # one float32 per (token, kv head), for K and for V, of a quantised cache


class CacheFullError(RuntimeError):
    """There are not enough free pages. Nothing was written and nothing is lost."""


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Cache bytes of one token: `2 x layers x kv_heads x head_dim x bytes`, and the scales of a quantised cache."""
    per_head = head_dim * dtype.itemsize + (SCALE_BYTES if dtype.itemsize == 1 else 0)
    return 2 * num_layers * num_kv_heads * per_head


@dataclass(frozen=True)
class LayerPages:
    """One layer's memory: caches `[num_pages, page_size, num_kv_heads, head_dim]`, scales without the last dimension."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


@dataclass(frozen=True)
class CachePlan:
    """What a number of bytes holds."""

    num_pages: int
    num_tokens: int
    bytes_per_token: int
    nbytes: int


@dataclass
class _Sequence:
    length: int = 0
    pages: list[int] = field(default_factory=list)  # from num_pages on: pages of the host pool
    swapped: bool = False


class PagedKVCache:
    """Keys and values of many sequences in fixed memory.

    Args:
        num_pages, page_size: how many pages of how many tokens.
        num_layers, num_kv_heads, head_dim: of the model.
        dtype: "auto" (bfloat16), "float32", "float16", "bfloat16", "int8", "fp8_e4m3", or the torch dtype. Quantised
            caches keep one float32 scale per (token, kv head).
        device: where the pages are.
        host_pages: pages of a second pool in host memory (pinned, where the device is a GPU), for `swap_out`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        host_pages: int = 0,
    ) -> None:
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_layers": num_layers}
        for name, value in (sizes | {"num_kv_heads": num_kv_heads, "head_dim": head_dim}).items():
            if value < 1:
                raise ValueError(f"PagedKVCache: {name} must be at least 1, got {value}")
        if host_pages < 0:
            raise ValueError(f"PagedKVCache: host_pages must be at least 0, got {host_pages}")
        self.dtype = _dtype(dtype)
        self.num_pages, self.page_size = num_pages, page_size
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.host_pages = host_pages
        self._layers = [self._pool(num_pages, device) for _ in range(num_layers)]
        pinned = torch.device(device).type != "cpu"
        self._host_layers = [self._pool(host_pages, "cpu", pinned) for _ in range(num_layers if host_pages else 0)]
        # Host pages are numbered after those of the device.
        self._references = [0] * (num_pages + host_pages)
        self._waiting = [0] * (num_pages + host_pages)  # how many of them belong to sequences that are swapped out
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_host = list(range(num_pages + host_pages - 1, num_pages - 1, -1))
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    def _pool(self, num_pages: int, device: str | torch.device, pinned: bool = False) -> LayerPages:
        """Memory of one layer."""
        shape = (num_pages, self.page_size, self.num_kv_heads)

        def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
            if pinned:
                return torch.empty(sizes, dtype=dtype, pin_memory=True)
            return memory.empty(*sizes, dtype=dtype, device=device)

        k, v = (empty(*shape, self.head_dim, dtype=self.dtype) for _ in range(2))
        if self.dtype.itemsize > 1:
            return LayerPages(k, v, None, None)
        return LayerPages(k, v, *(empty(*shape, dtype=torch.float32) for _ in range(2)))

    @staticmethod
    def plan(
        memory: int,
        *,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str | torch.dtype = "auto",
    ) -> CachePlan:
        """The largest cache of at most `memory` bytes. ValueError when not even one page fits."""
        token = bytes_per_token(num_layers, num_kv_heads, head_dim, _dtype(dtype))
        pages = memory // (page_size * token)
        if pages < 1:
            raise ValueError(f"PagedKVCache: {memory} bytes do not hold one page of {page_size * token} bytes")
        return CachePlan(pages, pages * page_size, token, pages * page_size * token)

    # ---- memory -------------------------------------------------------------------------------------------------
    def layer(self, index: int) -> LayerPages:
        return self._layers[index]

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and scales on the device."""
        return self.num_pages * self.page_size * self.bytes_per_token

    @property
    def host_nbytes(self) -> int:
        """Bytes of all pages and scales of the host pool."""
        return self.host_pages * self.page_size * self.bytes_per_token

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def free_host_pages(self) -> int:
        return len(self._free_host)

    # ---- sequences ----------------------------------------------------------------------------------------------
    def add_sequence(self) -> int:
        """A new, empty sequence; returns its id."""
        sequence, self._next_id = self._next_id, self._next_id + 1
        self._sequences[sequence] = _Sequence()
        return sequence

    def length(self, sequence: int) -> int:
        """Tokens in a sequence."""
        return self._get(sequence).length

    def is_swapped(self, sequence: int) -> bool:
        """Whether a sequence is swapped out: until it is back, only its length is known and all it can do is end."""
        return self._get(sequence).swapped

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in order."""
        return tuple(self._on_device(sequence).pages)

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens, sharing the pages; returns its id."""
        source = self._on_device(sequence)
        copy = self.add_sequence()
        self._sequences[copy] = _Sequence(source.length, list(source.pages))
        for page in source.pages:
            self._references[page] += 1
        return copy

    def free(self, sequence: int) -> None:
        """Forgets a sequence; its pages are reused once no other sequence reads them."""
        state = self._get(sequence)
        for page in reversed(state.pages):
            self._waiting[page] -= state.swapped
            self._release(page)
        del self._sequences[sequence]

    def append(self, sequence: int, tokens: int) -> torch.Tensor:
        """Room for `tokens` more tokens: their slots, int64 `[tokens]`, for `append_kv`.

        Raises:
            CacheFullError: not enough free pages; the sequence is as it was.
        """
        start = self._grow(sequence, tokens)
        positions, size = torch.arange(start, start + tokens), self.page_size
        return torch.tensor(self._get(sequence).pages, dtype=torch.int64)[positions // size] * size + positions % size

    def append_one(self, sequence: int) -> int:
        """`append` of one token: its slot."""
        start, size = self._grow(sequence, 1), self.page_size
        return self._get(sequence).pages[start // size] * size + start % size

    def _grow(self, sequence: int, tokens: int) -> int:
        """Pages for `tokens` more tokens; returns the position of the first."""
        if tokens < 0:
            raise ValueError(f"PagedKVCache: tokens must be at least 0, got {tokens}")
        state, size = self._on_device(sequence), self.page_size
        start, end = state.length, state.length + tokens
        grown = -(-end // size) - len(state.pages)
        shared = tokens > 0 and start % size != 0 and self._references[state.pages[-1]] > 1
        if grown + shared > len(self._free):
            raise CacheFullError(
                f"PagedKVCache: {tokens} more tokens need {grown + shared} pages of {size}, {len(self._free)} are free"
            )
        if shared:
            self._unshare(state)
        state.pages += [self._take() for _ in range(grown)]
        state.length = end
        return start

    def truncate(self, sequence: int, length: int) -> None:
        """Drops the tokens after the first `length`, as after a rejected draft."""
        state = self._on_device(sequence)
        if not 0 <= length <= state.length:
            raise ValueError(f"PagedKVCache: length must be in [0, {state.length}], got {length}")
        keep = -(-length // self.page_size)
        for page in reversed(state.pages[keep:]):
            self._release(page)
        del state.pages[keep:]
        state.length = length

    def tables(self, sequences: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """`block_table` int32 `[batch, max_pages]` (padded with -1) and `seqlens_k` int32 `[batch]`."""
        states = [self._on_device(s) for s in sequences]
        width = max((len(s.pages) for s in states), default=0)
        rows = [s.pages + [-1] * (width - len(s.pages)) for s in states]
        table = torch.tensor(rows, dtype=torch.int32).view(len(states), width)
        return table, torch.tensor([s.length for s in states], dtype=torch.int32)

    def write_tables(self, sequences: Sequence[int], block_table: torch.Tensor, seqlens_k: torch.Tensor) -> None:
        """`tables` into memory that a recorded plan or a CUDA graph points at; rows left over become empty sequences."""
        table, lengths = self.tables(sequences)
        rows, width = block_table.shape
        if len(sequences) > min(rows, len(seqlens_k)) or table.shape[1] > width:
            raise ValueError(
                f"PagedKVCache: block_table has room for {rows} sequences of {width} pages, "
                f"got {len(sequences)} of up to {table.shape[1]}"
            )
        block_table.fill_(-1)
        block_table[: len(sequences), : table.shape[1]] = table
        seqlens_k.zero_()
        seqlens_k[: len(sequences)] = lengths

    # ---- host memory --------------------------------------------------------------------------------------------
    def swap_out(self, sequence: int) -> int:
        """Moves the pages of a sequence that no running sequence reads into the host pool; returns how many.

        Pages that are shared with a running sequence stay, and move with the last of their readers. Called again on a
        sequence that is out, it moves those that the others have dropped since. Copies are enqueued on the current
        stream, as every op is; nothing waits.

        Raises:
            CacheFullError: not enough free pages in the host pool; nothing has changed.
        """
        state = self._get(sequence)
        arriving = 0 if state.swapped else 1
        moving = [
            page
            for page in state.pages
            if page < self.num_pages and self._references[page] == self._waiting[page] + arriving
        ]
        if len(moving) > len(self._free_host):
            raise CacheFullError(
                f"PagedKVCache: swapping out sequence {sequence} needs {len(moving)} pages of the host pool, "
                f"{len(self._free_host)} of {self.host_pages} are free"
            )
        for page in state.pages:
            self._waiting[page] += arriving
        state.swapped = True
        self._move(moving, self._free_host, self._free)
        return len(moving)

    def swap_in(self, sequence: int) -> int:
        """Brings a sequence that is swapped out back to the device; returns how many pages moved.

        Raises:
            CacheFullError: not enough free pages on the device; nothing has changed.
        """
        state = self._get(sequence)
        if not state.swapped:
            raise ValueError(f"PagedKVCache: sequence {sequence} is not swapped out")
        moving = [page for page in state.pages if page >= self.num_pages]
        if len(moving) > len(self._free):
            raise CacheFullError(
                f"PagedKVCache: swapping in sequence {sequence} needs {len(moving)} pages, {len(self._free)} are free"
            )
        self._move(moving, self._free, self._free_host)
        state.swapped = False
        for page in state.pages:
            self._waiting[page] -= 1
        return len(moving)

    def _move(self, pages: list[int], free: list[int], freed: list[int]) -> None:
        """Copies pages to the other side, and puts the new in the place of the old in every sequence that is out."""
        if not pages:
            return
        targets = [free.pop() for _ in pages]
        out = pages[0] < self.num_pages
        on_host = [page - self.num_pages for page in (targets if out else pages)]
        rows = (pages, on_host) if out else (on_host, targets)
        source, target = (torch.tensor(side, device=self._layers[0].k_cache.device) for side in rows)
        for device, host in zip(self._layers, self._host_layers, strict=True):
            a, b = (device, host) if out else (host, device)
            scales: dict[str, Any] = {
                "k_scale_from": a.k_scale,
                "v_scale_from": a.v_scale,
                "k_scale_to": b.k_scale,
                "v_scale_to": b.v_scale,
            }
            swap_pages(a.k_cache, a.v_cache, b.k_cache, b.v_cache, source, target, **scales)
        for old, new in zip(pages, targets, strict=True):
            for counts in (self._references, self._waiting):
                counts[new], counts[old] = counts[old], 0
            freed.append(old)
        place = dict(zip(pages, targets, strict=True))
        for state in self._sequences.values():
            if state.swapped:
                state.pages = [place.get(page, page) for page in state.pages]

    def _get(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise ValueError(f"PagedKVCache: there is no sequence {sequence}")
        return self._sequences[sequence]

    def _on_device(self, sequence: int) -> _Sequence:
        state = self._get(sequence)
        if state.swapped:
            raise ValueError(f"PagedKVCache: sequence {sequence} is swapped out: swap it in first")
        return state

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            (self._free if page < self.num_pages else self._free_host).append(page)

    def _unshare(self, state: _Sequence) -> None:
        """Replaces the sequence's last page, which others read, by a copy of its own."""
        shared, own = state.pages[-1], self._take()
        for layer in self._layers:
            device = layer.k_cache.device
            source, target = (torch.tensor([page], device=device) for page in (shared, own))
            copy_pages(layer.k_cache, layer.v_cache, source, target, k_scale=layer.k_scale, v_scale=layer.v_scale)
        state.pages[-1] = own
        self._release(shared)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16
    found = FORMATS.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in FORMATS.values():
        raise ValueError(f"PagedKVCache: dtype must be auto or one of {', '.join(FORMATS)}, got {dtype!r}")
    return found
