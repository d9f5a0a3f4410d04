"""Who may import whom (drawn in CONTRIBUTING.md), and what `import pykernels` must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["contract", "registry", "library", "ops"]  # each may import those before it
UPPER = ["memory", "kv_cache", "models", "generator", "roofline", "compat", "testing", "cli"]
BACKENDS = ["native", "cuda", "triton", "reference_backend"]


def imports_of(path: Path) -> set[str]:
    """The parts of pykernels that a file imports, as the first name below `pykernels`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names = [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("pykernels.")}
    return found


def files_of(part: str) -> list[Path]:
    single = ROOT / "pykernels" / f"{part}.py"
    return [single] if single.exists() else sorted((ROOT / "pykernels" / part).rglob("*.py"))


@pytest.mark.parametrize("part", LAYERS)
def test_a_layer_imports_only_those_below_it(part: str) -> None:
    allowed = {*LAYERS[: LAYERS.index(part) + 1]}
    for path in files_of(part):
        assert imports_of(path) <= allowed, path


@pytest.mark.parametrize("part", BACKENDS)
def test_a_backend_imports_the_contract_and_its_own_helpers(part: str) -> None:
    for path in files_of(part):
        assert imports_of(path) <= {"contract", part}, path


def test_the_reference_imports_torch_alone() -> None:
    allowed = {"__future__", "torch", "math", "dataclasses", "collections", "typing"}
    for path in (ROOT / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {a.name.split(".")[0] for a in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] in allowed, path


def test_importing_pykernels_loads_neither_triton_nor_a_model_library() -> None:
    heavy = "triton gguf tokenizers transformers rich plotly jinja2 nvtx"
    code = f"import sys, pykernels; print([m for m in {heavy.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_command_line_and_the_bench_itself_import_the_bench() -> None:
    for path in (ROOT / "pykernels").rglob("*.py"):
        if "cli" not in path.parts:
            assert "bench" not in imports_of(path), path
