"""Registers every op with `torch.library`, once: one schema, one fake, mutation annotated.

`torch.ops.pykernels.<op>(<contract arguments>, backend)` checks its arguments, picks a backend and runs it. Because
outputs are arguments, the fake has nothing to compute: it only checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .contract import OPS, Op, allocate, check, check_types
from .registry import resolve

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
    return {arg.name: value for arg, value in zip(op.args, values, strict=True)}


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


def call(op: Op, backend: str, /, **args: Any) -> dict[str, Any]:
    """Runs an op: allocates the outputs that are None, calls the registered op, returns all arguments by name."""
    check_types(op, args)  # the rest is checked by the registered op
    full = allocate(op, args)
    flat = [full[a.name] for a in op.args]
    getattr(torch.ops.pykernels, op.name)(*flat, backend)
    return full
