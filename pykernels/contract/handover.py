"""How arguments are handed to native code: what pybind11 modules receive for each argument of the contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .schema import Op, Scalar

# As in csrc/common/dtype.h.
DTYPE_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.int32: 5,
    torch.int64: 6,
    torch.uint8: 7,
    torch.bool: 8,
}

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def view(t: torch.Tensor | None) -> View | None:
    """What the native side sees of a tensor: pointer, dtype code, shape, strides in elements."""
    if t is None:
        return None
    return (t.data_ptr(), DTYPE_CODES[t.dtype], tuple(t.shape), t.stride())


def launch_error(op_name: str, args: Mapping[str, Any], error: Exception) -> RuntimeError:
    """What a launch failed with, and the call that it was."""
    shapes = ", ".join(f"{n} {list(v.shape)}" for n, v in args.items() if isinstance(v, torch.Tensor))
    return RuntimeError(f"{op_name}: {error} ({shapes})")


def native_arguments(op: Op, args: Mapping[str, Any]) -> list[Any]:
    """The op's arguments in the contract's order, tensors as views."""
    return [args[a.name] if isinstance(a, Scalar) else view(args[a.name]) for a in op.args]
