"""The gate of the Triton kernels' machine code: each rule fails on a doctored table, and the committed table passes. No compiler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import roofline_data

CI = Path(__file__).parents[1] / "ci"
sys.path.insert(0, str(CI))
from compile_gate import Expectation, audit, complaints, dump, stale  # noqa: E402

from pykernels.roofline.attach import attach  # noqa: E402
from pykernels.roofline.occupancy import MULTIPROCESSORS, estimate, report_rows  # noqa: E402
from pykernels.roofline.report import render  # noqa: E402

TABLE = CI / "compile_matrix.json"
# 128 x 64 keys, 128 columns: 64-wide scores in 8 steps, 128-wide outputs in 4, for each of two warpgroups.
GOOD: dict[str, Any] = {
    "registers": 180, "spills": 0, "shared": 131072, "instructions": 2776, "loop_length": 343, "num_warps": 8, "num_stages": 3,
    "loop": {"async": 2, "mufu": 34, "tensor": 12}, "tensor_ops": {"HGMMA.64x128x16": 4, "HGMMA.64x64x16": 8},
    "macs": 128 * 64 * 256, "steps": 12,
}  # fmt: skip
PREFILL = Expectation(tensor=True, wide=("sm90", "sm100"), longest={"sm90": 352})
DECODE = Expectation(tensor=True)


def judged(change: dict[str, Any], target: str = "sm90", expected: Expectation = PREFILL) -> list[str]:
    return complaints("k", target, GOOD | change, GOOD, expected)


def test_an_unchanged_row_passes() -> None:
    assert judged({}) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spills": 1}, "1 spills"),
        ({"tensor_ops": {"HMMA.16816": 128}}, "no HGMMA"),
        ({"tensor_ops": {}}, "no tensor cores"),
        ({"loop": {"mufu": 34, "tensor": 12}}, "asynchronous"),
        ({"loop": {"async": 0}}, "asynchronous"),
        ({"loop_length": 353}, "at most 352"),
        ({"registers": 199}, "registers grew"),
        ({"shared": 144180}, "shared grew"),
    ],
)
def test_each_regression_fails(change: dict[str, Any], word: str) -> None:
    (text, *_) = judged(change)
    assert word in text


def test_a_product_that_left_the_tensor_cores_fails_even_when_the_other_stays() -> None:
    """The scores fell back to mma.sync, or either product to the vector units."""
    assert any("fell back" in text for text in judged({"tensor_ops": {"HGMMA.64x128x16": 4, "HMMA.16816": 64}}))
    for left in ({"HGMMA.64x128x16": 4}, {"HGMMA.64x64x16": 8}):
        assert any("multiply-adds" in text for text in judged({"tensor_ops": left}))
    half = {"tensor_ops": {"HMMA.16816": 64}, "num_warps": 8}
    assert any("multiply-adds" in text for text in judged(half, "sm80", DECODE))
    assert judged({"tensor_ops": {"HMMA.16816": 128}}, "sm80", DECODE) == []


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_every_target_misses_its_own_instruction(target: str) -> None:
    own = {"sm80": "HMMA.16816", "sm90": "HGMMA.64x128x16", "sm100": "UTCHMMA", "gfx942": "v_mfma_f32_32x32x8_bf16"}
    for wide in (False, True):
        expected = Expectation(tensor=True, wide=(target,) if wide else ())
        assert judged({"tensor_ops": {own[target]: 1000}}, target, expected) == []
        assert judged({"tensor_ops": {"FFMA": 1000}}, target, expected)
    assert judged({"tensor_ops": {"UTCHMMA": 11}}, "sm100", PREFILL)


def test_small_tiles_may_use_the_warps_own_instruction_and_prefill_may_not() -> None:
    row = {"tensor_ops": {"HMMA.16816": 1000}}
    assert judged(row, "sm90", DECODE) == []
    assert judged(row, "sm90", PREFILL)


def test_growth_is_judged_against_the_table_and_not_below_it() -> None:
    known = GOOD | {"loop_length": 300}
    assert complaints("k", "sm90", GOOD | {"loop_length": 330}, known, PREFILL) == []
    assert complaints("k", "sm90", GOOD | {"loop_length": 331}, known, PREFILL)
    assert judged({"registers": 90, "loop_length": 100}) == []


def test_rows_that_are_missing_new_or_left_over_fail() -> None:
    label = "case/attention/sm90"
    assert audit({label: GOOD}, {label: GOOD}, {label: PREFILL}) == []
    assert "no row" in audit({label: GOOD}, {}, {label: PREFILL})[0]
    assert "no such kernel" in audit({}, {label: GOOD}, {label: PREFILL})[0]
    assert "remove it" in audit({label: GOOD}, {label: GOOD, "old/attention/sm90": GOOD}, {label: PREFILL})[0]


def test_a_row_that_was_made_from_other_code_fails() -> None:
    known = {"a/attention/sm90": GOOD | {"source": "0123"}, "b/attention/sm90": GOOD}
    assert stale(known, {"a/attention/sm90": "0123"}) == []
    assert "made from other code" in stale(known, {"a/attention/sm90": "4567"})[0]
    assert "made from other code" in stale(known, {"b/attention/sm90": "0123"})[0]


def test_the_committed_table_obeys_the_rules_and_is_complete() -> None:
    pytest.importorskip("triton")
    from compile_cases import expectations

    tables = json.loads(TABLE.read_text())
    assert "3.9" in tables
    assert dump(tables) == TABLE.read_text()
    for rows in tables.values():
        assert audit(rows, rows, expectations()) == []


def test_every_promise_has_a_row() -> None:
    """The widest tensor-core path for every width and kind of cache, in prefill and decode, and the tile of 128 x 64."""
    rows = json.loads(TABLE.read_text())["3.9"]
    for phase in ("paged", "decode"):
        for width in (64, 128, 256):
            for kind in ("", "-fp8-tensor", "-fp8-token", "-int8-tensor", "-int8-token"):
                row = rows[f"{phase}-d{width}{kind}/attention/sm90"]
                wide = phase == "paged" or kind
                assert all(op.startswith("HGMMA" if wide else "HMMA") for op in row["tensor_ops"]), (phase, width, kind)
                assert row["loop"]["async"] > 0
    tile = rows["prefill-d128-window/attention/sm90"]
    assert tile["tile"] == [128, 64]
    assert tile["loop_length"] <= 352


@pytest.mark.parametrize(
    ("target", "row", "warps", "limit"),
    [
        ("sm90", {"registers": 236, "shared": 163856, "num_warps": 8}, 8, "registers"),
        ("sm90", {"registers": 64, "shared": 100000, "num_warps": 8}, 16, "shared memory"),
        ("sm80", {"registers": 64, "shared": 100000, "num_warps": 8}, 8, "shared memory"),
        ("sm90", {"registers": 20, "shared": 0, "num_warps": 8}, 64, "warps"),
        ("sm90", {"registers": 20, "shared": 0, "num_warps": 1}, 32, "blocks"),
        ("sm90", {"registers": 108, "shared": 39168, "num_warps": 4}, 16, "registers"),
        ("gfx942", {"registers": 128, "shared": 16384, "num_warps": 4}, 16, "registers"),
        ("gfx942", {"registers": 64, "shared": 32768, "num_warps": 4}, 8, "shared memory"),
    ],
)
def test_occupancy_obeys_the_limits_of_each_target(target: str, row: dict[str, Any], warps: int, limit: str) -> None:
    found = estimate(row | {"loop_length": 0, "loop": {}}, target)
    assert (found.warps, found.limit) == (warps, limit)
    assert found.occupancy == warps / MULTIPROCESSORS[target].warps
    assert found.bound is None


def test_the_clocks_of_a_turn_are_issue_special_functions_and_tensor_cores() -> None:
    found = estimate(GOOD, "sm90")
    assert found.issue_clocks == 343 * 8 / 4
    assert found.special_clocks == 34 * 8 * 32 / 16
    assert found.tensor_clocks == 1024
    assert found.bound == "tensor"


def test_occupancy_rows_of_a_target_are_what_a_report_shows(tmp_path: Path) -> None:
    plain = {"registers": 20, "shared": 0, "num_warps": 8, "loop_length": 0, "loop": {}}
    rows = report_rows({"b/attention/sm90": GOOD, "a/copy/sm90": plain, "b/attention/sm80": GOOD}, "sm90")
    assert [r["kernel"] for r in rows] == ["a/copy/sm90", "b/attention/sm90"]
    copy, attention = rows
    assert (copy["warps per SM"], copy["occupancy %"], copy["limited by"]) == (64, 100.0, "warps")
    assert copy["loop bound by"] == "no loop"
    assert (attention["blocks per SM"], attention["occupancy %"], attention["loop bound by"]) == (1, 12.5, "tensor")
    page = render(attach(roofline_data.sample_document(), occupancy=rows), tmp_path).read_text()
    assert "b/attention/sm90" in page
    with pytest.raises(ValueError, match="no figures for sm100"):
        report_rows({"b/attention/sm90": GOOD}, "sm100")


@pytest.mark.parametrize("target", sorted(MULTIPROCESSORS))
def test_the_committed_table_has_occupancy_rows(target: str) -> None:
    for table in json.loads(TABLE.read_text()).values():
        for row in report_rows(table, target):
            assert 0 < row["occupancy %"] <= 100, row
