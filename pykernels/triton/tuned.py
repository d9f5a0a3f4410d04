"""Tiles that `pykernels tune` measured on a GPU, one table per GPU type in `tuned/<gpu>.json`; they replace analytic choices.

A table's entries name the kind of kernel, the shape that a tile was chosen for, and the tile. A GPU without a table, and a
shape that is not in it, keep the choice of `configs.py`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

Fields = dict[str, Any]  # of a configs.Tile, or of the shape that it is chosen for


@dataclass
class Scope:
    """What holds inside `scope()`: the tile that every kernel takes, and the choices that were asked for."""

    tile: Fields | None = None
    asked: list[tuple[str, Fields]] = field(default_factory=list)


_SCOPE: ContextVar[Scope | None] = ContextVar("pykernels_tuned_scope", default=None)


@contextmanager
def scope(tile: Any = None) -> Iterator[Scope]:
    """Inside, tables are left alone: every choice is `tile`, or without one the analytic choice."""
    entered = Scope(None if tile is None else asdict(tile))
    token = _SCOPE.set(entered)
    try:
        yield entered
    finally:
        _SCOPE.reset(token)


def slug(gpu: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`: the name of its file."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def key(kind: str, shape: Fields) -> str:
    """`decode head_dim=128 head_dim_v=128 group=4 ...`, whatever the order of the fields."""
    return " ".join([kind, *(f"{name}={shape[name]}" for name in sorted(shape))])


@functools.cache
def entries(gpu: str) -> dict[str, Fields]:
    """Key -> tile of the table of a GPU; empty without one."""
    if not gpu:
        return {}
    path = resources.files(__package__) / "tuned" / f"{slug(gpu)}.json"
    if not path.is_file():
        return {}
    table = json.loads(path.read_text())
    return {key(e["kind"], e["shape"]): e["tile"] for e in table["entries"]}


@functools.lru_cache(4096)
def _found(kind: str, gpu: str, shape: Any, tma_ok: bool) -> Fields | None:
    return entries(gpu).get(key(kind, {**asdict(shape), "tma_ok": tma_ok}))


def lookup(kind: str, gpu: str, shape: Any, tma_ok: bool = False) -> Fields | None:
    """The fields of the tile to take for a shape (a frozen dataclass) on a GPU of this name, or None."""
    current = _SCOPE.get()
    if current is not None:
        current.asked.append((kind, {**asdict(shape), "tma_ok": tma_ok}))
        return current.tile
    return _found(kind, gpu, shape, tma_ok)
