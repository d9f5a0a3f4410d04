"""The rules of `compile_matrix.py`: what is wrong with a row of figures, and with a table. Needs no compiler, and is tested without."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MARGIN = 1.1
GROWING = ("registers", "loop_length", "shared")
WIDE = {"sm80": "HMMA", "sm90": "HGMMA", "sm100": "UTCHMMA", "gfx942": "v_mfma"}  # the widest instruction of a target
WARP_WIDE = ("HMMA", "v_mfma")  # what serves tiles of 16 rows, where a target has a wider one too
NVIDIA = ("sm80", "sm90", "sm100")
Row = dict[str, Any]


@dataclass(frozen=True)
class Expectation:
    """What a kernel must hold: tensor cores at all, which copy ahead; on `wide` targets only the widest instruction; loop lengths."""

    tensor: bool = False
    wide: tuple[str, ...] = ()
    longest: Mapping[str, int] = field(default_factory=dict)


def multiply_adds(tensor_ops: Mapping[str, int], num_warps: int) -> int | None:
    """Multiply-adds that tensor instructions do for a block of so many warps; None where a name does not tell its shape."""
    total = 0
    for name, count in tensor_ops.items():
        if found := re.match(r"(?:HMMA\.|v_mfma_f32_)(16|32)x?(8|16|32)x?(8|16)(?!\d)", name):
            workers = num_warps
        elif found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
            workers = num_warps // 4
        else:
            return None
        total += count * workers * int(found[1]) * int(found[2]) * int(found[3])
    return total


def tensor_complaints(target: str, row: Row, wide: bool) -> Iterable[str]:
    """Rules of a kernel whose products must run on tensor cores."""
    ops = row["tensor_ops"]
    allowed = (WIDE[target],) if wide else (WIDE[target], *WARP_WIDE)
    if not any(name.startswith(allowed) for name in ops):
        yield f"no {' or '.join(dict.fromkeys(allowed))} in the main loop, but {ops or 'no tensor cores'}"
    elif any(not name.startswith(allowed) for name in ops):
        yield f"a product of the main loop fell back to {ops}"
    done = multiply_adds(ops, row["num_warps"])
    if done is not None and done < row["macs"]:
        yield f"tensor cores do {done} of the {row['macs']} multiply-adds of a turn"
    if sum(ops.values()) < row["steps"]:
        yield f"{sum(ops.values())} tensor instructions for {row['steps']} steps of the products"
    if target in NVIDIA and not row["loop"].get("async"):
        yield "no asynchronous copy in the main loop"


def complaints(label: str, target: str, row: Row, known: Row | None, expected: Expectation) -> list[str]:
    """What is wrong with one row, `known` being what the table holds for it."""
    found = []
    if row["spills"]:
        found.append(f"{row['spills']} spills")
    if expected.tensor:
        found += tensor_complaints(target, row, target in expected.wide)
    most = expected.longest.get(target)
    if most is not None and row["loop_length"] > most:
        found.append(f"a main loop of {row['loop_length']} instructions, at most {most} are allowed")
    if known is None:
        found.append("no row in the table of this Triton version: run ci/compile_matrix.py --write")
    else:
        for figure in GROWING:
            if row[figure] > known[figure] * MARGIN:
                found.append(f"{figure} grew from {known[figure]} to {row[figure]}")
    return [f"{label}: {text}" for text in found]


def audit(rows: Mapping[str, Row], known: Mapping[str, Row], expected: Mapping[str, Expectation]) -> list[str]:
    """What is wrong with the `rows` measured, by label `case/kernel/target`; `expected` names every row there must be."""
    found = [f"{label}: no case makes this row: remove it" for label in known if label not in expected]
    for label, expectation in expected.items():
        if label not in rows:
            found.append(f"{label}: the case launches no such kernel")
            continue
        found += complaints(label, label.rsplit("/", 1)[1], rows[label], known.get(label), expectation)
    return found


def stale(known: Mapping[str, Row], sources: Mapping[str, str]) -> list[str]:
    """Rows of the table that were made from another source than the `sources` by label (`triton_aot.digest`)."""
    return [
        f"{label}: made from other code (its figures are those of {known[label].get('source')}, the code is {source})"
        for label, source in sources.items()
        if label in known and known[label].get("source") != source
    ]


def dump(tables: Mapping[str, Mapping[str, Row]]) -> str:
    """Triton version -> label -> row as JSON with one row a line, so that a change reads well in a diff."""
    versions = []
    for version, rows in sorted(tables.items()):
        lines = (f"{json.dumps(label)}: {json.dumps(row, sort_keys=True)}" for label, row in sorted(rows.items()))
        versions.append(f"{json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(versions) + "\n}\n"
