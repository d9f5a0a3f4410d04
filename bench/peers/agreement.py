"""Whether an engine computes the model at all, before it is timed; and how close its logits are to float32's.

The teacher is transformers in float32 on the same file: its committed greedy ids, the gap between its two largest logits
at each, and its distributions (`tests/oracle`).
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .client import Worker, WorkerError
from .engines import SAME, Engine

ORACLE = Path(__file__).resolve().parents[2] / "tests" / "oracle"
STEPS = (0, 9, 18, 27, 36, 45, 54, 63)
NEW = 12
GAP = 0.4  # nats between float32's two largest logits: quantised activations flip closer ones, and only those
LEAST_SAME, LEAST_CONVERTED = 0.9, 1 / 3


class WrongOutput(RuntimeError):
    """The engine's tokens are not the model's: its times mean nothing."""


def load_oracle(folder: Path = ORACLE) -> ModuleType:
    """The committed teacher. FileNotFoundError outside of a checkout."""
    file = folder / "__init__.py"
    if not file.exists():
        raise FileNotFoundError(f"no teacher in {folder}: run in a checkout of the repository, or give --oracle")
    spec = importlib.util.spec_from_file_location("pykernels_bench_oracle", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass
class Agreement:
    """Teacher-forced: of `positions` next tokens `agreed` were float32's; `missed_gap` is the largest float32 gap at one
    that was not. Free-running: of `texts` greedy continuations of `NEW` + 1 tokens `identical` were float32's to the end, and
    `split_gap` is the largest gap at which another one left it. `batch_gap`: the same with all texts in one batch."""

    positions: int = 0
    agreed: int = 0
    missed_gap: float = 0.0
    texts: int = 0
    identical: int = 0
    split_gap: float = 0.0
    batch_gap: float | None = None

    @property
    def share(self) -> float:
        return self.agreed / self.positions

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def split_gap(ids: Sequence[int], teacher: Sequence[int], gaps: Sequence[float]) -> float:
    """The teacher's gap where a continuation leaves it, 0 when it does not. What comes later has another context."""
    return next((gap for a, b, gap in zip(ids, teacher, gaps, strict=False) if a != b), 0.0)


def compare_tokens(worker: Worker, oracle: ModuleType, cases: Sequence[Any]) -> Agreement:
    """Runs the engine over the committed prompts: every position where it gives logits, a few where it gives tokens."""
    found = Agreement()
    whole = worker.hello["logits"]
    if whole:
        logits = quality(worker, oracle, cases, "prefill")
        found.positions, found.agreed = int(logits["positions"]), round(logits["positions"] * logits["top1"])
        found.missed_gap = logits["missed_gap"]
    for case in cases:
        for step in STEPS[:1] if whole else STEPS:
            token = worker.ask("prefill", ids=case.prompt_ids + case.ids[:step])["token"]
            found.positions += 1
            found.agreed += token == case.ids[step]
            if token != case.ids[step]:
                found.missed_gap = max(found.missed_gap, case.gaps[step])
        ids = worker.ask("decode", name="check", prompts=[case.prompt_ids], new=NEW)["ids"][0]
        gap = split_gap(ids, case.ids, case.gaps)
        found.texts += 1
        found.identical += gap == 0.0
        found.split_gap = max(found.split_gap, gap)
    try:
        rows = worker.ask("decode", name="check", prompts=[c.prompt_ids for c in cases], new=NEW)["ids"]
    except WorkerError as error:
        if "only one sequence" not in str(error):
            raise
        return found
    found.batch_gap = max(split_gap(ids, c.ids, c.gaps) for ids, c in zip(rows, cases, strict=True))
    return found


def check(engine: Engine, worker: Worker, oracle: ModuleType, cases: Sequence[Any]) -> Agreement:
    """`WrongOutput` when the engine's tokens are not the model's.

    With the file's own weights every token must be float32's wherever float32 is sure (a gap above `GAP`). A conversion
    has other weights; what agrees less than another language model would is none, and the share of the others stands beside their speed.
    """
    found = compare_tokens(worker, oracle, cases)
    least = LEAST_SAME if engine.weights == SAME else LEAST_CONVERTED
    reasons = []
    if found.share < least:
        reasons.append(f"{100 * found.share:.0f} % of the next tokens are float32's, below {100 * least:.0f} %")
    if engine.weights == SAME:
        gaps = {
            "a next token": found.missed_gap,
            "a greedy text": found.split_gap,
            "a text in a batch": found.batch_gap or 0.0,
        }
        reasons += [
            f"{what} differs where float32 is sure (gap {gap:.2f} > {GAP:g})" for what, gap in gaps.items() if gap > GAP
        ]
    if reasons:
        raise WrongOutput(f"{engine.name} is not timed, its output is wrong: {'; '.join(reasons)}")
    return found


def quality(worker: Worker, oracle: ModuleType, cases: Sequence[Any], phase: str) -> dict[str, float]:
    """Teacher-forced over every committed position: mean KL to float32 (nats) with its standard error, share of equal
    likeliest tokens, and the largest float32 gap at a miss."""
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            path = str(Path(folder) / "logits.npy")
            worker.ask("logits", ids=case.teacher_ids, phase=phase, path=path)
            parts.append(oracle.compare(case.rows, np.load(path)))
    rows = sum(p.rows for p in parts)
    return {
        "positions": rows,
        "kl": sum(p.kl * p.rows for p in parts) / rows,
        "kl_error": float(np.sqrt(sum((p.standard_error * p.rows) ** 2 for p in parts))) / rows,
        "top1": 1 - sum(p.misses for p in parts) / rows,
        "missed_gap": max(p.largest_missed_gap for p in parts),
    }
