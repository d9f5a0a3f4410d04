"""Argument checks, read off the declaration. Every message is built from the values that were checked."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .schema import Args, Dims, Op, Scalar, Shape, Tensor


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_of(names: Iterable[str]) -> str:
    listed = list(names)
    return listed[0] if len(listed) == 1 else "one of " + ", ".join(listed)


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join(str(d) for d in shape) + "]"


class Binder:
    """Binds named dimensions to sizes, argument by argument, remembering who bound each."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.dims: Dims = {}
        self.bound_by: dict[str, str] = {}

    def bind(self, arg: Tensor, value: torch.Tensor) -> None:
        shape = next((s for s in arg.alternatives if len(s) == value.dim()), None)
        if shape is None:
            ranks = _one_of(_shape_text(s) for s in arg.alternatives)
            raise ValueError(f"{self.op.name}: {arg.name} must have shape {ranks}, got {list(value.shape)}")
        for dim, size in zip(shape, value.shape, strict=True):
            if dim.name and dim.name not in self.dims:
                if size < dim.offset or (size - dim.offset) % dim.scale != 0:
                    self._mismatch(arg, shape, value)
                self.dims[dim.name] = (size - dim.offset) // dim.scale
                self.bound_by[dim.name] = arg.name
            elif dim.value(self.dims) != size:
                self._mismatch(arg, shape, value)

    def _mismatch(self, arg: Tensor, shape: Shape, value: torch.Tensor) -> None:
        known = [f"{d.name}={self.dims[d.name]} (from {self.bound_by[d.name]})" for d in shape if d.name in self.dims]
        where = f" with {', '.join(dict.fromkeys(known))}" if known else ""
        raise ValueError(
            f"{self.op.name}: {arg.name} must have shape {_shape_text(shape)}{where}, got {list(value.shape)}"
        )


def check_types(op: Op, args: Args) -> None:
    """TypeError for a value that the op's schema cannot even express. Outputs may still be None, to be allocated."""
    for arg in op.args:
        value = args[arg.name]
        if isinstance(arg, Scalar):
            _check_scalar_type(op, arg, value)
        elif value is None:
            if not arg.optional and arg.role != "out":
                raise TypeError(f"{op.name}: {arg.name} must be a torch.Tensor, got None")
        elif not isinstance(value, torch.Tensor):
            raise TypeError(f"{op.name}: {arg.name} must be a torch.Tensor, got {type(value).__name__}")


def bind_dims(op: Op, args: Args) -> Dims:
    """Named dimensions of a call, from the tensors that are present. Raises on a shape that cannot be."""
    binder = Binder(op)
    for arg in op.tensors:
        value = args[arg.name]
        if value is not None:
            binder.bind(arg, value)
    return binder.dims


def device_of(op: Op, args: Args) -> tuple[torch.device, str]:
    """Where a call runs, and the argument that says so: the first tensor that must be on the call's device."""
    return next((args[t.name].device, t.name) for t in op.tensors if not t.host and args.get(t.name) is not None)


def check(op: Op, args: Args, *, fake: bool = False) -> Dims:
    """Everything that can be known without reading tensor contents; raises before anything is written.

    `fake`: the tensors have no memory (a compiler traces), so nobody knows yet whether it is pinned.
    """
    check_types(op, args)
    dims = bind_dims(op, args)
    device = device_of(op, args)
    for arg in op.args:
        value = args[arg.name]
        if isinstance(arg, Scalar):
            _check_scalar(op, arg, value)
        elif value is not None:
            _check_tensor(op, arg, value, args)
            _check_device(op, arg, value, device, fake)
    for rule in op.rules:
        if not rule.holds(dims, args):
            raise ValueError(f"{op.name}: " + rule.text.format(**{**args, **dims}))
    return dims


def _check_device(op: Op, arg: Tensor, value: torch.Tensor, device: tuple[torch.device, str], fake: bool) -> None:
    if value.device == device[0]:
        return
    on_host = arg.host and value.device.type == "cpu"
    if on_host and (fake or value.is_pinned()):
        return
    where = f"{device[0]} (the device of {device[1]})" + (" or in pinned host memory" if arg.host else "")
    got = f"{value.device} memory that is not pinned" if on_host else str(value.device)
    raise ValueError(f"{op.name}: {arg.name} must be on {where}, got {got}")


def _check_tensor(op: Op, arg: Tensor, value: torch.Tensor, args: Args) -> None:
    if isinstance(arg.dtypes, str):
        other = args[arg.dtypes]
        if other is not None and value.dtype != other.dtype:
            raise ValueError(
                f"{op.name}: {arg.name} must have the dtype of {arg.dtypes} ({dtype_name(other.dtype)}), "
                f"got {dtype_name(value.dtype)}"
            )
    elif value.dtype not in arg.dtypes:
        raise ValueError(
            f"{op.name}: {arg.name} must be {_one_of(dtype_name(d) for d in arg.dtypes)}, got {dtype_name(value.dtype)}"
        )
    if arg.layout == "last" and value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{op.name}: {arg.name} must have a contiguous last dimension (stride 1), "
            f"got strides {list(value.stride())}"
        )
    if arg.layout == "dense" and not value.is_contiguous():
        raise ValueError(f"{op.name}: {arg.name} must be contiguous, got strides {list(value.stride())}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op.name}: {arg.name} must not require grad (these kernels have no backward; use torch.no_grad()), "
            "got requires_grad=True"
        )


def _check_scalar_type(op: Op, arg: Scalar, value: object) -> None:
    legal = (int, float) if arg.type is float else (int, torch.SymInt) if arg.type is int else (arg.type,)
    if not isinstance(value, legal) or (isinstance(value, bool) and arg.type is not bool):
        raise TypeError(f"{op.name}: {arg.name} must be {arg.type.__name__}, got {type(value).__name__}")


def _check_scalar(op: Op, arg: Scalar, value: object) -> None:
    if arg.choices and value not in arg.choices:
        raise ValueError(f"{op.name}: {arg.name} must be {_one_of(arg.choices)}, got {value!r}")
    if isinstance(value, (int, float)) and value != value:
        raise ValueError(f"{op.name}: {arg.name} must be a number, got {value}")
    if arg.minimum is not None and isinstance(value, (int, float)):
        below = value <= arg.minimum if arg.exclusive else value < arg.minimum
        if below:
            sign = ">" if arg.exclusive else ">="
            raise ValueError(f"{op.name}: {arg.name} must be {sign} {arg.minimum:g}, got {value}")


def allocate(op: Op, args: Args) -> dict[str, object]:
    """`args` with every output that the caller left out allocated on the device of the call."""
    missing = [t for t in op.outputs if t.allocate and args[t.name] is None]
    if not missing:
        return dict(args)
    dims = bind_dims(op, args)
    device, _ = device_of(op, args)
    filled = dict(args)
    for out in missing:
        shape = [d.value(dims) for d in out.alternatives[0]]
        source = out.out_dtype if out.out_dtype is not None else out.dtypes
        dtype = args[source].dtype if isinstance(source, str) else source[0] if isinstance(source, tuple) else source
        filled[out.name] = torch.empty(shape, dtype=dtype, device=device)
    return filled
