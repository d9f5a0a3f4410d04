"""pykernels: kernels for the two phases of LLM inference, and the bench that proves how close each is to the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kv_cache import PagedKVCache
from .ops.activation import gated_activation
from .ops.decode import merge_attention_states, paged_decode_attention
from .ops.kv_cache import append_kv, copy_pages, gather_kv, rope_append_kv, swap_pages
from .ops.linear import PackedWeight, embedding, linear, pack_weight
from .ops.norm import rms_norm
from .ops.prefill import paged_prefill_attention, prefill_attention
from .ops.rope import rotary_embedding
from .ops.sampling import Sampled, philox_uniform, sample, verify_draft
from .registry import backends

if TYPE_CHECKING:
    from .generator import Generator, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Generator",
    "PackedWeight",
    "PagedKVCache",
    "Sampled",
    "SamplingParams",
    "append_kv",
    "backends",
    "copy_pages",
    "embedding",
    "gated_activation",
    "gather_kv",
    "linear",
    "merge_attention_states",
    "pack_weight",
    "paged_decode_attention",
    "paged_prefill_attention",
    "philox_uniform",
    "prefill_attention",
    "rms_norm",
    "rope_append_kv",
    "rotary_embedding",
    "sample",
    "swap_pages",
    "verify_draft",
]


def __getattr__(name: str) -> Any:
    if name in ("Generator", "SamplingParams"):  # they need tokenizers and templates; the ops need neither
        from . import generator

        return getattr(generator, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
