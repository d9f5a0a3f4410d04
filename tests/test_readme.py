"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import pykernels as pk

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
