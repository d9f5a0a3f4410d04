"""Every case of every op on the CPU backend: the full tables at the level in use, the smoke subset at every other level."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels import native
from pykernels.contract import OPS, native_arguments
from pykernels.library import call
from pykernels.ops.packed_weight import PackedWeight, pack_weight
from pykernels.testing.compare import check_case, same_bits
from pykernels.testing.factories import Case, cases

OTHER_LEVELS = [
    level
    for level in (*native.LEVELS, *native.TEST_LEVELS)
    if native.level_reason(level) is None and level != native.chosen_level()
]


def all_cases(subset: str) -> list[Any]:
    return [pytest.param(case, id=str(case)) for op in OPS for case in cases(op, subset) if "vast" not in case.name]


@pytest.mark.parametrize("case", all_cases("full"))
def test_the_cpu_backend_agrees_with_the_reference(case: Case) -> None:
    def run(op_name: str, args: dict[str, Any]) -> None:
        try:
            call(OPS[op_name], "cpu", **args)
        except NotImplementedError as error:
            pytest.skip(str(error))

    check_case(case, run)


def run_at(level: str, op_name: str, args: dict[str, Any]) -> None:
    """The op of one level's module, whatever level the backend uses."""
    getattr(native.load(level), op_name)(*native_arguments(OPS[op_name], args))


@pytest.mark.parametrize("level", OTHER_LEVELS)
@pytest.mark.parametrize("case", all_cases("smoke"))
def test_every_other_level_agrees_with_the_reference(case: Case, level: str) -> None:
    if native.BACKEND.refuses(case.op, case.args()):
        pytest.skip("no CPU level serves this case")
    check_case(case, lambda name, args: run_at(level, name, args))


@pytest.mark.parametrize("activations", ["float", "int8", "int16"])
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "int8", "q4_0", "q4_1", "q8_0"])
def test_a_row_of_linear_has_the_same_bits_in_any_call(weight_format: str, activations: str) -> None:
    if activations != "float" and weight_format in ("float32", "bfloat16"):
        pytest.skip("floats are multiplied as floats")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 192, generator=generator)
    weight = pack_weight(torch.randn(75, 192, generator=generator), weight_format)

    def linear(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(rows.shape[0], 75)
        words = {"weight_format": weight.format, "layout": weight.layout, "activations": activations}
        call(OPS["linear"], "cpu", x=rows, weight=weight.data, **words, bias=None, residual=None, out=out)
        return out

    whole = linear(x)
    for first, last in ((0, 1), (3, 5), (7, 10), (8, 16), (20, 37)):
        assert torch.equal(linear(x[first:last].clone()), whole[first:last]), (first, last)
    threads = native.module().num_threads()
    try:
        for count in (1, 3):
            native.module().set_num_threads(count)
            assert torch.equal(linear(x), whole), count
    finally:
        native.module().set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 16, 75])
@pytest.mark.parametrize(
    "weight_format", ["float32", "bfloat16", "float16", "int8", "fp8_e4m3", "q4_0", "q4_1", "q8_0"]
)
def test_repacking_loses_nothing(weight_format: str, rows: int) -> None:
    plain = pack_weight(torch.randn(rows, 96), weight_format, layout="plain")
    packed = plain.to_layout("rows16")
    assert torch.equal(packed.to_layout("plain").data, plain.data)
    assert same_bits(packed.dequantize(), plain.dequantize()).all()


@pytest.mark.parametrize("weight_format", ["q4_0", "q4_1", "q8_0"])
def test_block_formats_are_those_of_gguf(weight_format: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[weight_format.upper()]
    raw = gguf.quants.quantize(torch.randn(48, 128).numpy(), kind)
    packed = PackedWeight.from_plain(torch.from_numpy(raw), weight_format, (48, 128)).to_layout("rows16")
    assert torch.equal(packed.dequantize(), torch.from_numpy(gguf.quants.dequantize(raw, kind)))
