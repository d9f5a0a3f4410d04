"""What the decoder needs of a model's weights, whatever file they are in: lazy handles, layer by layer.

Nothing is read until `raw()` or `float32()` is called; packing for a backend is the business of the ops.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
import torch

from .config import ModelConfig
from .errors import ModelFileError
from .gguf_file import GGUFFile

Format = Literal["float32", "float16", "bfloat16", "q4_0", "q4_1", "q8_0"]
FLOATS: dict[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
GGUF_FORMATS: dict[str, Format] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q8_0": "q8_0",
}


@dataclass(frozen=True)
class WeightSource:
    """One weight in its file.

    `format` is what `raw()` gives; `stored` is the file's own name for the type. They name the same type unless
    `widened`: a type that no kernel reads (Q5_0, Q4_K, ...) is widened to float32, exactly.
    """

    name: str
    format: Format
    shape: tuple[int, ...]  # [out, in], or [n]
    stored: str
    widened: bool
    nbytes: int  # in the file
    _raw: Callable[[], torch.Tensor] = field(repr=False)
    _float32: Callable[[], torch.Tensor] = field(repr=False)

    def raw(self) -> torch.Tensor:
        """The weight in `format`, without a copy where the file holds it so.

        Floats: [out, in] or [n] of that dtype. Blocks: uint8 [out, bytes per row], GGUF's blocks of 32 in their order.
        """
        return self._raw()

    def float32(self) -> torch.Tensor:
        """The weight dequantised to float32, [out, in] or [n]; exact."""
        return self._float32()


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; q, k, v, o are [heads * head_dim, hidden] and so on, as `x @ weight.T` wants them."""

    attn_norm: WeightSource
    q: WeightSource
    k: WeightSource
    v: WeightSource
    o: WeightSource
    ffn_norm: WeightSource
    gate: WeightSource
    up: WeightSource
    down: WeightSource


@dataclass(frozen=True)
class ModelWeights:
    embedding: WeightSource  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: WeightSource
    head: WeightSource  # [vocab, hidden]; the embedding itself where the head is tied

    def sources(self) -> Iterator[WeightSource]:
        """Every weight once, in the order in which a forward pass needs them."""
        yield self.embedding
        for layer in self.layers:
            for part in fields(layer):
                yield getattr(layer, part.name)
        yield self.final_norm
        if self.head is not self.embedding:
            yield self.head

    def widened(self) -> dict[str, int]:
        """How many weights of each stored type had to be widened: what a user should be told."""
        counts: dict[str, int] = {}
        for source in self.sources():
            if source.widened:
                counts[source.stored] = counts.get(source.stored, 0) + 1
        return counts


# Roles, and where each kind of file keeps them ({} is the layer).
GGUF_NAMES = {
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
HF_NAMES = {
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def role_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape that each role must have."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "ffn_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        "embedding": (config.vocab_size, hidden),
        "final_norm": (hidden,),
        "head": (config.vocab_size, hidden),
    }


def assemble(
    config: ModelConfig, names: dict[str, str], source: Callable[[str, tuple[int, ...]], WeightSource]
) -> ModelWeights:
    """The weights of `config`, each made by `source(name in the file, expected shape)`."""
    shapes = role_shapes(config)

    def make(role: str, layer: int = 0) -> WeightSource:
        return source(names[role].format(layer), shapes[role])

    roles = [part.name for part in fields(LayerWeights)]
    embedding = make("embedding")
    layers = tuple(LayerWeights(**{role: make(role, i) for role in roles}) for i in range(config.num_layers))
    return ModelWeights(embedding, layers, make("final_norm"), embedding if config.tied_head else make("head"))


def unexpected_tensors(names: list[str]) -> str:
    return f"{len(names)} tensors that this architecture does not have, such as {names[0]!r}"


def weights_from_gguf(file: GGUFFile, config: ModelConfig) -> ModelWeights:
    """Lazy weights of a GGUF; raises `ModelFileError` for a tensor that is missing, of a wrong shape, or unexpected."""
    expected = set()

    def source(name: str, shape: tuple[int, ...]) -> WeightSource:
        expected.add(name)
        return gguf_source(file, name, shape)

    weights = assemble(config, GGUF_NAMES, source)
    unused = sorted(file.tensors.keys() - expected - {"rope_freqs.weight"})
    if unused:  # a bias or an extra norm: leaving it out would give a model that is quietly wrong
        raise ModelFileError(file.path, unexpected_tensors(unused))
    return weights


def gguf_source(file: GGUFFile, name: str, shape: tuple[int, ...]) -> WeightSource:
    info = file.tensor(name)
    if info.shape != shape:
        raise ModelFileError(file.path, f"tensor {name} has the shape {list(info.shape)}, expected {list(shape)}")
    form = GGUF_FORMATS.get(info.type_name)

    def raw() -> torch.Tensor:
        if form is None:
            return float32()
        stored = torch.from_numpy(file.raw(name))
        return stored.view(FLOATS[form]).reshape(shape) if form in FLOATS else stored

    def float32() -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(file.float32(name)))

    return WeightSource(name, form or "float32", shape, info.type_name, form is None, info.nbytes, raw, float32)
