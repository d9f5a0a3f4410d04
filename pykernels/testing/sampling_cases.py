"""Cases of sampling, draft verification and the random stream. Each row of a case has its own options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .attention_cases import BF16, F16, F32
from .build import Maker, cumulative

# One column per option, of different lengths: a row takes the next value of each, so combinations do not repeat soon.
TEMPERATURES = (1.0, 0.0, 0.7, 1.5, 2e-38, 0.3, 2.0, 1.0)
TOP_K = (0, 5, 50, 3, -1, 1, 1 << 30)
TOP_P = (1.0, 0.9, 0.5, 0.97, 0.95, 0.0, 1.0, 0.6, 0.3)
MIN_P = (0.0, 0.0, 0.05, 0.0, 0.2, 1.0)
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 123456789, 2**32, 2**31)
POSITIONS = (0, 1, 7, 2**31, 2**33 + 5, 511, 2**32 - 1, 3)


@dataclass(frozen=True)
class Sampling:
    """Rows of logits of standard deviation 3, with the options named in `use`."""

    batch: int = 8
    vocab: int = 1000
    dtype: torch.dtype = F32
    use: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p")
    index_dtype: torch.dtype = torch.int64
    # "coarse": many ties; "flat": at the top as well; "equal": all; "invalid": NaN, all -inf, +inf rows;
    # "huge": of the order of 1e5
    logits: str = "normal"
    logprobs: str = "raw"
    num_logprobs: int | None = 5  # None: no logprobs at all
    strides: str = "dense"


def row_options(make: Maker, batch: int, use: tuple[str, ...]) -> dict[str, Any]:
    """Temperature, filters and keys of each row; an option that is not in `use` is off in all rows."""

    def column(name: str, values: tuple[float, ...], off: float, dtype: torch.dtype) -> torch.Tensor:
        return make.tensor([values[i % len(values)] if name in use else off for i in range(batch)], dtype)

    return {
        "temperature": column("temperature", TEMPERATURES, 1.0, F32),
        "top_k": column("top_k", TOP_K, 0, torch.int32),
        "top_p": column("top_p", TOP_P, 1.0, F32),
        "min_p": column("min_p", MIN_P, 0.0, F32),
        "seeds": make.tensor([SEEDS[i % len(SEEDS)] for i in range(batch)], torch.int64),
        "positions": make.tensor([POSITIONS[(i + i // 8) % len(POSITIONS)] for i in range(batch)], torch.int64),
    }


def make_logits(spec: Sampling, make: Maker) -> torch.Tensor:
    x = make.normal(spec.batch, spec.vocab, std=3.0)
    if spec.logits in ("coarse", "flat"):
        x = x.round()
    if spec.logits == "flat":
        x = x.clamp(max=4.0)
    if spec.logits == "equal":
        x = torch.zeros_like(x)
    if spec.logits == "huge":
        x = x * (3e4 if spec.dtype != F16 else 5e3)
    if spec.logits == "invalid":
        x[0, 3], x[2, :], x[3, 4], x[5, :-1] = torch.nan, -torch.inf, torch.inf, -torch.inf
        x[6, 1], x[6, 5] = torch.inf, torch.inf
        x[7, ::2] = -torch.inf
    return x.to(spec.dtype)


def padded_ids(make: Maker, batch: int, width: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Token ids with repeats, rows of different length, the rest -1."""
    ids = make.integers(batch, width, low=0, high=min(vocab, 40), dtype=dtype)
    lengths = make.integers(batch, 1, low=0, high=width + 1)
    return torch.where(torch.arange(width, device=make.device) < lengths, ids, -1)


def sample(spec: Sampling, make: Maker) -> dict[str, Any]:
    """Arguments of `sample`."""
    batch, vocab, use = spec.batch, spec.vocab, spec.use
    args: dict[str, Any] = {
        "logits": make.placed(make_logits(spec, make), spec.strides),
        **row_options(make, batch, use),
    }
    args["repetition_penalty"] = make.uniform(batch, low=0.7, high=1.6) if "repetition" in use else None
    for name in ("presence", "frequency"):
        args[f"{name}_penalty"] = make.uniform(batch, low=-0.5, high=1.5) if name in use else None
    args["prompt_ids"] = padded_ids(make, batch, 30, vocab, spec.index_dtype) if "prompt" in use else None
    args["output_ids"] = padded_ids(make, batch, 17, vocab, spec.index_dtype) if "output" in use else None
    shape = (vocab,) if "shared" in use else (batch, vocab)
    args["logit_bias"] = make.normal(*shape, std=2.0) if "bias" in use else None
    args["allowed_mask"] = make.uniform(*shape) < 0.4 if "mask" in use else None
    if "mask" in use and spec.logits == "invalid":
        args["allowed_mask"][..., 3] = False  # where the NaN is
    if "forbid_all" in use:
        args["allowed_mask"][1] = False
    args["logprobs_mode"] = spec.logprobs
    args["ids"] = make.output(batch, dtype=torch.int64, strides="guarded")
    args["valid"] = make.output(batch, dtype=torch.bool, strides="guarded")
    args |= {"logprob": None, "top_ids": None, "top_logprobs": None}
    if spec.num_logprobs is not None:
        count = min(spec.num_logprobs, vocab)
        args["logprob"] = make.output(batch, dtype=F32, strides="guarded")
        args["top_ids"] = make.output(batch, count, dtype=torch.int64, strides="guarded")
        args["top_logprobs"] = make.output(batch, count, dtype=F32, strides="guarded")
    return args


@dataclass(frozen=True)
class Draft:
    """Drafts of different length; q is close to p, so that some tokens are accepted and some are not.

    "few": q is zero but for its four best tokens, and some drafts are among neither these nor the target's.
    """

    lengths: tuple[int, ...] = (3, 0, 5, 1, 4, 2, 7, 3)
    vocab: int = 200
    dtype: torch.dtype = F32
    one_hot: bool = False
    use: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p")
    index_dtype: torch.dtype = torch.int64
    logits: str = "normal"  # "invalid": one row of NaN, one of -inf
    drafts: str = "near"  # "few"
    strides: str = "dense"


def verify(spec: Draft, make: Maker) -> dict[str, Any]:
    """Arguments of `verify_draft`."""
    batch, total = len(spec.lengths), sum(spec.lengths)
    logits = make.normal(total + batch, spec.vocab, std=4.0)
    if spec.logits == "invalid":
        logits[1, 2], logits[6] = torch.nan, -torch.inf
    rows = [r for b in range(batch) for r in range(sum(spec.lengths[:b]) + b, sum(spec.lengths[: b + 1]) + b)]
    guess = torch.nan_to_num(logits[rows] + make.normal(total, spec.vocab, std=0.7), neginf=-30.0)
    q = torch.softmax(guess, dim=-1)
    drawn = torch.argmax(torch.log(q) + make.uniform(total, spec.vocab, low=1e-6).log().neg().log().neg(), dim=-1)
    likely = make.uniform(total) < 0.6
    draft_ids = torch.where(likely, logits[rows].nan_to_num(neginf=-30.0).argmax(-1), drawn)
    if spec.drafts == "few":
        q = torch.where(q >= q.topk(4).values[:, 3:], q, 0.0)
        q /= q.sum(-1, keepdim=True)
        draft_ids = torch.where(make.uniform(total) < 0.4, logits[rows].argmin(-1), draft_ids)
    return {
        "target_logits": make.placed(logits.to(spec.dtype), spec.strides),
        "draft_ids": draft_ids.to(spec.index_dtype),
        "draft_probs": None if spec.one_hot else make.placed(q, spec.strides),
        "cu_draft": make.tensor(cumulative(list(spec.lengths)), torch.int32),
        **row_options(make, batch, spec.use),
        "ids": make.output(batch, max(spec.lengths, default=0) + 1, dtype=torch.int64, strides="guarded"),
        "num_accepted": make.output(batch, dtype=torch.int32, strides="guarded"),
    }


def stream(batch: int, count: int, make: Maker) -> dict[str, Any]:
    """Arguments of `philox_uniform`."""
    options = row_options(make, batch, ())
    out = make.output(batch, count, dtype=F32, strides="gaps" if count % 2 else "guarded")
    return {"seeds": options["seeds"], "positions": options["positions"], "out": out}


PENALTIES = ("repetition", "presence", "frequency", "prompt", "output")
FILTERS = ("temperature", "top_k", "top_p", "min_p")


def sample_table() -> dict[str, Sampling]:
    base = Sampling()
    table = {
        "mixed": base,
        "plain": replace(base, use=()),
        "temperature": replace(base, use=("temperature",)),
        "top_k": replace(base, use=("top_k",)),
        "top_p": replace(base, use=("top_p",)),
        "min_p": replace(base, use=("min_p",)),
        "top_k_top_p": replace(base, use=("top_k", "top_p"), vocab=4099),
        "no_logprobs": replace(base, num_logprobs=None),
        "zero_logprobs": replace(base, num_logprobs=0),
        "processed": replace(base, logprobs="processed", num_logprobs=8),
        "processed_penalties": replace(base, logprobs="processed", use=(*FILTERS, *PENALTIES)),
        "raw_penalties": replace(base, use=(*FILTERS, *PENALTIES, "bias")),
        "repetition": replace(base, use=("repetition", "prompt", "output")),
        "repetition_prompt_only": replace(base, use=("repetition", "prompt")),
        "presence": replace(base, use=("presence", "output")),
        "frequency": replace(base, use=("frequency", "output"), index_dtype=torch.int32),
        "penalties_without_ids": replace(base, use=("repetition", "presence", "frequency")),
        "bias": replace(base, use=(*FILTERS, "bias")),
        "bias_shared": replace(base, use=("bias", "shared")),
        "mask": replace(base, use=(*FILTERS, "mask"), logprobs="processed"),
        "mask_shared": replace(base, use=("mask", "shared")),
        "forbid_all": replace(base, use=("mask", "forbid_all")),
        "everything": replace(base, use=(*FILTERS, *PENALTIES, "bias", "mask"), batch=17, vocab=777, strides="gaps"),
        "ties": replace(base, logits="coarse", num_logprobs=20),
        "ties_greedy_neighbours": replace(base, logits="coarse", use=("temperature",), vocab=129),
        "ties_processed": replace(base, logits="coarse", logprobs="processed", num_logprobs=20),
        # As many log-probabilities as tokens: all that is kept can be seen, not only what is drawn.
        "kept": replace(base, batch=18, vocab=64, logits="coarse", logprobs="processed", num_logprobs=64),
        "kept_flat": replace(base, batch=18, vocab=64, logits="flat", logprobs="processed", num_logprobs=64),
        # Half of 64 equal tokens reach a share of 0.5, and none more is kept.
        "kept_equal": replace(
            base, batch=9, vocab=64, logits="equal", logprobs="processed", num_logprobs=64, use=("top_p",)
        ),
        "kept_penalties": replace(
            base, batch=9, vocab=64, logprobs="processed", num_logprobs=64, use=(*FILTERS, *PENALTIES, "bias")
        ),
        "kept_unlikely": replace(
            base, batch=3, vocab=64, logprobs="processed", num_logprobs=64, use=("temperature", "top_k")
        ),
        "ties_between_blocks": replace(base, batch=3, vocab=9001, logits="flat", num_logprobs=2),
        "huge": replace(base, logits="huge"),
        "invalid": replace(base, logits="invalid"),
        "invalid_processed": replace(base, logits="invalid", logprobs="processed", use=()),
        "invalid_masked": replace(base, logits="invalid", use=("mask",)),
        "batch_1": replace(base, batch=1),
        "batch_33": replace(base, batch=33, vocab=127),
        "no_rows": replace(base, batch=0),
        "large": replace(base, batch=4, vocab=49152),
        "strides_odd": replace(base, strides="odd", vocab=999),
        "bfloat16": replace(base, dtype=BF16),
        "float16": replace(base, dtype=F16),
        "bfloat16_processed": replace(base, dtype=BF16, logprobs="processed", strides="gaps"),
    }
    return table | {f"vocab_{n}": replace(base, vocab=n) for n in (1, 2, 3, 7, 31, 127, 128, 129)}


SAMPLE_SMOKE = (
    "mixed",
    "everything",
    "kept_penalties",
    "ties",
    "invalid",
    "processed",
    "bfloat16",
    "vocab_1",
    "vocab_129",
)


def verify_table() -> dict[str, Draft]:
    base = Draft()
    table = {
        "mixed": base,
        "plain": replace(base, use=()),
        "temperature": replace(base, use=("temperature",)),
        "one_hot": replace(base, one_hot=True),
        "one_hot_plain": replace(base, one_hot=True, use=()),
        "few_drafted": replace(base, drafts="few"),
        "few_drafted_top_k": replace(base, drafts="few", use=("top_k",)),
        "no_drafts": Draft(lengths=(0, 0, 0)),
        "empty_batch": Draft(lengths=()),
        "one_request": Draft(lengths=(5,), vocab=1000),
        "many": Draft(lengths=(2, 0, 1) * 11, vocab=129),
        "int32_ids": replace(base, index_dtype=torch.int32),
        "bfloat16": replace(base, dtype=BF16, strides="gaps"),
        "float16": replace(base, dtype=F16, one_hot=True),
        "odd_strides": replace(base, strides="odd", vocab=131),
        "invalid": replace(base, logits="invalid", use=()),
        "invalid_one_hot": replace(base, logits="invalid", use=(), one_hot=True),
    }
    return table | {f"vocab_{n}": replace(base, vocab=n) for n in (1, 2, 7)}


VERIFY_SMOKE = ("mixed", "one_hot", "invalid", "bfloat16")
STREAMS = {"one": (1, 1), "odd": (5, 7), "quads": (8, 64), "long": (3, 4099), "no_rows": (0, 4)}
