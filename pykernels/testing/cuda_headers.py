"""Where CUDA's headers are: the toolkit's, or those of NVIDIA's PyPI wheels where there is no toolkit."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

NEEDED = ("cuda_runtime_api.h", "cuda_fp8.h", "crt/host_defines.h", "nv/target")


def _candidates() -> list[Path]:
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    if nvcc:
        roots.append(Path(nvcc).resolve().parent.parent)
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    places = [place for root in roots for place in (root / "include", *sorted(root.glob("targets/*/include")))]
    for site in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        places += _in_wheels(Path(site))
    return places


def _in_wheels(site: Path) -> list[Path]:
    return sorted((site / "nvidia").glob("*/include"), reverse=True)  # nvidia/cu13, or nvidia/cuda_runtime and others


def include_dirs() -> list[Path]:
    """Folders to pass with -I, in order, that together hold the headers kernels need.

    Raises FileNotFoundError, with what to install, when no combination does.
    """
    chosen: list[Path] = []
    missing = list(NEEDED)
    for place in _candidates():
        here = [name for name in missing if (place / name).exists()]
        if here:
            chosen.append(place)
            missing = [name for name in missing if name not in here]
        if not missing:
            return chosen
    raise FileNotFoundError(
        f"CUDA headers not found ({', '.join(missing)}): install a CUDA toolkit, or "
        "pip install nvidia-cuda-runtime nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-cccl"
    )
