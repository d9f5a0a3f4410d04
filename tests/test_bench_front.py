"""`pykernels bench`: which problems it takes, what its rows say, and that it never compares two machines."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import one_line, pykernels

from pykernels import native
from pykernels.bench import front, gate, plot, torch_peer
from pykernels.bench.harness import StopRule
from pykernels.bench.problems import GRIDS, problem, problems
from pykernels.contract import OPS
from pykernels.roofline.attach import bench_rows

NAME = "bench/suite/test_norm.py::test_rms_norm[cpu-row]"


def entry(seconds: float = 1e-3, **changes: Any) -> dict[str, Any]:
    info = {
        "op": "rms_norm",
        "case": "row",
        "backend": "cpu",
        "entry": "kernel",
        "temperature": "cold",
        "machine_key": "m1",
        "output_hash": "h1",
        "control_seconds": 1e-3,
        "flops": 4e6,
        "bytes": 2e6,
        "bound": "dram",
        "roof_pct": 50.0,
    }
    return {**info, **changes, "samples": [seconds * (1 + i % 5 / 1000) for i in range(21)]}


# ---- what is chosen ---------------------------------------------------------------------------------------------------
def test_smoke_is_one_problem_of_each_op_and_full_all() -> None:
    assert [c.op for c in front.choose([], ["smoke"])] == list(GRIDS)
    assert len(front.choose([], ["full"])) == sum(len(g.rows) for g in GRIDS.values())


def test_families_ops_and_size_words_choose() -> None:
    assert {OPS[c.op].family for c in front.choose(["decode"], ["full"])} == {"decode"}
    assert {c.op for c in front.choose(["rms_norm"], ["full"])} == {"rms_norm"}
    found = front.choose(["decode"], ["llama3_8b", "kv_int8"])
    assert found
    assert all({"llama3_8b", "kv_int8"} <= set(c.name.split("-")) for c in found)


def test_a_size_word_is_a_whole_word() -> None:
    assert all("batch_1" in c.name.split("-") for c in front.choose([], ["batch_1"]))


@pytest.mark.parametrize(("names", "sizes", "words"), [(["nor"], ["smoke"], "nor"), (["norm"], ["vast"], "tokens_1")])
def test_what_does_not_exist_is_told_what_does(names: list[str], sizes: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        front.choose(names, sizes)


# ---- rows -------------------------------------------------------------------------------------------------------------
def test_a_row_shows_bytes_per_second_unless_arithmetic_is_the_limit() -> None:
    rows = front.rows({"a": entry(), "b": entry(bound="float32"), "c": entry(bound=None, roof_pct=None)})
    assert [r.speed for r in rows] == ["2.00 GB/s", "3.99 GFLOP/s", "2.00 GB/s"]
    assert rows[0].median == pytest.approx(1.002e-3)
    assert rows[0].bar == "█" * 10 + "·" * 10
    assert rows[2].bar == ""


def test_the_ratio_is_normalised_by_the_control() -> None:
    slower = front.rows({NAME: entry(1.5e-3)}, {NAME: entry()})[0]
    assert (slower.verdict, slower.ratio) == ("SLOWER", pytest.approx(1.5, rel=1e-3))
    busy = front.rows({NAME: entry(1.5e-3, control_seconds=1.5e-3)}, {NAME: entry()})[0]
    assert (busy.verdict, busy.ratio) == ("SAME", pytest.approx(1.0, rel=1e-3))


def test_other_outputs_and_missing_rows_have_no_ratio() -> None:
    changed = front.rows({NAME: entry(output_hash="h2")}, {NAME: entry()})[0]
    assert changed.ratio is None
    assert "h1 became h2" in changed.verdict
    missing = front.rows({NAME: entry()}, {"another": entry()})[0]
    assert (missing.ratio, missing.verdict) == (None, "not in the baseline")


def test_another_machine_s_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"another machine's.*m2"):
        front.rows({NAME: entry()}, {NAME: entry(machine_key="m2")})
    on_both = {NAME: entry(), "gpu": entry(backend="cuda", machine_key="g1")}  # a file may hold a machine's CPU and GPU
    assert front.rows({NAME: entry()}, on_both)[0].verdict == "SAME"


def test_the_table_has_ratios_only_beside_a_baseline() -> None:
    alone = front.table(front.rows({NAME: entry()}))
    assert "ratio" not in alone
    assert "50.0 %" in alone
    beside = front.table(front.rows({NAME: entry(1.5e-3)}, {NAME: entry()}))
    assert beside.splitlines()[1].endswith("1.500  SLOWER")


def test_the_plot_is_a_file_of_its_own_with_a_bar_per_row_and_a_mark_of_before() -> None:
    rows = front.rows({NAME: entry(1.5e-3), "new": entry(roof_pct=25.0)}, {NAME: entry()})
    tree = ET.fromstring(plot.svg(rows))
    ns = "{http://www.w3.org/2000/svg}"
    bars = [float(r.get("width", 0)) for r in tree.iter(f"{ns}rect") if r.get("class") == "bar"]
    assert bars[0] == pytest.approx(2 * bars[1])
    marks = [line for line in tree.iter(f"{ns}line") if line.get("class") == "was"]
    assert len(marks) == 1
    assert float(marks[0].get("x1", 0)) - plot.LABELS == pytest.approx(1.5 * bars[0], rel=1e-3)
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.svg(front.rows({NAME: entry(roof_pct=None)}))


# ---- a peer ------------------------------------------------------------------------------------------------------------
QUICK = StopRule(min_samples=2, max_samples=2)
NORM = problem("rms_norm", model="smollm2", dtype="float32", tokens=1)
EXPRESSION: Any = torch_peer.PEERS["rms_norm"]
REFUSED = {"kv_int8", "kv_fp8_e4m3", "int8", "q4_1", "q8_0", "top_k_top_p", "min_p"}  # words of what torch cannot do


def expressed() -> list[Any]:
    ops = [op for op, build in torch_peer.PEERS.items() if not isinstance(build, str)]
    return [c for op in ops for c in problems(op) if "smollm2" in c.name]


def test_every_op_has_an_expression_or_a_reason() -> None:
    assert torch_peer.PEERS.keys() == GRIDS.keys()
    assert all((isinstance(build, str) and build) or callable(build) for build in torch_peer.PEERS.values())


@pytest.mark.parametrize("case", expressed(), ids=str)
def test_torch_agrees_with_the_reference_or_says_what_it_lacks(case: Any) -> None:
    found = torch_peer.beside(case, "cpu", rule=QUICK, cold=False)
    if REFUSED & set(case.name.split("-")):
        assert found["median"] is None
        assert "torch" in found["reason"] or "scaled_dot_product" in found["reason"] or "multinomial" in found["reason"]
        assert "wrong" not in found["reason"]
    else:
        assert found["reason"] == ""
        assert found["median"] > 0


def zeros(args: Any) -> torch_peer.Evaluate:
    return lambda: {n: torch.zeros_like(args[n]) for n in ("out", "residual_out")}


def once(args: Any) -> torch_peer.Evaluate:
    """Right results, computed by the first calls alone."""
    evaluate, calls = EXPRESSION(args), iter(range(3))
    return lambda: evaluate() if next(calls, None) is not None else {}


@pytest.mark.parametrize("build", [zeros, once])
def test_a_peer_that_is_wrong_has_no_time(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_peer.PEERS, "rms_norm", build)
    found = torch_peer.beside(NORM, "cpu", rule=QUICK, cold=False)
    assert found["median"] is None
    assert found["reason"].startswith("is not timed, it is wrong: out")


@pytest.mark.parametrize(
    ("op", "option"),
    [
        ("prefill_attention", {"window_left": 4}),
        ("prefill_attention", {"softcap": 30.0}),
        ("prefill_attention", {"sinks": torch.zeros(9)}),
        ("prefill_attention", {"cu_seqlens_q": torch.tensor([0, 100, 128])}),
        ("prefill_attention", {"q": torch.zeros(64, 9, 64), "cu_seqlens_q": torch.tensor([0, 64])}),
        ("paged_decode_attention", {"alibi_slopes": torch.zeros(9)}),
        ("paged_decode_attention", {"seqlens_k": torch.tensor([3, 5])}),
        ("linear", {"residual": torch.zeros(1, 576)}),
        ("sample", {"logit_bias": torch.zeros(49152)}),
    ],
)
def test_what_torch_s_expression_leaves_out_is_refused(op: str, option: dict[str, Any]) -> None:
    args = next(c for c in expressed() if c.op == op).args()
    torch_peer.prepare(op, args)()
    with pytest.raises(NotImplementedError):
        torch_peer.prepare(op, args | option)


def test_torch_has_as_many_threads_as_ours_and_gets_its_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def build(args: Any) -> torch_peer.Evaluate:
        seen.append(torch.get_num_threads())
        raise NotImplementedError("no")

    ours, before = native.module().num_threads(), torch.get_num_threads()
    monkeypatch.setitem(torch_peer.PEERS, "rms_norm", build)
    try:
        torch.set_num_threads(ours + 1)
        assert torch_peer.beside(NORM, "cpu", rule=QUICK)["threads"] == ours
        assert (seen, torch.get_num_threads()) == ([ours], ours + 1)
    finally:
        torch.set_num_threads(before)


def test_a_peer_stands_beside_ours_or_a_dash_with_the_reason() -> None:
    beside = {"name": "torch", "median": 2.004e-3, "reason": ""}
    rows = front.rows({"a": entry(peer=beside), "b": entry(peer=beside | {"median": None, "reason": "has none"})})
    assert [(r.peer_ratio, r.peer_reason) for r in rows] == [(pytest.approx(2.0), ""), (None, "has none")]
    head, first, second = front.table(rows).splitlines()
    assert head.endswith("torch  x torch")
    assert first.split()[-3:] == ["2.00", "ms", "2.00"]
    assert second.split()[-2:] == ["-", "-"]
    assert "torch" not in front.table(front.rows({"a": entry()}))


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="numpy"):
        next(front.run([NORM], ["cpu"], QUICK, limits=(None, None), say=print, peer="numpy"))


# ---- the command ------------------------------------------------------------------------------------------------------
def test_the_command_measures_saves_and_compares(tmp_path: Path) -> None:
    file, drawing = tmp_path / "now.json", tmp_path / "now.svg"
    quick = ("bench", "activation", "rope", "--backend", "cpu", "--seconds", "0.02")
    done = pykernels(*quick, "--save", str(file), "--plot", str(drawing))
    assert done.returncode == 0, done.stderr
    assert "gated_activation" in done.stdout
    assert "rotary_embedding" in done.stdout
    ET.fromstring(drawing.read_text())
    assert [line.ratio for line in gate.compare_files(file, file)] == [pytest.approx(1.0)] * 2  # the gate reads it
    assert {row["size"] for row in bench_rows(json.loads(file.read_text()))} == {
        "smollm2 bfloat16 tokens 1"
    }  # the report

    again = pykernels(*quick, "--baseline", str(file), "--json")
    assert again.returncode == 0, again.stderr
    rows = json.loads(again.stdout)["rows"]
    assert [r["op"] for r in rows] == ["rotary_embedding", "gated_activation"]
    assert all(r["ratio"] > 0 for r in rows)

    document = json.loads(file.read_text())
    for each in document["benchmarks"]:
        each["extra_info"]["machine_key"] = "elsewhere"
    file.write_text(json.dumps(document))
    one_line(pykernels(*quick, "--baseline", str(file)), "elsewhere", "nothing to compare")


def test_the_saved_names_are_the_suite_s(tmp_path: Path) -> None:
    file = tmp_path / "now.json"
    done = pykernels("bench", "gated_activation", "--backend", "cpu", "--seconds", "0.02", "--save", str(file))
    assert done.returncode == 0, done.stderr
    each = json.loads(file.read_text())["benchmarks"][0]
    row = "cpu-smollm2-bfloat16-tokens_1"
    assert each["fullname"] == f"bench/suite/test_activation.py::test_gated_activation[{row}]"
    assert each["params"] == {"backend": "cpu", "model": "smollm2", "dtype": "bfloat16", "tokens": 1}


def test_the_command_measures_a_peer_and_saves_it(tmp_path: Path) -> None:
    file = tmp_path / "now.json"
    quick = ("bench", "rms_norm", "rotary_embedding", "--backend", "cpu", "--seconds", "0.02", "--peer", "torch")
    done = pykernels(*quick, "--save", str(file), "--json")
    assert done.returncode == 0, done.stderr
    norm, rotary = json.loads(done.stdout)["rows"]
    assert norm["peer_ratio"] == pytest.approx(norm["peer_median"] / norm["median"])
    assert (rotary["peer"], rotary["peer_median"]) == ("torch", None)
    assert rotary["peer_reason"] == torch_peer.PEERS["rotary_embedding"]
    assert rotary["peer_reason"] in done.stderr
    saved = [each["peer"] for each in gate.entries(file).values()]
    assert [each["median"] for each in saved] == [norm["peer_median"], None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nothing"], ["nothing", "families"]),
        (["norm", "--sizes", "vast"], ["vast"]),
        (["norm", "--backend", "reference"], ["reference", "cannot be measured here"]),
        (["norm", "--baseline", "missing.json"], ["missing.json"]),
        (["norm", "--peer", "numpy"], ["numpy", "torch"]),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], words: list[str]) -> None:
    one_line(pykernels("bench", *options), *words)
