"""Registers, spills and machine code of every CUDA kernel and architecture, against committed figures.

    cuda_figures.py            compare the objects of the last build with ci/cuda_figures.json
    cuda_figures.py --write    replace the figures

It fails on a spill or any local memory, on a word of the compiler that it waits for products or keeps registers where the source
says otherwise, on a main loop that has other products or copies than the algorithm (`expected`), on tensor-core instructions or
128-bit loads that have vanished, on registers or instructions (in all, or of the main loop) that grew by more than a tenth, on a
kernel that is missing from the table or whose row lacks a figure, and on a row whose kernel is gone. `ci/build_cuda.sh` runs it.
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
MARGIN = 1.1  # of registers and instructions; 4 registers and 64 instructions more are always free
Row = dict[str, Any]

# What is counted in the machine code, by the beginning of the instruction.
INSTRUCTIONS = {
    name: re.compile(pattern)
    for name, pattern in {
        "hmma": r"HMMA\.",
        "imma": r"IMMA\.",
        "hgmma": r"HGMMA\.",
        "async_copy_128": r"LDGSTS\.(?:\S*\.)?128\b",
        "narrow_copy": r"LDGSTS\.(?!(?:\S*\.)?128\b)",
        "tma": r"UTMALDG",
        "load_128": r"LDG\.(?:\S*\.)?128\b",
        "register_moves": r"USETMAXREG",
        "store_128": r"STG\.(?:\S*\.)?128\b",
        "local": r"(?:LDL|STL)\b",
    }.items()
}
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^\s;]*)(?:[^;]*?\b0x([0-9a-f]+))?[^;]*;")
INSTRUCTION_BYTES = 16
PRODUCTS = ("hmma", "imma", "hgmma")
COPIES_128 = ("async_copy_128", "tma", "load_128")
KEPT = ("hmma", "imma", "hgmma", "async_copy_128", "tma", "register_moves", "load_128", "store_128")  # may not vanish
# What ptxas says when it makes asynchronous products wait for each other (C7508 to C7519), or ignores a budget of registers.
LOST_ADVICE = r"\bC75\d\d\b|wgmma\S* .*serialized|setmaxnreg.*ignored|'setmaxnreg'"


def products(m: int, n: int, k: int) -> int:
    """mma.sync of 16 x 8 x 16 in a matrix product of a warp."""
    return m // 16 * (n // 8) * (k // 16)


def expected(label: str) -> Row | None:
    """What a tensor-core kernel's machine code has, from the shapes of its tiles; None for another kernel.

    `loop_products`, `loop_copies`: instructions of a turn of the main loop, in which a warp's copies are 16 bytes a lane.
    """
    name, _, arguments = label.partition("/")[2].rpartition("/")[0].rstrip(">").partition("<")
    values = [a.strip() for a in arguments.split(",")]
    if name == "decode_kernel":  # csrc/cuda/decode.cuh: 16 rows, 16 keys, stages unrolled
        dim, codes = int(values[1]), values[2] == "true"
        stages = 2 if dim == 256 else 3
        copies = 2 * 16 * (dim if codes else 2 * dim) // 16 // 32
        every = stages * (products(16, 16, dim) + products(16, dim, 16))
        return {"hmma": every, "loop_products": every, "loop_copies": stages * copies}
    if name == "linear_kernel":  # csrc/cuda/linear.cuh: 16 rows, 8 tokens; then one copy of tokens in a loop of its own
        weight_format = values[1].rpartition(")")[2]
        columns = 64 if weight_format == "0" else 128
        chunks = {"0": 8, "4": 8, "5": 8, "6": 6, "7": 6, "8": 10}[weight_format]  # of 16 bytes in a row
        every = products(16, 8, columns) * (2 if weight_format == "7" else 1)  # q4_1 adds up x, too
        return {"hmma": every, "loop_products": every, "loop_copies": -(-16 * chunks // 32) + 1}
    if name == "prefill":  # csrc/cuda/prefill.cuh
        dim, codes = int(values[1]), values[2] == "2"
        rows, keys = (16, 32) if dim == 256 else (32, 64)  # a warp's rows; of the keys it copies a quarter
        copies = 2 * keys // 4 * (dim if codes else 2 * dim) // 16 // 32
        every = products(rows, keys, dim) + products(rows, dim, keys)
        return {"hmma": every, "loop_products": every, "loop_copies": copies}
    if (
        name == "prefill_sm90"
    ):  # csrc/cuda/prefill_sm90.cuh: the first tile's scores and the last's output outside of the loop
        dim = int(values[1])
        return {
            "hgmma": 2 * (dim // 16 + 128 // 16),
            "tma": 3 * dim // 64,
            "register_moves": 2,
        }  # tma: queries, keys, values
    return None


def demangle(names: list[str]) -> list[str]:
    """`pk::cuda::(anonymous namespace)::rms_norm_kernel<8>(Row)` as `rms_norm_kernel<8>`."""
    done = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        re.sub(r"\([\w:]+\)(?=\w)", "", re.sub(r"pk::cuda::|\(anonymous namespace\)::|^void ", "", n)).partition("(")[0]
        for n in done  # the inner one first: types of template arguments may lie in a namespace
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
    codes: dict[tuple[str, str], list[tuple[str, str]]] = {}
    arch, code = "", []
    for line in sass.splitlines():
        if found := INSTRUCTION.match(line):
            code.append((found[1], found[2]))
        elif found := re.match(r"\s*arch = (\S+)", line):
            arch = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            code = codes.setdefault((found[1], arch), [])
    return {key: counts(code) for key, code in codes.items()}


def counts(code: list[tuple[str, str]]) -> Row:
    """Counts in a kernel's instructions, of which each is a name and the target where it is a branch, and in its main loop: the
    smallest of the loops that have the most products, and nothing where there are none."""
    loops = [
        (int(target, 16) // INSTRUCTION_BYTES, i + 1)
        for i, (name, target) in enumerate(code)
        if name.startswith("BRA") and target and int(target, 16) // INSTRUCTION_BYTES < i
    ]
    found = [
        (i, kind) for i, (name, _) in enumerate(code) for kind, pattern in INSTRUCTIONS.items() if pattern.match(name)
    ]
    row = dict.fromkeys(INSTRUCTIONS, 0)
    for _, kind in found:
        row[kind] += 1

    def within(loop: tuple[int, int], kinds: tuple[str, ...]) -> int:
        return sum(kind in kinds and loop[0] <= i < loop[1] for i, kind in found)

    loops = [loop for loop in loops if within(loop, PRODUCTS)]
    best = max(loops, key=lambda loop: (within(loop, PRODUCTS), loop[0] - loop[1]), default=(0, 0))
    return row | {
        "instructions": len(code),
        "loop_instructions": best[1] - best[0],
        "loop_products": within(best, PRODUCTS),
        "loop_copies": within(best, COPIES_128),
        "loop_narrow_copies": within(best, ("narrow_copy",)),
    }


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
    if row["spills"]:
        found.append(f"{row['spills']} bytes of spills")
    if row["stack"] or row["local"]:
        found.append(f"local memory: {row['stack']} bytes, {row['local']} instructions")
    shape = expected(label)
    for name, n in (shape or {}).items():
        if row[name] < n or (
            row[name] > n and name != "loop_copies"
        ):  # a loop may hold a copy of itself for whole tiles
            found.append(f"{name} is {row[name]}, its tiles make {n}")
    if row["hmma"] + row["imma"] + row["hgmma"] and shape is None:
        found.append("no word in `expected` on its products")
    if row["hmma"] and (not row["loop_copies"] or row["loop_narrow_copies"]):
        found.append(f"copies in the main loop: {row['loop_copies']} of 16 bytes, {row['loop_narrow_copies']} narrower")
    if known is None:
        found.append("no row in the table: run ci/build_cuda.sh --write")
    elif missing := sorted(row.keys() - known.keys()):
        found.append(f"its row in the table lacks {', '.join(missing)}: run ci/build_cuda.sh --write")
    else:
        found += [f"no {name} any more" for name in KEPT if known.get(name) and not row[name]]
        if row["registers"] > known["registers"] * MARGIN + 4:
            found.append(f"registers grew from {known['registers']} to {row['registers']}")
        for name in ("instructions", "loop_instructions"):
            if row[name] > known[name] * MARGIN + 64:
                found.append(f"{name} grew from {known[name]} to {row[name]}")
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
