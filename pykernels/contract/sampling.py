"""Sampling (penalties, temperature, min-p, top-k, top-p, draw) in one op; draft verification; the random stream."""

from __future__ import annotations

from .attention import tensor_bytes
from .schema import BOOL, F32, FLOATS, I32, I64, INDICES, Args, Cost, Dims, Op, Rule, Scalar, Tensor

_ROW_OPTIONS = (
    Tensor("temperature", "batch", F32),
    Tensor("top_k", "batch", I32),
    Tensor("top_p", "batch", F32),
    Tensor("min_p", "batch", F32),
    Tensor("seeds", "batch", I64),
    Tensor("positions", "batch", I64),
)


def _sample_cost(dims: Dims, args: Args) -> Cost:
    names = ("logits", "logit_bias", "allowed_mask", "prompt_ids", "output_ids", "ids", "top_ids", "top_logprobs")
    return Cost(4.0 * dims["batch"] * dims["vocab"], tensor_bytes(args, names))


def _together(names: tuple[str, ...]) -> Rule:
    def holds(_: Dims, args: Args) -> bool:
        return len({args[n] is None for n in names}) == 1

    return Rule(holds, " and ".join(names) + " must be given together")


SAMPLE = Op(
    name="sample",
    family="sampling",
    args=(
        Tensor("logits", "batch vocab", FLOATS),
        *_ROW_OPTIONS,
        Tensor("repetition_penalty", "batch", F32, optional=True),
        Tensor("presence_penalty", "batch", F32, optional=True),
        Tensor("frequency_penalty", "batch", F32, optional=True),
        Tensor("prompt_ids", "batch max_prompt", INDICES, optional=True),  # padded with -1
        Tensor("output_ids", "batch max_output", INDICES, optional=True),  # padded with -1
        Tensor("logit_bias", "vocab | batch vocab", F32, optional=True),
        Tensor("allowed_mask", "vocab | batch vocab", BOOL, optional=True),
        Scalar("logprobs_mode", str, choices=("raw", "processed")),
        Tensor("ids", "batch", I64, role="out"),
        Tensor("valid", "batch", BOOL, role="out"),
        Tensor("logprob", "batch", F32, role="out", optional=True, allocate=False),
        Tensor("top_ids", "batch num_logprobs", I64, role="out", optional=True, allocate=False),
        Tensor("top_logprobs", "batch num_logprobs", F32, role="out", optional=True, allocate=False),
    ),
    rules=(
        _together(("top_ids", "top_logprobs")),
        Rule(
            lambda d, a: a["top_ids"] is None or (a["logprob"] is not None and d["num_logprobs"] <= d["vocab"]),
            "top_ids needs logprob and at most vocab ({vocab}) entries a row",
        ),
        Rule(lambda d, a: d["vocab"] > 0, "vocab must be at least 1, got {vocab}"),
    ),
    cost=_sample_cost,
)


def _verify_cost(dims: Dims, args: Args) -> Cost:
    names = ("target_logits", "draft_probs", "draft_ids", "ids")
    return Cost(8.0 * dims["target_rows"] * dims["vocab"], tensor_bytes(args, names))


VERIFY_DRAFT = Op(
    name="verify_draft",
    family="sampling",
    args=(
        Tensor("target_logits", "target_rows vocab", FLOATS),  # request b: rows cu_draft[b] + b to cu_draft[b + 1] + b
        Tensor("draft_ids", "total_draft", INDICES),
        Tensor("draft_probs", "total_draft vocab", F32, optional=True),  # None: one-hot drafts
        Tensor("cu_draft", "batch+1", I32),
        *_ROW_OPTIONS,  # positions[b] is the position of the request's first target row
        Tensor("ids", "batch max_tokens", I64, role="out"),  # accepted tokens, then one more; -1 after
        Tensor("num_accepted", "batch", I32, role="out"),
    ),
    rules=(
        Rule(
            lambda d, a: d["target_rows"] == d["total_draft"] + d["batch"],
            "target_logits must have total_draft + batch rows ({total_draft} + {batch}), got {target_rows}",
        ),
    ),
    cost=_verify_cost,
)

PHILOX_UNIFORM = Op(
    name="philox_uniform",
    family="sampling",
    args=(
        Tensor("seeds", "batch", I64),
        Tensor("positions", "batch", I64),
        Tensor("out", "batch count", F32, role="out"),
    ),
    cost=lambda dims, args: Cost(0.0, tensor_bytes(args, ("seeds", "positions", "out"))),
)
