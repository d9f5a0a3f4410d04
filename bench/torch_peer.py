"""What plain torch needs for the rows of `pykernels bench`: one expression per op, on the same inputs, by the same harness.

Where torch's op takes another layout it is made before the clock starts: keys and values of a decode are contiguous, not
gathered from pages, and a weight is row-major. An expression's result takes the place of the output that it is judged as,
so nothing is copied; `lse`, which torch does not return, is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from pykernels import native
from pykernels.reference.linear import FLOAT_FORMATS, unpack
from pykernels.roofline.ceilings import RoofError
from pykernels.testing.build import Maker
from pykernels.testing.compare import Mismatch

from .clocks import Call, CpuClock
from .harness import Case, measure
from .inputs import Args

NAME = "torch"
Evaluate = Callable[[], Args]  # results by the names of the contract's outputs


def _refuse(refused: bool, reason: str) -> None:
    if refused:
        raise NotImplementedError(reason)


# ---- the expressions ------------------------------------------------------------------------------------------------
def _only_masks_of_torch(args: Args) -> None:
    windowed = (args["window_left"], args["window_right"]) != (-1, -1)
    extra = args["softcap"] or args["alibi_slopes"] is not None or args["sinks"] is not None
    _refuse(bool(windowed or extra), "scaled_dot_product_attention has no window, softcap, ALiBi or sinks")


def _batched(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """[total, heads, width] of sequences of one length -> [batch, heads, tokens, width]."""
    lengths = starts.diff()
    _refuse(bool((lengths != lengths[0]).any()), "scaled_dot_product_attention takes sequences of one length")
    return x.unflatten(0, (len(lengths), -1)).transpose(1, 2)


def _prefill(args: Args) -> Evaluate:
    _only_masks_of_torch(args)
    q = _batched(args["q"], args["cu_seqlens_q"])
    k, v = (_batched(args[n], args["cu_seqlens_k"]) for n in ("k", "v"))
    causal, scale = args["causal"], args["softmax_scale"]
    _refuse(causal and q.shape[2] != k.shape[2], "is_causal aligns queries with the first keys, not with the last")

    def attend() -> Args:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        return {"out": out.transpose(1, 2).flatten(0, 1)}

    return attend


def _decode(args: Args) -> Evaluate:
    _only_masks_of_torch(args)
    lengths, q, scale = args["seqlens_k"], args["q"][:, :, None], args["softmax_scale"]
    kind = args["k_cache"].dtype
    _refuse(kind != q.dtype, f"scaled_dot_product_attention reads no {str(kind).removeprefix('torch.')} keys")
    _refuse(bool((lengths != lengths[0]).any()), "scaled_dot_product_attention takes sequences of one length")
    length = int(lengths[0])

    def contiguous(cache: torch.Tensor) -> torch.Tensor:  # [batch, kv heads, tokens, width]
        pages = args["block_table"][:, : -(-length // cache.shape[1])].long()
        return cache[pages].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()

    k, v = contiguous(args["k_cache"]), contiguous(args["v_cache"])
    return lambda: {"out": F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)[:, :, 0]}


def _rms_norm(args: Args) -> Evaluate:
    x, weight, residual, eps = (args[n] for n in ("x", "weight", "residual", "eps"))
    if residual is None:
        return lambda: {"out": F.rms_norm(x, weight.shape, weight, eps)}

    def add_and_norm() -> Args:
        total = x + residual
        out = F.rms_norm(total, weight.shape, weight, eps)
        return {"out": out} if args["residual_out"] is None else {"out": out, "residual_out": total}

    return add_and_norm


def _gated_activation(args: Args) -> Evaluate:
    gate, up = args["x"].chunk(2, dim=-1)
    if args["kind"] == "silu":
        return lambda: {"out": F.silu(gate) * up}
    return lambda: {"out": F.gelu(gate, approximate="tanh") * up}


def _row_major(args: Args, columns: int, rows: int, kind: torch.dtype) -> torch.Tensor:
    form = args["weight_format"]
    _refuse(form != "dense" and form not in FLOAT_FORMATS, f"torch takes no {form} weights")
    own = args["weight"].dtype if form == "dense" else FLOAT_FORMATS[form]
    _refuse(own != kind, "torch takes a weight of the type of its input or output alone")
    return unpack(args["weight"], form, args["layout"], rows, columns, kind).contiguous()


def _linear(args: Args) -> Evaluate:
    x, bias = args["x"], args["bias"]
    _refuse(args["residual"] is not None, "linear adds no residual")
    weight = _row_major(args, x.shape[-1], args["out"].shape[-1], x.dtype)
    return lambda: {"out": F.linear(x, weight, bias)}


def _embedding(args: Args) -> Evaluate:
    ids, out = args["ids"], args["out"]
    weight = _row_major(args, out.shape[-1], args["num_embeddings"], out.dtype)
    return lambda: {"out": F.embedding(ids, weight)}


def _sample(args: Args) -> Evaluate:
    logits, valid, temperature = args["logits"], args["valid"], args["temperature"]
    greedy = temperature is not None and bool((temperature == 0).all())
    _refuse(not greedy, "multinomial draws other random numbers: its ids cannot be compared")
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_mask", "logprob")
    _refuse(any(args[n] is not None for n in names), "argmax takes no penalties and returns no logprobs")
    return lambda: {"ids": logits.argmax(-1), "valid": valid.fill_(True)}


PAGES = "torch has no paged keys and values"
PEERS: dict[str, Callable[[Args], Evaluate] | str] = {  # the expression, or why there is none
    "paged_decode_attention": _decode,
    "merge_attention_states": "torch does not merge attention states",
    "prefill_attention": _prefill,
    "paged_prefill_attention": PAGES,
    "append_kv": PAGES,
    "rope_append_kv": PAGES,
    "gather_kv": PAGES,
    "copy_pages": PAGES,
    "swap_pages": PAGES,
    "sample": _sample,
    "verify_draft": "torch does not verify drafts",
    "philox_uniform": "torch's generator has other counters: its numbers cannot be compared",
    "linear": _linear,
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "rotary_embedding": "torch has no rotary embedding",
    "gated_activation": _gated_activation,
}


# ---- measured -------------------------------------------------------------------------------------------------------
class TorchClock(CpuClock):
    """Flushes with torch's team, which is then as awake as ours is when our kernels are timed."""

    def flush(self) -> None:
        if self._sweep is None:
            buffer = torch.ones(2 * self.cache_bytes() // 4)

            def sweep() -> None:
                buffer.mul_(1.0)

            self._sweep = sweep
        self._sweep()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes with `count` threads inside, and as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare(op_name: str, args: Args) -> Call:
    """A call whose results take the place of the outputs. NotImplementedError with the reason where torch has none."""
    build = PEERS[op_name]
    if isinstance(build, str):
        raise NotImplementedError(build)
    evaluate = build(args)

    def call() -> None:
        args.update(evaluate())

    return call


def _unasked(case: Case) -> Case:
    """The case without the output that torch's attention does not return."""

    def build(make: Maker) -> Args:
        args = case.build(make)
        return args | {"lse": None} if "lse" in args and not isinstance(PEERS[case.op], str) else args

    return replace(case, build=build)


def beside(case: Case, device: str, **how: Any) -> dict[str, Any]:
    """torch's time for a case, as it is saved; `median` is None with the `reason` where torch has no expression, or a
    result that the harness does not time. `how` goes to `harness.measure`."""
    threads = native.module().num_threads() if device == "cpu" else torch.get_num_threads()
    found: dict[str, Any] = {"name": NAME, "version": torch.__version__, "threads": threads}
    try:
        with torch_threads(threads):
            clock = TorchClock() if device == "cpu" else None
            measured = measure(_unasked(case), NAME, device=device, call=prepare, clock=clock, **how)
    except (NotImplementedError, Mismatch, RoofError) as error:
        what = f"{case.op}[{case.name}] on {NAME} "
        return {**found, "median": None, "reason": str(error).removeprefix(what)}
    timing = measured.timing
    q1, q3 = timing.quartiles
    times = {"median": timing.median, "q1": q1, "q3": q3, "data": timing.samples}
    return {**found, **times, "reason": "", "output_hash": measured.output_hash}
