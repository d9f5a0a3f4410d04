"""Builds CUDA sources for the CPU: the emulation's runtime once, kernels plain or with the memory hooks, by ninja.

Every kernel library comes in two builds. `plain` is fast and checks what goes through the facade; `race` adds the
compiler's memory hooks, so that every load and store is checked too.
"""

from __future__ import annotations

import fcntl
import io
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cuda_headers

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path("build/emulation")  # relative to ROOT, like every path below: reports name files as the repository does
RUNTIME = "libpykernels_emulation.so"
# -Wno-restrict: false alarms of GCC 12 on std::string. -Wno-psabi: a note about 64-byte aligned tensor maps.
WARNINGS = "-Wall -Wextra -Wno-unknown-pragmas -Wno-restrict -Wno-psabi"
HOT = (
    "clocks",
    "collective",
    "hooks",
    "matrix",
    "numeric",
    "scheduler",
    "shadow",
)  # runtime sources worth -O3; the rest compiles faster without
# -ffp-contract=off: the same bits on every machine. -fno-gnu-unique: libraries can be reloaded.
COMMON = f"-std=c++20 -O2 -g1 -fPIC -ffp-contract=off -fno-gnu-unique -pthread {WARNINGS}"
HOOKS = "-fsanitize=thread --param tsan-instrument-func-entry-exit=0"  # compiled only: libtsan is not linked


@dataclass(frozen=True)
class Library:
    """A shared library of kernels. `kernels` are instrumented in the race build, `host` sources never."""

    name: str
    kernels: tuple[str, ...]
    host: tuple[str, ...] = ()
    flags: str = ""
    module: bool = False  # a Python extension, whose host sources include pybind11
    host_flags: str = ""

    def path(self, build: str, portable: bool = False) -> Path:
        folder = BUILD / "portable" if portable else BUILD
        return folder / build / (f"{self.name}.so" if self.module else f"lib{self.name}.so")


def available() -> str | None:
    """None if kernels can be built here, else the reason why not."""
    if not (ROOT / "csrc/emulation/emu.h").exists():
        return "the emulation's sources are not installed: it runs from a source checkout"
    try:
        cuda_headers.include_dirs()
    except FileNotFoundError as error:
        return str(error)
    return None


def _write(libraries: list[Library]) -> Path:
    from ninja import ninja_syntax

    includes = "-Icsrc " + " ".join(f"-isystem {shlex.quote(str(p))}" for p in cuda_headers.include_dirs())
    (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
    path = ROOT / BUILD / ("-".join(library.name for library in libraries) + ".ninja")
    text = io.StringIO()
    writer: Any = ninja_syntax.Writer  # its stub takes a str
    n = writer(text)
    n.variable("builddir", str(BUILD))
    n.variable("cxx", os.environ.get("CXX", "g++"))
    compile_one = "$cxx -MMD -MF $out.d -x c++ $flags -c $in -o $out"
    n.rule("compile", compile_one, depfile="$out.d", deps="gcc", description="CXX $out")
    n.rule("link", "$cxx -shared -pthread $in -o $out $flags", description="LINK $out")
    _write_runtime(n, includes)
    written: set[str] = set()
    for library in libraries:
        _write_library(n, library, includes, written)
    if not path.exists() or path.read_text() != text.getvalue():
        path.write_text(text.getvalue())
    return path


def _write_runtime(n: Any, includes: str) -> None:
    flags = f"{COMMON} -fvisibility=hidden {includes}"
    if os.uname().machine == "x86_64":
        flags += " -mtls-dialect=gnu2"  # thread-local variables without a call
    objects = []
    for source in sorted(p.relative_to(ROOT) for p in (ROOT / "csrc/emulation").glob("*.cpp")):
        objects.append(str(BUILD / "runtime" / f"{source.stem}.o"))
        own = f"{flags} -O3" if source.stem in HOT else flags
        n.build(objects[-1], "compile", str(source), variables={"flags": own})
    portable = str(BUILD / "runtime/fiber_portable.o")
    n.build(portable, "compile", "csrc/emulation/fiber.cpp", variables={"flags": f"{flags} -DEMU_PORTABLE_FIBERS"})
    # Kernels and runtime may instantiate the same templates: -Bsymbolic keeps the runtime on its uninstrumented ones.
    link = {"flags": "-Wl,-Bsymbolic -ldl"}
    n.build(str(BUILD / RUNTIME), "link", objects, variables=link)
    others = [o for o in objects if not o.endswith("/fiber.o")]
    n.build(str(BUILD / "portable" / RUNTIME), "link", [*others, portable], variables=link)


def _write_library(n: Any, library: Library, includes: str, written: set[str]) -> None:
    for build, hooks in (("plain", ""), ("race", HOOKS)):
        objects = []
        for source in (*library.kernels, *library.host):
            flags = f"{COMMON} {includes} {library.flags} {hooks if source in library.kernels else ''}".rstrip()
            if library.module and source in library.host:
                flags += f" {_python_includes()} -fvisibility=hidden {library.host_flags}"
            own = f"{library.name}/" if library.flags else ""  # libraries with the same flags share objects
            objects.append(str(BUILD / build / f"{own}{source}.o"))
            if objects[-1] not in written:
                n.build(objects[-1], "compile", source, variables={"flags": flags})
                written.add(objects[-1])
        for portable in (False, True):
            out = library.path(build, portable)
            runtime = out.parents[1] / RUNTIME
            link = f"-L{runtime.parent} -lpykernels_emulation -Wl,-rpath,'$$ORIGIN/..'"
            n.build(str(out), "link", objects, implicit=str(runtime), variables={"flags": link})


def _python_includes() -> str:
    import sysconfig

    import pybind11

    return f"-isystem {shlex.quote(pybind11.get_include())} -isystem {shlex.quote(sysconfig.get_path('include'))}"


def build(
    *libraries: Library, builds: tuple[str, ...] = ("plain", "race"), portable: bool = False
) -> dict[tuple[str, str], Path]:
    """Compiles what changed. Returns the absolute path of each (library name, build).

    `portable` links with a runtime whose fibers use ucontext instead of assembly.
    """
    from ninja import BIN_DIR

    script = _write(list(libraries))
    out = {(library.name, b): ROOT / library.path(b, portable) for library in libraries for b in builds}
    targets = [str(path.relative_to(ROOT)) for path in out.values()]
    jobs = os.environ.get("PYKERNELS_JOBS") or str(len(os.sched_getaffinity(0)))
    command = [str(Path(BIN_DIR) / "ninja"), "-f", str(script.relative_to(ROOT)), "-j", jobs, *targets]
    with (ROOT / BUILD / "lock").open("w") as lock:  # one ninja at a time in a build folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        names = ", ".join(library.name for library in libraries)
        raise RuntimeError(f"building {names} for the emulation failed:\n{done.stdout[-8000:]}")
    if "warning:" in done.stdout:
        print(done.stdout, file=sys.stderr)
    return out
