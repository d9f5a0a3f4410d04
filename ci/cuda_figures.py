"""Registers, spills and machine code of every CUDA kernel and architecture, against committed figures.

    cuda_figures.py            compare the objects of the last build with ci/cuda_figures.json
    cuda_figures.py --write    replace the figures

It fails on a spill or any local memory (but for SPILLS_ALLOWED, with its reason), on a word of the compiler that it waits for
products or keeps registers where the source says otherwise, on tensor-core instructions or 128-bit loads that have vanished, on registers that grew by more than a tenth, on a kernel that is missing from the table, and on a
row whose kernel is gone. `ci/build_cuda.sh` runs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".json")
MARGIN = 1.1
Row = dict[str, Any]

# What is counted in the machine code, by the beginning of the instruction.
INSTRUCTIONS = {
    "hmma": r"HMMA\.",
    "imma": r"IMMA\.",
    "hgmma": r"HGMMA\.",
    "async_copy_128": r"LDGSTS\.\S*128",
    "tma": r"UTMALDG",
    "load_128": r"LDG\.\S*128",
    "register_moves": r"USETMAXREG",
    "store_128": r"STG\.\S*128",
    "local": r"(?:LDL|STL)\b",
}
# Bytes that a kernel may keep in local memory, by the beginning of its label. Prefill of 256 columns: the output alone is half of
# the registers, and a few values that the main loop does not change find no room.
SPILLS_ALLOWED = {"prefill_bf16/prefill<__nv_bfloat16, 256": 64, "prefill_f16/prefill<__half, 256": 64}
KEPT = ("hmma", "imma", "hgmma", "async_copy_128", "tma", "register_moves", "load_128", "store_128")  # may not vanish
# What ptxas says when it makes asynchronous products wait for each other (C7508 to C7519), or ignores a budget of registers.
LOST_ADVICE = r"\bC75\d\d\b|wgmma\S* .*serialized|setmaxnreg.*ignored|'setmaxnreg'"


def demangle(names: list[str]) -> list[str]:
    """`pk::cuda::(anonymous namespace)::rms_norm_kernel<8>(Row)` as `rms_norm_kernel<8>`."""
    done = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        re.sub(r"\(int\)|\(bool\)|pk::cuda::|\(anonymous namespace\)::|^void ", "", n).partition("(")[0] for n in done
    ]


def compiler_figures(log: str) -> dict[tuple[str, str], Row]:
    """(mangled kernel, architecture) -> registers, spills, stack and static shared memory, from `-Xptxas -v`."""
    rows: dict[tuple[str, str], Row] = {}
    entry = None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            entry = rows.setdefault((found[1], found[2]), {})
        elif entry is not None and (
            found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line)
        ):
            entry |= {"stack": int(found[1]), "spills": int(found[2]) + int(found[3])}
        elif entry is not None and (found := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            entry |= {"registers": int(found[1]), "shared": int(shared[1]) if shared else 0}
            entry = None
    return rows


def lost_advice(log: str) -> list[str]:
    """The compiler's warnings that asynchronous products are serialised or register budgets ignored."""
    return [line.strip() for line in log.splitlines() if re.search(LOST_ADVICE, line)]


def machine_code(sass: str) -> dict[tuple[str, str], Row]:
    """(mangled kernel, architecture) -> counts of instructions, from `cuobjdump -sass`."""
    rows: dict[tuple[str, str], Row] = {}
    arch, row = "", None
    for line in sass.splitlines():
        if found := re.match(r"\s*arch = (\S+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            row = rows.setdefault((found[1], arch), dict.fromkeys(INSTRUCTIONS, 0) | {"instructions": 0})
        elif row is not None and (found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)", line)):
            row["instructions"] += 1
            for name, pattern in INSTRUCTIONS.items():
                row[name] += bool(re.match(pattern, found[1].rstrip(";")))
    return rows


def disassembler() -> str:
    """cuobjdump of the toolkit, or the one that Triton's wheel carries."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    for folder in triton.submodule_search_locations or () if triton else ():
        carried = Path(folder) / "backends/nvidia/bin/cuobjdump"
        if carried.exists():
            return str(carried)
    raise SystemExit("cuobjdump is neither on PATH nor in an installed triton")


def built() -> list[Path]:
    """The CUDA objects of the last build; the compiler's log lies beside each."""
    objects = sorted(ROOT.glob("build/native-*/_cuda/cuda/*.o"))
    if not objects:
        raise SystemExit("there are no CUDA objects: run ci/build_cuda.sh")
    return objects


def measure() -> Iterator[tuple[str, Row]]:
    """A label and a row for every kernel of the last build."""
    cuobjdump = disassembler()
    for path in built():
        compiled = compiler_figures(Path(f"{path}.log").read_text())
        sass = subprocess.run([cuobjdump, "-sass", str(path)], capture_output=True, text=True, check=True).stdout
        code = machine_code(sass)
        keys = sorted(compiled)
        for (kernel, arch), name in zip(keys, demangle([k for k, _ in keys]), strict=True):
            yield f"{path.name.partition('.')[0]}/{name}/{arch}", compiled[kernel, arch] | code[kernel, arch]


def complaints(label: str, row: Row, known: Row | None) -> list[str]:
    """What is wrong with one row."""
    found = []
    allowed = max((n for start, n in SPILLS_ALLOWED.items() if label.startswith(start)), default=0)
    if row["spills"] > allowed:
        found.append(f"{row['spills']} bytes of spills")
    if row["stack"] > allowed or (row["local"] and not allowed):
        found.append(f"local memory: {row['stack']} bytes, {row['local']} instructions")
    if known is None:
        found.append("no row in the table: run ci/build_cuda.sh --write")
    else:
        found += [f"no {name} any more" for name in KEPT if known.get(name) and not row[name]]
        if row["registers"] > known["registers"] * MARGIN + 4:
            found.append(f"registers grew from {known['registers']} to {row['registers']}")
    return [f"{label}: {text}" for text in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the committed figures")
    options = parser.parse_args()
    rows = dict(measure())
    known = rows if options.write else json.loads(TABLE.read_text())
    wrong = [text for label, row in rows.items() for text in complaints(label, row, known.get(label))]
    wrong += [f"{path.name}: {text}" for path in built() for text in lost_advice(Path(f"{path}.log").read_text())]
    archs = {label.rpartition("/")[2] for label in rows}
    gone = [label for label in known if label not in rows and label.rpartition("/")[2] in archs]
    wrong += [f"{label}: the kernel is gone: run ci/build_cuda.sh --write" for label in gone]
    if options.write:
        TABLE.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(f"{'kernel':60s} registers spills shared instructions  mma load128 store128")
    for label, row in sorted(rows.items()):
        tensor = row["hmma"] + row["imma"] + row["hgmma"]
        loads = row["load_128"] + row["async_copy_128"] + row["tma"]
        print(f"{label:60s} {row['registers']:9d} {row['spills']:6d} {row['shared']:6d} {row['instructions']:12d} {tensor:4d} "
              f"{loads:7d} {row['store_128']:8d}")  # fmt: skip
    print("\n".join(wrong) if wrong else f"CUDA build: {len(rows)} kernels, all as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
