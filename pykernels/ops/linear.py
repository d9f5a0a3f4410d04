"""Linear layers over dense or packed weights, and rows of an embedding."""

from __future__ import annotations

import torch

from ..contract.linear import EMBEDDING, LINEAR
from ..library import call
from .packed_weight import PackedWeight, pack_weight

__all__ = ["PackedWeight", "embedding", "linear", "pack_weight"]


def _unpacked(weight: torch.Tensor | PackedWeight) -> tuple[torch.Tensor, str, str]:
    """What the op takes: bytes or matrix, format, layout."""
    if isinstance(weight, PackedWeight):
        return weight.data, weight.format, weight.layout
    return weight, "dense", "plain"


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    activations: str = "float",
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`y = x weight^T + bias + residual`.

    Args:
        x: `[..., in_features]`, float32, float16 or bfloat16; products are summed in float32.
        weight: `[out_features, in_features]` floats with any row stride, or a `PackedWeight` of that shape.
        bias: `[out_features]`, any float type.
        residual: `[..., out_features]`, any float type; may be `out` itself.
        activations: "float" multiplies with the weights' real values; "int8" rounds groups of 32 columns of x to 8 bits
            (scale = amax / 127) and multiplies codes in integers (packed weights, in_features a multiple of 32);
            "int16" does so with 16 bits, at twice the integer products.
        out: where to write, `[..., out_features]` of any float type; must not overlap x. x's dtype when allocated here.

    Returns:
        `out`. The bits of one row never depend on the other rows of x.

    Raises:
        ValueError: shape, dtype, device or stride; TypeError: not a tensor; NotImplementedError: no backend serves it.
    """
    data, weight_format, layout = _unpacked(weight)
    rows = weight.shape[0] if isinstance(weight, (torch.Tensor, PackedWeight)) and len(weight.shape) else 0
    lead = x.shape[:-1] if isinstance(x, torch.Tensor) else ()
    if out is None and isinstance(x, torch.Tensor):
        out = torch.empty((*lead, rows), dtype=x.dtype, device=x.device)
    call(
        LINEAR,
        backend,
        x=_matrix(x),
        weight=data,
        weight_format=weight_format,
        layout=layout,
        activations=activations,
        bias=bias,
        residual=_matrix(residual),
        out=_matrix_view(out),
    )
    return out


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    *,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Rows `ids` of an embedding matrix, widened.

    Args:
        ids: `[...]`, int32 or int64, each in `[0, num_embeddings)`.
        weight: `[num_embeddings, hidden]` floats, or a `PackedWeight` of that shape.
        out: where to write, `[..., hidden]` of any float type.
        dtype: of the output allocated here; the weight's own when dense, else float32.

    Returns:
        `out`.

    Raises:
        ValueError: shape, dtype, device, stride, or an id out of range (nothing is written); TypeError: not a tensor.
    """
    data, weight_format, layout = _unpacked(weight)
    if out is None and isinstance(ids, torch.Tensor):
        if dtype is None:
            dtype = data.dtype if weight_format == "dense" else torch.float32
        out = torch.empty((*ids.shape, weight.shape[-1]), dtype=dtype, device=ids.device)
    call(
        EMBEDDING,
        backend,
        ids=ids.reshape(-1) if isinstance(ids, torch.Tensor) else ids,
        weight=data,
        num_embeddings=weight.shape[0],
        weight_format=weight_format,
        layout=layout,
        out=_matrix_view(out),
    )
    return out


def _matrix(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.reshape(-1, t.shape[-1]) if isinstance(t, torch.Tensor) and t.dim() not in (0, 2) else t


def _matrix_view(t: torch.Tensor | None) -> torch.Tensor | None:
    """Like `_matrix`, but never a copy: what is written must reach the caller."""
    return t.view(-1, t.shape[-1]) if isinstance(t, torch.Tensor) and t.dim() not in (0, 2) else t
