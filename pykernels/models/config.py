"""What the decoder must know of a model: sizes, rotary embedding, norms, end tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from .errors import ModelFileError
from .gguf_file import GGUFFile
from .pretokenize import PRE_TOKENIZERS

KNOWN_ARCHITECTURES = ("llama", "mistral")
# Control tokens that end a turn or a document; a model's metadata often names only one of those that it was trained on.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
SAME_AS_NONE = ("none", "default")
POSITIVE_FIELDS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_context",
    "rope_base",
    "rope_dim",
    "rms_eps",
)

RopeKind = Literal["none", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the context that the model was first trained on.

    `linear` divides all by `factor`; `llama3` divides the slow ones; `yarn` divides the slow ones and scales cos and
    sin by `attention_factor` (arXiv 2309.00071); `factors` divides each by its own entry of `frequency_factors`, which
    is how a GGUF states `llama3`.
    """

    kind: RopeKind = "none"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Raises `ValueError` for sizes that do not fit together."""

    arch: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_base: float
    rope_dim: int  # how many of a head's dimensions are rotated
    rms_eps: float
    rope_interleaved: bool  # pairs are (0, 1), (2, 3), ... instead of (0, half), (1, half + 1), ...
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tied_head: bool = False
    sliding_window: int | None = None  # tokens that a token sees, itself included
    eos_ids: tuple[int, ...] = ()  # any of them ends the text; the model's own eos first
    bos_id: int | None = None
    add_bos: bool = False

    def __post_init__(self) -> None:
        check_architecture(self.arch)
        for name in POSITIVE_FIELDS:
            _positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim ({self.rope_dim}) must be even and at most head_dim ({self.head_dim})")
        factors, pairs = len(self.rope_scaling.frequency_factors), self.rope_dim // 2
        if self.rope_scaling.kind == "factors" and factors != pairs:
            raise ValueError(f"rope_scaling has {factors} frequency factors, expected {pairs} (rope_dim / 2)")
        for token in (*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"the token id {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def rope_scale(self) -> float:
        """The factor on cos and sin: the op's `scale`."""
        return self.rope_scaling.attention_factor if self.rope_scaling.kind == "yarn" else 1.0


def check_architecture(arch: str) -> None:
    if arch not in KNOWN_ARCHITECTURES:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(KNOWN_ARCHITECTURES)}")


def inv_freq(config: ModelConfig) -> torch.Tensor:
    """Rotary frequencies, float32 [rope_dim / 2]: the angle of pair i at position p is `p * inv_freq[i]`."""
    scaling = config.rope_scaling
    exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
    plain = 1.0 / (config.rope_base**exponents)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "factors":
        return plain / torch.tensor(scaling.frequency_factors, dtype=torch.float32)
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn_frequencies(plain, scaling, config)
    return plain


def _llama3_frequencies(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Fast pairs stay, slow pairs are divided, those between are blended by their turns in the original context."""
    turns = scaling.original_context * plain / (2 * math.pi)
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn_frequencies(plain: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_context / (times * 2 * math.pi)
        return config.rope_dim * math.log(wavelength) / (2 * math.log(config.rope_base))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), config.rope_dim - 1)
    pairs = torch.arange(len(plain), dtype=torch.float32)
    divide = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return divide * plain / scaling.factor + (1 - divide) * plain


def yarn_attention_factor(factor: float) -> float:
    """The scale of cos and sin that YaRN prescribes where the model states none (arXiv 2309.00071, section 3.4)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration in a GGUF's metadata. Raises `ModelFileError` where it is missing, unknown or contradictory."""
    arch = file.require("general.architecture", str)
    if arch != "llama":  # the name under which GGUF keeps Llama, SmolLM2 and Mistral
        raise ModelFileError(file.path, f"unknown architecture {arch!r}; known in GGUF files: llama")
    if file.get(f"{arch}.expert_count", int, 0):
        raise ModelFileError(file.path, "a mixture of experts, which is not supported")
    hidden, heads = file.require(f"{arch}.embedding_length", int), file.require(f"{arch}.attention.head_count", int)
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden // max(heads, 1))
    if file.get(f"{arch}.attention.value_length", int, head_dim) != head_dim:
        raise ModelFileError(file.path, f"keys and values of different length ({head_dim}), which is not supported")
    rope_dim = file.get(f"{arch}.rope.dimension_count", int, head_dim)
    eos_ids, bos_id = _gguf_end_tokens(file), file.get("tokenizer.ggml.bos_token_id", int, -1)
    try:
        return ModelConfig(
            arch=arch,
            num_layers=file.require(f"{arch}.block_count", int),
            hidden_size=hidden,
            intermediate_size=file.require(f"{arch}.feed_forward_length", int),
            num_heads=heads,
            num_kv_heads=file.get(f"{arch}.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            vocab_size=file.tensor("token_embd.weight").shape[0],
            max_context=file.require(f"{arch}.context_length", int),
            rope_base=file.get(f"{arch}.rope.freq_base", float, 10000.0),
            rope_dim=rope_dim,
            rms_eps=file.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
            rope_interleaved=True,  # the rows of q and k are stored permuted for it
            rope_scaling=_gguf_rope_scaling(file, arch),
            tied_head="output.weight" not in file.tensors,
            sliding_window=file.get(f"{arch}.attention.sliding_window", int, 0) or None,
            eos_ids=eos_ids,
            bos_id=None if bos_id < 0 else bos_id,
            add_bos=file.get("tokenizer.ggml.add_bos_token", bool, _adds_bos(file)),
        )
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(file.path, str(error)) from None


def _gguf_rope_scaling(file: GGUFFile, arch: str) -> RopeScaling:
    prefix = f"{arch}.rope.scaling"
    if "rope_freqs.weight" in file.tensors:
        return RopeScaling("factors", frequency_factors=tuple(file.float32("rope_freqs.weight").reshape(-1).tolist()))
    factor = file.get(f"{prefix}.factor", float, file.get(f"{arch}.rope.scale_linear", float, 1.0))
    kind = file.get(f"{prefix}.type", str, "none" if factor == 1.0 else "linear")
    if kind in SAME_AS_NONE:
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise ModelFileError(file.path, f"unknown rotary scaling {kind!r}; known in GGUF files: none, linear, yarn")
    _positive(f"{prefix}.factor", factor)
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling(
        "yarn",
        factor,
        original_context=file.require(f"{prefix}.original_context_length", int),
        attention_factor=file.get(f"{prefix}.attn_factor", float, 1.0) * yarn_attention_factor(factor),
    )


def _adds_bos(file: GGUFFile) -> bool:
    """What a file means that does not say: Llama 3's vocabularies want it, GPT-2's do not."""
    pre = PRE_TOKENIZERS.get(file.get("tokenizer.ggml.pre", str, ""))
    return pre is not None and pre.adds_bos


def _gguf_end_tokens(file: GGUFFile) -> tuple[int, ...]:
    stated = [file.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot", "eom")]
    tokens = file.get("tokenizer.ggml.tokens", list, [])
    types = file.get("tokenizer.ggml.token_type", np.ndarray, np.empty(0, np.int32))
    control = 3
    known = [tokens.index(t) for t in (*END_OF_TURN, *END_OF_DOCUMENT) if t in tokens]
    marked = [i for i in known if i < len(types) and types[i] == control]
    return tuple(dict.fromkeys(i for i in [*stated, *marked] if i >= 0))


def config_from_hf(document: Mapping[str, Any], *, tied_head: bool, eos_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The configuration in a Hugging Face `config.json`; raises `ValueError` for what is missing or contradictory.

    `tied_head` says whether the weights lack an own head; `eos_ids` (of generation_config.json) go before those of
    `document`.
    """
    check_architecture(str(document.get("model_type")))
    for flag in ("attention_bias", "mlp_bias"):
        if document.get(flag):
            raise ValueError(f"{flag} is set, which is not supported")
    if document.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {document['hidden_act']!r}, expected 'silu'")
    hidden, heads = _require(document, "hidden_size", int), _require(document, "num_attention_heads", int)
    head_dim = int(document.get("head_dim") or hidden // max(heads, 1))
    rope = {k: document[k] for k in ("rope_theta", "partial_rotary_factor") if k in document}
    rope |= document.get("rope_parameters") or document.get("rope_scaling") or {}
    own_eos = document.get("eos_token_id")
    own = [] if own_eos is None else own_eos if isinstance(own_eos, list) else [own_eos]
    return ModelConfig(
        arch=str(document["model_type"]),
        num_layers=_require(document, "num_hidden_layers", int),
        hidden_size=hidden,
        intermediate_size=_require(document, "intermediate_size", int),
        num_heads=heads,
        num_kv_heads=int(document.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=_require(document, "vocab_size", int),
        max_context=_require(document, "max_position_embeddings", int),
        rope_base=float(rope.get("rope_theta") or 10000.0),
        rope_dim=int(head_dim * float(rope.get("partial_rotary_factor") or 1.0)),
        rms_eps=_require(document, "rms_norm_eps", float),
        rope_interleaved=False,
        rope_scaling=_hf_rope_scaling(rope, int(document["max_position_embeddings"])),
        tied_head=tied_head,
        sliding_window=document.get("sliding_window") or None,
        eos_ids=tuple(dict.fromkeys([*eos_ids, *own])),
        bos_id=document.get("bos_token_id"),
    )


def _hf_rope_scaling(rope: Mapping[str, Any], max_context: int) -> RopeScaling:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind in SAME_AS_NONE:
        return RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"unknown rotary scaling {kind!r}; known: default, linear, llama3, yarn")
    factor = _require(rope, "factor", float)
    _positive("rope_scaling.factor", factor)
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = int(rope.get("original_max_position_embeddings") or max_context)
    if kind == "llama3":
        low, high = _require(rope, "low_freq_factor", float), _require(rope, "high_freq_factor", float)
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key):
            raise ValueError(f"the yarn option {key} is set, which is not supported")
    attention = rope.get("attention_factor")
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=yarn_attention_factor(factor) if attention is None else float(attention),
    )


def _require(document: Mapping[str, Any], key: str, kind: type) -> Any:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ValueError(f"{key} is {value!r}, expected {'a number' if kind is float else 'an integer'}")
    return kind(value)


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}, expected a positive number")
