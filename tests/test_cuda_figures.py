"""The gate of the CUDA build: what it reads out of the tools' texts, and that each kind of regression fails it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))
from cuda_figures import SPILLS_ALLOWED, TABLE, compiler_figures, complaints, lost_advice, machine_code

LOG = """\
ptxas info    : Compiling entry function '_Z1kv' for 'sm_80'
ptxas info    : Function properties for _Z1kv
    8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 8 bytes cumulative stack size, 128 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 400 bytes cmem[0]
"""
SASS = """\
arch = sm_80
\t\tFunction : _Z1kv
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0030*/               @P1 STL [R1], R4 ;
        /*0040*/                   EXIT ;
arch = sm_90a
\t\tFunction : _Z1kv
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
"""
GOOD = compiler_figures(LOG)["_Z1kv", "sm_90a"] | machine_code(SASS)["_Z1kv", "sm_90a"]


def test_the_compilers_figures_are_read_per_kernel_and_architecture() -> None:
    rows = compiler_figures(LOG)
    assert rows["_Z1kv", "sm_80"] == {"stack": 8, "spills": 16, "registers": 64, "shared": 128}
    assert rows["_Z1kv", "sm_90a"] == {"stack": 0, "spills": 0, "registers": 40, "shared": 0}


def test_instructions_are_counted_with_and_without_a_predicate() -> None:
    row = machine_code(SASS)["_Z1kv", "sm_80"]
    assert row["instructions"] == 5
    assert (row["load_128"], row["async_copy_128"], row["hmma"], row["local"]) == (1, 1, 1, 1)
    assert machine_code(SASS)["_Z1kv", "sm_90a"]["hgmma"] == 1


def test_an_unchanged_kernel_passes() -> None:
    assert complaints("k", GOOD, GOOD) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spills": 4}, "spills"),
        ({"stack": 8}, "local memory"),
        ({"local": 1}, "local memory"),
        ({"hgmma": 0}, "hgmma"),
        ({"register_moves": 0}, "register_moves"),
        ({"registers": 49}, "registers"),
    ],
)
def test_each_regression_fails(change: dict[str, int], word: str) -> None:
    (text,) = complaints("k", GOOD | change, GOOD)
    assert word in text


def test_spills_are_allowed_to_the_kernels_that_are_listed_and_no_further() -> None:
    for label, most in SPILLS_ALLOWED.items():
        assert complaints(label, GOOD | {"spills": most, "stack": most, "local": 5}, GOOD) == []
        assert complaints(label, GOOD | {"spills": most + 4}, GOOD)
        assert complaints(f"x{label}", GOOD | {"spills": 4}, GOOD)


def test_a_kernel_without_a_row_fails() -> None:
    (text,) = complaints("k", GOOD, None)
    assert "no row" in text


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function '_Z1kv'",
        "ptxas info    : (C7507) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements.",
        "ptxas warning : setmaxnreg is ignored; unable to determine register count at entry",
    ],
)
def test_what_the_compiler_could_not_do_fails(line: str) -> None:
    assert lost_advice(LOG) == []
    assert lost_advice(f"{LOG}{line}\n") == [line]


def test_attention_on_sm90_has_the_products_of_its_tiles_and_no_others() -> None:
    """Scores of the first tile, scores and output of the loop, output of the last: each once in the code."""
    rows = {label: row for label, row in json.loads(TABLE.read_text()).items() if "prefill_sm90<" in label}
    assert len(rows) == 8
    for label, row in rows.items():
        dim = int(re.search(r", (\d+), (?:true|false)>", label)[1])
        assert row["hgmma"] == 2 * (dim // 16 + 128 // 16), label
        assert row["tma"] == 3 * dim // 64, label  # queries, keys, values
        assert row["register_moves"] == 2, label
        assert row["spills"] == row["stack"] == row["local"] == 0, label


def test_every_kernel_source_has_rows() -> None:
    sources = {p.stem: p.read_text() for p in (Path(__file__).parents[1] / "csrc/cuda").glob("*.cu")}
    with_kernels = {
        name
        for name, text in sources.items()
        if "__global__" in text or re.search(rf'#include "{name.split("_")[0]}(_sm90)?\.cuh"', text)
    }
    assert {"prefill_bf16", "prefill_bf16_sm90"} < with_kernels
    table = TABLE.read_text()
    assert not [name for name in with_kernels if f'"{name}/' not in table]
