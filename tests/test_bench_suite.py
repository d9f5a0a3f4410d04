"""The pytest-benchmark suite: its smoke subset runs, its entries say what they must, and its grids are complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pykernels.bench import problems
from pykernels.bench.suite_records import Playback
from pykernels.contract import FAMILIES, OPS

ROOT = Path(__file__).parents[1]


def suite(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "bench/suite", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "smoke.json"
    done = suite("-m", "smoke", "--benchmark-json", str(path), "--benchmark-max-time", "0.05")
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(path.read_text())


def test_the_smoke_subset_measures_every_op(smoke: dict[str, Any]) -> None:
    assert {b["extra_info"]["op"] for b in smoke["benchmarks"] if b["extra_info"]["backend"] == "cpu"} == set(OPS)


def test_an_entry_says_what_was_measured(smoke: dict[str, Any]) -> None:
    for entry in smoke["benchmarks"]:
        info = entry["extra_info"]
        assert info["bytes"] > 0
        assert 0 < info["roof_pct"] < 106
        assert info["roof_seconds"] <= 1.06 * entry["stats"]["median"]
        assert len(info["output_hash"]) == 16
        assert info["machine_key"] == info["machine"]["key"]
        assert info["temperature"] == "cold"
        assert info["stopped"]


def test_the_grid_s_columns_are_the_parameters(smoke: dict[str, Any]) -> None:
    entry = next(b for b in smoke["benchmarks"] if b["extra_info"]["op"] == "paged_decode_attention")
    columns = {"backend": "cpu", "model": "smollm2", "dtype": "bfloat16", "kv": "int8", "context": 1024, "batch": 1}
    assert entry["params"] == columns


def test_the_plugin_compares_two_runs(smoke: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    path.write_text(json.dumps(smoke))
    done = suite(
        "-m", "smoke", "-k", "rms_norm", f"--benchmark-compare={path}", "--benchmark-compare-fail=min:1000000%"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "before" in done.stdout


def test_without_timing_the_ops_are_still_compared_with_the_reference() -> None:
    done = suite("-k", "rope_tables", "--benchmark-disable")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


def test_the_playback_advances_by_the_samples() -> None:
    clock = Playback()
    clock.load([1.0, 0.25])
    seen = []
    for _ in range(3):
        before = clock.now()
        clock.advance()
        seen.append(clock.now() - before)
    assert seen == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_suite_file_with_every_op(family: str) -> None:
    text = (ROOT / "bench" / "suite" / f"test_{family}.py").read_text()
    for op in OPS.values():
        if op.family == family:
            assert f'@grid("{op.name}")' in text
    assert f'@table("{family}")' in text


@pytest.mark.parametrize("op", OPS)
def test_the_smoke_row_is_a_row_of_the_grid(op: str) -> None:
    assert problems.SMOKE[op] in problems.GRIDS[op].rows
    names = [case.name for case in problems.problems(op)]
    assert len(set(names)) == len(names)
    assert problems.problems(op, "smoke")[0].name in names


def test_a_column_that_a_grid_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="rms_norm has the columns model, dtype, tokens"):
        problems.problem("rms_norm", model="smollm2", context=3)
