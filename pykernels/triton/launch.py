"""From a call of the contract to the arguments of the attention kernel: views, strides and constexpr flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from .common import LOG2E, TYPES, padded, target_of
from .configs import MAX_SPLITS, SPLIT_TOKENS, AttentionShape, Tile


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One attention call. k and v are [pages, page_size, kv heads, width]; without a block table pages are tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor  # [tokens, heads, head_dim_v], or [splits, tokens, heads, head_dim_v] parts
    lse: torch.Tensor | None  # [heads, tokens], or [splits, heads, tokens]
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    split_size: int = 0

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[2]

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            head_dim=self.q.shape[2],
            head_dim_v=self.v.shape[3],
            group=self.group,
            q_bytes=self.q.element_size(),
            kv_bytes=self.k.element_size(),
            paged=self.block_table is not None,
            masks=(self.window_left >= 0) + (self.softcap > 0) + (self.alibi_slopes is not None),
        )


def scale_strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    """(page, slot, head) strides of a scale: dynamic, per head, or one number."""
    if scale is None or scale.dim() == 0:
        return 0, 0, 0
    return (0, 0, scale.stride(0)) if scale.dim() == 1 else (scale.stride(0), scale.stride(1), scale.stride(2))


def _descriptor(x: torch.Tensor, block_n: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, _, heads, width = x.shape
    return TensorDescriptor(x, [rows, heads * width], [x.stride(0), 1], [block_n, width])


def attention_arguments(call: AttentionCall, tile: Tile) -> dict[str, Any]:
    """Keyword arguments of `attention.attention` for a call and a tile."""
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    head_dim, head_dim_v = q.shape[2], v.shape[3]
    split_strides = (0, 0) if out.dim() == 3 or lse is None else (out.stride(0), lse.stride(0))
    paged = call.block_table is not None
    bits = k.dtype == torch.float8_e4m3fn and not target_of(q).has_e4m3
    dynamic = call.k_scale is not None and call.k_scale.dim() == 3
    # 8-bit codes are exact in float16, which takes a quarter of the instructions of widening them to bfloat16.
    norm_q = k.element_size() == 1 and q.dtype == torch.bfloat16
    dot_type = tl.float16 if norm_q else TYPES[q.dtype]
    int8_ptx = k.dtype == torch.int8 and dot_type == tl.float16 and target_of(q).backend == "cuda"
    if bits:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    ks, vs = scale_strides(call.k_scale), scale_strides(call.v_scale)
    slot = 1 if paged else 0  # contiguous keys stand one per page
    pages = (k.stride(0), k.stride(slot), k.stride(2)), (v.stride(0), v.stride(slot), v.stride(2))
    boxes = (_descriptor(k, tile.block_n), _descriptor(v, tile.block_n)) if tile.tma else (None, None)
    scale = float(call.softmax_scale) * LOG2E.value
    scale_high = torch.tensor(scale, dtype=torch.float32).item()
    scale_low = scale - scale_high
    return dict(
        Q=q, K=k, V=v, KBoxes=boxes[0], VBoxes=boxes[1], Out=out, Lse=lse, KScale=call.k_scale, VScale=call.v_scale, Alibi=call.alibi_slopes, Sinks=call.sinks,
        BlockTable=call.block_table, CuQ=call.cu_seqlens_q, CuK=call.cu_seqlens_k, SeqK=call.seqlens_k,
        total_q=q.shape[0], num_seqs=call.batch, scale_high=scale_high, scale_low=scale_low, softcap=float(call.softcap),
        left=call.window_left, right=call.window_right, split_size=call.split_size,
        s_table=0 if call.block_table is None else call.block_table.stride(0),
        sq_row=q.stride(0), sq_head=q.stride(1), so_part=split_strides[0], so_row=out.stride(-3),
        so_head=out.stride(-2), sl_part=split_strides[1], sl_head=0 if lse is None else lse.stride(-2),
        sk_page=pages[0][0], sk_slot=pages[0][1], sk_head=pages[0][2],
        sv_page=pages[1][0], sv_slot=pages[1][1], sv_head=pages[1][2],
        sks_page=ks[0], sks_slot=ks[1], sks_head=ks[2], svs_page=vs[0], svs_slot=vs[1], svs_head=vs[2],
        sa_seq=call.alibi_slopes.stride(0) if call.alibi_slopes is not None and call.alibi_slopes.dim() == 2 else 0,
        D=head_dim, DV=head_dim_v, D_PAD=padded(head_dim), DV_PAD=padded(head_dim_v), GROUP=call.group,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PAGE=call.k.shape[1] if paged else 0,
        SAME=pages[0][:2] == pages[1][:2] and ks == vs, WIDE=call.k.shape[1] * max(pages[0][1], pages[1][1]) >= 2**31,
        TYPE=dot_type, NORM_Q=norm_q, E4M3_BITS=bits, INT8_PTX=int8_ptx, DYNAMIC=dynamic,
        SOFTCAP=call.softcap > 0, LEFT=call.window_left >= 0, RIGHT=call.window_right >= 0,
        SPLIT=out.dim() == 4, SPLIT_TOKENS=SPLIT_TOKENS, MAX_SPLITS=MAX_SPLITS,
    )  # fmt: skip
