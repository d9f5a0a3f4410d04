"""The gate of the CUDA build: what it reads out of the tools' texts, and that each kind of regression fails it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ci"))
from cuda_figures import TABLE, compiler_figures, complaints, demangle, lost_advice, machine_code

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
GOOD = compiler_figures(LOG)["_Z1kv", "sm_90a"] | machine_code(SASS)["_Z1kv", "sm_90a"] | {"hgmma": 0, "store_128": 1}


def test_the_compilers_figures_are_read_per_kernel_and_architecture() -> None:
    rows = compiler_figures(LOG)
    assert rows["_Z1kv", "sm_80"] == {"stack": 8, "spills": 16, "registers": 64, "shared": 128}
    assert rows["_Z1kv", "sm_90a"] == {"stack": 0, "spills": 0, "registers": 40, "shared": 0}


def test_instructions_are_counted_with_and_without_a_predicate() -> None:
    row = machine_code(SASS)["_Z1kv", "sm_80"]
    assert row["instructions"] == 5
    assert (row["load_128"], row["async_copy_128"], row["hmma"], row["local"]) == (1, 1, 1, 1)
    assert machine_code(SASS)["_Z1kv", "sm_90a"]["hgmma"] == 1


def test_labels_keep_template_arguments_of_every_kind() -> None:
    mangled = [
        "_ZN2pk4cuda12_GLOBAL__N_17prefillI6__halfLi64ELNS1_6InputsE2EEEvNS0_11PrefillArgsE",
        "_ZN2pk4cuda12_GLOBAL__N_16kernelILNS_5DTypeE3ELb1ELi8EEEvNS1_3RowE",
    ]
    assert demangle(mangled) == ["prefill<__half, 64, 2>", "kernel<3, true, 8>"]


def test_an_unchanged_kernel_passes() -> None:
    assert complaints("k", GOOD, GOOD) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spills": 4}, "spills"),
        ({"stack": 8}, "local memory"),
        ({"local": 1}, "local memory"),
        ({"store_128": 0}, "store_128"),
        ({"register_moves": 0}, "register_moves"),
        ({"registers": 49}, "registers"),
        ({"instructions": 67}, "instructions grew"),
        ({"loop_instructions": 65}, "loop_instructions grew"),
    ],
)
def test_each_regression_fails(change: dict[str, int], word: str) -> None:
    (text,) = complaints("k", GOOD | change, GOOD)
    assert word in text


def test_a_kernel_without_a_row_fails() -> None:
    (text,) = complaints("k", GOOD, None)
    assert "no row" in text


@pytest.mark.parametrize("name", ["loop_instructions", "hmma", "registers"])
def test_a_row_that_lacks_a_figure_fails(name: str) -> None:
    (text,) = complaints("k", GOOD, {k: n for k, n in GOOD.items() if k != name})
    assert f"lacks {name}: run" in text


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


LOOP = """\
arch = sm_80
\t\tFunction : _Z1kv
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64] ;
        /*0030*/                   LDGSTS.E [R1], [R2.64] ;
        /*0040*/                   LDG.E.128 R4, [R2.64] ;
        /*0050*/               @P1 BRA 0x10 ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0080*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0090*/                   BRA 0x60 ;
        /*00a0*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*00b0*/                   BRA 0x0 ;
        /*00c0*/                   BRA 0xc0;
"""


def test_the_main_loop_is_the_smallest_with_all_products() -> None:
    def loop(text: str) -> tuple[int, ...]:
        row = machine_code(text)["_Z1kv", "sm_80"]
        return tuple(row[f"loop_{name}"] for name in ("instructions", "products", "copies", "narrow_copies"))

    assert loop(LOOP) == (12, 3, 5, 1)
    assert loop(LOOP.replace("BRA 0x0 ", "EXIT")) == (4, 2, 1, 0)
    cached = LOOP.replace("LDGSTS.E ", "LDGSTS.E.BYPASS.LTC128B ")  # 128 bytes of cache, not 128 bits
    assert loop(cached) == loop(LOOP)
    assert loop(LOOP.replace("HMMA", "FFMA")) == (0, 0, 0, 0)
    assert loop(SASS) == (0, 0, 0, 0)


def test_every_tensor_core_kernel_in_the_table_has_what_its_tiles_make() -> None:
    table = json.loads(TABLE.read_text())
    rows = {label: row for label, row in table.items() if row["hmma"] + row["imma"] + row["hgmma"]}
    for family in ("decode_kernel<", "linear_kernel<", "prefill<", "prefill_sm90<"):
        assert any(f"/{family}" in label for label in rows), family
    assert not [text for label, row in rows.items() for text in complaints(label, row, row)]


@pytest.mark.parametrize("family", ["decode_kernel<", "linear_kernel<", "prefill<"])
@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("hmma", -1, "hmma is"),
        ("loop_products", -1, "loop_products is"),
        ("loop_narrow_copies", 1, "copies in the main loop"),
    ],
)
def test_another_main_loop_than_the_algorithms_fails(family: str, name: str, change: int, word: str) -> None:
    label, row = next((k, r) for k, r in json.loads(TABLE.read_text()).items() if f"/{family}" in k)
    (text,) = complaints(label, row | {name: row[name] + change}, row)
    assert word in text


@pytest.mark.parametrize("family", ["decode_kernel<", "linear_kernel<", "prefill<"])
def test_narrower_copies_in_a_main_loop_fail(family: str) -> None:
    label, row = next((k, r) for k, r in json.loads(TABLE.read_text()).items() if f"/{family}" in k)
    assert any(
        "loop_copies is" in text for text in complaints(label, row | {"loop_copies": row["loop_copies"] - 1}, row)
    )
    assert any("0 of 16 bytes" in text for text in complaints(label, row | {"loop_copies": 0}, row))


def test_products_that_no_rule_knows_fail() -> None:
    (text,) = complaints("a/unknown<1>/sm_90a", GOOD | {"hgmma": 4}, GOOD)
    assert "expected" in text


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
