"""The CUDA backend: hand-written kernels for NVIDIA GPUs, in the native module `_cuda` (csrc/cuda).

The module imports without a driver; `unavailable()` then says why nothing runs. The same kernels, compiled against
csrc/emulation, run on the CPU in the tests: see `pykernels/testing/emulated_cuda.py`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from ..contract import OPS, device_of, launch_error, native_arguments

_PACKAGE = __package__ or "pykernels.cuda"
_ROOT = _PACKAGE.rpartition(".")[0]


@functools.cache
def _module() -> ModuleType:
    if importlib.util.find_spec(f"{_ROOT}._cuda") is None:
        raise ImportError(
            "the module _cuda is not built (it needs nvcc when the package is installed; see PYKERNELS_CUDA)"
        )
    return importlib.import_module(f"{_ROOT}._cuda")


class CudaBackend:
    """Serves the contract's ops on CUDA tensors, on the current stream."""

    name = "cuda"
    device_type = "cuda"

    def native(self) -> ModuleType:
        """The module with the launchers. ImportError, with the reason, where it was not built."""
        return _module()

    def unavailable(self) -> list[str]:
        """Why no call at all can be served here; empty when the backend is usable."""
        try:
            error = self.native().driver_error()
        except ImportError as missing:
            return [str(missing)]
        if error:
            return [str(error)]
        return [] if torch.cuda.is_available() else ["this torch has no CUDA"]

    def refuses(self, op_name: str, args: Mapping[str, Any]) -> list[str]:
        """Why this legal call cannot be served; empty when it can."""
        device, _ = device_of(OPS[op_name], args)
        if device.type != self.device_type:
            return [f"tensors are on {device}, not on a CUDA device"]
        if not hasattr(self.native(), op_name):
            return [f"{op_name} has no CUDA kernel"]
        family = f"{_PACKAGE}.{OPS[op_name].family}"
        if importlib.util.find_spec(family) is None:
            return []
        narrowing = getattr(importlib.import_module(family), f"refuses_{op_name}", None)
        return [] if narrowing is None else narrowing(scratch_bytes=self.scratch_bytes(op_name, args), **args)

    def run(self, op_name: str, args: Mapping[str, Any]) -> None:
        """Launches the op on the current stream; it writes into the outputs among `args`."""
        flat = native_arguments(OPS[op_name], args)
        device, _ = device_of(OPS[op_name], args)
        scratch = self._scratch(op_name, flat, args.get("workspace"), device)
        where = (device.index or 0, self.stream(device), 0 if scratch is None else scratch.data_ptr())
        try:
            getattr(self.native(), op_name)(*flat, *where)
        except RuntimeError as error:
            raise launch_error(op_name, args, error) from error

    def stream(self, device: torch.device) -> int:
        """The handle of the current stream."""
        return torch.cuda.current_stream(device).cuda_stream

    def scratch_bytes(self, op_name: str, args: Mapping[str, Any]) -> int:
        """Bytes of memory for partial results that the op needs, from shapes alone."""
        return self._scratch_bytes(op_name, native_arguments(OPS[op_name], args))

    def _scratch_bytes(self, op_name: str, flat: list[Any]) -> int:
        bytes_needed = getattr(self.native(), f"{op_name}_scratch_bytes", None)
        return 0 if bytes_needed is None else bytes_needed(*flat)

    def _scratch(
        self, op_name: str, flat: list[Any], workspace: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        if workspace is not None:
            return workspace
        size = self._scratch_bytes(op_name, flat)
        return torch.empty(size, dtype=torch.uint8, device=device) if size else None


BACKEND = CudaBackend()
