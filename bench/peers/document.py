"""The result file: samples of one or several runs on one machine and one revision, and what is read off them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .engines import BY_NAME
from .spread import Round, Spread, ratios, spread

FORMAT = 1
Document = dict[str, Any]


class Mixed(ValueError):
    """Samples of two machines, models or revisions do not belong into one table."""


def new(machine: Mapping[str, Any], model: str, threads: int, revision: str | None) -> Document:
    """An empty document."""
    return {
        "format": FORMAT,
        "machine": dict(machine),
        "model": model,
        "threads": threads,
        "revision": revision,
        "slices": [],
        "engines": {},
        "jobs": {},
        "samples": [],
        "ops": [],
        "quality": {},
    }


def load_any(path: Path) -> Document:
    """A document as it is."""
    data: Document = json.loads(path.read_text())
    return data


def load(path: Path, machine: Mapping[str, Any], model: str, threads: int, revision: str | None) -> Document:
    """The document to add to. `Mixed` when it is of another machine, model, thread count or revision."""
    data = load_any(path)
    here = {"format": FORMAT, "machine": dict(machine), "model": model, "threads": threads, "revision": revision}
    for name, value in here.items():
        if data.get(name) != value:
            raise Mixed(f"{path} has {name} {data.get(name)!r}, this run {value!r}: start a new file")
    return data


def save(path: Path, data: Document) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)


# ---- reading --------------------------------------------------------------------------------------------------------
def of(data: Document, engine: str, job: str) -> list[dict[str, Any]]:
    return [s for s in data["samples"] if s["engine"] == engine and s["job"] == job]


def speeds(data: Document, engine: str, job: str) -> dict[Round, float]:
    """Tokens per second by round."""
    return {(s["slice"], s["round"]): s["tokens_per_s"] for s in of(data, engine, job)}


def speed(data: Document, engine: str, job: str) -> Spread | None:
    found = speeds(data, engine, job)
    return spread(list(found.values())) if found else None


def ratio(data: Document, ours: str, theirs: str, job: str) -> Spread | None:
    """How many times as fast `ours` is, round by round."""
    return ratios(speeds(data, ours, job), speeds(data, theirs, job))


def measured(data: Document) -> list[str]:
    """Engines with samples, in the table's order."""
    have = {s["engine"] for s in data["samples"]}
    return [name for name in BY_NAME if name in have]


def roof_share(data: Document, engine: str, job: str) -> Spread | None:
    """Share of the probe beside each sample: of the DRAM probe for decode of one sequence, of the int8 probe for prefill
    and batches.

    The work is what pykernels' contract says for its own KV format; for other engines the file's weights and a KV cache of
    two bytes, whatever they really read. Arithmetic counts matrices and attention alike.
    """
    own = of(data, engine, job)
    source = {
        (s["slice"], s["round"]): s for s in (own if engine.startswith("pykernels") else of(data, "pykernels", job))
    }
    bound = "dram" if data["jobs"][job]["phase"] == "decode" and len(data["jobs"][job]["contexts"]) == 1 else "int8"
    shares = []
    for sample in own:
        work = source.get((sample["slice"], sample["round"]), {})
        amount = work.get("bytes" if bound == "dram" else "flops")
        if amount is not None and bound in sample["probe"]:
            shares.append(amount / sample["seconds"] / sample["probe"][bound])
    return spread(shares) if shares else None


def linear_share(data: Document, job: str) -> Spread | None:
    """FLOP/s of the matrices of our prefill, each timed on its own, over the int8 probe."""
    rows = [s for s in of(data, "pykernels", job) if "linear" in s and "int8" in s["probe"]]
    shares = [s["linear"]["flops"] / s["linear"]["seconds"] / s["probe"]["int8"] for s in rows]
    return spread(shares) if shares else None


def overhead(data: Document, engine: str, job: str) -> Spread | None:
    """Share of our steps' time outside of kernels."""
    shares = [1 - s["kernel_share"] for s in of(data, engine, job) if "kernel_share" in s]
    return spread(shares) if shares else None


def noise(data: Document) -> dict[str, Spread]:
    """CPUs that others took beside the samples, and what the probes read."""
    found = {name: [s[name] for s in data["samples"]] for name in ("others", "stolen")}
    for name in ("dram", "int8"):
        found[name] = [s["probe"][name] for s in data["samples"] if name in s["probe"]]
    return {name: spread(values) for name, values in found.items() if values}
