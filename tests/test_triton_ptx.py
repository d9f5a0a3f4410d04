"""8-bit codes become 16-bit floats by NVIDIA's instructions: the text that is compiled, run on every code by a small model of PTX."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from pykernels.triton import fp8

F16, BF16 = torch.float16, torch.bfloat16
Words = dict[str, int]  # 32-bit registers by name


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """float64 [2]: the low and the high half of a word."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype).double()


def packed(value: torch.Tensor, dtype: torch.dtype) -> int:
    low, high = (value.to(dtype).view(torch.int16).int() & 0xFFFF).tolist()
    return low | high << 16


def permuted(a: int, b: int, selector: int) -> int:
    """`prmt`: each byte of the result is one of the eight of (b, a), of which a's are 0 to 3."""
    source = (a | b << 32).to_bytes(8, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    assert max(nibbles) < 8, "a nibble above 7 repeats a sign"
    return int.from_bytes(bytes(source[n] for n in nibbles), "little")


def looked_up(a: int, b: int, c: int, table: int) -> int:
    """`lop3`: bit by bit, the entry of an 8-bit table that (a, b, c) number."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "sub.rn.f16x2": lambda a, b: packed(halves(a, F16) - halves(b, F16), F16),
    "fma.rn.bf16x2": lambda a, b, c: packed(halves(a, BF16) * halves(b, BF16) + halves(c, BF16), BF16),
}


def executed(text: str, word: int) -> tuple[int, int]:
    """$0 and $1 after the instructions of `text`, $2 being `word`."""
    words: Words = {"$2": word}
    for line in text.strip().strip("{}").split(";"):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *values = (o.strip() for o in operands.split(","))
        words[to] = INSTRUCTIONS[name](*(int(v, 0) if v[0].isdigit() else words[v] for v in values))
    return words["$0"], words["$1"]


def every_code(text: str, dtype: torch.dtype) -> torch.Tensor:
    """What the instructions make of `CODES`, four at a time, as float64."""
    codes = bytes(CODES.tolist())
    found = [executed(text, int.from_bytes(codes[n : n + 4], "little")) for n in range(0, len(codes), 4)]
    return torch.cat([halves(word, dtype) for pair in found for word in pair])


# Every code in every byte of a word.
CODES = torch.cat([torch.arange(256, dtype=torch.int32).roll(n) for n in range(4)]).to(torch.uint8)


@pytest.mark.parametrize(("text", "dtype"), [(fp8.TO_FP16, F16), (fp8.TO_BF16, BF16)], ids=["float16", "bfloat16"])
def test_every_e4m3_code_is_widened_exactly(text: object, dtype: torch.dtype) -> None:
    expected = CODES.view(torch.float8_e4m3fn).double() / 256
    found = every_code(str(text.value), dtype)  # type: ignore[attr-defined]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found.signbit(), expected.signbit())


def test_every_int8_code_is_widened_exactly() -> None:
    assert torch.equal(every_code(str(fp8.INT8_TO_FP16.value), F16), CODES.view(torch.int8).double())
