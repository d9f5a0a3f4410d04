"""Runs CUDA kernels on the CPU from Python: load a library, place tensors, run a session, read its report.

library = emulation.load(emulation_build.Library("kernels", ("csrc/cuda/decode.cu",)), "race")
with emulation.session(library, schedule="random", seed=3) as report:
    library.pk_decode(...)
assert not report.faults, report
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch

from .emulation_build import Library, build

SCHEDULES = ("forward", "reverse", "random")
ASYNC_MODES = ("lazy", "eager", "poison")


@dataclass(frozen=True)
class Fault:
    """One kind of misuse at one place; `count` is how often it was met there."""

    kind: str
    message: str
    file: str
    line: int
    other_file: str
    other_line: int
    block: tuple[int, int, int]
    threads: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        other = f" (against {self.other_file}:{self.other_line})" if self.other_line else ""
        return f"{self.file}:{self.line}: {self.kind}: {self.message}{other} [block {self.block}, {self.count}x]"


@dataclass(frozen=True)
class SiteProfile:
    """Plain accesses at one source line.

    Cost: wavefronts (shared) or 32-byte sectors (global); ideal: the fewest that the bytes need.
    """

    file: str
    line: int
    space: str
    write: bool
    bytes_per_thread: int
    requests: int
    cost: int
    ideal: int


@dataclass
class Report:
    faults: list[Fault] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    sites: list[SiteProfile] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults)) or "no faults"


def load(library: Library, build_kind: str = "race", portable: bool = False) -> ctypes.CDLL:
    """Builds if needed and loads; the emulation's own functions are visible through the handle."""
    path = build(library, builds=(build_kind,), portable=portable)[library.name, build_kind]
    return bind(ctypes.CDLL(str(path)))


def load_module(library: Library, build_kind: str = "race") -> tuple[ModuleType, ctypes.CDLL]:
    """The same for a library that is a Python extension: the imported module, and the handle for sessions."""
    path = build(library, builds=(build_kind,))[library.name, build_kind]
    spec = importlib.util.spec_from_file_location(library.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, bind(ctypes.CDLL(str(path)))


def bind(handle: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the signatures of the session functions on a loaded library."""
    handle.emu_configure.argtypes = [ctypes.c_int, ctypes.c_uint64, *[ctypes.c_int] * 6]
    handle.emu_report_json.restype = ctypes.c_char_p
    handle.emu_allocate.argtypes = [ctypes.c_size_t, ctypes.c_char_p]
    handle.emu_allocate.restype = ctypes.c_void_p
    handle.emu_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    return handle


@contextlib.contextmanager
def session(
    handle: ctypes.CDLL,
    *,
    schedule: str = "forward",
    seed: int = 1,
    async_copies: str = "poison",
    workers: int = 1,
    races: bool = True,
    strict: bool = True,
    capability: int = 90,
    profile: bool = False,
) -> Iterator[Report]:
    """Everything launched inside runs under this configuration; the report is filled on leaving.

    `capability` (10 x major + minor) is what launchers are told, and chooses between kernels.
    """
    flags = (int(races), int(strict), capability, int(profile))
    handle.emu_configure(SCHEDULES.index(schedule), seed, ASYNC_MODES.index(async_copies), workers, *flags)
    handle.emu_clear_report()
    report = Report()
    try:
        yield report
    finally:
        data = json.loads(handle.emu_report_json())
        report.faults = [
            Fault(**{**f, "block": tuple(f["block"]), "threads": tuple(f["threads"])}) for f in data["faults"]
        ]
        report.counters = data["counters"]
        report.sites = [SiteProfile(**s) for s in data["sites"]]


def place(handle: ctypes.CDLL, tensor: torch.Tensor, label: str) -> torch.Tensor:
    """A copy of `tensor` (same shape, contiguous) in the emulation's guarded memory: a stray access names `label`."""
    size = tensor.numel() * tensor.element_size()
    pointer = handle.emu_allocate(size, label.encode())
    if not pointer:
        raise MemoryError(f"the emulation's arena has no room for {label} ({size} bytes)")
    if size == 0:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    raw = (ctypes.c_uint8 * size).from_address(pointer)
    placed = torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    placed.copy_(tensor)
    return placed


def register(handle: ctypes.CDLL, tensor: torch.Tensor, label: str, *, writable: bool) -> None:
    """Lets kernels touch a tensor's own storage where it is."""
    storage = tensor.untyped_storage()
    handle.emu_register(storage.data_ptr(), storage.nbytes(), int(writable), label.encode())
