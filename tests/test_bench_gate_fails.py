"""What the gate must never let pass, each through the command or script that ci/gate.sh calls."""

from __future__ import annotations

import json
import re
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from suite_file import entry, write

from pykernels.bench import gate, harness, roof_share
from pykernels.bench.roof_share import Share
from pykernels.cli import main
from pykernels.roofline.ceilings import RoofError

ROOT = Path(__file__).parents[1]
CI = ROOT / "ci"
sys.path.insert(0, str(CI))
import cuda_figures  # noqa: E402


# ---- two files of the suite -------------------------------------------------------------------------------------------
def gated(folder: Path, before: list[dict[str, Any]], after: list[dict[str, Any]], *options: str) -> int:
    paths = [write(folder / f"{name}.json", *rows) for name, rows in (("a", before), ("b", after))]
    return main(["gate", *map(str, paths), *options])


WHOLE = [entry("p"), entry("q")]


@pytest.mark.parametrize(
    ("after", "code", "words"),
    [
        (WHOLE, 0, "SAME"),
        ([], 2, "an empty run is a failure"),
        (WHOLE[:1], 1, r"q +MISSING"),
        ([entry("p"), entry("q", output_hash="h2")], 1, r"q +CHANGED OUTPUT .*h1 became h2"),
        ([entry("p"), entry("q", roof_pct=107.0)], 1, r"q +ABOVE ROOF .*107 % of its roof"),
        ([entry("p", machine_key="m2"), entry("q", machine_key="m2")], 2, "from different machines"),
    ],
    ids=["unchanged", "empty", "missing", "hash", "roof", "machine"],
)
def test_two_runs_of_the_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: list[dict[str, Any]], code: int, words: str
) -> None:
    assert gated(tmp_path, WHOLE, after) == code
    shown = capsys.readouterr()
    assert re.search(words, shown.out + shown.err)


def test_what_is_undecided_fails_only_when_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noisy = [entry("p"), entry("q")]
    noisy[1]["stats"] = {"data": [1.0, 1.3] * 10}
    for options, code in (((), 0), (("--strict",), 1)):
        assert gated(tmp_path, WHOLE, noisy, *options) == code
        assert re.search(r"q +AMBIGUOUS", capsys.readouterr().out)
    assert gated(tmp_path, WHOLE, WHOLE, "--strict") == 0


def test_a_baseline_of_another_machine_fails(tmp_path: Path) -> None:
    assert gated(tmp_path, [entry("p", machine_key="m2")], [entry("p")]) == 2


# ---- two revisions ----------------------------------------------------------------------------------------------------
class Told:
    """A side that answers as `answers` says, without a process."""

    answers: dict[str, dict[str, Any]]

    def __init__(self, tree: Path, threads: int) -> None:
        self.changed = self.answers if tree.name == "b" else {}

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        usual = {
            "hello": {"machine": "m1"},
            "prepare": {"hash": "h1"},
            "sample": {"times": [1.0] * 5, "controls": [1.0] * 5},
        }
        return (usual | self.changed)[do]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ({}, 0, "SAME"),
        ({"prepare": {"error": "no such case"}}, 1, "MISSING"),
        ({"prepare": {"hash": "h2"}}, 1, "CHANGED OUTPUT"),
        ({"sample": {"times": [1.1] * 5, "controls": [1.0] * 5}}, 1, "SLOWER"),
        ({"hello": {"machine": "m2"}}, 2, "run differently"),
    ],
    ids=["unchanged", "missing", "hash", "slower", "machine"],
)
def test_two_revisions(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: dict[str, dict[str, Any]],
    code: int,
    words: str,
) -> None:
    from pykernels.cli import gate as command

    monkeypatch.setattr(Told, "answers", answers, raising=False)
    monkeypatch.setattr(gate, "Side", Told)
    monkeypatch.setattr(command, "tree", lambda revision: Path({"HEAD": "a", ".": "b"}[revision]))
    assert main(["gate", "HEAD", ".", "--op", "rms_norm"]) == code
    shown = capsys.readouterr()
    assert words in shown.out + shown.err


# ---- roofs ------------------------------------------------------------------------------------------------------------
def test_a_point_above_its_roof_fails_the_gate_on_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The op takes a thousandth of its time, on the clock."""

    class Hasty(harness.Timer):
        def sample(self) -> float:
            return super().sample() / 1000

    from pykernels import native
    from pykernels.bench import baseline

    name = roof_share.name("gated_activation")
    baseline.write(tmp_path / "roof.json", native.chosen_level(), {name: 30.0})
    monkeypatch.setattr(roof_share, "Timer", Hasty)
    threads = native.module().num_threads()
    try:
        assert main(["baseline", "roof", "--op", "gated_activation", "--folder", str(tmp_path)]) == 1
    finally:
        native.module().set_num_threads(threads)
    assert "ABOVE ROOF" in capsys.readouterr().out


def test_a_share_below_its_minimum_and_one_without_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pykernels import native
    from pykernels.bench import baseline

    command = ["baseline", "roof", "--op", "rms_norm", "--folder", str(tmp_path)]
    threads = native.module().num_threads()
    monkeypatch.setattr(roof_share, "measure", lambda *_: Share(20.0, 19.0, 21.0, "dram"))
    try:
        assert main(command) == 2  # no table of this level
        baseline.write(tmp_path / "roof.json", native.chosen_level(), {"another": 1.0})
        assert main(command) == 1
        baseline.write(tmp_path / "roof.json", native.chosen_level(), {roof_share.name("rms_norm"): 40.0})
        assert main(command) == 1
        assert "SLOWER" in capsys.readouterr().out
        assert main([*command, "--margin", "0.6"]) == 0
    finally:
        native.module().set_num_threads(threads)


def test_the_suite_does_not_write_a_point_above_its_roof() -> None:
    """It raises, so that the benchmark is missing from the file, which fails."""
    from pykernels.bench.problems import gated as problem
    from pykernels.roofline import measure as measure_ceilings

    ceilings = measure_ceilings()
    for ceiling in ceilings.table.values():
        ceiling.samples, ceiling.value = [s / 1e4 for s in ceiling.samples], ceiling.value / 1e4
    with pytest.raises(RoofError, match="rms_norm"):
        harness.measure(problem("rms_norm"), "cpu", ceilings=ceilings)


# ---- the CUDA build ---------------------------------------------------------------------------------------------------
LOG = """\
ptxas info    : Compiling entry function '_Z13decode_kernelI6__halfLi64ELb0EEvi' for 'sm_80'
ptxas info    : Function properties for _Z13decode_kernelI6__halfLi64ELb0EEvi
    {stack} bytes stack frame, {stack} bytes spill stores, {stack} bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 400 bytes cmem[0]
"""
PRODUCT = "HMMA.16816.F32 R4, R8, R10, R4 ;"
COPY = "LDGSTS.E.BYPASS.128 [R1], [R2.64] ;"


def code(products: int, instruction: str = PRODUCT) -> str:
    """A main loop of a decode kernel: three stages of two products of 16 x 16 x 64 each, and their copies."""
    lines = [instruction] * products + [COPY] * 24
    body = "".join(f"        /*{16 * i:04x}*/                   {line}\n" for i, line in enumerate(lines))
    end = f"        /*{16 * len(lines):04x}*/              @P1 BRA 0x0 ;\n"
    return f"arch = sm_80\n\t\tFunction : _Z13decode_kernelI6__halfLi64ELb0EEvi\n{body}{end}"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The last build as `ci/cuda_figures.py` finds it: an object, the compiler's log beside it, and a disassembler."""
    objects = tmp_path / "build" / "native-x" / "_cuda" / "cuda"
    objects.mkdir(parents=True)
    tool = tmp_path / "cuobjdump"
    tool.write_text('#!/bin/sh\ncat "$2"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(cuda_figures, "ROOT", tmp_path)
    monkeypatch.setattr(cuda_figures, "TABLE", tmp_path / "figures.json")
    monkeypatch.setattr(cuda_figures, "disassembler", lambda: str(tool))

    def run(*options: str, stack: int = 0, sass: str | None = None) -> int:
        (objects / "decode.cu.o").write_text(code(48) if sass is None else sass)
        (objects / "decode.cu.o.log").write_text(LOG.format(stack=stack))
        monkeypatch.setattr(sys, "argv", ["cuda_figures.py", *options])
        return cuda_figures.main()

    assert run("--write") == 0
    return run


@pytest.mark.parametrize(
    ("change", "code_", "words"),
    [
        ({}, 0, "all as they should be"),
        ({"stack": 8}, 1, "bytes of spills"),
        ({"sass": code(47)}, 1, "hmma is 47, its tiles make 48"),
        ({"sass": code(48, "FFMA R4, R8, R10, R4 ;")}, 1, "no hmma any more"),
        ({"sass": code(48, "DMMA R4, R8, R10, R4 ;")}, 1, "no hmma any more"),
    ],
    ids=["unchanged", "spill", "one product", "vector units", "another instruction"],
)
def test_the_cuda_build(
    build: Any, capsys: pytest.CaptureFixture[str], change: dict[str, Any], code_: int, words: str
) -> None:
    capsys.readouterr()
    assert build(**change) == code_
    assert words in capsys.readouterr().out


def test_a_build_of_nothing_and_a_kernel_without_a_row_fail(build: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table = json.loads(cuda_figures.TABLE.read_text())
    (label,) = table
    cuda_figures.TABLE.write_text("{}")
    assert build() == 1
    assert "no row in the table" in capsys.readouterr().out
    cuda_figures.TABLE.write_text(json.dumps(table | {label.replace("64", "128"): table[label]}))
    assert build() == 1
    assert "the kernel is gone" in capsys.readouterr().out
    for path in cuda_figures.built():
        path.unlink()
    with pytest.raises(SystemExit, match="no CUDA objects"):
        cuda_figures.main()


# ---- the Triton kernels -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "code_", "words"),
    [
        ({}, 0, "all as they should be"),
        ({"spills": 3}, 1, "3 spills"),
        ({"tensor_ops": {}}, 1, "no tensor cores"),
        ({"tensor_ops": {"HMMA.16816": 9999}}, 1, "no HGMMA"),
        ({"source": "older"}, 1, "made from other code"),
        (None, 1, "launches no such kernel"),
    ],
    ids=["unchanged", "spill", "vector units", "narrower instruction", "stale", "missing"],
)
def test_the_triton_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any] | None,
    code_: int,
    words: str,
) -> None:
    """`ci/compile_matrix.py --quick`, with figures of the committed table in the compiler's place."""
    pytest.importorskip("triton")
    import compile_matrix

    committed = json.loads(compile_matrix.TABLE.read_text())[compile_matrix.version()]
    rows = {label: row | {"source": "this"} for label, row in committed.items()}
    table = tmp_path / "matrix.json"
    table.write_text(json.dumps({compile_matrix.version(): rows}))
    broken = next(k for k in compile_matrix.expectations(True) if k.endswith("attention/sm90") and "prefill" in k)

    def measure(job: tuple[str, str]) -> dict[str, Any]:
        made = {k: v for k, v in rows.items() if (k.split("/")[0], k.split("/")[2]) == job}
        if broken in made:
            made = made | {broken: made[broken] | (change or {})}
            if change is None:
                del made[broken]
        return made

    monkeypatch.setattr(compile_matrix, "TABLE", table)
    monkeypatch.setattr(compile_matrix, "measure", measure)
    monkeypatch.setattr(compile_matrix, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(sys, "argv", ["compile_matrix.py", "--quick"])
    assert compile_matrix.main() == code_
    assert words in capsys.readouterr().out
