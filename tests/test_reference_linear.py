"""The linear reference: GGUF's own quantiser and dequantiser, both byte orders, quantised activations."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pykernels.contract import packed_bytes
from pykernels.reference.linear import LIMITS, embedding, linear, pack_plain, quantise_activations, unpack
from pykernels.testing.build import Maker
from pykernels.testing.packing import Codes, pack, random_codes

F64 = torch.float64
GGUF = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
FORMATS = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3", *GGUF)


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Magnitudes differ from block to block; one block is all zero, one constant, one has ties."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator)
    w *= torch.exp2(torch.randint(-8, 8, (rows, columns // 32), generator=generator)).repeat_interleave(32, 1)
    w[0, :32], w[1, :32], w[2, :32] = 0, 0.75, torch.arange(32) / 2 - 8
    return w


def dense(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    settings = {
        "weight_format": "dense",
        "layout": "plain",
        "activations": "float",
        "bias": None,
        "residual": None,
        **options,
    }
    return linear(x=x, weight=weight, **{"out_features": weight.shape[0], **settings})[0]


@pytest.mark.parametrize("weight_format", GGUF)
def test_block_formats_are_quantised_as_gguf_quantises(weight_format: str) -> None:
    w = weights(24, 160)
    expected = gguf.quants.quantize(w.numpy(), GGUF[weight_format])
    np.testing.assert_array_equal(pack_plain(w, weight_format).view(24, -1).numpy(), expected)


@pytest.mark.parametrize("weight_format", GGUF)
def test_block_formats_are_read_as_gguf_reads_them(weight_format: str) -> None:
    # Random bytes reach every code; random scales are kept finite.
    rows, columns = 20, 96
    data = pack(random_codes(Maker(3, "cpu"), weight_format, rows, columns), weight_format, "plain")
    expected = gguf.quants.dequantize(data.view(rows, -1).numpy(), GGUF[weight_format])
    got = unpack(data, weight_format, "plain", rows, columns, torch.float32)
    np.testing.assert_array_equal(got.numpy(), expected)


def test_int8_and_fp8_are_quantised_per_row() -> None:
    w = weights(8, 64)
    w[3] = 0
    for weight_format, largest in (("int8", 127), ("fp8_e4m3", 448)):
        data = pack_plain(w, weight_format)
        scale = data[8 * 64 :].view(torch.float32)
        expected = np.abs(w.numpy()).max(1) / np.float32(largest)
        expected[3] = 1
        np.testing.assert_array_equal(scale.numpy(), expected)
        real = unpack(data, weight_format, "plain", 8, 64, F64)
        step = 0.5 if weight_format == "int8" else 16  # half the distance between codes, in units of the scale
        assert ((real - w.double()).abs() <= step * scale.double()[:, None] * (1 + 1e-6)).all()
    codes = pack_plain(w, "int8")[: 8 * 64].view(torch.int8).view(8, 64)
    np.testing.assert_array_equal(codes.numpy(), np.rint(w.numpy() / np.where(scale_of(w) == 0, 1, scale_of(w))))


def scale_of(w: torch.Tensor) -> np.ndarray:
    return np.abs(w.numpy()).max(1, keepdims=True) / np.float32(127)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_float_formats_and_codes_survive_packing(weight_format: str) -> None:
    w = weights(5, 64)
    data = pack_plain(w, weight_format)
    assert data.dtype == torch.uint8
    assert data.numel() == packed_bytes(weight_format, 5, 64)
    if weight_format in ("float32", "bfloat16", "float16"):
        assert torch.equal(
            unpack(data, weight_format, "plain", 5, 64, F64), w.to(getattr(torch, weight_format)).double()
        )


@pytest.mark.parametrize(
    ("weight_format", "columns"), [(f, c) for f in FORMATS for c in (32, 64, 96, *([] if f in GGUF else [37]))]
)
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_both_byte_orders_hold_the_same_weight(weight_format: str, rows: int, columns: int) -> None:
    codes = random_codes(Maker(rows + columns, "cpu"), weight_format, rows, columns)
    real = {}
    for layout in ("plain", "rows16"):
        data = pack(codes, weight_format, layout)
        real[layout] = unpack(data, weight_format, layout, rows, columns, F64)
    assert torch.equal(real["plain"], real["rows16"])
    assert torch.equal(real["plain"], by_definition(codes, weight_format))


def by_definition(codes: Codes, weight_format: str) -> torch.Tensor:
    """code x scale (+ minimum), without any byte in between."""
    values = codes.values.double()
    if codes.scales is None:
        return values
    if weight_format == "q4_0":
        values = values - 8
    width = values.shape[1] // codes.scales.shape[1]
    real = values * codes.scales.double().repeat_interleave(width, 1)
    return real if codes.minima is None else real + codes.minima.double().repeat_interleave(width, 1)


def test_one_element_of_each_interleaved_format_stands_where_the_table_says() -> None:
    row, column, columns = 21, 45, 96  # second row block, lane 5; second group, column 13 of it
    assert_only(q4_0=288 * 3 + 288 + 32 + 3 * 64 + 5 * 4 + 1, row=row, column=column, columns=columns)
    q8 = (1088 + 544) + 64 + 512 + 3 * 64 + 5 * 4 + 1
    assert_only(q8_0=q8, row=row, column=column, columns=columns)
    assert_only(int8=(64 + 16 * 96) + 64 + 512 + 3 * 64 + 5 * 4 + 1, row=row, column=column, columns=columns)


def assert_only(row: int, column: int, columns: int, **where: int) -> None:
    """Changing one byte changes exactly one weight (two nibbles of a 4-bit byte: 16 columns apart)."""
    ((weight_format, offset),) = where.items()
    data = pack(random_codes(Maker(0, "cpu"), weight_format, 32, columns), weight_format, "rows16")
    before = unpack(data, weight_format, "rows16", 32, columns, F64)
    data[offset] ^= 0x11 if weight_format == "q4_0" else 0x01
    changed = torch.nonzero(unpack(data, weight_format, "rows16", 32, columns, F64) != before).tolist()
    expected = [[row, column], [row, column + 16]] if weight_format == "q4_0" else [[row, column]]
    assert changed == expected


def test_dense_linear_is_torch_linear_plus_residual() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b, r = (torch.randn(*s, generator=generator, dtype=F64) for s in ((5, 33), (7, 33), (7,), (5, 7)))
    out = dense(x, w, bias=b, residual=r)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, w, b) + r, rtol=0, atol=1e-13)


def test_half_types_round_operands_and_the_result_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 64, generator=generator).bfloat16(), torch.randn(9, 64, generator=generator)
    out = dense(x, w, compute_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    exact = x.double() @ w.bfloat16().double().T
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("limit", [127, 32258])
def test_activations_are_quantised_in_groups_of_32_with_one_multiplication(limit: int) -> None:
    x = weights(6, 96, seed=4)
    got = quantise_activations(x, limit)
    own = x.numpy()
    for t in range(6):
        for g in range(3):
            group = own[t, 32 * g : 32 * g + 32]
            peak = np.abs(group).max()
            if peak == 0:
                assert (got[t, 32 * g : 32 * g + 32] == 0).all()
                continue
            codes = np.rint(group * (np.float32(limit) / peak))
            assert codes.dtype == np.float32
            assert np.abs(codes).max() == limit
            np.testing.assert_array_equal(
                got[t, 32 * g : 32 * g + 32].numpy(), codes * np.float64(peak / np.float32(limit))
            )


@pytest.mark.parametrize("weight_format", [f for f in FORMATS if f not in ("float32", "bfloat16", "float16")])
@pytest.mark.parametrize(("activations", "rtol"), [("int8", 1e-6), ("int16", 1e-9)])
def test_quantised_activations_sum_integer_products_exactly(weight_format: str, activations: str, rtol: float) -> None:
    codes = random_codes(Maker(1, "cpu"), weight_format, 6, 64)
    x = weights(4, 64, seed=2)
    for layout in ("plain", "rows16"):
        data = pack(codes, weight_format, layout)
        out = dense(x, data, weight_format=weight_format, layout=layout, activations=activations, out_features=6)
        expected = quantise_activations(x, LIMITS[activations]) @ by_definition(codes, weight_format).T
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(out, x.double() @ by_definition(codes, weight_format).T, rtol=rtol)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("layout", ["plain", "rows16"])
def test_embedding_reads_rows_of_the_same_weight(weight_format: str, layout: str) -> None:
    codes = random_codes(Maker(9, "cpu"), weight_format, 21, 64)
    ids = torch.tensor([20, 0, 7, 7], dtype=torch.int32)
    (out,) = embedding(
        ids=ids,
        weight=pack(codes, weight_format, layout),
        num_embeddings=21,
        weight_format=weight_format,
        layout=layout,
        hidden=64,
    )
    assert torch.equal(out, by_definition(codes, weight_format)[ids.long()])


@pytest.mark.parametrize("bad", [-1, 4])
def test_embedding_refuses_ids_outside_the_table(bad: int) -> None:
    with pytest.raises(ValueError, match=r"ids must be in \[0, 4\)"):
        embedding(
            ids=torch.tensor([0, bad]),
            weight=torch.zeros(4, 8),
            num_embeddings=4,
            weight_format="dense",
            layout="plain",
            hidden=8,
        )
