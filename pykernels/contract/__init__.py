"""Every op of the package, declared once. `OPS` maps its name to its declaration."""

from __future__ import annotations

from .activation import GATED_ACTIVATION
from .check import allocate, bind_dims, check, check_types, device_of, dtype_name
from .decode import MERGE_ATTENTION_STATES, PAGED_DECODE_ATTENTION
from .handover import launch_error, native_arguments, view
from .kv_cache import APPEND_KV, COPY_PAGES, GATHER_KV, ROPE_APPEND_KV, SWAP_PAGES
from .linear import BLOCK, EMBEDDING, FORMATS, LAYOUTS, LINEAR, packed_bytes
from .norm import RMS_NORM
from .prefill import PAGED_PREFILL_ATTENTION, PREFILL_ATTENTION
from .rope import ROTARY_EMBEDDING
from .sampling import PHILOX_UNIFORM, SAMPLE, VERIFY_DRAFT
from .schema import Args, Cost, Dims, Op, Scalar, Tensor

FAMILIES = ("prefill", "decode", "kv_cache", "sampling", "linear", "norm", "rope", "activation")

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        PREFILL_ATTENTION,
        PAGED_PREFILL_ATTENTION,
        PAGED_DECODE_ATTENTION,
        MERGE_ATTENTION_STATES,
        APPEND_KV,
        ROPE_APPEND_KV,
        GATHER_KV,
        COPY_PAGES,
        SWAP_PAGES,
        SAMPLE,
        VERIFY_DRAFT,
        PHILOX_UNIFORM,
        LINEAR,
        EMBEDDING,
        RMS_NORM,
        ROTARY_EMBEDDING,
        GATED_ACTIVATION,
    )
}

__all__ = [
    "BLOCK",
    "FAMILIES",
    "FORMATS",
    "LAYOUTS",
    "OPS",
    "Args",
    "Cost",
    "Dims",
    "Op",
    "Scalar",
    "Tensor",
    "allocate",
    "bind_dims",
    "check",
    "check_types",
    "device_of",
    "dtype_name",
    "launch_error",
    "native_arguments",
    "packed_bytes",
    "view",
]
