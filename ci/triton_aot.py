"""Compile what the Triton launchers launch, for any target and without a GPU, and read the machine code.

`capture` runs a launcher on CPU tensors with the launch itself replaced by a recorder, as if on a device of a given target;
so what is compiled is exactly what a user's call would compile. `compile_launch` compiles one recorded launch ahead of time,
`read_machine_code` disassembles it with the tools that Triton's wheel carries and counts what its main loop is made of.
"""

from __future__ import annotations

import ast
import collections
import hashlib
import inspect
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from compile_gate import multiply_adds
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


def _sources(kernel: JITFunction, found: dict[str, str]) -> None:
    """The code of a kernel, of the jitted functions that it names, and the constants that they name, without comments."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    function = tree.body[0]
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    found[kernel.fn.__qualname__] = ast.unparse(tree)
    for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
        value = kernel.fn.__globals__.get(name)
        if isinstance(value, tl.constexpr):
            found[name] = repr(value.value)
        elif isinstance(value, JITFunction) and value.fn.__qualname__ not in found:
            _sources(value, found)


def digest(launch: Launch) -> str:
    """What the machine code of a launch is made from, in 12 digits: code, constants, specialisation and options."""
    sources: dict[str, str] = {}
    _sources(launch.kernel, sources)
    facts = (sorted(sources.items()), signature(launch), sorted(launch.options.items()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


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
    ("spill", r"(LDL|STL)\b"),
    ("mufu", r"MUFU"),
    ("shfl", r"(SHFL|REDUX)"),
    ("convert", r"(F2F|F2I|I2F|F2FP|I2FP|HADD2|HMUL2|HFMA2)"),
    ("bits", r"(PRMT|LOP3|SHF|SGXT|BMSK)"),
    ("float", r"(FFMA|FMUL|FADD|FMNMX|FSEL|FSETP)"),
    ("int", r"(IADD|IMAD|LEA|IMNMX|VIMNMX|VIADD|IABS|SEL)"),
]
_AMD_KINDS = [
    ("tensor", r"v_mfma"),
    ("ldg", r"(global|buffer|flat)_load"),
    ("lds", r"ds_read"),
    ("sts", r"ds_write"),
    ("spill", r"scratch_"),
    ("mufu", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
    ("shfl", r"(ds_b?permute|ds_swizzle|v_\w+_dpp|v_permlane)"),
    ("convert", r"v_cvt"),
    ("bits", r"v_(and|or|xor|lsh|ash|perm|bfe|bfi|alignbit|not)"),
    ("float", r"v_(pk_)?(fma|mul|add|sub|max|min|max3|cmp\w*|cndmask|mac|fmac)_(f|b)"),
    ("int", r"[vs]_(add|sub|mul|mad|min|max|addc|subb|lshl_add)"),
]


@dataclass(frozen=True)
class MachineCode:
    """What was read off a compiled kernel. `loop` counts the instructions of the main loop by kind."""

    registers: int  # a thread
    spills: int  # instructions that touch local (on AMD: scratch) memory
    shared: int  # bytes a block
    instructions: int
    loop_length: int
    loop: Mapping[str, int]
    tensor_ops: Mapping[str, int]  # by name and shape, in the main loop


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _sass(cubin: bytes) -> tuple[list[tuple[str, str]], int]:
    """(address, text) of every instruction, and registers a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, usage = (
            subprocess.run([_tool("cuobjdump"), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    found = (re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", line) for line in text.splitlines())
    code = [(f"{int(m[1], 16):x}", re.sub(r"^@!?U?P\w+\s+", "", m[2].strip())) for m in found if m]
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None or not code:
        raise RuntimeError("cuobjdump printed neither code nor register usage")
    return code, int(registers[1])


_BRANCHES = {"sm": r"BRA\S*\s+(?:\S+,\s*)?`?\(?0x([0-9a-f]+)", "gfx": r"s_c?branch\w*\s+(\S+)"}
# HMMA.16816.F32.BF16, HGMMA.64x128x16.F32.BF16, UTCHMMA.2CTA, v_mfma_f32_32x32x8_bf16: the name and its shape
_TENSOR_OP = re.compile(r"(?:HGMMA|HMMA|IMMA|QGMMA|IGMMA|QMMA)(?:\.[0-9x]+)?|UTC\w*MMA|v_mfma_\w+")


def _innermost_loops(code: list[tuple[Any, str]], branch: str) -> list[list[str]]:
    """Bodies of the backward branches that hold no other; `code` is (label, text), a branch names a label."""
    place: dict[Any, int] = {}
    spans = []
    for i, (label, text) in enumerate(code):
        place.setdefault(label, i)
        target = re.match(branch, text)
        if target and place.get(target[1], i) < i:
            spans.append((place[target[1]], i))
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [[text for _, text in code[a : b + 1]] for a, b in inner]


def _counts(lines: list[str], kinds: list[tuple[str, str]]) -> dict[str, int]:
    named = (next((name for name, pattern in kinds if re.match(pattern, line)), "other") for line in lines)
    return dict(sorted(collections.Counter(named).items()))


def _tensor_ops(lines: list[str]) -> dict[str, int]:
    found = (_TENSOR_OP.match(line) for line in lines)
    return dict(sorted(collections.Counter(m[0] for m in found if m).items()))


def _main_loop(loops: list[list[str]]) -> list[str]:
    """The innermost loop with most tensor work, the shortest of equals (masked tiles are narrower or longer); else the longest."""

    def work(body: list[str]) -> tuple[int, int]:
        ops = _tensor_ops(body)
        tensor = multiply_adds(ops, 4) or sum(ops.values())
        return tensor, -len(body) if tensor else len(body)

    return max(loops, key=work, default=[])


def read_machine_code(compiled: Any, target: str) -> MachineCode:
    """Figures of a compiled kernel."""
    if target.startswith("gfx"):
        return _read_amd(compiled)
    code, registers = _sass(compiled.asm["cubin"])
    lines = [text for _, text in code]
    body = _main_loop(_innermost_loops(code, _BRANCHES["sm"]))
    return MachineCode(
        registers=registers,
        spills=sum(bool(re.match(r"(LDL|STL)\b", line)) for line in lines),
        shared=compiled.metadata.shared,
        instructions=len(lines),
        loop_length=len(body),
        loop=_counts(body, _KINDS),
        tensor_ops=_tensor_ops(body),
    )


def _read_amd(compiled: Any) -> MachineCode:
    text = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        if found is None:
            raise RuntimeError(f"the assembly does not state {name}")
        return int(found[1])

    code, label = [], ""
    for line in text.splitlines():
        if found := re.match(r"(\.LBB\w+):", line):
            label = found[1]
        elif found := re.match(r"\s+([vsdbg]\w*_\w+.*)", line):
            code.append((label, found[1].strip()))
    body = _main_loop(_innermost_loops(code, _BRANCHES["gfx"]))
    return MachineCode(
        registers=figure("vgpr_count"),
        spills=figure("vgpr_spill_count"),
        shared=compiled.metadata.shared,
        instructions=len(code),
        loop_length=len(body),
        loop=_counts(body, _AMD_KINDS),
        tensor_ops=_tensor_ops(body),
    )
