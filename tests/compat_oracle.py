"""Attention in float64, written for the tests of the adapters alone, and the budget that results are held to."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from pykernels.testing.compare import largest, unit_in_last_place, within_budget

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn

# Options of a call, alone and together; "alibi" is made to measure by `options_for`.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 0)},
    "both sides": {"window_size": (3, 2)},
    "left only": {"window_size": (4, -1)},
    "right only": {"window_size": (-1, 1)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.31},
    "no scale at all": {"softmax_scale": 0.0, "window_size": (6, 1)},
    "negative scale": {"softmax_scale": -0.2, "causal": True},
    "alibi": {"alibi_slopes": "heads"},
    "alibi by sequence": {"alibi_slopes": "batch", "causal": True},
    "all": {
        "causal": True,
        "window_size": (9, -1),
        "softcap": 2.0,
        "softmax_scale": 0.4,
        "alibi_slopes": "batch",
    },
}


def normal(*shape: int, seed: int, std: float = 1.0, dtype: torch.dtype = F32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return int32(*[sum(lengths[:i]) for i in range(len(lengths) + 1)])


def options_for(name: str, batch: int, heads: int) -> dict[str, Any]:
    made = dict(OPTIONS[name])
    shape = {"heads": (heads,), "batch": (batch, heads)}.get(made.get("alibi_slopes", ""))
    if shape:
        made["alibi_slopes"] = torch.rand(*shape, generator=torch.Generator().manual_seed(5)) * 0.4 + 0.05
    return made


def attend(
    q: torch.Tensor,  # [seqlen_q, heads, dim]
    k: torch.Tensor,  # [seqlen_k, kv_heads, dim]
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,  # [heads]
    s_aux: torch.Tensor | None = None,
    attention_chunk: int = 0,
    unseen: float = torch.inf,
    narrow: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence -> out [seqlen_q, heads, dim], lse [heads, seqlen_q]; in float64, or with `narrow` as a kernel would."""
    wide = torch.float64 if narrow is None else F32
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide)
    lse = torch.full((q.shape[1], q.shape[0]), unseen, dtype=wide)
    for h in range(q.shape[1]):
        keys, values = k[:, h // group].to(wide), v[:, h // group].to(wide)
        for i in range(q.shape[0]):
            at = i + k.shape[0] - q.shape[0]
            first = 0 if window_size[0] < 0 else max(0, at - window_size[0])
            right = 0 if causal else window_size[1]
            past = k.shape[0] if right < 0 else min(k.shape[0], at + right + 1)
            if attention_chunk:
                first = max(first, at // attention_chunk * attention_chunk)
                past = min(past, (at // attention_chunk + 1) * attention_chunk)
            if past <= first:
                continue
            x = keys[first:past] @ q[i, h].to(wide) * (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
            if softcap > 0:
                x = softcap * torch.tanh(x / softcap)
            if alibi_slopes is not None:
                x = x - alibi_slopes[h].to(wide) * (torch.arange(first, past) - at).abs()
            lse[h, i] = torch.logsumexp(x, 0)
            total = lse[h, i] if s_aux is None else torch.logaddexp(lse[h, i], s_aux[h].to(wide))
            weights = torch.exp(x - total)
            out[i, h] = (weights if narrow is None else weights.to(narrow).to(wide)) @ values[first:past]
    return out, lse


Sequence = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend_each(
    sequences: list[Sequence], options: dict[str, Any], unseen: float, narrow: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences one after another -> out [total_q, heads, dim], lse [heads, total_q]."""
    slopes = options.get("alibi_slopes")
    outs, sums = [], []
    for b, (q, k, v) in enumerate(sequences):
        own = options | ({"alibi_slopes": slopes[b]} if slopes is not None and slopes.dim() == 2 else {})
        out, lse = attend(q, k, v, unseen=unseen, narrow=narrow, **own)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs), torch.cat(sums, 1)


def check(
    out: torch.Tensor,  # [total_q, heads, dim]
    lse: torch.Tensor | None,  # [heads, total_q]
    sequences: list[Sequence],
    options: dict[str, Any],
    unseen: float = torch.inf,
    extra: float = 0.0,
) -> None:
    """Twice the error of the same formula in the input's type, and the rounding of the result."""
    exact, narrow = (attend_each(sequences, options, unseen, n) for n in (None, out.dtype))
    for name, got, a, b in (("out", out, exact[0], narrow[0]), ("lse", lse, exact[1], narrow[1])):
        if got is not None:
            assert got.shape == a.shape, (name, got.shape, a.shape)
            finite = torch.isfinite(a)
            error = largest((b - a)[finite])
            rounding = unit_in_last_place(got.dtype, largest(a)) * (0.5 if name == "out" else 4) + extra
            verdict = within_budget(name, got, a, error, rounding)
            assert verdict.ok, verdict.reason


def keys_read(monkeypatch: pytest.MonkeyPatch, adapter: ModuleType) -> list[tuple[int, int]]:
    """Where keys and values lie that an adapter hands to the ops, call by call."""
    seen: list[tuple[int, int]] = []
    for name in ("prefill_attention", "paged_prefill_attention", "paged_decode_attention"):
        real = getattr(adapter, name)

        def spy(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            seen.append((args[1].data_ptr(), args[2].data_ptr()))
            return real(*args, **kwargs)

        monkeypatch.setattr(adapter, name, spy)
    return seen
