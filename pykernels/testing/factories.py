"""Every op's cases by name: complete arguments of the contract, outputs full of poison.

The "smoke" subset is a few small cases of each kind, for interpreters and emulators; "full" is everything.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..contract import OPS
from . import attention_cases, attention_tables, cache_cases, dense_cases, sampling_cases
from .attention_cases import BF16, F16, F32
from .build import Maker

Build = Callable[[Maker], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One call of one op. `args()` builds it afresh, the same values each time and on every device."""

    op: str
    name: str
    build: Build
    smoke: bool

    def args(self, device: str = "cpu") -> dict[str, Any]:
        """All arguments by name, in the order of the contract."""
        made = self.build(Maker(zlib.crc32(f"{self.op}/{self.name}".encode()), device))
        return {arg.name: made[arg.name] for arg in OPS[self.op].args}

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def narrowed(args: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Attention's arguments with what is float32 in `dtype`, for kernels that take 16 bits: same strides, same poison around."""
    found = dict(args)
    for name in ("q", "k", "v", "k_cache", "v_cache", "out"):
        value = found.get(name)
        if value is not None and value.dtype == F32:
            buffer = torch.full((value.untyped_storage().nbytes() // 4,), torch.nan, dtype=dtype, device=value.device)
            found[name] = buffer.as_strided(value.shape, value.stride(), value.storage_offset())
            if name != "out":
                found[name].copy_(value)
    return found


def _from(
    table: Mapping[str, Any], build: Callable[..., dict[str, Any]], smoke: Iterable[str]
) -> dict[str, tuple[Build, bool]]:
    quick = set(smoke)
    return {name: (partial(build, spec), name in quick) for name, spec in table.items()}


def _merges() -> dict[str, tuple[Build, bool]]:
    sizes = {"float32": (37, 3, 64, F32, "dense"), "one": (1, 64, 8, F32, "dense"), "none": (0, 2, 64, F32, "dense")}
    sizes |= {
        "bfloat16": (37, 4, 80, BF16, "gaps"),
        "float16": (129, 2, 128, F16, "outer"),
        "odd": (5, 9, 64, F32, "odd"),
    }

    def build(size: tuple[Any, ...], make: Maker) -> dict[str, Any]:
        return attention_cases.merge(make, *size)

    return _from(sizes, build, ("float32", "bfloat16"))


def _streams() -> dict[str, tuple[Build, bool]]:
    def build(size: tuple[int, int], make: Maker) -> dict[str, Any]:
        return sampling_cases.stream(*size, make)

    return _from(sampling_cases.STREAMS, build, ("odd", "quads"))


def _copies() -> dict[str, tuple[Build, bool]]:
    def build(spec: tuple[Any, int, bool], make: Maker) -> dict[str, Any]:
        return cache_cases.copy(*spec, make)

    return _from(cache_cases.copy_table(), build, ("halves", "int8_token", "bfloat16"))


_CASES: dict[str, Callable[[], dict[str, tuple[Build, bool]]]] = {
    "prefill_attention": lambda: _from(
        attention_tables.ragged_table(), attention_cases.prefill, (*attention_tables.SMOKE, "fused_projection")
    ),
    "paged_prefill_attention": lambda: _from(
        attention_tables.paged_prefill_table(), attention_cases.paged_prefill, attention_tables.paged_smoke()
    ),
    "paged_decode_attention": lambda: _from(
        attention_tables.decode_table(),
        attention_cases.decode,
        (*attention_tables.paged_smoke(), "heads_9_3", "split_100"),
    ),
    "merge_attention_states": _merges,
    "append_kv": lambda: _from(cache_cases.append_table(), cache_cases.append, cache_cases.APPEND_SMOKE),
    "rope_append_kv": lambda: _from(
        cache_cases.rope_append_table(), cache_cases.rope_append, (*cache_cases.APPEND_SMOKE, "partial", "interleaved")
    ),
    "gather_kv": lambda: _from(
        cache_cases.gather_table(),
        cache_cases.gather,
        ("bfloat16", "halves", "pages_of_3", "int8_token", "fp8_head_float16"),
    ),
    "copy_pages": _copies,
    "swap_pages": lambda: _from(cache_cases.swap_table(), cache_cases.swap, cache_cases.SWAP_SMOKE),
    "sample": lambda: _from(sampling_cases.sample_table(), sampling_cases.sample, sampling_cases.SAMPLE_SMOKE),
    "verify_draft": lambda: _from(sampling_cases.verify_table(), sampling_cases.verify, sampling_cases.VERIFY_SMOKE),
    "philox_uniform": _streams,
    "linear": lambda: _from(dense_cases.linear_table(), dense_cases.linear, dense_cases.LINEAR_SMOKE),
    "embedding": lambda: _from(dense_cases.embedding_table(), dense_cases.embedding, dense_cases.EMBEDDING_SMOKE),
    "rms_norm": lambda: _from(
        dense_cases.norm_table(), dense_cases.norm, ("width_129", "residual_kept", "bfloat16", "float16", "gaps")
    ),
    "rotary_embedding": lambda: _from(
        cache_cases.rotary_table(),
        cache_cases.rotary,
        ("half_split", "partial_interleaved", "heads_9_3", "rotary_bfloat16"),
    ),
    "gated_activation": lambda: _from(
        dense_cases.activation_table(), dense_cases.activation, ("silu_width_129", "gelu_tanh_bfloat16", "silu_odd")
    ),
}


def cases(op: str, subset: str = "full") -> Iterator[Case]:
    """The cases of one op; `subset` is "smoke" or "full"."""
    if subset not in ("smoke", "full"):
        raise ValueError(f'subset must be "smoke" or "full", got {subset!r}')
    for name, (build, smoke) in _CASES[op]().items():
        if smoke or subset == "full":
            yield Case(op, name, build, smoke)
