"""The vocabulary in which every op is declared: tensors with named dimensions, scalars with ranges, rules between them.

An `Op` is written once. Argument checks, error text, the allocation of outputs, the `torch.library` schema and the
roofline's costs are all read off the declaration; no backend and no public function repeats them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
F32 = (torch.float32,)
I32 = (torch.int32,)
I64 = (torch.int64,)
INDICES = (torch.int32, torch.int64)
U8 = (torch.uint8,)
BOOL = (torch.bool,)
KV_CODES = (torch.int8, torch.float8_e4m3fn)
CACHE = FLOATS + KV_CODES

Args = Mapping[str, Any]
Dims = dict[str, int]

_TERM = re.compile(r"(?:(\d+)\*)?([a-z_]+)(?:\+(\d+))?$")


@dataclass(frozen=True)
class Dim:
    """One dimension of a shape: `scale * name + offset`, or a literal number when `name` is empty."""

    name: str
    scale: int = 1
    offset: int = 0

    @staticmethod
    def parse(text: str) -> Dim:
        if text.isdigit():
            return Dim("", 0, int(text))
        match = _TERM.match(text)
        if match is None:
            raise ValueError(f"bad dimension {text!r}")
        scale, name, offset = match.groups()
        return Dim(name, int(scale or 1), int(offset or 0))

    def value(self, dims: Mapping[str, int]) -> int:
        return self.scale * dims[self.name] + self.offset if self.name else self.offset

    def __str__(self) -> str:
        if not self.name:
            return str(self.offset)
        head = self.name if self.scale == 1 else f"{self.scale}*{self.name}"
        return head if self.offset == 0 else f"{head}+{self.offset}"


Shape = tuple[Dim, ...]


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(tuple(Dim.parse(part) for part in alternative.split()) for alternative in text.split("|"))


@dataclass(frozen=True)
class Tensor:
    """A tensor argument.

    `shape` names the dimensions, alternatives of different rank separated by `|` (`""` is a zero-dimensional tensor).
    `dtypes` is a tuple of torch dtypes, or the name of the argument whose dtype this one must share.
    `role` is "in", "inout" (read and written) or "out" (only written; the public function may allocate it).
    `layout` is "last" (last dimension contiguous), "dense" (contiguous) or "any".
    `allocate` is False for an output that is computed only when the caller passes a tensor for it.
    `host` is True where the tensor may also be in pinned host memory, whatever the device of the call.
    """

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False
    role: str = "in"
    layout: str = "last"
    out_dtype: str | torch.dtype | None = None
    allocate: bool = True
    host: bool = False
    alternatives: tuple[Shape, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alternatives", _shapes(self.shape))

    @property
    def mutated(self) -> bool:
        return self.role != "in"


@dataclass(frozen=True)
class Scalar:
    """A number, flag or word. `minimum` is inclusive unless `exclusive`; `choices` lists the legal words."""

    name: str
    type: type
    minimum: float | None = None
    exclusive: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A relation between dimensions or arguments. `text` is formatted with dims and scalar arguments.

    `of_memory` is True where it asks which memory the tensors have, beyond their dtypes, shapes and strides.
    """

    holds: Callable[[Dims, Args], bool]
    text: str
    of_memory: bool = False


@dataclass(frozen=True)
class Cost:
    """Work of one call: floating-point (or integer multiply-add) operations, and bytes that must cross memory once."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


Argument = Tensor | Scalar


@dataclass(frozen=True)
class Op:
    """One op: its arguments in the order of the native parameter struct, the rules between them, and its cost."""

    name: str
    family: str
    args: tuple[Argument, ...]
    cost: Callable[[Dims, Args], Cost]
    rules: tuple[Rule, ...] = ()
    tensors: tuple[Tensor, ...] = field(init=False)
    outputs: tuple[Tensor, ...] = field(init=False)
    by_kind: bool = field(init=False)  # its checks look at dtypes, shapes, strides, devices and scalars only
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(a for a in self.args if isinstance(a, Tensor)))
        object.__setattr__(self, "outputs", tuple(t for t in self.tensors if t.role == "out"))
        of_memory = any(t.host for t in self.tensors) or any(rule.of_memory for rule in self.rules)
        object.__setattr__(self, "by_kind", not of_memory)
        object.__setattr__(self, "names", tuple(a.name for a in self.args))

    def torch_schema(self) -> str:
        """The `torch.library` schema: every argument in order, mutation annotated, plus the backend's name."""
        parts, alias = [], iter("abcdefghijklmnop")
        kinds = {int: "SymInt", float: "float", bool: "bool", str: "str"}
        for arg in self.args:
            if isinstance(arg, Tensor):
                mark = f"({next(alias)}!)" if arg.mutated else ""
                parts.append(f"Tensor{mark}{'?' if arg.optional else ''} {arg.name}")
            else:
                parts.append(f"{kinds[arg.type]} {arg.name}")
        return f"({', '.join([*parts, 'str backend'])}) -> ()"
