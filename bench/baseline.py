"""The committed baselines in bench/baselines: what is kept, what a machine is compared with, and the change of an update.

- `<processor>_<level>_<threads>threads.json`: times of the smoke rows on one machine, a file as the suite writes it. Only that
  machine is compared with it.
- `roof.json`: ISA level -> benchmark -> the least percentage of its roof.
- `instructions.json`: compiler -> benchmark -> instructions of one call, AVX2 build.

Nothing is written but by `pykernels baseline --update`, which shows the change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .gate import GateError, table_of

FOLDER = Path(__file__).parent / "baselines"
SAMPLES = 60  # kept of each benchmark
Figures = Mapping[str, float]


def load(path: Path) -> dict[str, Any]:
    """A table; an empty one where there is no file. GateError for a file that is none."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise GateError(f"{path}: no table of baselines ({error})") from error
    if not isinstance(found, dict):
        raise GateError(f"{path}: no table of baselines")
    return found


def section(path: Path, key: str) -> dict[str, Any]:
    """The figures of `key` (a compiler, an ISA level). GateError, with those that there are, when it has none."""
    found = load(path)
    if key not in found:
        raise GateError(
            f"{path.name} has nothing for {key}, but for {', '.join(sorted(found)) or 'nothing'}: "
            "not compared; pykernels baseline --update adds it"
        )
    return dict(found[key])


def changes(old: Figures, new: Figures, digits: int) -> list[str]:
    """A line for each figure that an update adds or changes."""
    lines = []
    for name, value in sorted(new.items()):
        before = old.get(name)
        if before is None:
            lines.append(f"{name}: {value:,.{digits}f} (new)")
        elif before != value:
            lines.append(f"{name}: {before:,.{digits}f} -> {value:,.{digits}f} ({100 * (value / before - 1):+.1f} %)")
    return lines


def write(path: Path, key: str, figures: Figures) -> None:
    """Merges figures into a section; a row a line, so that a change reads well in a diff."""
    found = load(path)
    found[key] = {**found.get(key, {}), **figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


# ---- times of one machine -------------------------------------------------------------------------------------------
def file_name(machine: Mapping[str, Any]) -> str:
    """`amd_epyc_avx512_2threads.json`."""
    words = re.sub(r"[^a-z0-9]+", "_", f"{machine['cpu']}".lower()).strip("_")
    return f"{words}_{machine['level']}_{machine['threads']}threads.json"


def of_machine(folder: Path, machine: Mapping[str, Any]) -> Path:
    """This machine's file. GateError when there is none, or when what it holds was measured on another."""
    path = folder / file_name(machine)
    known = sorted(p.name for p in folder.glob("*threads.json"))
    if not path.exists():
        raise GateError(
            f"no baseline of this machine, {path.name}: {folder.name} has {', '.join(known) or 'none'}; another machine's "
            "is not compared, and pykernels baseline times --update makes one"
        )
    keys = {e.get("machine_key") for e in table_of(load(path)).values()}
    if keys != {machine["key"]}:
        raise GateError(f"{path.name} is another machine's ({keys}, this one is {machine['key']}): nothing to compare")
    return path


def trimmed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A run of the suite with `SAMPLES` samples of each benchmark, evenly taken."""
    kept = []
    for each in document["benchmarks"]:
        data = each["stats"]["data"]
        step = max(1, len(data) // SAMPLES)
        some = [float(f"{s:.4g}") for s in data[::step][:SAMPLES]]
        kept.append({**each, "stats": {**each["stats"], "data": some}})
    return {"benchmarks": kept}


def medians(document: Mapping[str, Any]) -> dict[str, float]:
    """Benchmark -> microseconds."""
    return {b["fullname"]: 1e6 * b["stats"]["median"] for b in document.get("benchmarks", [])}
