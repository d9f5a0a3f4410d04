"""The calls whose kernels `compile_matrix.py` compiles: the shapes of models that people run, and what their code must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compile_gate import NVIDIA, Expectation

from pykernels.triton import activation, decode, kv_cache, linear, norm, prefill, rope, sampling

BF16, F32, FP8, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
I32, I64 = torch.int32, torch.int64
EVERYWHERE = (*NVIDIA, "gfx942")
MASK = dict(
    causal=True, softmax_scale=0.09, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None
)  # fmt: skip


ANYTHING = Expectation()


@dataclass(frozen=True)
class Case:
    """A call of a launcher, the kernels of it that are measured, and on which targets. `expected` is of the first kernel."""

    call: Callable[[], None]
    kernels: tuple[str, ...]
    targets: tuple[str, ...] = EVERYWHERE
    quick: tuple[str, ...] = ()
    expected: Expectation = ANYTHING


def loop_work(kernel: str, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """(multiply-adds, steps of 16 along what the products sum over) of a turn of a kernel's main loop for one block."""
    a = arguments
    if kernel == "attention":
        return a["BLOCK_M"] * a["BLOCK_N"] * (a["D_PAD"] + a["DV_PAD"]), (a["D_PAD"] + a["BLOCK_N"]) // 16
    if kernel == "gemv_rows":
        return a["BLOCK_N"] * a["BLOCK_K"] * a["TOKENS"], a["BLOCK_K"] // 16
    if kernel == "gemv_blocks":
        return a["BLOCK_N"] * a["GROUPS"] * 32 * a["TOKENS"], a["GROUPS"] * 2
    return 0, 0


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _cache(dtype: torch.dtype, scales: str, dim: int, kv_heads: int = 8) -> dict[str, Any]:
    shape = (8, 16, kv_heads, dim)
    scale = {"": None, "tensor": torch.ones(()), "token": torch.ones(shape[:3])}[scales]
    return dict(k_cache=_empty(*shape, dtype=dtype), v_cache=_empty(*shape, dtype=dtype), k_scale=scale, v_scale=scale)


def _pages() -> dict[str, Any]:
    return dict(block_table=torch.zeros(4, 512, dtype=I32), seqlens_k=torch.zeros(4, dtype=I32))


def _ragged(dim: int, dtype: torch.dtype = BF16, **mask: Any) -> Callable[[], None]:
    q, k = _empty(256, 32, dim, dtype=dtype), _empty(256, 8, dim, dtype=dtype)
    lengths = torch.zeros(5, dtype=I32)
    return lambda: prefill.prefill_attention(
        q=q, k=k, v=k, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=128, max_seqlen_k=128, **{**MASK, **mask},
        out=torch.empty_like(q), lse=_empty(32, 256, dtype=F32),
    )  # fmt: skip


def _paged(
    dim: int, dtype: torch.dtype = BF16, scales: str = "", q_dtype: torch.dtype = BF16, **mask: Any
) -> Callable[[], None]:
    q = _empty(256, 32, dim, dtype=q_dtype)
    return lambda: prefill.paged_prefill_attention(
        q=q, **_cache(dtype, scales, dim), **_pages(), cu_seqlens_q=torch.zeros(5, dtype=I32), max_seqlen_q=128,
        max_seqlen_k=8192, **{**MASK, **mask}, out=torch.empty_like(q), lse=_empty(32, 256, dtype=F32),
    )  # fmt: skip


def _decode(
    dim: int, dtype: torch.dtype = BF16, scales: str = "", heads: int = 32, q_dtype: torch.dtype = BF16, **mask: Any
) -> Callable[[], None]:
    q = _empty(4, heads, dim, dtype=q_dtype)
    return lambda: decode.paged_decode_attention(
        q=q, **_cache(dtype, scales, dim), **_pages(), **{**MASK, **mask}, split_size=0, workspace=None,
        out=torch.empty_like(q), lse=_empty(heads, 4, dtype=F32),
    )  # fmt: skip


def _linear(weight_format: str, row_bytes: int) -> Callable[[], None]:
    dense = weight_format == "dense"
    weight = _empty(4096, 4096) if dense else _empty(4096 * row_bytes, dtype=torch.uint8)
    return lambda: linear.linear(
        x=_empty(4, 4096), weight=weight, weight_format=weight_format, layout="plain", activations="float", bias=None,
        residual=None, out=_empty(4, 4096),
    )  # fmt: skip


def _rotary() -> dict[str, Any]:
    rows = dict(q=_empty(64, 32, 128), k=_empty(64, 8, 128), positions=_empty(64, dtype=I64), q_out=_empty(64, 32, 128))
    return dict(rows, inv_freq=_empty(64, dtype=F32), interleaved=False, rope_scale=1.0)


def _options(batch: int) -> dict[str, Any]:
    floats = {n: _empty(batch, dtype=F32) for n in ("temperature", "top_p", "min_p")}
    return dict(
        floats, top_k=_empty(batch, dtype=I32), seeds=_empty(batch, dtype=I64), positions=_empty(batch, dtype=I64)
    )


def _sample(penalties: bool) -> Callable[[], None]:
    batch, vocab = 8, 128256
    ids = _empty(batch, 64, dtype=I64) if penalties else None
    penalty = _empty(batch, dtype=F32) if penalties else None
    return lambda: sampling.sample(
        logits=_empty(batch, vocab, dtype=F32), **_options(batch), repetition_penalty=penalty, presence_penalty=penalty,
        frequency_penalty=penalty, prompt_ids=ids, output_ids=ids, logit_bias=_empty(vocab, dtype=F32) if penalties else None,
        allowed_mask=_empty(vocab, dtype=torch.bool) if penalties else None, logprobs_mode="processed" if penalties else "raw",
        ids=_empty(batch, dtype=I64), valid=_empty(batch, dtype=torch.bool), logprob=_empty(batch, dtype=F32),
        top_ids=_empty(batch, 5, dtype=I64), top_logprobs=_empty(batch, 5, dtype=F32),
    )  # fmt: skip


def _verify() -> None:
    sampling.verify_draft(
        target_logits=_empty(40, 128256), draft_ids=_empty(32, dtype=I64), draft_probs=_empty(32, 128256, dtype=F32),
        cu_draft=torch.zeros(9, dtype=I32), **_options(8), ids=_empty(8, 5, dtype=I64), num_accepted=_empty(8, dtype=I32),
    )  # fmt: skip


ATTENTION = ("attention",)
HOPPER = ("sm90", "sm100")
AMPERE = ("sm80", "sm90")
TENSOR = Expectation(tensor=True)
EVERY_MASK = dict(window_left=4095, softcap=50.0, alibi_slopes=torch.empty(32), sinks=torch.empty(32))
WIDTHS = (64, 128, 256)
CODED = [
    (f"{name}-{scales}", dtype, scales)
    for dtype, name in ((FP8, "fp8"), (INT8, "int8"))
    for scales in ("tensor", "token")
]


def _wide(**longest: int) -> Expectation:
    """Both products on the widest instruction of Hopper and Blackwell; the lengths that a prototype of the kernel reached."""
    return Expectation(True, HOPPER, longest)


def _prefill_cases() -> dict[str, Case]:
    cases = {f"prefill-d{d}": Case(_ragged(d), ATTENTION, expected=_wide()) for d in WIDTHS}
    # 128 rows x 128 keys: twice 64 keys, for which 352 instructions are allowed below.
    cases["prefill-d128"] = Case(_ragged(128), ATTENTION, quick=AMPERE, expected=_wide(sm90=506))
    for d in WIDTHS:
        cases |= {
            f"prefill-d{d}-window": Case(
                _ragged(d, window_left=4095), ATTENTION, NVIDIA, expected=_wide(**({"sm90": 352} if d == 128 else {}))
            ),
            f"prefill-d{d}-every-mask": Case(_ragged(d, **EVERY_MASK), ATTENTION, AMPERE, expected=_wide()),
            f"prefill-d{d}-float32": Case(_ragged(d, F32), ATTENTION, AMPERE),
            f"paged-d{d}": Case(_paged(d), ATTENTION, EVERYWHERE if d == 128 else NVIDIA, expected=_wide()),
            f"paged-d{d}-every-mask": Case(_paged(d, **EVERY_MASK), ATTENTION, AMPERE, expected=_wide()),
        }
        for name, dtype, scales in CODED:
            targets = EVERYWHERE if d == 128 else HOPPER
            longest = {"sm90": 391} if (d, name) == (128, "fp8-tensor") else {}
            quick = tuple(longest)
            cases[f"paged-d{d}-{name}"] = Case(_paged(d, dtype, scales), ATTENTION, targets, quick, _wide(**longest))
    cases |= {
        "prefill-d96": Case(_ragged(96), ATTENTION, AMPERE, expected=_wide()),  # padded to 128: no descriptors
        "prefill-d128-float16": Case(_ragged(128, torch.float16), ATTENTION, AMPERE, expected=_wide()),
        "prefill-d128-full": Case(_ragged(128, causal=False), ATTENTION, AMPERE, expected=_wide()),
        "paged-d128-float16-fp8": Case(
            _paged(128, FP8, "tensor", torch.float16), ATTENTION, ("sm90",), expected=_wide()
        ),
        "paged-d128-float32": Case(_paged(128, F32, q_dtype=F32), ATTENTION, AMPERE),
    }
    return cases


def _decode_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for d in WIDTHS:
        cases |= {
            f"decode-d{d}": Case(_decode(d), ATTENTION, NVIDIA if d == 256 else EVERYWHERE, expected=TENSOR),
            f"decode-d{d}-every-mask": Case(_decode(d, **EVERY_MASK), ATTENTION, AMPERE, expected=TENSOR),
            f"decode-d{d}-float32": Case(_decode(d, F32, q_dtype=F32), ATTENTION, AMPERE),
        }
        for name, dtype, scales in CODED:
            targets = EVERYWHERE if d == 128 else HOPPER
            longest = {"sm90": 474} if (d, name) == (128, "fp8-tensor") else {}
            cases[f"decode-d{d}-{name}"] = Case(
                _decode(d, dtype, scales), ATTENTION, targets, tuple(longest), Expectation(True, HOPPER, longest)
            )
    kernels = ("attention", "merge_splits")
    cases["decode-d128"] = Case(_decode(128), kernels, quick=AMPERE, expected=TENSOR)
    cases["decode-d128-group2"] = Case(_decode(128, heads=16), ATTENTION, NVIDIA, expected=TENSOR)
    cases["decode-d128-group1"] = Case(_decode(128, heads=8), ATTENTION, ("sm90",), expected=TENSOR)
    return cases


CASES: dict[str, Case] = {
    **_prefill_cases(),
    **_decode_cases(),
    "merge-states": Case(lambda: decode.merge_attention_states(
        out_a=_empty(64, 32, 128), lse_a=_empty(32, 64, dtype=F32), out_b=_empty(64, 32, 128), lse_b=_empty(32, 64, dtype=F32),
        out=_empty(64, 32, 128), lse=_empty(32, 64, dtype=F32)), ("merge_states",), ("sm90",)),
    "norm": Case(lambda: norm.rms_norm(
        x=_empty(64, 4096), weight=_empty(4096), eps=1e-5, residual=_empty(64, 4096), out=_empty(64, 4096),
        residual_out=_empty(64, 4096)), ("rms_norm",), ("sm90", "gfx942")),
    "rope": Case(lambda: rope.rotary_embedding(**_rotary(), k_out=_empty(64, 8, 128)), ("rotary",), ("sm90", "gfx942")),
    "activation": Case(lambda: activation.gated_activation(x=_empty(64, 8192), kind="silu", out=_empty(64, 4096)),
                       ("gated_activation",), ("sm90", "gfx942")),
    "append-int8": Case(lambda: kv_cache.append_kv(
        k=_empty(64, 8, 128), v=_empty(64, 8, 128), slot_mapping=_empty(64, dtype=I64), **_cache(INT8, "token", 128)),
        ("append",), ("sm80", "sm90", "gfx942")),
    "rope-append-fp8": Case(lambda: kv_cache.rope_append_kv(
        **_rotary(), v=_empty(64, 8, 128), slot_mapping=_empty(64, dtype=I64), **_cache(FP8, "token", 128)),
        ("append",), ("sm80", "sm90", "gfx942")),
    "gather-fp8": Case(lambda: kv_cache.gather_kv(
        **_cache(FP8, "token", 128), **_pages(), k=_empty(256, 8, 128), v=_empty(256, 8, 128)), ("gather",), ("sm80", "sm90")),
    "sample": Case(_sample(False), ("scan", "finish", "top_logprobs"), ("sm90",), ("sm90",)),
    "sample-penalties": Case(_sample(True), ("count_tokens", "scan"), ("sm90",)),
    "verify": Case(_verify, ("prefixes", "verify"), ("sm90",)),
    **{f"linear-{name}": Case(_linear(name, size), (kernel,), AMPERE, expected=TENSOR) for name, size, kernel in (
        ("dense", 0, "gemv_rows"), ("int8", 4100, "gemv_rows"), ("fp8_e4m3", 4100, "gemv_rows"), ("q4_0", 128 * 18, "gemv_blocks"),
        ("q4_1", 128 * 20, "gemv_blocks"), ("q8_0", 128 * 34, "gemv_blocks"))},
}  # fmt: skip


def expectations(quick: bool = False) -> dict[str, Expectation]:
    """Every row that the table must have, `case/kernel/target`, and what it must hold."""
    return {
        f"{name}/{kernel}/{target}": case.expected if kernel == case.kernels[0] else ANYTHING
        for name, case in CASES.items()
        for target in (case.quick if quick else case.targets)
        for kernel in case.kernels
    }
