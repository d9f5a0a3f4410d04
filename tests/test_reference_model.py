"""Norm, rotation, activation, and the whole decoder, against torch and transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_split_rotary

from pykernels.reference.activation import gated_activation
from pykernels.reference.model import Config, forward, generate_greedy
from pykernels.reference.norm import rms_norm
from pykernels.reference.rope import rotary_embedding

F64 = torch.float64


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * std


@pytest.mark.parametrize("std", [1e-4, 1.0, 1e4])
def test_rms_norm_matches_torch(std: float) -> None:
    x, w = normal(5, 33, std=std), normal(33, seed=1)
    out, same = rms_norm(x=x, weight=w, eps=1e-5, residual=None)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (33,), w, 1e-5), rtol=1e-13, atol=1e-13)
    assert torch.equal(same, x)


def test_rms_norm_adds_the_residual_first_and_returns_the_sum() -> None:
    x, r, w = normal(5, 33), normal(5, 33, seed=1), normal(33, seed=2)
    out, total = rms_norm(x=x, weight=w, eps=1e-6, residual=r)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + r, (33,), w, 1e-6), rtol=1e-13, atol=1e-13)
    assert torch.equal(total, x + r)


def test_rms_norm_of_half_types_normalises_the_rounded_sum() -> None:
    x, r = (normal(4, 64, seed=s).bfloat16() for s in (0, 1))
    out, total = rms_norm(x=x, weight=torch.ones(64), eps=1e-5, residual=r, compute_dtype=torch.bfloat16)
    assert torch.equal(total, x + r)
    assert torch.equal(out, torch.nn.functional.rms_norm((x + r).float(), (64,), eps=1e-5).bfloat16())


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation_matches_torch_far_into_both_tails(kind: str) -> None:
    x = normal(6, 40, std=30.0)
    gate, up = x.chunk(2, -1)
    act = torch.nn.functional.silu(gate) if kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(gated_activation(x=x, kind=kind)[0], act * up, rtol=1e-12, atol=1e-12)


def test_gated_activation_refuses_other_kinds() -> None:
    with pytest.raises(ValueError, match="kind must be"):
        gated_activation(x=normal(2, 4), kind="relu")


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_embedding_matches_transformers(interleaved: bool) -> None:
    q, k, positions = normal(7, 4, 32), normal(7, 2, 32, seed=1), torch.tensor([0, 1, 5, 4000, 77, 2, 8191])
    inv_freq = 10000.0 ** -(torch.arange(16) / 16)
    angle = positions.double()[:, None] * inv_freq.double()
    repeat = torch.repeat_interleave(angle, 2, dim=-1) if interleaved else torch.cat((angle, angle), dim=-1)
    apply = interleaved_rotary if interleaved else half_split_rotary
    cos, sin = repeat.cos() * 1.3, repeat.sin() * 1.3
    expected = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    got = rotary_embedding(q=q, k=k, positions=positions, inv_freq=inv_freq, interleaved=interleaved, rope_scale=1.3)
    for x, y in zip(got, expected, strict=True):
        # cohere's form computes in float32
        torch.testing.assert_close(x, y[0].transpose(0, 1).double(), rtol=0, atol=1e-5 if interleaved else 1e-12)


def test_interleaved_rotation_is_multiplication_of_complex_numbers() -> None:
    q, positions, inv_freq = (
        normal(5, 3, 16),
        torch.arange(5) * 11,
        torch.rand(8, generator=torch.Generator().manual_seed(1)),
    )
    turn = torch.polar(torch.ones(5, 8, dtype=F64), positions[:, None] * inv_freq.double())
    expected = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (8, 2))) * turn[:, None]).flatten(-2)
    got, _ = rotary_embedding(q=q, k=q, positions=positions, inv_freq=inv_freq, interleaved=True, rope_scale=1.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("interleaved", [True, False])
def test_partial_rotation_keeps_the_rest(interleaved: bool) -> None:
    q, positions, inv_freq = normal(4, 2, 24), torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, 0.5, 0.25])
    got, _ = rotary_embedding(q=q, k=q, positions=positions, inv_freq=inv_freq, interleaved=interleaved, rope_scale=2.0)
    whole, _ = rotary_embedding(
        q=q[..., :6], k=q[..., :6], positions=positions, inv_freq=inv_freq, interleaved=interleaved, rope_scale=2.0
    )
    assert torch.equal(got[..., :6], whole)
    assert torch.equal(got[..., 6:], q[..., 6:])


def test_large_positions_keep_their_angle_in_half_types() -> None:
    # bfloat16 cannot tell position 4097 from 4096; the angle must not be computed in it.
    q = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    inv_freq = torch.tensor([1.0])
    turn = {
        "q": q,
        "k": q,
        "positions": torch.tensor([4097]),
        "inv_freq": inv_freq,
        "interleaved": False,
        "rope_scale": 1.0,
    }
    half, exact = (rotary_embedding(**turn, compute_dtype=d)[0].double() for d in (torch.bfloat16, F64))
    assert (half - exact).abs().max() < 0.01


def tiny(kind: str) -> tuple[torch.nn.Module, Config]:
    """A random model of transformers in float64, and its sizes in ours."""
    sizes = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "head_dim": 8 if kind != "qwen3" else 16,
        "tie_word_embeddings": kind == "tied",
        "attn_implementation": "sdpa",
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**sizes)).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            # Far from the initial values: norms of 1 and biases of 0 would hide mistakes, small weights attend evenly.
            p.copy_(
                1 + 0.3 * torch.randn_like(p) if "norm" in name else torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.5)
            )
    widen(model)
    return model, Config(3, 6, 2, sizes["head_dim"], 1e-5, 50000.0)


def widen(model: torch.nn.Module) -> None:
    """Replaces what transformers computes in float32 whatever the model's type: norms and rotation tables."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: torch.nn.functional.rms_norm(x, m.weight.shape, m.weight, 1e-5)
    rotary = model.model.rotary_emb

    def tables(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids[..., None].to(x.dtype) * rotary.inv_freq.to(x.dtype)
        both = torch.cat((angle, angle), dim=-1)
        return both.cos(), both.sin()

    rotary.forward = tables


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "qwen3"])
def test_the_decoder_gives_the_logits_of_transformers(kind: str) -> None:
    model, config = tiny(kind)
    ids = torch.randint(0, 61, (37,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    weights = {n: w for n, w in model.state_dict().items() if not (kind == "tied" and n == "lm_head.weight")}
    got = forward(config, weights, ids)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def test_greedy_generation_matches_transformers() -> None:
    model, config = tiny("llama")
    prompt = [5, 17, 3, 60]
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert generate_greedy(config, model.state_dict(), prompt, 12) == expected[0, 4:].tolist()


def test_rows_permuted_for_interleaved_pairs_give_the_same_logits() -> None:
    # How llama-architecture GGUF files store q and k: rows of each head reordered from halves to neighbours.
    model, config = tiny("llama")
    weights = dict(model.state_dict())
    for name, w in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = w.view(-1, 2, 4, 48).transpose(1, 2).reshape(-1, 48)
    ids = torch.arange(20)
    paired = Config(**{**vars(config), "interleaved": True})
    torch.testing.assert_close(
        forward(paired, weights, ids), forward(config, model.state_dict(), ids), rtol=0, atol=1e-10
    )
    assert not torch.allclose(forward(config, weights, ids), forward(config, model.state_dict(), ids), atol=1e-3)


def test_a_window_limits_what_a_token_sees() -> None:
    model, config = tiny("llama")
    windowed = Config(**{**vars(config), "window_left": 2, "num_layers": 1})
    ids = torch.arange(10)
    changed = ids.clone()
    changed[0] = 50
    first, second = (forward(windowed, model.state_dict(), x) for x in (ids, changed))
    differs = (first - second).abs().amax(-1) > 0
    assert differs.tolist() == [True] * 3 + [False] * 7
