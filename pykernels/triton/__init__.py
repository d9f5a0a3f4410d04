"""The Triton backend: kernels for CUDA and HIP devices, and on CPU tensors under `TRITON_INTERPRET=1` Triton's interpreter.

This module does not import triton: a machine without it can still ask why the backend is unavailable.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ..contract import OPS, device_of, launch_error


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class TritonBackend:
    """Serves the contract's ops with the launchers of `pykernels/triton/<family>.py`."""

    name = "triton"

    def unavailable(self) -> list[str]:
        """Why no call at all can be served here; empty when the backend is usable."""
        if importlib.util.find_spec("triton") is None:
            return ["the triton package is not installed"]
        if not _interpreting() and not torch.cuda.is_available():
            return ["there is no CUDA or HIP device, and TRITON_INTERPRET=1 is not set"]
        return []

    def refuses(self, op_name: str, args: Mapping[str, Any]) -> list[str]:
        """Why this legal call cannot be served; empty when it can."""
        device = device_of(OPS[op_name], args)[0].type
        if device != "cuda" and not _interpreting():
            return [f"kernels run on cuda tensors, got {device} (TRITON_INTERPRET=1 interprets them on the CPU)"]
        narrowing = getattr(self._family(op_name), f"refuses_{op_name}", None)
        return [] if narrowing is None else narrowing(**args)

    def run(self, op_name: str, args: Mapping[str, Any]) -> None:
        """Launches the op on the current stream of its device; it writes into the outputs among `args`."""
        launcher: Callable[..., None] = getattr(self._family(op_name), op_name)
        device, _ = device_of(OPS[op_name], args)
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                launcher(**args)
        except Exception as error:  # the compiler's, the driver's and Triton's own have no other base
            raise launch_error(op_name, args, error) from error

    @staticmethod
    def _family(op_name: str) -> Any:
        return importlib.import_module(f"{__name__}.{OPS[op_name].family}")


BACKEND = TritonBackend()
