"""The workflow: it parses, and calls scripts that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = re.compile(r"ci/\w+\.\w+")


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_calls_scripts_that_exist(jobs: dict[str, Any]) -> None:
    called = {name for job in jobs.values() for text in commands(job) for name in SCRIPT.findall(text)}
    assert called == {"ci/test.sh", "ci/gate.sh"}
    assert all((ROOT / name).exists() for name in called)


def test_actions_are_pinned_to_a_version(jobs: dict[str, Any]) -> None:
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in used)


def test_the_gate_sees_the_history_and_runs_on_pull_requests_alone(jobs: dict[str, Any]) -> None:
    gate = jobs["gate"]
    assert gate["if"] == "github.event_name == 'pull_request'"
    (checkout,) = (step for step in gate["steps"] if step.get("uses", "").startswith("actions/checkout"))
    assert checkout["with"]["fetch-depth"] == 0
    assert "if" not in jobs["test"]


def test_the_gate_runs_where_its_instruction_counts_are_from(jobs: dict[str, Any]) -> None:
    gate, script = jobs["gate"], (ROOT / "ci" / "gate.sh").read_text()
    assert "baseline instructions" in script
    assert any("install -y --no-install-recommends valgrind" in text for text in commands(gate))
    table = json.loads((ROOT / "bench" / "baselines" / "instructions.json").read_text())
    assert any(key.startswith("GCC 12.2") for key in table)
    assert gate["container"].endswith("bookworm")  # whose compiler is GCC 12.2


@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "ci").glob("*.sh")))
def test_every_script_parses_and_names_files_that_exist(script: str) -> None:
    path = ROOT / "ci" / script
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all((ROOT / name).exists() for name in SCRIPT.findall(path.read_text()))
