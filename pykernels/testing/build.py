"""Tensors for cases: seeded values, real strides, and poison where nothing may be read or all must be written."""

from __future__ import annotations

import torch

SENTINEL = -77  # in integer outputs, where NaN cannot stand


class Maker:
    """Makes the tensors of one case on one device, reproducibly on every device."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * std).to(dtype).to(self.device)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return (low + (high - low) * torch.rand(shape, generator=self.generator)).to(self.device)

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int64).to(dtype).to(self.device)

    def permutation(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator)

    def tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def poison(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """What must be overwritten or never read: NaN, or where there is none a value that shows."""
        if dtype == torch.bool:
            return torch.ones(*shape, dtype=dtype, device=self.device)
        if dtype == torch.int8 or dtype == torch.uint8:
            return torch.full(shape, 99, dtype=dtype, device=self.device)
        if dtype.is_floating_point:
            return torch.full(shape, torch.nan, dtype=torch.float32, device=self.device).to(dtype)
        return torch.full(shape, SENTINEL, dtype=dtype, device=self.device)

    def placed(self, value: torch.Tensor, strides: str) -> torch.Tensor:
        """`value` in a poisoned buffer, as a view of real strides; the last dimension stays contiguous.

        "dense" is the tensor itself; "gaps" leaves 8 elements before and after each row of the last dimension; "odd"
        leaves 1 before and 2 after, so that no vector is aligned; "outer" swaps the first two dimensions in memory.
        """
        if strides == "dense" or value.dim() == 0:
            return value
        if strides == "outer" and value.dim() > 1:
            buffer = self.poison(value.shape[1], value.shape[0], *value.shape[2:], dtype=value.dtype)
            view = buffer.transpose(0, 1)
        else:
            before, after = (1, 2) if strides == "odd" else (8, 8)
            size = value.shape[-1]
            buffer = self.poison(*value.shape[:-1], before + size + after, dtype=value.dtype)
            view = buffer[..., before : before + size]
        view.copy_(value)
        return view

    def apart(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A poisoned tensor whose rows of the last dimension begin on 16 elements each; its memory ends with the last one."""
        size = shape[-1]
        step = size + -size % 16
        rows = torch.empty(shape[:-1], device="meta")
        buffer = self.poison(max(0, rows.numel() * step - (step - size)), dtype=dtype)
        return buffer.as_strided(shape, (*(n * step for n in rows.stride()), 1))

    def vast(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A poisoned cache [pages, ...] of which half the pages start past element 2^31.

        Memory between the pages is never touched, so on a CPU it costs address space alone.
        """
        rest = torch.empty(shape[1:], device="meta")
        step = -(-(2**31) // max(shape[0] // 2, 1))
        step += -step % 64 + rest.numel()
        storage = torch.empty(step * shape[0], dtype=dtype, device=self.device).untyped_storage()
        view = torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, shape, (step, *rest.stride()))
        return view.copy_(self.poison(*shape, dtype=dtype))

    def pinned(self, value: torch.Tensor) -> torch.Tensor:
        """`value` with its strides in pinned host memory; the tensor itself where the device is the host."""
        return value if torch.device(self.device).type == "cpu" else value.cpu().pin_memory()

    def output(self, *shape: int, dtype: torch.dtype, strides: str = "dense") -> torch.Tensor:
        """An output full of poison. "guarded" leaves a band of poison before and after it in memory."""
        if strides == "guarded":
            count = 1
            for size in shape:
                count *= size
            return self.poison(count + 64, dtype=dtype)[32 : 32 + count].view(shape)
        return self.placed(self.poison(*shape, dtype=dtype), strides)


def cumulative(lengths: list[int]) -> list[int]:
    """[0, n0, n0 + n1, ...]"""
    total, sums = 0, [0]
    for n in lengths:
        total += n
        sums.append(total)
    return sums
