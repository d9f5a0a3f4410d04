"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pykernels as pk
from pykernels.compat import uninstall

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def inputs() -> dict[str, Any]:
    """The tensors that the first example takes for granted."""
    tokens, cu = 6, torch.tensor([0, 6], dtype=torch.int32)
    cache = torch.randn(2, 4, 2, 64)
    ragged = {name: torch.randn(tokens, heads, 64) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return ragged | {
        "k_cache": cache,
        "v_cache": cache.clone(),
        "table": torch.tensor([[1, 0]] * tokens, dtype=torch.int32),
        "lens": torch.full((tokens,), 7, dtype=torch.int32),
        "cu": cu,
        "n": tokens,
        "logits": torch.randn(2, 100),
        "seeds": torch.tensor([1, 2]),
        "positions": torch.tensor([0, 0]),
        "x": torch.randn(3, 64),
        "weight": torch.randn(32, 64),
    }


def test_the_first_example_runs(capsys: Any) -> None:
    names = inputs()
    exec(BLOCKS[0], names)
    assert names["out"].shape == (6, 4, 64)
    assert names["lse"].shape == (4, 6)
    assert names["drawn"].ids.shape == (2,)
    assert names["y"].shape == (3, 32)
    assert "Paris" in capsys.readouterr().out


def test_every_name_exists() -> None:
    for block in BLOCKS:
        for name in re.findall(r"\bpk\.([A-Za-z_]\w*)", block):
            assert hasattr(pk, name), name
        for module, names in re.findall(r"^\s*from (pykernels[\w.]*) import ([\w, ]+)", block, re.MULTILINE):
            exec(f"from {module} import {names}", {})


def block_with(text: str) -> str:
    return next(block for block in BLOCKS if text in block)


def test_the_drop_in_example_runs() -> None:
    names: dict[str, Any] = {}
    before = torch.nn.functional.scaled_dot_product_attention
    try:
        exec(block_with("from pykernels.compat.flash_attn import"), names)
        import flash_attn

        assert flash_attn.flash_attn_func is names["flash_attn_func"]
    finally:
        uninstall("flash_attn")
    assert torch.nn.functional.scaled_dot_product_attention is before


def test_the_transformers_example_runs(tmp_path: Path, capsys: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.tensor([[1, 5, 9]])
    names = {"torch": torch, "name": str(tmp_path), "tokenizer": lambda text, **options: {"input_ids": ids}}
    exec(block_with("from pykernels.compat.transformers import"), names)
    assert names["logits"].shape == (1, 3, 32)
    assert names["model"].config._attn_implementation == "pykernels"
    assert capsys.readouterr().out.startswith("{}"), "nothing of a Llama model is left alone"
