"""Checks a large call by some of its rows: each is a small call of its own, which the reference computes in float64.

A request's result does not depend on its batch, and a row of causal prefill not on the rows after it, so that a few rows of
a few heads of the large call are the whole result of a small one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pykernels.contract import Op
from pykernels.testing.compare import Mismatch, Snapshot, judge

from .inputs import Args

ROWS = 24  # query rows of one small prefill


def verify(op: Op, args: Args, *, exact: bool, what: str) -> float:
    """Compares rows of a finished call, `args` with its outputs. Returns the largest error as a share of its budget.

    Not `exact` (a peer that draws other random numbers): ids must be legal. Raises `Mismatch` with the reasons.
    """
    if not exact and op.name == "sample":
        return _in_support(args, what)
    worst = 0.0
    for part in parts(op.name, args):
        verdicts = judge(op.name, Snapshot(part), part)
        reasons = [v.reason for v in verdicts if not v.ok]
        if reasons:
            raise Mismatch(f"{what} is wrong: {'; '.join(reasons)}")
        worst = max([worst, *(v.error / v.budget for v in verdicts if v.budget > 0)])
    return worst


def parts(op_name: str, args: Args) -> Iterator[Args]:
    """Small calls on the host whose outputs are rows of the large one's."""
    if op_name not in _PARTS:
        raise ValueError(f"no rows are known to check {op_name} by")
    for part in _PARTS[op_name](args):
        yield {n: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for n, v in part.items()}


def _prefill(args: Args) -> Iterator[Args]:
    """The first, some middle and the last rows of one sequence, each of the query heads of another kv head."""
    tokens, kv_heads = args["k"].shape[:2]
    group = args["q"].shape[1] // kv_heads
    for start, head in ((0, 0), (max(0, tokens // 2 - 7), kv_heads // 2), (max(0, tokens - ROWS), kv_heads - 1)):
        rows = slice(start, min(start + ROWS, tokens))
        heads = slice(head * group, (head + 1) * group)
        yield {
            **args,
            "q": args["q"][rows, heads],
            "k": args["k"][: rows.stop, head : head + 1],
            "v": args["v"][: rows.stop, head : head + 1],
            "cu_seqlens_q": torch.tensor([0, rows.stop - start], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, rows.stop], dtype=torch.int32),
            "max_seqlen_q": rows.stop - start,
            "max_seqlen_k": rows.stop,
            "out": args["out"][rows, heads],
            "lse": None,
        }


def _decode(args: Args) -> Iterator[Args]:
    """The first and the last sequence, each with the query heads of another kv head."""
    batch, (_, page_size, kv_heads, _) = args["q"].shape[0], args["k_cache"].shape
    group = args["q"].shape[1] // kv_heads
    for b, head in {0: kv_heads - 1, batch - 1: kv_heads // 2}.items():
        count = -(-int(args["seqlens_k"][b]) // page_size)
        pages = args["block_table"][b, :count].long()
        heads = slice(head * group, (head + 1) * group)
        stored = ("k_cache", "v_cache", "k_scale", "v_scale")
        yield {
            **args,
            "q": args["q"][b : b + 1, heads],
            **{n: None if args[n] is None else args[n][pages][:, :, head : head + 1] for n in stored},
            "block_table": torch.arange(count, dtype=torch.int32)[None],
            "seqlens_k": args["seqlens_k"][b : b + 1],
            "workspace": None,
            "out": args["out"][b : b + 1, heads],
            "lse": None,
        }


def _sample(args: Args) -> Iterator[Args]:
    batch = args["logits"].shape[0]
    for b in sorted({0, batch // 3, batch - 1}):
        rows = {n: v[b : b + 1] for n, v in args.items() if isinstance(v, torch.Tensor) and v.shape[:1] == (batch,)}
        yield {**args, **rows}


def _in_support(args: Args, what: str) -> float:
    """Ids exist, the most probable where the temperature is 0, and none is below the k-th largest logit."""
    logits, ids = args["logits"], args["ids"].long()
    legal = (ids >= 0) & (ids < logits.shape[1])
    chosen = logits.gather(1, ids.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    rank = (logits > chosen[:, None]).sum(1)
    limit = torch.where(args["top_k"] > 0, args["top_k"].long(), logits.shape[1])
    limit = torch.where(args["temperature"] == 0, 1, limit)
    wrong = ~legal | (rank >= limit)
    if bool(wrong.any()):
        raise Mismatch(
            f"{what} is wrong: {int(wrong.sum())} ids outside the support, first in row {int(wrong.int().argmax())}"
        )
    return 0.0


_PARTS = {"prefill_attention": _prefill, "paged_decode_attention": _decode, "sample": _sample}
