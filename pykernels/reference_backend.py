"""The reference as a backend: calls `pykernels.reference.<family>` and copies what it returns into the outputs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from .contract import OPS, Tensor


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
        if "count" in inspect.signature(function).parameters:
            inputs["count"] = args["out"].shape[1]
        if "num_logprobs" in inspect.signature(function).parameters:
            inputs["num_logprobs"] = 0 if args["top_ids"] is None else args["top_ids"].shape[1]
        results = function(**inputs)
        for output, result in zip(op.outputs, results or (), strict=True):
            if args[output.name] is not None and result is not None:
                args[output.name].copy_(result)


BACKEND = ReferenceBackend()
