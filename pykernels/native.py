"""The CPU backend's native modules: which instruction-set level to load, and how tensors are handed over.

One extension module per level (`_cpu_scalar`, `_cpu_avx2`, `_cpu_avx512`), each a complete build of `csrc/cpu`. Only a
module whose level this CPU has is ever imported. `PYKERNELS_CPU_ISA` forces a level.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .contract import OPS, device_of, native_arguments, packed_bytes

# Best first. The CPU flags that a level's code may use, as Linux names them.
LEVELS = ("avx512", "avx2", "scalar")
TEST_LEVELS = ("emulated512",)
_AVX2_FLAGS = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm"})
LEVEL_FLAGS: dict[str, frozenset[str]] = {
    "avx512": _AVX2_FLAGS | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"},
    "avx2": _AVX2_FLAGS,
    "scalar": frozenset(),
    "emulated512": _AVX2_FLAGS,
}

# Weight formats whose codes are multiplied with quantised activations in integers.
INT8_DOT_FORMATS = ("int8", "q4_0", "q4_1", "q8_0")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags of this CPU (empty when the system does not tell)."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    for line in path.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def missing_flags(level: str) -> list[str]:
    return sorted(LEVEL_FLAGS[level] - cpu_flags())


def is_built(level: str) -> bool:
    return importlib.util.find_spec(f"{__package__}._cpu_{level}") is not None


def usable_levels() -> list[str]:
    """Levels that are built and that this CPU has, best first."""
    return [level for level in LEVELS if not missing_flags(level) and is_built(level)]


def level_reason(level: str) -> str | None:
    """Why a level cannot be used here, or None."""
    if level not in LEVEL_FLAGS:
        return f"unknown level {level!r} (levels: {', '.join(reversed(LEVELS))})"
    if missing := missing_flags(level):
        return f"this CPU lacks {', '.join(missing)}"
    if not is_built(level):
        return f"the module _cpu_{level} is not built (pip install . builds it; see PYKERNELS_CPU_LEVELS)"
    return None


def load(level: str) -> ModuleType:
    """The native module of a level. ImportError with the reason when this machine cannot run it."""
    if reason := level_reason(level):
        raise ImportError(f"CPU level {level}: {reason}")
    return importlib.import_module(f"{__package__}._cpu_{level}")


def chosen_level() -> str:
    """The level in use: `PYKERNELS_CPU_ISA`, else the best that is built and that this CPU has."""
    return os.environ.get("PYKERNELS_CPU_ISA") or _best_level()


@functools.cache
def _best_level() -> str:
    levels = usable_levels()
    if not levels:
        raise ImportError("no CPU module is built: " + "; ".join(f"{lv}: {level_reason(lv)}" for lv in LEVELS))
    return levels[0]


@functools.cache
def _load_chosen(level: str) -> ModuleType:
    module = load(level)
    if threads := os.environ.get("PYKERNELS_THREADS"):
        if not threads.isdigit() or int(threads) < 1:
            raise ImportError(f"PYKERNELS_THREADS must be a positive number, got {threads!r}")
        module.set_num_threads(int(threads))
    return module


def module() -> ModuleType:
    """The module of the level in use (`PYKERNELS_CPU_ISA`, else the best that this machine can run)."""
    return _load_chosen(chosen_level())


def share_torch_threads(share: bool = True) -> bool:
    """Runs the CPU backend on torch's own threads, `torch.get_num_threads()` of them, or on as many of ours again.

    For calls between torch's ops: torch's threads spin for milliseconds after each of those, on the cores that ours would
    run on. Outputs keep their bits. `PYKERNELS_THREADS` no longer counts. A forked child has threads of its own again.

    Returns:
        Whether torch's threads are in use: never where it has one only, which is the caller's, or comes without OpenMP.
    """
    addresses = _torch_openmp() if share and torch.get_num_threads() > 1 else ()
    if addresses:
        module().set_num_threads(torch.get_num_threads())
    module().borrow_openmp(*(addresses or (0, 0, 0)))
    return bool(addresses)


@functools.cache
def _torch_openmp() -> tuple[int, ...]:
    """Where in torch's OpenMP runtime the functions lie that `borrow_openmp` takes; none where there is none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return ()
    names = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")
    loaded = ctypes.CDLL(str(library))  # its symbols include those of the runtime that it is linked with
    if not all(hasattr(loaded, name) for name in names):
        return ()
    return tuple(ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in names)


def _linear_refusals(args: Mapping[str, Any]) -> list[str]:
    weight_format = args["weight_format"]
    if weight_format == "dense":
        return []
    if args["layout"] != "rows16":
        return [f"a {args['layout']} packed weight is not multiplied directly: pack it with .to_layout('rows16')"]
    if args["activations"] != "float" and weight_format not in INT8_DOT_FORMATS:
        return [
            f"{args['activations']} activations need a weight of format {', '.join(INT8_DOT_FORMATS)}, got {weight_format}"
        ]
    return []


class CpuBackend:
    """The hand-written C++ kernels, for tensors in host memory."""

    name = "cpu"

    def unavailable(self) -> list[str]:
        """Reasons why nothing can run here; empty when usable."""
        try:
            module()
        except ImportError as error:
            return [str(error)]
        return []

    def refuses(self, op_name: str, args: Mapping[str, Any]) -> list[str]:
        """Reasons why this legal call cannot be served; empty when it can."""
        device, _ = device_of(OPS[op_name], args)
        if device.type != "cpu":
            return [f"tensors are on {device}, not in host memory"]
        if not hasattr(module(), op_name):
            return [f"{op_name} is not in the native module"]
        return _linear_refusals(args) if op_name == "linear" else []

    def run(self, op_name: str, args: Mapping[str, Any]) -> None:
        getattr(module(), op_name)(*native_arguments(OPS[op_name], args))

    def repack_rows16(self, plain: torch.Tensor, weight_format: str, rows: int, columns: int) -> torch.Tensor:
        """The bytes of a plain packed weight in the rows16 layout, rows padded with zeros to a multiple of 16."""
        rows16 = torch.empty(packed_bytes(weight_format, -(-rows // 16) * 16, columns), dtype=torch.uint8)
        module().repack_rows16(plain.data_ptr(), rows16.data_ptr(), weight_format, rows, columns)
        return rows16


BACKEND = CpuBackend()


@contextmanager
def record() -> Iterator[Any]:
    """Ops of the CPU backend called inside are appended to the yielded plan instead of being run.

    `plan.run()` replays them in one native call on the same buffers, which the caller keeps alive.
    """
    native = module()
    plan = native.Plan()
    native.record(plan)
    try:
        yield plan
    finally:
        native.record(None)
