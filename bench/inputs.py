"""Copies of a call's arguments, with the same strides and the same tensors sharing memory, and poison for its outputs."""

from __future__ import annotations

from typing import Any

import torch

from pykernels.contract import Op
from pykernels.testing.build import SENTINEL

Args = dict[str, Any]


def copies_of(args: Args, count: int) -> list[Args]:
    """`count` copies in memory of their own."""
    return [_copy(args) for _ in range(count)]


def _copy(args: Args) -> Args:
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(t: torch.Tensor) -> torch.Tensor:
        old = t.untyped_storage()
        if old.data_ptr() not in storages:
            storages[old.data_ptr()] = old.clone()
        view = torch.empty(0, dtype=t.dtype, device=t.device)
        return view.set_(storages[old.data_ptr()], t.storage_offset(), t.shape, t.stride())

    return {name: copied(v) if isinstance(v, torch.Tensor) else v for name, v in args.items()}


def poison_outputs(op: Op, args: Args) -> None:
    """Fills every tensor that the op only writes with what cannot be a result."""
    for tensor in op.outputs:
        value = args[tensor.name]
        if value is None:
            continue
        if value.is_floating_point():
            value.fill_(torch.nan)
        elif value.dtype == torch.bool:
            value.logical_not_()
        else:
            value.fill_(99 if value.dtype in (torch.int8, torch.uint8) else SENTINEL)
