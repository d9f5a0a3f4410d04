"""What ci/gpu.sh must know of the Python that it runs in: prints one answer, line by line.

versions   torch and the GPU; fails with the reason where they are too old
packages   what to install of what building and testing needs
toolkit    CUDA's compiler and sanitizer as PyPI packages, where a toolkit is missing (CUDA 13 alone comes in one folder)
arch       this GPU's architecture as PYKERNELS_CUDA_ARCHS takes it
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys

PACKAGES = {
    "setuptools": "setuptools>=77",
    "wheel": "wheel",
    "pybind11": "pybind11>=2.13",
    "ninja": "ninja>=1.11",
    "numpy": "numpy",
    "pytest": "pytest>=8",
    "xdist": "pytest-xdist>=3",
    "execnet": "execnet",
    "pluggy": "pluggy>=1.5",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "pygments": "pygments",
}
BACKPORTS = {"exceptiongroup": "exceptiongroup", "tomli": "tomli"}  # pytest's, before Python 3.11
COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")


def versions() -> list[str]:
    import torch

    numbers = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < (2, 8):
        raise SystemExit(f"torch 2.8 or newer is needed, got {torch.__version__}")
    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU")
    return [f"Python {sys.version.split()[0]}, torch {torch.__version__}, {torch.cuda.get_device_name()}"]


def packages() -> list[str]:
    wanted = PACKAGES | (BACKPORTS if sys.version_info < (3, 11) else {})
    return [spec for name, spec in wanted.items() if importlib.util.find_spec(name) is None or _old(name, spec)]


def _old(module: str, spec: str) -> bool:
    """Whether the version that is there is below the least that `spec` allows."""
    name, _, least = spec.partition(">=")
    if not least:
        return False
    found = importlib.metadata.version(name).split(".")
    numbers = [int(n) if n.isdigit() else 0 for n in found]
    return numbers < [int(n) for n in least.split(".")]


def toolkit() -> list[str]:
    import torch

    cuda = str(torch.version.cuda)
    if not cuda.startswith("13."):
        return []
    missing = [] if shutil.which("nvcc") else list(COMPILER)
    missing += [] if shutil.which("compute-sanitizer") else ["nvidia-cuda-sanitizer-api"]
    return [f"{name}=={cuda}.*" if name != "nvidia-cuda-sanitizer-api" else f"{name}==13.*" for name in missing]


def arch() -> list[str]:
    import torch

    found = "".join(map(str, torch.cuda.get_device_capability()))
    return ["90a" if found == "90" else found]  # Hopper's own instructions are in 90a alone


if __name__ == "__main__":
    answers = {f.__name__: f for f in (versions, packages, toolkit, arch)}
    if len(sys.argv) != 2 or sys.argv[1] not in answers:
        raise SystemExit(f"usage: gpu_setup.py {' | '.join(answers)}")
    for line in answers[sys.argv[1]]():
        print(line)
