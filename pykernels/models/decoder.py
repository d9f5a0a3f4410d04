"""The Llama decoder on our ops: packed weights, working buffers, and one forward pass for both phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kv_cache import PagedKVCache
from ..memory import Arena
from ..ops.activation import gated_activation
from ..ops.decode import paged_decode_attention
from ..ops.kv_cache import rope_append_kv
from ..ops.linear import PackedWeight, embedding, linear, pack_weight
from ..ops.norm import rms_norm
from ..ops.prefill import paged_prefill_attention
from ..ranges import span
from .config import ModelConfig, inv_freq
from .weights import LayerWeights, ModelWeights, WeightSource

# Backends whose matrices are packed for vector lanes, and which quantise activations; the others read plain weights.
LANE_BACKENDS = ("auto", "cpu", "reference")
WEIGHT_MODES = ("auto", "float32", "bfloat16", "int8", "q8_0", "q4_0", "q4_1")


@dataclass(frozen=True)
class Precision:
    """How a decoder computes.

    `weights`: "auto" keeps the file's format (blocks stay quantised in memory), otherwise the format to convert to.
    `activations`: "int8" quantises them per group of 32 in front of quantised weights, "float" never. In front of the
    projections to queries, keys and values, and of the head, int8 becomes int16: errors there reach scores and logits
    directly. Most of the divergence from float32 comes from them, and a ninth of the arithmetic.
    `attention`: dtype of queries and, unless the cache is quantised, of keys and values.
    """

    weights: str = "auto"
    activations: str = "int8"
    attention: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.weights not in WEIGHT_MODES:
            raise ValueError(f"weights must be one of {', '.join(WEIGHT_MODES)}, got {self.weights!r}")
        if self.activations not in ("int8", "float"):
            raise ValueError(f"activations must be int8 or float, got {self.activations!r}")


EXACT = Precision(weights="float32", activations="float", attention=torch.float32)


@dataclass
class StepInputs:
    """What one forward pass works on; the tensors may be views of longer-lived buffers.

    T tokens of B sequences. Decode: T == B and `cu_seqlens_q` is None.
    """

    ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    block_table: torch.Tensor  # int32 [B, max_pages_per_seq]
    seqlens_k: torch.Tensor  # int32 [B], with this step's tokens
    cu_seqlens_q: torch.Tensor | None = None  # int32 [B + 1]
    max_seqlen_q: int = 1


class Buffers:
    """Working memory of a forward pass over at most `tokens` tokens, `rows` of which want logits."""

    def __init__(self, config: ModelConfig, precision: Precision, tokens: int, rows: int) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

        def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        self.tokens, self.rows = tokens, rows
        self.x = floats(tokens, config.hidden_size)
        self.normed = floats(tokens, config.hidden_size)
        self.qkv = floats(tokens, (heads + 2 * kv_heads) * dim)
        self.q = floats(tokens, heads, dim, dtype=precision.attention)
        self.attention = floats(tokens, heads, dim, dtype=precision.attention)
        self.gate_up = floats(tokens, 2 * config.intermediate_size)
        self.hidden = floats(tokens, config.intermediate_size)
        self.last = floats(rows, config.hidden_size)
        self.logits = floats(rows, config.vocab_size)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))


@dataclass(frozen=True)
class PackedLayer:
    attn_norm: torch.Tensor
    qkv: PackedWeight
    o: PackedWeight
    ffn_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight

    def matrices(self) -> tuple[PackedWeight, ...]:
        """In execution order."""
        return self.qkv, self.o, self.gate_up, self.down

    def moved(self, arena: Arena) -> PackedLayer:
        """The same with its matrices in the arena."""
        qkv, o, gate_up, down = (_moved(w, arena) for w in self.matrices())
        return replace(self, qkv=qkv, o=o, gate_up=gate_up, down=down)


def _moved(weight: PackedWeight, arena: Arena) -> PackedWeight:
    return replace(weight, data=arena.hold(weight.data))


class Decoder:
    """Weights packed for the kernels, and `forward`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, precision: Precision, backend: str = "auto") -> None:
        self.config, self.precision, self.backend = config, precision, backend
        self.layout = "rows16" if backend in LANE_BACKENDS else "plain"
        self.inv_freq = inv_freq(config)
        self.window = (-1, -1) if config.sliding_window is None else (config.sliding_window - 1, 0)
        layers = [self._pack_layer(layer) for layer in weights.layers]
        self.final_norm = weights.final_norm.float32()
        embedding = self._pack([weights.embedding])
        head = embedding if weights.head is weights.embedding else self._pack([weights.head])
        matrices = [*(w for layer in layers for w in layer.matrices()), head]
        arena = Arena(w.nbytes for w in [*matrices, *([] if embedding is head else [embedding])])
        self.layers = []
        while layers:  # in execution order; each copy frees its original
            self.layers.append(layers.pop(0).moved(arena))
        self.head = _moved(head, arena)
        self.embedding = self.head if embedding is head else _moved(embedding, arena)

    def _pack_layer(self, layer: LayerWeights) -> PackedLayer:
        return PackedLayer(
            attn_norm=layer.attn_norm.float32(),
            qkv=self._pack([layer.q, layer.k, layer.v]),
            o=self._pack([layer.o]),
            ffn_norm=layer.ffn_norm.float32(),
            gate_up=self._pack([layer.gate, layer.up]),
            down=self._pack([layer.down]),
        )

    def _pack(self, sources: Sequence[WeightSource]) -> PackedWeight:
        """One matrix of the rows of several, so that one call reads them all."""
        wanted = self.precision.weights
        same = len({s.format for s in sources}) == 1
        if wanted == "auto" and same:
            parts = [PackedWeight.from_plain(s.raw(), s.format, (s.shape[0], s.shape[1])) for s in sources]
            return PackedWeight.concat(parts).to_layout(self.layout)
        rows = torch.cat([s.float32() for s in sources])
        return pack_weight(rows, "float32" if wanted == "auto" else wanted, layout=self.layout)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        seen = {id(w): w.nbytes for w in self.matrices()}
        norms = [self.final_norm, *(n for layer in self.layers for n in (layer.attn_norm, layer.ffn_norm))]
        return sum(seen.values()) + sum(n.nbytes for n in norms)

    def matrices(self) -> list[PackedWeight]:
        """Every matrix in the order in which a forward pass reads it."""
        layers = [w for layer in self.layers for w in layer.matrices()]
        return [self.embedding, *layers, self.head]

    def _linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        out: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        sensitive: bool = False,
    ) -> None:
        activations = self.precision.activations
        if weight.format not in ("q4_0", "q4_1", "q8_0", "int8"):
            activations = "float"
        elif activations == "int8" and sensitive:
            activations = "int16"
        linear(x, weight, residual=residual, activations=activations, out=out, backend=self.backend)

    def forward(self, step: StepInputs, cache: PagedKVCache, buffers: Buffers) -> torch.Tensor:
        """Logits after every token, float32 `[tokens, vocab]`, in `buffers.logits`. Keys and values go to the cache."""
        self.layers_forward(step, cache, buffers)
        return self.head_forward(buffers.x[: step.ids.shape[0]], buffers)

    def layers_forward(self, step: StepInputs, cache: PagedKVCache, buffers: Buffers) -> None:
        """Embedding and all layers: the residual stream of every token, `[tokens, hidden]`, in `buffers.x`."""
        tokens = step.ids.shape[0]
        x, normed = buffers.x[:tokens], buffers.normed[:tokens]
        embedding(step.ids, self.embedding, out=x, backend=self.backend)
        for index, layer in enumerate(self.layers):
            with span("layer", index):
                self._layer_forward(index, layer, (x, normed), step, cache, buffers)

    def _layer_forward(
        self,
        index: int,
        layer: PackedLayer,
        rows: tuple[torch.Tensor, torch.Tensor],
        step: StepInputs,
        cache: PagedKVCache,
        buffers: Buffers,
    ) -> None:
        """Adds one layer to the residual stream; `rows` are this step's of `buffers.x` and `buffers.normed`."""
        (x, normed), tokens = rows, step.ids.shape[0]
        rms_norm(x, layer.attn_norm, eps=self.config.rms_eps, out=normed, backend=self.backend)
        attended = self._attention(index, layer, normed, step, cache, buffers)
        self._linear(attended, layer.o, out=x, residual=x)
        rms_norm(x, layer.ffn_norm, eps=self.config.rms_eps, out=normed, backend=self.backend)
        gate_up, hidden = buffers.gate_up[:tokens], buffers.hidden[:tokens]
        self._linear(normed, layer.gate_up, out=gate_up)
        gated_activation(gate_up, kind="silu", out=hidden, backend=self.backend)
        self._linear(hidden, layer.down, out=x, residual=x)

    def head_forward(self, x: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        """Logits of rows of the residual stream, float32 `[rows, vocab]`, in `buffers.logits`."""
        rows = x.shape[0]
        normed, logits = buffers.last[:rows], buffers.logits[:rows]
        if rows:
            with span("head"):
                rms_norm(x, self.final_norm, eps=self.config.rms_eps, out=normed, backend=self.backend)
                self._linear(normed, self.head, out=logits, sensitive=True)
        return logits

    def _attention(
        self,
        index: int,
        layer: PackedLayer,
        normed: torch.Tensor,
        step: StepInputs,
        cache: PagedKVCache,
        buffers: Buffers,
    ) -> torch.Tensor:
        """Attention of one layer, `[tokens, num_heads * head_dim]`; this step's keys and values are appended first."""
        config, tokens = self.config, normed.shape[0]
        qkv = buffers.qkv[:tokens]
        self._linear(normed, layer.qkv, out=qkv, sensitive=True)
        heads = qkv.view(tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        rotated, out = buffers.q[:tokens], buffers.attention[:tokens]
        pages = cache.layer(index)
        rope_append_kv(
            q,
            k,
            v,
            step.positions,
            self.inv_freq,
            pages.k_cache,
            pages.v_cache,
            step.slot_mapping,
            interleaved=config.rope_interleaved,
            scale=config.rope_scale,
            k_scale=pages.k_scale,
            v_scale=pages.v_scale,
            q_out=rotated,
            backend=self.backend,
        )
        common: dict[str, Any] = {
            "block_table": step.block_table,
            "seqlens_k": step.seqlens_k,
            "k_scale": pages.k_scale,
            "v_scale": pages.v_scale,
            "window_size": self.window,
            "out": out,
            "backend": self.backend,
        }
        if step.cu_seqlens_q is None:
            paged_decode_attention(rotated, pages.k_cache, pages.v_cache, **common)
        else:
            paged_prefill_attention(
                rotated,
                pages.k_cache,
                pages.v_cache,
                cu_seqlens_q=step.cu_seqlens_q,
                max_seqlen_q=step.max_seqlen_q,
                max_seqlen_k=step.block_table.shape[1] * cache.page_size,
                **common,
            )
        return out.view(tokens, config.num_heads * config.head_dim)
