"""RMSNorm, RoPE and gated MLP of a transformers model on our ops: `use_ops(model)`, beside `attn_implementation`.

A module is recognised by what it computes: each kind is run once, and replaced only where our op gives the same. What is
left as it was is told with the reason. Parameters stay where they are; a saved model does not change.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch

from ..ops.activation import gated_activation
from ..ops.norm import rms_norm
from ..ops.rope import rotary_embedding

APPLY = "apply_rotary_pos_emb"  # what every family calls its rotation of q and k
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


class Used(NamedTuple):
    """What `use_ops` did: names of the modules that run on our ops, by op; and of those left alone, with the reason."""

    rms_norm: list[str]
    gated_activation: list[str]
    rotary_embedding: list[str]
    left: dict[str, str]


class Turn(NamedTuple):
    """Stands in for the cosines of a forward pass: the angles are made where they are used."""

    positions: torch.Tensor  # [batch * tokens]
    inv_freq: torch.Tensor  # [rotary_pairs] float32
    scale: float
    interleaved: bool


def use_ops(model: torch.nn.Module) -> Used:
    """Replaces, in place, the forward of every RMSNorm, gated MLP and rotary embedding that our ops can compute.

    For RoPE the family's `apply_rotary_pos_emb` is replaced too, by one that turns to ours for the models given here and
    does for all others what it did. Inference only: call the model under `torch.no_grad()`.
    """
    used = Used([], [], [], {})
    kinds: dict[tuple[Any, ...], Any] = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            kind = type(module).__name__
            if not kind.endswith(("RMSNorm", "MLP", "RotaryEmbedding")):
                continue
            if "forward" in vars(module):
                used.left[name] = "its forward has been replaced before"
            elif kind.endswith("RMSNorm"):
                _use_norm(name, module, used, kinds)
            elif kind.endswith("MLP"):
                _use_mlp(name, module, used, kinds)
            else:
                _use_rotation(name, module, model, used)
    return used


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for rounding, of which a product of two rounded factors has a few units."""
    error = (ours.double() - theirs.double()).abs().max()
    return bool(error <= 16 * torch.finfo(theirs.dtype).eps * theirs.double().abs().max())


def _noise(*shape: int, like: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(device=like.device, dtype=like.dtype)


# ---- RMSNorm --------------------------------------------------------------------------------------------------------
def _norm(self: Any, hidden_states: torch.Tensor) -> Any:
    return rms_norm(hidden_states, self.weight, eps=_eps(self))


def _norm_from_one(self: Any, hidden_states: torch.Tensor) -> Any:
    """Gemma's: the weight is stored less 1."""
    return rms_norm(hidden_states, self.weight.float() + 1.0, eps=_eps(self))


def _eps(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def _use_norm(name: str, module: Any, used: Used, kinds: dict[tuple[Any, ...], Any]) -> None:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1 or not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        used.left[name] = "no weight [hidden] with an epsilon"
        return
    kind = (type(module), weight.shape)
    if kind not in kinds:
        x = _noise(3, weight.shape[0], like=weight)
        kinds[kind] = next((f for f in (_norm, _norm_from_one) if _close(f(module, x), module(x))), None)
    if kinds[kind] is None:
        used.left[name] = "computes neither x / rms(x) * w nor x / rms(x) * (1 + w)"
        return
    module.forward = MethodType(kinds[kind], module)
    used.rms_norm.append(name)


# ---- gated MLP ------------------------------------------------------------------------------------------------------
def _mlp(self: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
    gate, up = self.gate_proj, self.up_proj
    if torch.compiler.is_compiling() or not (_is_plain(gate) and _is_plain(up)):
        return self.down_proj(gated_activation(torch.cat((gate(x), up(x)), dim=-1), kind=kind))
    rows, width = x.reshape(-1, x.shape[-1]), gate.out_features
    both = x.new_empty(rows.shape[0], 2 * width)
    torch.mm(rows, gate.weight.t(), out=both[:, :width])
    torch.mm(rows, up.weight.t(), out=both[:, width:])
    return self.down_proj(gated_activation(both, kind=kind).view(*x.shape[:-1], width))


def _mlp_silu(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _mlp(self, x, "silu")


def _mlp_gelu_tanh(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _mlp(self, x, "gelu_tanh")


MLPS = {"silu": _mlp_silu, "gelu_tanh": _mlp_gelu_tanh}


def _is_plain(linear: torch.nn.Module) -> bool:
    """Whether a layer is its weight and nothing else: no bias, adapter, quantisation or hook, now and not only once."""
    return (
        type(linear) is torch.nn.Linear
        and linear.bias is None
        and "forward" not in vars(linear)
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def _use_mlp(name: str, module: Any, used: Used, kinds: dict[tuple[Any, ...], Any]) -> None:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not all(isinstance(getattr(module, part, None), torch.nn.Module) for part in parts):
        used.left[name] = f"is not made of {', '.join(parts)}"
        return
    kind = (type(module), type(module.act_fn), module.gate_proj.weight.shape)
    if kind not in kinds:
        weight = module.down_proj.weight
        line = torch.linspace(-4.0, 4.0, 65, dtype=weight.dtype, device=weight.device)
        kinds[kind] = next((MLPS[n] for n, f in ACTIVATIONS.items() if _close(f(line), module.act_fn(line))), None)
        x = _noise(1, 3, module.gate_proj.in_features, like=weight)
        if kinds[kind] is not None and not _close(kinds[kind](module, x), module(x)):
            kinds[kind] = None
    if kinds[kind] is None:
        used.left[name] = "computes no down(act(gate(x)) * up(x)) with silu or gelu_tanh"
        return
    module.forward = MethodType(kinds[kind], module)
    used.gated_activation.append(name)


# ---- RoPE -----------------------------------------------------------------------------------------------------------
def _turn(q: torch.Tensor, k: torch.Tensor, turn: Turn, unsqueeze_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k `[batch, heads, tokens, head_dim]`, or with `unsqueeze_dim=2` `[batch, tokens, heads, head_dim]`."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"pykernels: unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}")
    by_token = [x.transpose(1, 2) if unsqueeze_dim == 1 else x for x in (q, k)]
    q, k = (x.reshape(-1, *x.shape[2:]) for x in by_token)
    turned = rotary_embedding(q, k, turn.positions, turn.inv_freq, interleaved=turn.interleaved, scale=turn.scale)
    q, k = (x.view(shaped.shape) for x, shaped in zip(turned, by_token, strict=True))
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


def _apply_after(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *others: Any, **named: Any) -> Any:
        if not isinstance(cos, Turn):
            return theirs(q, k, cos, sin, *others, **named)
        return _turn(q, k, cos, *(others or (named.pop("unsqueeze_dim", 1),)), **named)

    apply_rotary_pos_emb.theirs = theirs  # type: ignore[attr-defined]
    return apply_rotary_pos_emb


def _angles(module: Any, layer_type: str | None) -> tuple[torch.Tensor, float]:
    before = "" if layer_type is None else f"{layer_type}_"
    return getattr(module, f"{before}inv_freq").float(), float(getattr(module, f"{before}attention_scaling"))


def _rotation(interleaved: bool) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        if position_ids.dim() != 2:
            raise ValueError(f"pykernels: position_ids must be [batch, tokens], got {list(position_ids.shape)}")
        inv_freq, scale = _angles(self, layer_type)
        positions = position_ids.expand(x.shape[0], -1).reshape(-1).contiguous()  # one token per row keeps stride 0
        return Turn(positions, inv_freq, scale, interleaved), None

    return forward


def _use_rotation(name: str, module: Any, model: torch.nn.Module, used: Used) -> None:
    family = sys.modules[type(module).__module__]
    theirs = getattr(family, APPLY, None)
    types = [*module.rope_type] if isinstance(getattr(module, "rope_type", None), dict) else [None]
    found = module.rope_type.values() if types != [None] else [getattr(module, "rope_type", None)]
    if any(kind is None or "dynamic" in kind or kind == "longrope" for kind in found):
        used.left[name] = f"its frequencies change with the length (rope_type {', '.join(map(str, found))})"
    elif theirs is None or not all(_calls_apply(m) for m in model.modules() if _takes_embeddings(m)):
        used.left[name] = f"not every attention of {family.__name__} rotates by {APPLY}"
    elif (interleaved := _pairing(module, getattr(theirs, "theirs", theirs), types)) is None:
        used.left[name] = f"{APPLY} turns neither halves nor neighbours by position * inv_freq"
    else:
        module.forward = MethodType(_rotation(interleaved), module)
        if not hasattr(theirs, "theirs"):
            setattr(family, APPLY, _apply_after(theirs))
        used.rotary_embedding.append(name)


def _takes_embeddings(module: torch.nn.Module) -> bool:
    return hasattr(module, "q_proj") or type(module).__name__.endswith("Attention")


def _calls_apply(module: torch.nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return APPLY in getattr(forward, "__code__", forward).co_names


def _pairing(module: Any, theirs: Callable[..., Any], layer_types: list[Any]) -> bool | None:
    """Whether pairs are neighbours, from turning noise by the model's own function; None when neither fits."""
    for interleaved in (False, True):
        if all(_turns_alike(module, theirs, layer_type, interleaved) for layer_type in layer_types):
            return interleaved
    return None


def _turns_alike(module: Any, theirs: Callable[..., Any], layer_type: str | None, interleaved: bool) -> bool:
    inv_freq, scale = _angles(module, layer_type)
    x = _noise(1, 2, 6, 2 * inv_freq.numel(), like=inv_freq)
    positions = torch.arange(6, device=inv_freq.device)
    named = {} if layer_type is None else {"layer_type": layer_type}
    cos, sin = module(x, positions[None], **named)
    ours = _turn(x, x, Turn(positions, inv_freq, scale, interleaved), 1)
    return all(_close(a, b) for a, b in zip(ours, theirs(x, x, cos, sin), strict=True))
