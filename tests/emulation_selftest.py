"""The emulation's self-test kernels, loaded once per build: shared by the test_emulation_* files."""

from __future__ import annotations

import ctypes
import functools

import torch

from pykernels.testing import emulation
from pykernels.testing.emulation_build import ROOT, Library

FOLDER = "csrc/emulation/selftest"
NAMES = (
    "attention_sm80",
    "attention_sm90",
    "faults",
    "faults_barrier",
    "faults_hopper",
    "faults_memory",
    "fragments",
    "intrinsics",
)
LIBRARY = Library("selftest", tuple(f"{FOLDER}/{name}.cu" for name in NAMES))

MODULE = Library("selftest_module", (f"{FOLDER}/intrinsics.cu",), (f"{FOLDER}/module.cpp",), module=True)


@functools.cache
def library(build: str = "race", portable: bool = False) -> ctypes.CDLL:
    return emulation.load(LIBRARY, build, portable=portable)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def line_of(file: str, mark: str) -> int:
    """The line of a self-test source that ends in the comment `mark`."""
    source = (ROOT / FOLDER / file).read_text().splitlines()
    lines = [i for i, text in enumerate(source, 1) if text.rstrip().endswith(f"// {mark}")]
    assert len(lines) == 1, f"{file}: {len(lines)} lines marked {mark}"
    return lines[0]
