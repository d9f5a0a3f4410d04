"""Builds the native modules with ninja: no torch at build time, incremental, one module per CPU instruction-set level,
and one for CUDA where nvcc is found.

Environment:
  PYKERNELS_CPU_LEVELS  comma-separated levels to build (default: all that this architecture has)
  PYKERNELS_CUDA        auto | 0 | 1: build the CUDA module when nvcc is found | never | or fail
  PYKERNELS_CUDA_ARCHS  comma-separated compute capabilities (default: 80,86,89,90a,100)
  PYKERNELS_JOBS        parallel compile jobs (default: the CPUs of this process)
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
X86 = platform.machine() in ("x86_64", "AMD64")

AVX2 = "-mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mprefer-vector-width=512"
# One module per level, imported only where the CPU has the level, so that no inline function compiled for a higher
# level can be picked by the linker for a lower one. `emulated512` tests the AVX-512 code's logic without AVX-512:
# nobody measures it, and -O1 compiles its emulated vectors in a third of the time.
LEVEL_FLAGS = {"scalar": "", "avx2": AVX2, "avx512": AVX512, "emulated512": f"{AVX2} -DPK_EMULATE_512 -O1"}
DEFAULT_LEVELS = ("scalar", "avx2", "avx512") if X86 else ("scalar",)

# A kernel file named *_sm90.cu uses what only that architecture has, and is compiled for it alone.
DEFAULT_ARCHS = "80,86,89,90a,100"
NVCC_FLAGS = (
    "-std=c++20 -O3 -lineinfo -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra -Xptxas -v --expt-relaxed-constexpr"
)

CXX_FLAGS = (
    "-std=c++20 -O3 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=off -pthread "
    "-Wall -Wextra -Wno-psabi -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-uninitialized"
)


def cpu_levels() -> list[str]:
    levels = [s for s in os.environ.get("PYKERNELS_CPU_LEVELS", ",".join(DEFAULT_LEVELS)).split(",") if s]
    unknown = [s for s in levels if s not in LEVEL_FLAGS or (s != "scalar" and not X86)]
    if unknown:
        known = ", ".join(LEVEL_FLAGS)
        raise SystemExit(f"PYKERNELS_CPU_LEVELS: {', '.join(unknown)} cannot be built here; levels: {known}")
    return levels


def nvcc() -> Path | None:
    """The CUDA compiler to use, or None when PYKERNELS_CUDA says or allows that there is none."""
    wanted = os.environ.get("PYKERNELS_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"PYKERNELS_CUDA must be auto, 0 or 1, got {wanted!r}")
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if wanted == "1" and not found:
        raise SystemExit("PYKERNELS_CUDA=1, but nvcc is neither on PATH nor in CUDA_HOME/bin")
    return Path(found) if found and wanted != "0" else None


def gencode(archs: list[str]) -> str:
    """sm_86 has the instructions of sm_80: one pass of the front end, half of the compiler's time, serves both."""
    real = {a: [f"sm_{a}"] for a in archs}
    if "80" in real and "86" in real:
        real["80"] += real.pop("86")
    return " ".join(f"-gencode 'arch=compute_{a},code=[{','.join(codes)}]'" for a, codes in real.items())


@dataclass
class Module:
    """One extension module: where it goes, what it is made of."""

    name: str
    output: Path
    sources: list[Path]
    flags: str
    link_flags: str = ""
    device_sources: dict[Path, str] = field(default_factory=dict)  # and the architectures that each is compiled for
    objects: list[str] = field(default_factory=list)


def cpu_module(level: str, output: Path) -> Module:
    sources = [ROOT / "csrc/bindings/cpu.cpp", *sorted((ROOT / "csrc/cpu").glob("*.cpp"))]
    return Module(f"_cpu_{level}", output, sources, f"{LEVEL_FLAGS[level]} -DPK_MODULE=_cpu_{level}")


def cuda_module(compiler: Path, output: Path) -> Module:
    """Launchers and kernels by nvcc, bindings by the C++ compiler, the CUDA runtime linked in."""
    archs = [a for a in os.environ.get("PYKERNELS_CUDA_ARCHS", DEFAULT_ARCHS).split(",") if a]
    module = Module("_cuda", output, [ROOT / "csrc/bindings/cuda.cpp"], "-DPK_MODULE=_cuda")
    home = subprocess.run(
        [str(compiler), "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    top = next(line.split("=", 1)[1] for line in home.splitlines() if line.startswith("#$ TOP="))
    module.flags += f" -I{ROOT}/csrc -isystem {top}/include"
    module.link_flags = f"-L{top}/lib64 -L{top}/lib -lcudart_static -ldl -lrt"
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        own = [a for a in archs if a == "90a"] if source.stem.endswith("_sm90") else archs
        if own:
            module.device_sources[source] = gencode(own) + (" -DPK_SM90" if "90a" in archs else "")
    return module


def write_ninja(build_dir: Path, modules: list[Module]) -> None:
    import pybind11
    from ninja import ninja_syntax

    build_dir.mkdir(parents=True, exist_ok=True)
    text_path = build_dir / "build.ninja.new"
    with text_path.open("w") as handle:
        n = ninja_syntax.Writer(handle)
        n.variable("cxx", os.environ.get("CXX", "g++"))
        n.variable("nvcc", str(nvcc() or "nvcc"))
        n.variable("includes", f"-isystem {sysconfig.get_paths()['include']} -isystem {pybind11.get_include()}")
        n.rule("cxx", "$cxx -MMD -MF $out.d $includes $flags $extra -c $in -o $out", depfile="$out.d", deps="gcc")
        n.rule(
            "nvcc",
            f"$nvcc -MMD -MF $out.d -I{ROOT / 'csrc'} {NVCC_FLAGS} $archs -c $in -o $out 2> $out.log || (cat $out.log; exit 1)",
            depfile="$out.d",
            deps="gcc",
        )
        n.rule("link", "$cxx -shared $in -o $out $flags")
        n.variable("flags", CXX_FLAGS)
        for module in modules:
            for source in module.sources:
                target = f"{module.name}/{source.relative_to(ROOT / 'csrc')}.o"
                n.build(target, "cxx", str(source), variables={"extra": module.flags})
                module.objects.append(target)
            for source, archs in module.device_sources.items():
                target = f"{module.name}/{source.relative_to(ROOT / 'csrc')}.o"
                n.build(target, "nvcc", str(source), variables={"archs": archs})
                module.objects.append(target)
            n.build(str(module.output), "link", module.objects, variables={"flags": f"-pthread {module.link_flags}"})
    target_path = build_dir / "build.ninja"
    if not target_path.exists() or target_path.read_bytes() != text_path.read_bytes():
        shutil.move(text_path, target_path)


class NinjaBuild(build_ext):
    def run(self) -> None:
        from ninja import BIN_DIR

        modules = [cpu_module(level, Path(self.get_ext_fullpath(f"pykernels._cpu_{level}"))) for level in cpu_levels()]
        if compiler := nvcc():
            modules.append(cuda_module(compiler, Path(self.get_ext_fullpath("pykernels._cuda"))))
        for module in modules:
            module.output = module.output if module.output.is_absolute() else ROOT / module.output
            module.output.parent.mkdir(parents=True, exist_ok=True)
        build_dir = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
        write_ninja(build_dir, modules)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        jobs = os.environ.get("PYKERNELS_JOBS", str(cpus))
        subprocess.run([str(Path(BIN_DIR) / "ninja"), "-C", str(build_dir), "-j", jobs], check=True)


# reference/ and bench/ are folders at the root that install as pykernels.reference and pykernels.bench.
setup(
    packages=[
        *find_packages(include=["pykernels", "pykernels.*"]),
        "pykernels.reference",
        *(f"pykernels.{name}" for name in find_packages(include=["bench", "bench.*"])),
    ],
    package_dir={"pykernels.reference": "reference", "pykernels.bench": "bench"},
    ext_modules=[
        *(Extension(f"pykernels._cpu_{level}", sources=[]) for level in cpu_levels()),
        *([Extension("pykernels._cuda", sources=[])] if nvcc() else []),
    ],
    cmdclass={"build_ext": NinjaBuild},
)
