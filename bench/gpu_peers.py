"""What others offer for the ops of bench/gpu.py, on the same inputs: torch, flash-attn, FlashInfer.

A peer turns a call's arguments into a call of its own and a way to get at its result. What it needs in another layout is
made before the clock starts, and said in its note.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .harness import Call
from .inputs import Args

Deliver = Callable[[], Args]  # the results, by the names of the contract's outputs
Traits = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """One implementation. `exact`: its results are held to the reference; otherwise to the support of the distribution."""

    name: str
    op: str
    prepare: Callable[[Args], tuple[Call, Deliver]]
    module: str = "torch"
    refuses: Callable[[Traits], str] = lambda _: ""
    exact: bool = True
    compiles: bool = False  # for up to a minute before the first call: measured after all others
    note: str = ""

    def missing(self, traits: Traits) -> str:
        """Why it is not measured on a benchmark here; empty when it is."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return self.refuses(traits)


def kept(function: Callable[[], torch.Tensor], name: str, shape: torch.Size) -> tuple[Call, Deliver]:
    """A call that keeps its last result, which is delivered under `name` in the contract's shape."""
    last: list[torch.Tensor] = []

    def call() -> None:
        last[:] = [function()]

    return call, lambda: {name: last[0].reshape(shape)}


# ---- prefill -----------------------------------------------------------------------------------------------------------
def _sdpa(backend: str, args: Args) -> tuple[Call, Deliver]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (args[n].transpose(0, 1)[None] for n in ("q", "k", "v"))
    kind = getattr(SDPBackend, backend)

    def attend(k: torch.Tensor, v: torch.Tensor, gqa: bool) -> torch.Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=args["softmax_scale"], enable_gqa=gqa
            ).transpose(1, 2)

    try:
        attend(k, v, True)
    except RuntimeError:  # this backend has no grouped queries in this version
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return kept(lambda: attend(k, v, False), "out", args["out"].shape)
    return kept(lambda: attend(k, v, True), "out", args["out"].shape)


@functools.cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex_attention(args: Args) -> tuple[Call, Deliver]:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (args[n].transpose(0, 1)[None] for n in ("q", "k", "v"))
    tokens = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=str(q.device))
    flex = _flex()

    def attend() -> torch.Tensor:
        return flex(q, k, v, block_mask=mask, scale=args["softmax_scale"], enable_gqa=True).transpose(1, 2)

    return kept(attend, "out", args["out"].shape)


def _varlen(module: str, args: Args) -> tuple[Call, Deliver]:
    attend = importlib.import_module(module).flash_attn_varlen_func
    lengths = (args["cu_seqlens_q"], args["cu_seqlens_k"], args["max_seqlen_q"], args["max_seqlen_k"])

    def run() -> torch.Tensor:
        found = attend(args["q"], args["k"], args["v"], *lengths, softmax_scale=args["softmax_scale"], causal=True)
        return found[0] if isinstance(found, tuple) else found

    return kept(run, "out", args["out"].shape)


def _flashinfer_prefill(args: Args) -> tuple[Call, Deliver]:
    import flashinfer

    def run() -> torch.Tensor:
        return flashinfer.single_prefill_with_kv_cache(
            args["q"], args["k"], args["v"], causal=True, sm_scale=args["softmax_scale"]
        )

    return kept(run, "out", args["out"].shape)


# ---- decode ------------------------------------------------------------------------------------------------------------
def _contiguous(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[batch, kv heads, tokens, width] of sequences of one length."""
    pages = table[:, : -(-length // cache.shape[1])].long()
    return cache[pages].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()


def _sdpa_decode(args: Args) -> tuple[Call, Deliver]:
    length = int(args["seqlens_k"][0])
    k, v = (_contiguous(args[n], args["block_table"], length) for n in ("k_cache", "v_cache"))
    q = args["q"][:, :, None]

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=args["softmax_scale"], enable_gqa=True)[:, :, 0]

    return kept(attend, "out", args["out"].shape)


def _fa3_decode(args: Args) -> tuple[Call, Deliver]:
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    table = args["block_table"].clamp(min=0)

    def run() -> torch.Tensor:
        found = attend(
            args["q"][:, None],
            args["k_cache"],
            args["v_cache"],
            cache_seqlens=args["seqlens_k"],
            page_table=table,
            softmax_scale=args["softmax_scale"],
            causal=True,
        )
        return (found[0] if isinstance(found, tuple) else found)[:, 0]

    return kept(run, "out", args["out"].shape)


def _flashinfer_decode(args: Args) -> tuple[Call, Deliver]:
    import flashinfer

    q, page_size = args["q"], args["k_cache"].shape[1]
    lengths = args["seqlens_k"]
    counts = (lengths + page_size - 1) // page_size
    starts = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    indices = torch.cat([row[:n] for row, n in zip(args["block_table"], counts.tolist(), strict=True)])
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        starts,
        indices,
        (lengths - 1) % page_size + 1,
        q.shape[1],
        args["k_cache"].shape[2],
        q.shape[2],
        page_size,
        q_data_type=q.dtype,
        data_type=args["k_cache"].dtype,
        sm_scale=args["softmax_scale"],
    )
    return kept(lambda: wrapper.run(q, (args["k_cache"], args["v_cache"])), "out", args["out"].shape)


# ---- sampling ----------------------------------------------------------------------------------------------------------
def _draw(probabilities: torch.Tensor) -> torch.Tensor:
    """The exponential race: a draw without waiting for the device."""
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)


def _torch_sample(args: Args) -> tuple[Call, Deliver]:
    logits, shape = args["logits"], args["ids"].shape
    temperature, top_k, top_p = (float(args[n][0]) for n in ("temperature", "top_k", "top_p"))
    if temperature == 0:
        return kept(lambda: logits.argmax(-1), "ids", shape)
    if top_k <= 0 and top_p >= 1:
        return kept(lambda: _draw(torch.softmax(logits / temperature, -1)), "ids", shape)

    def run() -> torch.Tensor:
        values, order = torch.topk(logits, int(top_k), dim=-1)
        p = torch.softmax(values / temperature, -1)
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)
        return order.gather(-1, _draw(p)[:, None])[:, 0]

    return kept(run, "ids", shape)


def _flashinfer_sample(args: Args) -> tuple[Call, Deliver]:
    from flashinfer import sampling

    logits = args["logits"] / args["temperature"].clamp(min=1e-6)[:, None]
    top_k, top_p = int(args["top_k"][0]), float(args["top_p"][0])
    if top_k <= 0 and top_p >= 1:
        return kept(lambda: sampling.sampling_from_logits(logits), "ids", args["ids"].shape)
    return kept(
        lambda: sampling.top_k_top_p_sampling_from_logits(logits, top_k, top_p, filter_apply_order="joint"),
        "ids",
        args["ids"].shape,
    )


def _only_bfloat16(traits: Traits) -> str:
    return "" if traits["kv"] == "bfloat16" else "measured on bfloat16 keys and values alone"


def _only_8k(traits: Traits) -> str:
    return "" if traits["tokens"] == 8192 else "compiled for one length, 8k, which takes half a minute"


def _drawing(traits: Traits) -> str:
    return "greedy is torch's argmax" if traits["temperature"] == 0 else ""


def _fixed_pages(traits: Traits) -> str:
    return _only_bfloat16(traits) or "takes pages of 256 tokens, these have 16"


_REPEATED = "heads of k and v are repeated beforehand where it has no grouped queries"
PEERS = (
    Peer("sdpa-flash", "prefill_attention", functools.partial(_sdpa, "FLASH_ATTENTION"), note=_REPEATED),
    Peer("sdpa-cudnn", "prefill_attention", functools.partial(_sdpa, "CUDNN_ATTENTION"), note=_REPEATED),
    Peer("flex_attention", "prefill_attention", _flex_attention, refuses=_only_8k, compiles=True),
    Peer("flash-attn-2", "prefill_attention", functools.partial(_varlen, "flash_attn"), "flash_attn"),
    Peer(
        "flash-attn-3", "prefill_attention", functools.partial(_varlen, "flash_attn_interface"), "flash_attn_interface"
    ),
    Peer("flashinfer", "prefill_attention", _flashinfer_prefill, "flashinfer", compiles=True),
    Peer(
        "sdpa",
        "paged_decode_attention",
        _sdpa_decode,
        refuses=_only_bfloat16,
        note="keys and values are contiguous, not paged",
    ),
    Peer("flash-attn-2", "paged_decode_attention", _fa3_decode, "flash_attn", _fixed_pages),
    Peer("flash-attn-3", "paged_decode_attention", _fa3_decode, "flash_attn_interface", _only_bfloat16),
    Peer("flashinfer", "paged_decode_attention", _flashinfer_decode, "flashinfer", _only_bfloat16, compiles=True),
    Peer("torch", "sample", _torch_sample, exact=False, note="top-k first, so that only 50 are sorted"),
    Peer(
        "flashinfer",
        "sample",
        _flashinfer_sample,
        "flashinfer",
        _drawing,
        exact=False,
        compiles=True,
        note="temperature applied before",
    ),
)


def peers_of(op: str) -> list[Peer]:
    return [peer for peer in PEERS if peer.op == op]
