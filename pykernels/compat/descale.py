"""Scales of float8 queries, keys and values as FA3 has them, `[batch, num_kv_heads]`: real = code x descale.

A factor that all sequences share (a stride of 0, or a batch of 1) becomes the ops' scale per kv head, exactly. Others are
folded into the queries and the output, which costs one rounding of each. Queries are widened to bfloat16 without loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import require, require_shape


@dataclass
class Descale:
    """What is left to do with a call's descales: factors of the rows, `[batch, num_kv_heads]`, and scales of the ops."""

    scales: dict[str, torch.Tensor] | None
    of_q: torch.Tensor | None
    of_out: torch.Tensor | None

    def queries(self, rows: torch.Tensor, sequence: torch.Tensor | None) -> torch.Tensor:
        return _times(_widened(rows), self.of_q, sequence)

    def output(self, rows: torch.Tensor, sequence: torch.Tensor | None) -> torch.Tensor:
        return _times(rows, self.of_out, sequence)

    @property
    def per_sequence(self) -> bool:
        return self.of_q is not None or self.of_out is not None


def descale_of(
    q: torch.Tensor,
    k: torch.Tensor,
    batch: int,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> Descale:
    """Refuses a descale of tensors that are not float8: it would mean nothing."""
    kv_heads, quantised = k.shape[-2], k.dtype.itemsize == 1
    for name, x in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        require_shape(name, x, batch, kv_heads)
        scaled = q if name == "q_descale" else k
        require(x is None or scaled.dtype.itemsize == 1, f"{name} needs float8 tensors, got {scaled.dtype}")
    if not quantised:
        return Descale(None, None, None)
    shared_qk = [x for x in (q_descale, k_descale) if x is not None and _shared(x)]
    own_qk = [x for x in (q_descale, k_descale) if x is not None and not _shared(x)]
    own_v = v_descale if v_descale is not None and not _shared(v_descale) else None
    one = torch.ones(kv_heads, dtype=torch.float32, device=k.device)
    scales = {
        "k_scale": _product([x[0].float() for x in shared_qk]) if shared_qk else one,
        "v_scale": one if v_descale is None or own_v is not None else v_descale[0].float(),
    }
    return Descale(scales, _product(own_qk) if own_qk else None, own_v)


def _shared(x: torch.Tensor) -> bool:
    return x.shape[0] == 1 or x.stride(0) == 0


def _product(factors: list[torch.Tensor]) -> torch.Tensor:
    return factors[0] if len(factors) == 1 else factors[0] * factors[1]


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x


def _times(rows: torch.Tensor, factor: torch.Tensor | None, sequence: torch.Tensor | None) -> torch.Tensor:
    """rows `[tokens, num_heads, dim]` times the factor of their sequence and kv head."""
    if factor is None or sequence is None:
        return rows
    per_row = factor[sequence].repeat_interleave(rows.shape[1] // factor.shape[1], 1)
    return (rows.float() * per_row.unsqueeze(-1)).to(rows.dtype)
