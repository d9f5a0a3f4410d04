"""A batch of requests over one paged pool, for tests of bits: any subset of the batch, any chunk of a prompt, any page size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pykernels import native

LEVELS = [lv for lv in (*native.LEVELS, *native.TEST_LEVELS) if native.level_reason(lv) is None]
F32, BF16, INT8, FP8 = torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn

# Score options of a call, alone and together. ALiBi slopes and sinks are per head.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (50, 0)},
    "all": {"window_size": (70, -1), "softcap": 6.0, "alibi_slopes": True, "sinks": True},
    "full": {"causal": False, "window_size": (40, 20)},
}


def normal(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@dataclass
class Requests:
    """Keys and values of several requests, ragged; `pool` lays them out in pages."""

    lengths: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = F32
    cache: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        total, kind = sum(self.lengths), self.cache or self.dtype
        self.q = normal(total, self.heads, self.dim, seed=self.seed, std=4.0).to(self.dtype)
        reals = [normal(total, self.kv_heads, self.dim, seed=self.seed + 1 + i) for i in range(2)]
        self.scales: list[torch.Tensor] | None = None
        if self.cache:
            largest = 127.0 if self.cache == INT8 else 448.0
            self.scales = [x.abs().amax(-1) / largest for x in reals]
            reals = [x / s[..., None] for x, s in zip(reals, self.scales, strict=True)]
            if self.cache == INT8:
                reals = [x.round() for x in reals]
        self.k, self.v = (x.to(kind) for x in reals)
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]

    def options(self, name: str) -> dict[str, Any]:
        made = dict(OPTIONS[name])
        if made.pop("alibi_slopes", False):
            made["alibi_slopes"] = torch.linspace(0.02, 0.2, self.heads)
        if made.pop("sinks", False):
            made["sinks"] = normal(self.heads, seed=9, std=3.0)
        return made

    def pool(
        self, which: tuple[int, ...], lengths: tuple[int, ...] | None = None, page_size: int = 16
    ) -> dict[str, Any]:
        """The first `lengths` tokens of requests `which` in shuffled pages; whatever nobody may read is NaN or -1."""
        lengths = lengths or tuple(self.lengths[i] for i in which)
        needed = [-(-n // page_size) for n in lengths]
        pages = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        shape = (len(pages), page_size, self.kv_heads)
        caches = [torch.full((*shape, self.dim), torch.nan).to(self.k.dtype) for _ in range(2)]
        scales = [torch.full(shape, torch.nan) for _ in range(2)] if self.scales else [None, None]
        table = torch.full((len(which), max(needed) + 1), -1, dtype=torch.int32)
        for row, (i, n) in enumerate(zip(which, lengths, strict=True)):
            own = pages[sum(needed[:row]) : sum(needed[: row + 1])]
            table[row, : len(own)] = own
            page, slot = own.long().repeat_interleave(page_size)[:n], torch.arange(n) % page_size
            source = slice(self.starts[i], self.starts[i] + n)
            for cache, tokens in zip(caches, (self.k, self.v), strict=True):
                cache[page, slot] = tokens[source]
            for scale, values in zip(scales, self.scales or (), strict=False):
                assert scale is not None
                scale[page, slot] = values[source]
        return {
            "k_cache": caches[0],
            "v_cache": caches[1],
            "k_scale": scales[0],
            "v_scale": scales[1],
            "block_table": table,
            "seqlens_k": torch.tensor(lengths, dtype=torch.int32),
        }


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
