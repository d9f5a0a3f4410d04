"""The committed baselines: instructions, shares of the roof and times, what fails against them, and how they are updated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from suite_file import entry, write

from pykernels.bench import baseline, callgrind, front, gate, instructions, roof_share
from pykernels.bench.problems import GATED, GRIDS, SMOKE
from pykernels.bench.roof_share import Share
from pykernels.cli import main
from pykernels.contract import OPS
from pykernels.roofline.ceilings import RoofError
from pykernels.testing.compare import Mismatch

ROW = "rms_norm[smollm2-bfloat16-tokens_256]"
valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")

TARGET = """\
#include <stddef.h>
float data[LENGTH];
float work(void) {
  float sum = 0;
  for (size_t i = 0; i < LENGTH; i++) sum += data[i] * data[i];
  return sum;
}
"""
PROGRAM = """\
import ctypes, importlib.util
spec = importlib.util.spec_from_file_location("callgrind", {module!r})  # alone: a torch under valgrind takes a minute
callgrind = importlib.util.module_from_spec(spec)
spec.loader.exec_module(callgrind)
work, marks = ctypes.CDLL({library!r}).work, callgrind.Marks()
work()
for _ in range(3):
    with marks.window("one#1"):
        work()
    with marks.window("one#2"):
        work()
        work()
"""


# ---- instructions -----------------------------------------------------------------------------------------------------
@pytest.fixture
def counted(tmp_path: Path) -> Any:
    """Counts a loop of so many elements in a process of its own, by the tool that counts kernels."""

    def count(length: int) -> int:
        source, library = tmp_path / f"{length}.c", tmp_path / f"{length}.so"
        source.write_text(TARGET.replace("LENGTH", str(length)))
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        program = PROGRAM.format(module=callgrind.__file__, library=str(library))
        found = callgrind.under_callgrind([sys.executable, "-S", "-c", program], limit=120)
        return found["one#2"] - found["one#1"]

    return count


@valgrind
def test_planted_instructions_are_found_and_counts_repeat(counted: Any) -> None:
    base, again, planted = counted(400_000), counted(400_000), counted(408_000)
    assert abs(again - base) < 0.001 * base
    assert base > 400_000
    assert instructions.compare({ROW: again}, {ROW: base})[0].kind == "SAME"
    (line,) = instructions.compare({ROW: planted}, {ROW: base})
    assert line.kind == "MORE INSTRUCTIONS"
    assert line.ratio == pytest.approx(1.02, abs=0.004)
    assert line.failed


@valgrind
def test_a_program_that_fails_or_marks_nothing_fails() -> None:
    with pytest.raises(callgrind.CallgrindError, match="ended with code 3"):
        callgrind.under_callgrind([sys.executable, "-S", "-c", "raise SystemExit(3)"], limit=60)
    with pytest.raises(callgrind.CallgrindError, match="empty run"):
        callgrind.under_callgrind([sys.executable, "-S", "-c", "pass"], limit=60)


@valgrind
@pytest.mark.slow  # torch is imported under valgrind: half a minute
def test_a_kernel_is_counted_without_its_caller() -> None:
    found = instructions.count(["rms_norm"])
    assert list(found) == [ROW]
    assert (
        256 * 576 / 8 < found[ROW] < 256 * 576 * 16
    )  # vectors of eight, two roundings to bfloat16 each, and no Python


def test_without_valgrind_or_a_compiler_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(instructions, "compiler", lambda: "GCC 1")
    baseline.write(tmp_path / "instructions.json", "GCC 1", {ROW: 1000})
    assert main(["baseline", "instructions", "--op", "rms_norm", "--folder", str(tmp_path)]) == 2
    assert "install the package valgrind" in capsys.readouterr().err
    (tmp_path / "valgrind").write_text("#!/bin/sh\n")
    (tmp_path / "valgrind").chmod(0o755)
    with pytest.raises(callgrind.CallgrindError, match="needs a C compiler"):
        callgrind.build_marks(tmp_path)


def test_fewer_instructions_ask_for_the_table() -> None:
    lines = {
        x.benchmark: x for x in instructions.compare({"a": 100, "b": 90, "new": 5}, {"a": 100, "b": 100, "old": 5})
    }
    assert {n: x.kind for n, x in lines.items()} == {
        "a": "SAME",
        "b": "FEWER INSTRUCTIONS",
        "new": "MISSING",
        "old": "MISSING",
    }
    assert "--update" in lines["b"].note
    assert [n for n, x in lines.items() if x.failed] == ["b", "new", "old"]


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        ({"rms_norm[x]#1": 5}, "nothing was counted"),
        ({"rms_norm[x]#1": 5, "rms_norm[x]#2": 5}, "nothing was counted"),
        ({"linear[x]#1": 5, "linear[x]#2": 9}, "did not count rms_norm"),
    ],
)
def test_a_count_that_lacks_a_benchmark_fails(
    monkeypatch: pytest.MonkeyPatch, windows: dict[str, int], words: str
) -> None:
    monkeypatch.setattr(instructions, "under_callgrind", lambda *_: windows)
    with pytest.raises(gate.GateError, match=words):
        instructions.count(["rms_norm"])


def test_a_module_tells_its_compiler(tmp_path: Path) -> None:
    module = tmp_path / "m.so"
    module.write_bytes(b"\0GCC: (Debian 12.2.0-14) 12.2.0\0")
    assert instructions.compiler_of(module) == "GCC 12.2.0"
    module.write_bytes(b"\0nothing")
    with pytest.raises(gate.GateError, match="does not tell"):
        instructions.compiler_of(module)


# ---- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What callgrind will have counted."""
    counts = {ROW: 1000}
    monkeypatch.setattr(instructions, "compiler", lambda: "GCC 12.2.0")
    monkeypatch.setattr(instructions, "count", lambda ops: dict(counts))
    return counts


def test_a_table_changes_by_an_explicit_update_that_shows_the_change(
    tmp_path: Path, told: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["baseline", "instructions", "--op", "rms_norm", "--folder", str(tmp_path)]
    path = tmp_path / "instructions.json"
    assert main(command) == 2
    assert not path.exists()
    assert main([*command, "--update"]) == 0
    assert f"{ROW}: 1,000 (new)" in capsys.readouterr().out
    kept = path.read_bytes()
    assert main(command) == 0
    told[ROW] = 1020
    assert main(command) == 1
    assert "MORE INSTRUCTIONS  1.020" in capsys.readouterr().out
    assert path.read_bytes() == kept
    assert main([*command, "--update"]) == 0
    assert f"{ROW}: 1,000 -> 1,020 (+2.0 %)" in capsys.readouterr().out
    assert json.loads(path.read_text()) == {"GCC 12.2.0": {ROW: 1020}}
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_another_compiler_s_counts_are_not_compared(
    tmp_path: Path, told: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline.write(tmp_path / "instructions.json", "GCC 12.2.0", told)
    monkeypatch.setattr(instructions, "compiler", lambda: "GCC 13.3.0")
    assert main(["baseline", "instructions", "--folder", str(tmp_path)]) == 2
    assert "nothing for GCC 13.3.0, but for GCC 12.2.0" in capsys.readouterr().err


def test_an_update_of_one_op_keeps_the_others(tmp_path: Path, told: dict[str, int]) -> None:
    path = tmp_path / "instructions.json"
    baseline.write(path, "GCC 12.2.0", {"linear[x]": 7})
    assert main(["baseline", "instructions", "--op", "rms_norm", "--folder", str(tmp_path), "--update"]) == 0
    assert json.loads(path.read_text()) == {"GCC 12.2.0": {"linear[x]": 7, ROW: 1000}}


@pytest.mark.parametrize("words", [["speed"], ["--margin", "0"]])
def test_wrong_usage_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---- shares of the roof -----------------------------------------------------------------------------------------------
def compared(monkeypatch: pytest.MonkeyPatch, found: Share | Exception, least: float = 40.0) -> gate.Line:
    def measure(*_: Any) -> Share:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(roof_share, "measure", measure)
    nothing: Any = None
    return roof_share.compare("rms_norm", {ROW: least}, nothing, nothing, margin=0.2)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (Share(41.0, 39.0, 44.0, "dram"), "SAME"),
        (Share(31.0, 25.0, 33.0, "dram"), "SAME"),  # undecided is not below
        (Share(30.0, 28.0, 31.0, "dram"), "SLOWER"),
        (RoofError("130 % of its roof"), "ABOVE ROOF"),
        (Mismatch("it is wrong"), "CHANGED OUTPUT"),
    ],
)
def test_a_share_is_held_against_its_minimum(
    monkeypatch: pytest.MonkeyPatch, found: Share | Exception, kind: str
) -> None:
    line = compared(monkeypatch, found)
    assert line.kind == kind
    assert line.failed == (kind != "SAME")


def test_an_op_without_a_minimum_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    assert roof_share.compare("linear", {ROW: 1.0}, nothing, nothing).kind == "MISSING"


def test_a_share_is_measured_beside_its_probe() -> None:
    from pykernels import native
    from pykernels.roofline.ceilings import Prober
    from pykernels.roofline.ceilings import measure as measure_ceilings

    before = native.module().num_threads()
    native.module().set_num_threads(1)
    try:
        level = native.chosen_level()
        found = roof_share.measure("gated_activation", measure_ceilings(level, 1), Prober(level, 1))
    finally:
        native.module().set_num_threads(before)
    assert 0 < found.low <= found.percent <= found.high
    assert found.percent < 106


# ---- times of one machine ---------------------------------------------------------------------------------------------
def test_times_are_compared_on_their_own_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from pykernels.bench.machine import machine

    here = machine(torch.device("cpu"))
    mine = {"op": "rms_norm", "machine_key": here["key"]}
    rows = [entry("rms_norm", 1e-3, samples=200, **mine)]
    monkeypatch.setattr(front, "run", lambda *a, **k: iter(rows))
    command = ["baseline", "times", "--op", "rms_norm", "--folder", str(tmp_path)]
    assert main(command) == 2
    assert "no baseline of this machine" in capsys.readouterr().err
    assert main([*command, "--update"]) == 0
    assert "rms_norm: 1,002.0 (new)" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    assert path.name == baseline.file_name(here)
    assert len(json.loads(path.read_text())["benchmarks"][0]["stats"]["data"]) == baseline.SAMPLES
    assert main(command) == 0
    assert main(["gate", str(path), str(path)]) == 0
    rows[:] = [entry("rms_norm", 1.3e-3, samples=200, **mine)]
    assert main(command) == 1
    capsys.readouterr()
    write(path, entry("rms_norm", op="rms_norm", machine_key="another"))
    assert main(command) == 2
    assert "another machine's" in capsys.readouterr().err


# ---- what is committed --------------------------------------------------------------------------------------------------
def test_the_gated_rows_are_rows_of_the_grids() -> None:
    assert set(GATED) == set(SMOKE) == set(OPS)
    assert all(row in GRIDS[op].rows for op, row in GATED.items())


def test_the_committed_tables_name_every_op() -> None:
    names = {roof_share.name(op) for op in OPS}
    instruction_tables = json.loads((baseline.FOLDER / "instructions.json").read_text())
    roof_tables = json.loads((baseline.FOLDER / "roof.json").read_text())
    assert {"avx2", "avx512"} <= set(roof_tables)
    for table in [*instruction_tables.values(), *roof_tables.values()]:
        assert set(table) == names
        assert all(value > 0 for value in table.values())
    files = list(baseline.FOLDER.glob("*threads.json"))
    assert files
    for path in files:
        rows = gate.entries(path)
        assert {e["op"] for e in rows.values()} == set(OPS)
        assert len({e["machine_key"] for e in rows.values()}) == 1
        assert path.name == baseline.file_name(next(iter(rows.values()))["machine"])
