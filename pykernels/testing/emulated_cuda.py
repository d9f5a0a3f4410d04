"""The CUDA backend on the CPU: its launchers and kernels, compiled against csrc/emulation, over tensors in host memory.

backend = EmulatedCuda(schedule="random", seed=2)
check_case(case, backend.run)  # raises Faults, too, when the emulation reports any
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from ..contract import OPS
from ..cuda import CudaBackend
from . import emulation
from .emulation_build import ROOT, Library


class Faults(AssertionError):
    """The emulation met something that the hardware leaves undefined."""


def library() -> Library:
    """Every CUDA source as a Python extension for the emulation."""
    kernels = sorted(p.relative_to(ROOT) for p in (ROOT / "csrc/cuda").glob("*.cu"))
    name = "_cuda"
    return Library(
        name, tuple(map(str, kernels)), ("csrc/bindings/cuda.cpp",), module=True, host_flags=f"-DPK_MODULE={name}"
    )


@functools.cache
def _loaded(build: str) -> tuple[ModuleType, Any]:
    return emulation.load_module(library(), build)


class EmulatedCuda(CudaBackend):
    """Runs each op in a session of its own with these settings, and keeps the last report."""

    device_type = "cpu"

    def __init__(self, build: str = "race", **settings: Any) -> None:
        self.build = build
        self.settings = settings
        self.report = emulation.Report()

    def native(self) -> ModuleType:
        return _loaded(self.build)[0]

    def stream(self, device: torch.device) -> int:
        return 0

    def run(self, op_name: str, args: Mapping[str, Any]) -> None:
        """The op, with its tensors as the only memory that kernels may touch. Raises Faults if anything was reported."""
        handle = _loaded(self.build)[1]
        handle.emu_free_all()
        failed: RuntimeError | None = None
        with emulation.session(handle, **self.settings) as report:
            self._register(op_name, args)
            try:
                super().run(op_name, args)
            except RuntimeError as error:
                failed = error  # a launch that cannot go on says where only in the report
        self.report = report
        if report.faults:
            raise Faults(f"{op_name}: {report}") from failed
        if failed is not None:
            raise failed

    def _scratch(self, *arguments: Any) -> torch.Tensor | None:
        scratch = super()._scratch(*arguments)
        if scratch is not None:
            handle = _loaded(self.build)[1]
            scratch = emulation.place(handle, torch.full_like(scratch, 0xFF), "scratch")  # NaN, if read before written
        return scratch

    def _register(self, op_name: str, args: Mapping[str, Any]) -> None:
        mutated = {
            args[t.name].untyped_storage().data_ptr()
            for t in OPS[op_name].tensors
            if t.mutated and args[t.name] is not None
        }
        for tensor in OPS[op_name].tensors:
            value = args[tensor.name]
            if value is not None and value.untyped_storage().nbytes():
                writable = value.untyped_storage().data_ptr() in mutated
                emulation.register(_loaded(self.build)[1], value, tensor.name, writable=writable)
