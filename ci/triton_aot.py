"""Compile what the Triton launchers launch, for any target and without a GPU, and read the machine code.

`capture` runs a launcher on CPU tensors with the launch itself replaced by a recorder, as if on a device of a given target;
so what is compiled is exactly what a user's call would compile. `compile_launch` compiles one recorded launch ahead of time,
`read_machine_code` disassembles it with the tools that Triton's wheel carries and counts what its main loop is made of.
"""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pykernels.triton import common

TARGETS = {
    "sm80": (common.Target("cuda", 80), GPUTarget("cuda", 80, 32)),
    "sm90": (common.Target("cuda", 90), GPUTarget("cuda", 90, 32)),
    "sm100": (common.Target("cuda", 100), GPUTarget("cuda", 100, 32)),
    "gfx942": (common.Target("hip", 942), GPUTarget("hip", "gfx942", 64)),
}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, and its options."""

    kernel: JITFunction
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


@contextmanager
def _recording(target: common.Target, found: list[Launch]) -> Iterator[None]:
    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        options = {k: kwargs.pop(k) for k in LAUNCH_OPTIONS if k in kwargs}
        found.append(Launch(self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options))

    run, device_target = JITFunction.run, common._device_target
    JITFunction.run, common._device_target = record, lambda _: target
    try:
        yield
    finally:
        JITFunction.run, common._device_target = run, device_target


def capture(target: common.Target, call: Callable[[], None]) -> list[Launch]:
    """The launches that `call` would make on a device of this target."""
    found: list[Launch] = []
    with _recording(target, found):
        call()
    return found


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list]]:
    """Types, constants and divisibility of a launch's arguments, as Triton's own launcher specialises them."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: dict[tuple[int], list] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        fixed = parameter.is_constexpr or value is None
        if not fixed and type(value) is int and value == 1 and not parameter.do_not_specialize:
            fixed = True
        if fixed:
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        aligned = False
        if isinstance(value, torch.Tensor):
            types[parameter.name] = "*" + _TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
        elif isinstance(value, float):
            types[parameter.name] = "fp32"
        elif isinstance(value, int):
            types[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        else:  # a tensor descriptor
            box = ", ".join(map(str, value.block_shape))
            types[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}[{box}]>"
        if aligned:
            divisible[(i,)] = [["tt.divisibility", 16]]
    return types, constants, divisible


def compile_launch(launch: Launch, target: str) -> Any:
    """The compiled kernel of a launch for one of TARGETS."""
    types, constants, divisible = signature(launch)
    source = triton.compiler.ASTSource(launch.kernel, signature=types, constexprs=constants, attrs=divisible)
    # The default of FP fusion changes in Triton 3.10: say it, so that figures stay comparable.
    return triton.compile(source, target=TARGETS[target][1], options=dict(launch.options, enable_fp_fusion=True))


_KINDS = [
    ("tensor", r"(HGMMA|QGMMA|IGMMA|HMMA|IMMA|QMMA|UTC\w*MMA)"),
    ("async", r"(LDGSTS|UTMALDG|UBLKCP)"),
    ("ldg", r"(LDG|LD\.)"),
    ("lds", r"(LDS|LDSM|LDTM)"),
    ("sts", r"(STS|STSM|STTM)"),
    ("spill", r"(LDL|STL)"),
    ("mufu", r"MUFU"),
    ("shfl", r"(SHFL|REDUX)"),
    ("convert", r"(F2F|F2I|I2F|F2FP|I2FP|HADD2|HMUL2|HFMA2)"),
    ("bits", r"(PRMT|LOP3|SHF|SGXT|BMSK)"),
    ("float", r"(FFMA|FMUL|FADD|FMNMX|FSEL|FSETP)"),
    ("int", r"(IADD|IMAD|LEA|IMNMX|VIMNMX|VIADD|IABS|SEL)"),
]
COUNTED = [name for name, _ in _KINDS]


@dataclass(frozen=True)
class MachineCode:
    """What was read off a compiled kernel. `loop` counts the instructions of the main loop by kind."""

    registers: int
    spills: int
    shared: int
    instructions: int
    loop_length: int
    loop: Mapping[str, int]
    tensor_ops: Mapping[str, int]  # by mnemonic, in the main loop
    all_tensor_ops: Mapping[str, int]  # by mnemonic, in the whole kernel


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _sass(cubin: bytes) -> tuple[list[tuple[int, str]], int]:
    """(address, text) of every instruction, and registers a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, usage = (
            subprocess.run([_tool("cuobjdump"), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    found = (re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", line) for line in text.splitlines())
    code = [(int(m[1], 16), re.sub(r"^@!?U?P\w+\s+", "", m[2].strip())) for m in found if m]
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None or not code:
        raise RuntimeError("cuobjdump printed neither code nor register usage")
    return code, int(registers[1])


def _innermost_loops(code: list[tuple[int, str]]) -> list[list[str]]:
    """Bodies of the backward branches that hold no other."""
    spans = []
    for at, text in code:
        target = re.match(r"BRA\S*\s+(?:\S+,\s*)?`?\(?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [[text for at, text in code if a <= at <= b] for a, b in inner]


def _counts(lines: list[str]) -> dict[str, int]:
    kinds = (next((name for name, pattern in _KINDS if re.match(pattern, line)), "other") for line in lines)
    return dict(sorted(collections.Counter(kinds).items()))


def _tensor_ops(lines: list[str]) -> dict[str, int]:
    found = (re.match(_KINDS[0][1], line) for line in lines)
    return dict(sorted(collections.Counter(m[1] for m in found if m).items()))


def read_machine_code(compiled: Any, target: str) -> MachineCode:
    """Figures of a compiled kernel; the main loop is the shortest innermost loop with tensor work, else the longest."""
    if target.startswith("gfx"):
        return _read_amd(compiled)
    code, registers = _sass(compiled.asm["cubin"])
    lines = [text for _, text in code]
    loops = _innermost_loops(code)
    tensor = [body for body in loops if _tensor_ops(body)]
    body = min(tensor, key=len) if tensor else max(loops, key=len, default=[])
    return MachineCode(
        registers=registers,
        spills=sum(bool(re.match(_KINDS[5][1], line)) for line in lines),
        shared=compiled.metadata.shared,
        instructions=len(lines),
        loop_length=len(body),
        loop=_counts(body),
        tensor_ops=_tensor_ops(body),
        all_tensor_ops=_tensor_ops(lines),
    )


def _read_amd(compiled: Any) -> MachineCode:
    text = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        if found is None:
            raise RuntimeError(f"the assembly does not state {name}")
        return int(found[1])

    tensor = dict(sorted(collections.Counter(re.findall(r"\b(v_mfma_\w+)", text)).items()))
    return MachineCode(
        registers=figure("vgpr_count"),
        spills=figure("vgpr_spill_count"),
        shared=compiled.metadata.shared,
        instructions=len(re.findall(r"^\s+[vsdbg]\w*_\w+", text, re.MULTILINE)),
        loop_length=0,
        loop={},
        tensor_ops=tensor,
        all_tensor_ops=tensor,
    )
