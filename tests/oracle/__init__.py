"""The committed answers of another implementation, and how to compare with them.

`make_smollm2.py` writes the files; this module reads them and needs numpy alone.

Arrays of `smollm2_teacher.npz` (rows: every position of every prompt and its 64 greedy ids but the last, in order; p
is transformers' float32 distribution of the next token):

* `lengths` int32 [cases]: rows per case
* `top_ids` uint16, `top_logprobs` float32 [rows, 64]: the 64 likeliest tokens, likeliest first
* `log_tail_mass` float32 [rows]: log of what all others together have
* `tail_ids` uint16, `tail_logprobs` float32 [rows, 32]: draws from those others, with probability p / tail mass
* `gap` float32 [rows]: the distance of the two largest logits
* `logits` float32 [cases * 4, 256]: every 192nd logit at four of the greedy steps

Kullback-Leibler divergence. Summing the 64 known terms and one lump for the rest would be a lower bound: merging tokens
hides what differs within the lump. Here the lump is estimated without bias from the draws x. With r = q(x) / p(x),

    sum over the tail of p log(p / q)  =  P E[(r - 1) - log r] - (Q - P)        P, Q: the tail's mass under p and q

which holds because P E[r - 1] = Q - P, known exactly; what is left to sample, (r - 1) - log r >= 0, is of second order
in the difference, so 32 draws per row give a mean over hundreds of rows with an error of a few percent; it is reported.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Case:
    """One prompt. `rows` are those of the teacher arrays; row `len(prompt_ids) - 1 + s` predicts `ids[s]`."""

    name: str
    prompt: str
    prompt_ids: list[int]
    ids: list[int]  # 64 greedy ids
    gaps: list[float]  # between the two largest logits, at each of them
    rows: dict[str, np.ndarray]
    logit_steps: tuple[int, ...]
    logit_stride: int

    @property
    def teacher_ids(self) -> list[int]:
        """What to run through a model to get one row of logits per row of `rows`."""
        return self.prompt_ids + self.ids[:-1]

    def sampled(self, logits: np.ndarray) -> np.ndarray:
        """The part of logits [rows, vocab] that `rows["logits"]` has."""
        steps = [len(self.prompt_ids) - 1 + step for step in self.logit_steps]
        return logits[steps, :: self.logit_stride]


@dataclass(frozen=True)
class Divergence:
    """What a model's logits are against the teacher's; see the module for the estimate."""

    kl: float  # mean over the rows, in nats
    standard_error: float  # of that mean, from drawing the tail
    misses: int  # rows whose likeliest token is another
    largest_missed_gap: float  # 0 without misses
    rows: int


def load_cases(name: str = "smollm2") -> list[Case]:
    document = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    with np.load(HERE / f"{name}_teacher.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    ends = np.cumsum(arrays.pop("lengths"))
    logits = arrays.pop("logits").reshape(len(ends), -1, arrays_width(document))
    cases = []
    for i, case in enumerate(document["cases"]):
        span = slice(ends[i - 1] if i else 0, ends[i])
        rows = {key: array[span] for key, array in arrays.items()} | {"logits": logits[i]}
        cases.append(
            Case(
                name=case["name"],
                prompt=case["prompt"],
                prompt_ids=case["prompt_ids"],
                ids=case["ids"],
                gaps=case["gaps"],
                rows=rows,
                logit_steps=tuple(document["logit_steps"]),
                logit_stride=document["logit_stride"],
            )
        )
    return cases


def arrays_width(document: dict) -> int:
    """Logits kept per step."""
    return -(-document["vocab_size"] // document["logit_stride"])


def compare(rows: dict[str, np.ndarray], logits: np.ndarray) -> Divergence:
    """Judges logits [rows, vocab] against a case's rows (or a slice of them)."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logq = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    top_ids, tail_ids = rows["top_ids"].astype(np.int64), rows["tail_ids"].astype(np.int64)
    top_p = np.exp(rows["top_logprobs"].astype(np.float64))
    top_q = np.take_along_axis(logq, top_ids, -1)
    known = (top_p * (rows["top_logprobs"] - top_q)).sum(-1)
    log_ratio = np.take_along_axis(logq, tail_ids, -1) - rows["tail_logprobs"]
    draws = np.expm1(log_ratio) - log_ratio
    mass = np.exp(rows["log_tail_mass"].astype(np.float64))
    kl = known + mass * draws.mean(-1) - ((1 - np.exp(top_q).sum(-1)) - mass)
    variance = mass**2 * draws.var(-1, ddof=1) / draws.shape[-1]
    missed = rows["gap"][logits.argmax(-1) != top_ids[:, 0]]
    count = len(kl)
    error = float(np.sqrt(variance.sum()) / count)
    return Divergence(float(kl.mean()), error, len(missed), float(missed.max(initial=0.0)), count)
