"""A whole Llama-style decoder, recomputed from scratch for every call: the oracle for models and generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .activation import gated_activation
from .attention import attend
from .linear import linear
from .norm import rms_norm
from .rope import rotate

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder. `interleaved` says how elements are paired for the rotation: (0, 1) or (0, head_dim / 2)."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    interleaved: bool = False
    window_left: int = -1

    def inv_freq(self) -> torch.Tensor:
        """theta^(-2 p / head_dim) for each pair p, float32 [head_dim / 2], computed as transformers does."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.int64).to(torch.float32) / self.head_dim
        return 1.0 / (self.rope_theta**exponent)


def project(x: torch.Tensor, weights: Weights, name: str, dtype: torch.dtype) -> torch.Tensor:
    """x W^T + b with the weights `name.weight` and, where the model has it, `name.bias`."""
    weight = weights[f"{name}.weight"]
    (out,) = linear(
        x=x,
        weight=weight,
        weight_format="dense",
        layout="plain",
        activations="float",
        bias=weights.get(f"{name}.bias"),
        residual=None,
        out_features=weight.shape[0],
        compute_dtype=dtype,
    )
    return out


def normalise(x: torch.Tensor, weights: Weights, name: str, config: Config, dtype: torch.dtype) -> torch.Tensor:
    weight = weights[f"{name}.weight"]
    out, _ = rms_norm(x=x.flatten(0, -2), weight=weight, eps=config.rms_norm_eps, residual=None, compute_dtype=dtype)
    return out.view(x.shape)


def attention_block(h: torch.Tensor, weights: Weights, prefix: str, config: Config, dtype: torch.dtype) -> torch.Tensor:
    """Self-attention of one sequence h [tokens, hidden], with q_norm and k_norm where the model has them."""
    tokens = h.shape[0]
    q, k, v = (project(h, weights, f"{prefix}.{n}_proj", dtype).view(tokens, -1, config.head_dim) for n in "qkv")
    if f"{prefix}.q_norm.weight" in weights:
        q, k = (normalise(x, weights, f"{prefix}.{n}_norm", config, dtype) for x, n in ((q, "q"), (k, "k")))
    positions, inv_freq = torch.arange(tokens), config.inv_freq()
    q, k = (rotate(x, positions, inv_freq, config.interleaved, 1.0, dtype) for x in (q, k))
    out, _ = attend(
        q,
        k,
        v,
        causal=True,
        softmax_scale=config.head_dim**-0.5,
        window_left=config.window_left,
        window_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        sinks=None,
        compute_dtype=dtype,
    )
    return project(out.flatten(1), weights, f"{prefix}.o_proj", dtype)


def mlp_block(h: torch.Tensor, weights: Weights, prefix: str, dtype: torch.dtype) -> torch.Tensor:
    """down(silu(gate h) * up h) for h [tokens, hidden]."""
    gate_up = torch.cat([project(h, weights, f"{prefix}.{n}_proj", dtype) for n in ("gate", "up")], dim=-1)
    (active,) = gated_activation(x=gate_up, kind="silu", compute_dtype=dtype)
    return project(active, weights, f"{prefix}.down_proj", dtype)


def forward(
    config: Config, weights: Weights, token_ids: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence token_ids [tokens].

    `weights` maps Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`, ...) to tensors, packed formats
    already widened; without `lm_head.weight` the head is the embedding.
    """
    h = weights["model.embed_tokens.weight"].to(dtype)[token_ids.long()]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        normed = normalise(h, weights, f"{prefix}.input_layernorm", config, dtype)
        h = h + attention_block(normed, weights, f"{prefix}.self_attn", config, dtype)
        normed = normalise(h, weights, f"{prefix}.post_attention_layernorm", config, dtype)
        h = h + mlp_block(normed, weights, f"{prefix}.mlp", dtype)
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    return project(normalise(h, weights, "model.norm", config, dtype), weights, head, dtype)


def generate_greedy(
    config: Config, weights: Weights, prompt: list[int], count: int, dtype: torch.dtype = torch.float64
) -> list[int]:
    """The `count` most likely continuations of `prompt`, one at a time, everything recomputed for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(forward(config, weights, torch.tensor(ids), dtype)[-1].argmax()))
    return ids[len(prompt) :]
