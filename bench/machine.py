"""Which machine a result belongs to. Results of two machines are never compared."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pykernels import native
from pykernels.registry import backends
from pykernels.roofline.machine import key_hash, machine_key


@functools.cache
def _gpu(index: int) -> dict[str, str | int]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory": properties.total_memory,
        "cuda": str(torch.version.cuda or torch.version.hip),
    }


def measurable() -> list[str]:
    """Backends whose speed means something here: Triton's interpreter is none of them."""
    gpu = torch.cuda.is_available()
    return [n for n, s in backends().items() if s and n != "reference" and (gpu or n == "cpu")]


def machine(device: torch.device) -> dict[str, Any]:
    """What results depend on besides the code (no host name, no path), and `key`, a hash of it.

    CPU results depend on processor, ISA level, threads and affinity, GPU results on the GPU.
    """
    if device.type == "cuda":
        facts = _gpu(device.index or 0)
    else:
        facts = machine_key(native.chosen_level(), native.module().num_threads(), "")
        del facts["version"]
    return {**facts, "key": key_hash(facts)}
