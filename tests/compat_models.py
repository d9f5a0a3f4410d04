"""Small random transformers models, prompts and masks, for the tests of the adapter."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from pykernels.compat.transformers_mask import visible_keys

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
NEW_MASKS = transformers.__version__ >= "5"


def model_of(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
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


def mask_of(**options: Any) -> Any:
    """`visible_keys` as this version of transformers calls it."""
    if not NEW_MASKS:
        options["cache_position"] = torch.arange(options.pop("q_length")) + options.pop("q_offset", 0)
    return visible_keys(**{"batch_size": 2, **options})


def layer(causal: bool = True) -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal, module.layer_idx = causal, 0
    return module


# ---- what transformers calls ----
ROOT = Path(transformers.__file__).parent
NOT_NAMES = {"kwargs", "self", "others", "options"}


def keywords_of_calls(function: str, files: list[Path]) -> set[str]:
    """Names given by keyword wherever `function(` is called in these files, read from the text of the calls."""
    names: set[str] = set()
    for file in files:
        text = file.read_text(encoding="utf-8")
        for found in re.finditer(rf"(?<!def )\b{function}\(", text):
            depth, end = 1, found.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            call: Any = ast.parse(f"f({text[found.end() : end]}").body[0]
            names |= {keyword.arg for keyword in call.value.keywords if keyword.arg}
    return names


def names_of(*functions: Callable[..., Any]) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters} - NOT_NAMES
