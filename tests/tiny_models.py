"""Models small enough to be made in a test: a two-layer Llama as a GGUF file or a folder, and its forward pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pykernels.models import Checkpoint, WeightSource, inv_freq
from pykernels.models.tokenizer import byte_alphabet

SIZES = {"layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "context": 128}
MERGES = ["t h", "th e", "Ġ the", "a n", "Ġ a"]
CONTROL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


def tiny_vocabulary() -> list[str]:
    return CONTROL + list(byte_alphabet()) + [merge.replace(" ", "") for merge in MERGES]


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors by GGUF name; q and k are in Hugging Face's row order."""
    rng = np.random.default_rng(seed)
    hidden, ffn, kv = SIZES["hidden"], SIZES["ffn"], SIZES["hidden"] // SIZES["heads"] * SIZES["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tiny_vocabulary()), hidden), "output_norm": (hidden,)}
    for i in range(SIZES["layers"]):
        b = f"blk.{i}"
        shapes |= {f"{b}.attn_norm": (hidden,), f"{b}.ffn_norm": (hidden,)}
        shapes |= {f"{b}.attn_q": (hidden, hidden), f"{b}.attn_k": (kv, hidden), f"{b}.attn_v": (kv, hidden)}
        shapes |= {f"{b}.attn_output": (hidden, hidden), f"{b}.ffn_gate": (ffn, hidden), f"{b}.ffn_up": (ffn, hidden)}
        shapes |= {f"{b}.ffn_down": (hidden, ffn)}
    return {f"{name}.weight": (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


def tiny_metadata() -> dict[str, Any]:
    vocabulary = tiny_vocabulary()
    return {
        "general.architecture": "llama",
        "llama.block_count": SIZES["layers"],
        "llama.context_length": SIZES["context"],
        "llama.embedding_length": SIZES["hidden"],
        "llama.feed_forward_length": SIZES["ffn"],
        "llama.attention.head_count": SIZES["heads"],
        "llama.attention.head_count_kv": SIZES["kv_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(vocabulary) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    types: dict[str, str] | None = None,
) -> Path:
    """A GGUF file; `types` quantises tensors by name ("Q4_1", ...). Nothing that is left out is filled in."""
    metadata = tiny_metadata() if metadata is None else metadata
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, values in (tiny_tensors() if tensors is None else tensors).items():
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def tiny_tokenizer() -> Tokenizer:
    """The tiny vocabulary as a Hugging Face tokenizer."""
    vocab = {token: i for i, token in enumerate(tiny_vocabulary())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(a, b) for a, b in (m.split(" ") for m in MERGES)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    return backend


def write_hf_text_files(folder: Path) -> None:
    """What transformers' save_pretrained of a model leaves out: the tokenizer and the chat template."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": {"content": "<|bos|>"}, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


Read = Callable[[WeightSource], torch.Tensor]


def forward(checkpoint: Checkpoint, ids: list[int], read: Read = WeightSource.float32) -> torch.Tensor:
    """Logits [tokens, vocab] in float32 torch, from a checkpoint's weights."""
    config, weights = checkpoint.config, checkpoint.weights
    tokens, heads = len(ids), config.num_heads
    angles = torch.outer(torch.arange(tokens).float(), inv_freq(config))
    cos, sin = angles.cos() * config.rope_scale, angles.sin() * config.rope_scale
    causal = torch.full((tokens, tokens), -torch.inf).triu(1)

    def norm(x: torch.Tensor, weight: WeightSource) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_eps) * read(weight)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [tokens, heads, head_dim]
        half = x.shape[-1] // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if config.rope_interleaved else (x[..., :half], x[..., half:])
        c, s = cos[:, None], sin[:, None]
        pair = (a * c - b * s, a * s + b * c)
        return torch.stack(pair, -1).flatten(-2) if config.rope_interleaved else torch.cat(pair, -1)

    embedding = read(weights.embedding)
    x = embedding[ids]
    for layer in weights.layers:
        h = norm(x, layer.attn_norm)
        q, k, v = ((h @ read(w).T).view(tokens, -1, config.head_dim) for w in (layer.q, layer.k, layer.v))
        k, v = (t.repeat_interleave(heads // config.num_kv_heads, 1) for t in (rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotate(q), k) / config.head_dim**0.5 + causal
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ read(layer.o).T
        h = norm(x, layer.ffn_norm)
        x = x + (torch.nn.functional.silu(h @ read(layer.gate).T) * (h @ read(layer.up).T)) @ read(layer.down).T
    head = embedding if weights.head is weights.embedding else read(weights.head)
    return norm(x, weights.final_norm) @ head.T
