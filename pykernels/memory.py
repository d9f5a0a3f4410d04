"""Host memory for what a step reads once: weights and KV pages, in huge pages where the system has them.

A token of decode walks through all weights. With 4 KiB pages every few lines miss the TLB, which costs a quarter of the
bandwidth; Linux gives 2 MiB pages to memory that asks for them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable

import torch

HUGE_PAGE = 2 << 20
LINE = 64


def empty(*shape: int, dtype: torch.dtype = torch.uint8, device: str | torch.device = "cpu") -> torch.Tensor:
    """Like `torch.empty`; in host memory from half a huge page on, aligned to huge pages and made of them."""
    nbytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or nbytes < HUGE_PAGE // 2 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    padded = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    buffer = mmap.mmap(-1, padded + HUGE_PAGE)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(buffer, dtype=torch.uint8)  # keeps the mapping alive
    first = -raw.data_ptr() % HUGE_PAGE
    return raw[first : first + nbytes].view(dtype).view(shape)


class Arena:
    """One piece of memory that tensors are copied into, one after another, each on a line of its own."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._memory = empty(sum(map(_lines, sizes)))
        self._end = 0

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a flat uint8 tensor, behind those that were taken before."""
        start, self._end = self._end, self._end + _lines(tensor.numel())
        return self._memory[start : start + tensor.numel()].copy_(tensor)


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
