"""The reference as a backend: calls `pykernels.reference.<family>` and copies what it returns into the outputs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from .contract import OPS, Tensor, bind_dims


class ReferenceBackend:
    """Plain PyTorch, float64 inside: the specification. Never chosen by `backend="auto"`."""

    name = "reference"

    def unavailable(self) -> list[str]:
        return []

    def refuses(self, op_name: str, args: Mapping[str, Any]) -> list[str]:
        return []

    def run(self, op_name: str, args: Mapping[str, Any]) -> None:
        op = OPS[op_name]
        function = getattr(importlib.import_module(f"{__package__}.reference.{op.family}"), op_name)
        inputs = {a.name: args[a.name] for a in op.args if not (isinstance(a, Tensor) and a.role == "out")}
        dims = bind_dims(op, args)
        for name in inspect.signature(function).parameters:
            if name not in inputs and name != "compute_dtype":
                inputs[name] = dims.get(name, 0)  # a size that only an output knows
        results = function(**inputs)
        for output, result in zip(op.outputs, results or (), strict=True):
            if args[output.name] is not None and result is not None:
                args[output.name].copy_(result)


BACKEND = ReferenceBackend()
