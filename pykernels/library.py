"""Registers every op with `torch.library`, once: one schema, one fake, mutation annotated.

`torch.ops.pykernels.<op>(<contract arguments>, backend)` checks its arguments, picks a backend and runs it. Because
outputs are arguments, the fake has nothing to compute: it only checks.

The checks look at what a tensor is and never into it, so `call` makes them once per kind of call: a later one of the same
dtypes, shapes, strides and scalars goes straight to its backend, unless somebody wants to see it pass the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from .contract import OPS, Args, Op, allocate, check, check_types
from .registry import Backend, resolve

_LIBRARY = torch.library.Library("pykernels", "DEF")

# Called around each op that runs: observe(op, args, run). Used by the roofline to time and count.
Observer = Callable[[Op, Mapping[str, Any], Callable[[], None]], None]
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Every op that runs inside goes through `observer(op, args, run)`, which must call `run()` once.

    Observers nest: one that is entered later runs inside those entered before.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _named(op: Op, values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(op.names, values, strict=True))


def _register(op: Op) -> None:
    def implementation(*values: Any) -> None:
        *flat, backend = values
        args = _named(op, tuple(flat))
        check(op, args)
        chosen = resolve(op, args, backend)
        run: Callable[[], None] = partial(chosen.run, op.name, args)
        for observer in reversed(_observers):
            run = partial(observer, op, args, run)
        run()

    def fake(*values: Any) -> None:
        check(op, _named(op, values[:-1]), fake=True)

    _LIBRARY.define(op.name + op.torch_schema())
    _LIBRARY.impl(op.name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pykernels::{op.name}", fake, lib=_LIBRARY)


for _op in OPS.values():
    _register(_op)


class _Known(NamedTuple):
    """What is known of a kind of call that has passed its checks: who serves it, and the outputs that it leaves out."""

    backend: Backend
    outputs: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]


_MOST_KNOWN = 1024  # then all are forgotten: lengths that grow make new kinds without end
_known: dict[tuple[Any, ...], _Known] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform, _trace = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


def _is_watched() -> bool:
    """Whether a compiler, an observer, a profiler, a mode, a transform or a trace wants to see the op itself."""
    return bool(
        torch.compiler.is_compiling()
        or _observers
        or profiler._is_profiler_enabled
        or _modes()
        or _functions()
        or _transform()
        or _trace()
    )


def _kind(op: Op, backend: str, args: Args) -> tuple[Any, ...] | None:
    """All that the checks of a call look at; None where they look at memory, or at tensors of a class of their own."""
    if not op.by_kind:
        return None
    kind: list[Any] = [op.name, backend, torch.is_grad_enabled()]
    for name in op.names:
        value = args[name]
        if value is None:
            kind.append(None)
        elif type(value) in _PLAIN:
            kind += (value.dtype, value.shape, value.stride(), value.device, value.requires_grad)
        elif type(value) in (bool, int, float, str):
            kind += (type(value), value)
        else:
            return None
    return tuple(kind)


def call(op: Op, backend: str, /, **args: Any) -> dict[str, Any]:
    """Runs an op: allocates the outputs that are None, calls the registered op, returns all arguments by name."""
    kind = None if _is_watched() else _kind(op, backend, args)
    if kind is not None and (known := _known.get(kind)) is not None:
        for name, shape, dtype, device in known.outputs:
            args[name] = torch.empty(shape, dtype=dtype, device=device)
        known.backend.run(op.name, args)
        return args
    check_types(op, args)  # the rest is checked by the registered op
    full = allocate(op, args)
    flat = [full[name] for name in op.names]
    getattr(torch.ops.pykernels, op.name)(*flat, backend)
    if kind is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        made = [(name, value) for name, value in full.items() if args[name] is None and isinstance(value, torch.Tensor)]
        outputs = tuple((name, value.shape, value.dtype, value.device) for name, value in made)
        _known[kind] = _Known(resolve(op, full, backend), outputs)
    return full
