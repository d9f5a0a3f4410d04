"""What a device must show, one body for the backends `cuda` and `triton`: every case against the reference, captured
graphs, streams, devices, allocations, synchronisation, the text of errors.

Without a GPU the parts that need none run through the emulation and the interpreter; the rest is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_cuda import arguments, is_float32
from test_cuda import table as cuda_table

from pykernels.contract import OPS, Scalar
from pykernels.cuda import CudaBackend
from pykernels.library import call
from pykernels.registry import backends, load
from pykernels.testing import Case, cases
from pykernels.testing.compare import Mismatch, Snapshot, judge, same_bits
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available as emulation_missing

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from lanes that the interpreter masks

GPU = torch.cuda.is_available()
BACKENDS = ("cuda", "triton")
ATTENTION = ("prefill_attention", "paged_prefill_attention", "paged_decode_attention")
WORKSPACE = 1 << 26  # bytes: more than any case here needs
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


class Rig:
    """A backend on tensors of one device: the real one, or on a machine without a GPU what stands in for it."""

    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device
        self.stand_in = None if device == "cuda" else EmulatedCuda() if backend == "cuda" else load(backend)

    def run(self, op_name: str, args: dict[str, Any]) -> None:
        """The registered op, checks and dispatch included; a stand-in is called directly."""
        if self.stand_in is None:
            call(OPS[op_name], self.backend, **args)
        else:
            self.stand_in.run(op_name, args)

    def refuses(self, op_name: str, args: dict[str, Any]) -> list[str]:
        return (self.stand_in or load(self.backend)).refuses(op_name, args)

    def args(self, case: Case) -> dict[str, Any]:
        """A case's arguments here; attention in float32, which tensor cores do not take, as bfloat16."""
        narrow = self.backend == "cuda" and case.op in ATTENTION and is_float32(case)
        args = arguments(case, BF16 if narrow else None, self.device)
        if "workspace" in args:
            args["workspace"] = torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8, device=self.device)
        return args

    def one_call(self, op_name: str, usable: Callable[[dict[str, Any]], bool] = lambda _: True) -> Case:
        """A small case of an op that this backend takes."""
        for case in cases(op_name, "smoke"):
            args = self.args(case)
            if usable(args) and not self.refuses(op_name, args):
                return case
        pytest.skip(f"{self.backend} takes none of the small cases of {op_name}")

    def replayer(self, body: Callable[[], None]) -> Callable[[], None]:
        """`body` captured into a CUDA graph; a stand-in runs it again."""
        if self.stand_in is not None:
            return body
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            body()  # compiles and loads: not legal inside a capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph.replay


def missing(backend: str) -> str:
    """Why a backend does not run on this machine's GPU; empty when it does."""
    if not GPU:
        return "there is no GPU"
    state = backends()[backend]
    return "" if state else "; ".join(getattr(state, "reasons", ()))


@pytest.fixture(params=BACKENDS)
def gpu(request: pytest.FixtureRequest) -> Rig:
    """A backend on the GPU."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return Rig(request.param, "cuda")


@pytest.fixture(params=BACKENDS)
def rig(request: pytest.FixtureRequest) -> Rig:
    """A backend on the GPU, or its stand-in where there is none."""
    if GPU:
        if reason := missing(request.param):
            pytest.skip(reason)
        return Rig(request.param, "cuda")
    if request.param == "cuda":
        if reason := emulation_missing():
            pytest.skip(reason)
    elif reasons := load("triton").unavailable():
        pytest.skip("; ".join(reasons))
    else:
        from interpreter import patch_once

        patch_once()
    return Rig(request.param, "cpu")


# ---- every case --------------------------------------------------------------------------------------------------------
def device_table() -> list[Any]:
    if not GPU:
        return [pytest.param(None, None, None, marks=pytest.mark.skip(reason="there is no GPU"), id="no-gpu")]
    found = [pytest.param("cuda", *p.values, id=f"cuda-{p.id}") for p in cuda_table()]
    return found + [pytest.param("triton", c, None, id=f"triton-{c}") for op in OPS for c in cases(op)]


@pytest.mark.parametrize(("backend", "case", "dtype"), device_table())
def test_agrees_with_the_reference_on_the_device(backend: str, case: Case, dtype: torch.dtype | None) -> None:
    if reason := missing(backend):
        pytest.skip(reason)
    try:
        args = arguments(case, dtype, "cuda")
    except torch.OutOfMemoryError as error:
        pytest.skip(f"the case does not fit this GPU: {error}")
    if reasons := load(backend).refuses(case.op, args):
        pytest.skip("; ".join(reasons))
    before = Snapshot(args)
    call(OPS[case.op], backend, **args)
    torch.cuda.synchronize()
    reasons = [v.reason for v in judge(case.op, before, args) if not v.ok]
    if reasons:
        raise Mismatch(f"{case}: " + "; ".join(reasons))


# ---- a decode step in a graph ------------------------------------------------------------------------------------------
class DecodeStep:
    """A token of a model of one layer for three sequences: rotate and append, attend, project to logits, sample.

    Inputs live in fixed memory that `feed` fills, as a replayed graph needs; every step has its own numbers.
    """

    BATCH, HEADS, KV_HEADS, DIM, VOCAB, PAGE, PAGES = 3, 4, 2, 64, 160, 16, 3

    def __init__(self, rig: Rig, kv: torch.dtype) -> None:
        self.rig, device = rig, rig.device
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(BF16).to(device)

        self.new = {n: normal(self.BATCH, h, self.DIM) for n, h in (("q", self.HEADS), ("k", 2), ("v", 2))}
        self.head = normal(self.VOCAB, self.HEADS * self.DIM)
        pages = self.BATCH * self.PAGES
        shape = (pages, self.PAGE, self.KV_HEADS, self.DIM)
        self.caches: dict[str, Any] = {n: torch.zeros(shape, device=device).to(kv) for n in ("k_cache", "v_cache")}
        coded = kv.itemsize == 1
        scales = (torch.ones(shape[:3], device=device) if coded else None for _ in range(2))
        self.caches |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
        self.table = torch.randperm(pages, generator=generator).to(I32).view(self.BATCH, self.PAGES).to(device)
        self.lengths = torch.zeros(self.BATCH, dtype=I32, device=device)
        self.positions, self.slots = (torch.zeros(self.BATCH, dtype=I64, device=device) for _ in range(2))
        self.inv_freq = 10000.0 ** (-torch.arange(self.DIM // 2, device=device, dtype=F32) / (self.DIM // 2))
        self.workspace = torch.empty(1 << 22, dtype=torch.uint8, device=device)
        self.q_out, self.attended = (torch.empty_like(self.new["q"]) for _ in range(2))
        self.logits = torch.empty(self.BATCH, self.VOCAB, device=device)
        self.options = {n: torch.ones(self.BATCH, device=device) for n in ("temperature", "top_p")}
        self.options |= {"min_p": torch.zeros(self.BATCH, device=device)}
        self.options |= {"top_k": torch.zeros(self.BATCH, dtype=I32, device=device)}
        self.options |= {"seeds": torch.arange(self.BATCH, dtype=I64, device=device)}
        self.ids = torch.empty(self.BATCH, dtype=I64, device=device)
        self.valid = torch.empty(self.BATCH, dtype=torch.bool, device=device)

    def feed(self, token: int) -> None:
        """What the host writes before the step of the sequences' tokens `token`, `token + 15` and `token + 30`."""
        generator = torch.Generator().manual_seed(100 + token)
        for value in self.new.values():
            value.copy_(torch.randn(value.shape, generator=generator).to(BF16))
        at = token + 15 * torch.arange(self.BATCH)
        page = self.table.cpu()[torch.arange(self.BATCH), at // self.PAGE]
        self.positions.copy_(at)
        self.lengths.copy_(at + 1)
        self.slots.copy_(page * self.PAGE + at % self.PAGE)

    def launch(self) -> None:
        run, scales = self.rig.run, {n: self.caches[n] for n in ("k_scale", "v_scale")}
        rotation = {"positions": self.positions, "inv_freq": self.inv_freq, "interleaved": False, "rope_scale": 1.0}
        run(
            "rope_append_kv",
            {**self.new, **rotation, **self.caches, "slot_mapping": self.slots, "q_out": self.q_out},
        )
        mask = {"causal": True, "softmax_scale": 0.125, "window_left": -1, "window_right": -1, "softcap": 0.0}
        mask |= {"alibi_slopes": None, "sinks": None}
        paged = {"k_cache": self.caches["k_cache"], "v_cache": self.caches["v_cache"], "block_table": self.table}
        outputs = {"split_size": 0, "workspace": self.workspace, "out": self.attended, "lse": None}
        run(
            "paged_decode_attention",
            {"q": self.q_out, **paged, "seqlens_k": self.lengths, **scales, **mask, **outputs},
        )
        words = {"weight_format": "dense", "layout": "plain", "activations": "float", "bias": None, "residual": None}
        run("linear", {"x": self.attended.flatten(1), "weight": self.head, **words, "out": self.logits})
        self.sample()

    def sample(self) -> None:
        absent = [a.name for a in OPS["sample"].tensors if a.optional]
        args = {**self.options, **dict.fromkeys(absent), "logits": self.logits, "positions": self.positions}
        self.rig.run("sample", {**args, "logprobs_mode": "raw", "ids": self.ids, "valid": self.valid})

    def state(self) -> list[torch.Tensor]:
        """Everything that a step writes."""
        written = [self.q_out, self.attended, self.logits, self.ids, self.valid, *self.caches.values()]
        return [t.clone() for t in written if t is not None]


@pytest.mark.parametrize("kv", [BF16, torch.int8, torch.float8_e4m3fn], ids=["bfloat16", "int8", "fp8"])
def test_a_replayed_decode_step_has_the_bits_of_one_that_is_launched(rig: Rig, kv: torch.dtype) -> None:
    tokens = range(4) if rig.device == "cuda" else range(2)
    eager, steps = DecodeStep(rig, kv), []
    for token in tokens:
        eager.feed(token)
        eager.launch()
        steps.append(eager.state())
    replayed = DecodeStep(rig, kv)
    replayed.feed(0)
    replay = rig.replayer(replayed.launch)
    for name, value in replayed.caches.items():  # as they were before the graph was made
        if value is not None:
            value.fill_(1.0 if name.endswith("scale") else 0.0)
    for token, expected in zip(tokens, steps, strict=True):
        replayed.feed(token)
        replay()
        for got, wanted in zip(replayed.state(), expected, strict=True):
            assert same_bits(got, wanted).all(), token
    assert bool(replayed.valid.all())


def test_a_replay_draws_afresh_at_each_position_and_the_same_at_the_same(rig: Rig) -> None:
    step = DecodeStep(rig, BF16)
    step.logits.zero_()  # every token is as likely
    replay = rig.replayer(step.sample)
    drawn = []
    for position in (5, 6, 7, 8, 5):
        step.positions.fill_(position)
        replay()
        drawn.append(step.ids.tolist())
    assert drawn[0] == drawn[4]
    assert len({tuple(ids) for ids in drawn}) == 4
    assert len(set(drawn[0])) == step.BATCH  # seeds tell the rows apart


# ---- streams and devices -----------------------------------------------------------------------------------------------
def floats_of(args: dict[str, Any], op_name: str) -> list[torch.Tensor]:
    """The inputs that hold numbers."""
    read = [args[t.name] for t in OPS[op_name].tensors if t.role == "in" and args[t.name] is not None]
    return [t for t in read if t.is_floating_point() and t.numel()]


def written(op_name: str, args: dict[str, Any]) -> list[torch.Tensor]:
    names = [t.name for t in OPS[op_name].tensors if t.mutated and t.name != "workspace"]
    return [args[name] for name in names if args[name] is not None]


def occupy(cycles: int = 200_000_000) -> None:
    """Keeps the current stream busy for about a tenth of a second."""
    torch.cuda._sleep(cycles)


@pytest.mark.parametrize("op", OPS)
def test_a_call_runs_on_the_current_stream(gpu: Rig, op: str) -> None:
    """Its inputs come late, on that stream: a launch on another would read what was there before."""
    case = gpu.one_call(op, lambda args: bool(floats_of(args, op)))
    expected, args = gpu.args(case), gpu.args(case)
    gpu.run(op, expected)
    late = [t.clone() for t in floats_of(args, op)]
    for tensor in floats_of(args, op):
        tensor.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        occupy()
        for tensor, value in zip(floats_of(args, op), late, strict=True):
            tensor.copy_(value)
        gpu.run(op, args)
    torch.cuda.synchronize()
    for got, wanted in zip(written(op, args), written(op, expected), strict=True):
        assert same_bits(got, wanted).all()


@pytest.mark.parametrize("op", ["rms_norm", "append_kv", "paged_decode_attention", "sample"])
def test_a_call_runs_on_the_device_of_its_tensors_and_leaves_the_current_one(gpu: Rig, op: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    case = gpu.one_call(op)
    expected = gpu.args(case)
    gpu.run(op, expected)
    moved = Rig(gpu.backend, "cuda:1")
    args = moved.args(case)
    call(OPS[op], gpu.backend, **args)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    for got, wanted in zip(written(op, args), written(op, expected), strict=True):
        assert same_bits(got.cpu(), wanted.cpu()).all()


# ---- allocations and synchronisation -----------------------------------------------------------------------------------
@contextmanager
def no_synchronisation() -> Any:
    """torch raises where one of its own calls waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", OPS)
def test_a_call_waits_for_nothing(gpu: Rig, op: str) -> None:
    args = gpu.args(gpu.one_call(op))
    gpu.run(op, args)  # compiles and loads
    torch.cuda.synchronize()
    occupy()
    with no_synchronisation():
        gpu.run(op, args)
    assert not torch.cuda.current_stream().query(), "the call returned after the device was done: it waited"
    torch.cuda.synchronize()


# Ops that keep partial results in memory of their own: the contract has no argument to hand it over.
ALLOCATE = {"cuda": ("copy_pages", "sample", "verify_draft"), "triton": ("copy_pages", "sample", "verify_draft")}


@pytest.mark.parametrize("op", OPS)
def test_a_call_with_outputs_and_workspace_allocates_nothing(gpu: Rig, op: str) -> None:
    if op in ALLOCATE[gpu.backend]:
        pytest.skip(f"{op} of {gpu.backend} allocates its partial results")
    args = gpu.args(gpu.one_call(op))
    gpu.run(op, args)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gpu.run(op, args)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# ---- pinned host memory ------------------------------------------------------------------------------------------------
def test_pages_go_to_pinned_memory_and_come_back(gpu: Rig) -> None:
    from pykernels import PagedKVCache

    cache = PagedKVCache(6, 16, 2, 2, 64, "int8", device="cuda", host_pages=4)
    sequence = cache.add_sequence()
    cache.append(sequence, 60)
    layers = [cache.layer(i) for i in range(2)]
    for layer in layers:
        layer.k_cache.random_(-100, 100)
        layer.v_cache.random_(-100, 100)
        layer.k_scale.uniform_()
        layer.v_scale.uniform_()
    before = [[t[list(cache.pages(sequence))].clone() for t in vars(layer).values()] for layer in layers]
    assert cache.swap_out(sequence) == 4
    for layer in layers:
        for tensor in vars(layer).values():
            tensor.zero_()
    assert cache.swap_in(sequence) == 4
    for layer, kept in zip(layers, before, strict=True):
        for tensor, value in zip(vars(layer).values(), kept, strict=True):
            assert torch.equal(tensor[list(cache.pages(sequence))], value)


def test_host_memory_that_is_not_pinned_is_refused(gpu: Rig) -> None:
    args = gpu.args(next(c for c in cases("swap_pages") if c.name == "out"))
    loose = {n: args[n].clone() for n in ("k_to", "v_to")}
    assert not loose["k_to"].is_pinned()
    with pytest.raises(
        ValueError, match=r"k_to must be on cuda:0 .* or in pinned host memory, got cpu memory that is not"
    ):
        gpu.run("swap_pages", args | loose)


# ---- errors ------------------------------------------------------------------------------------------------------------
class FailingModule:
    """A native module whose launches fail as the driver makes them fail."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_scratch_bytes"):
            raise AttributeError(name)

        def launch(*_: Any) -> None:
            raise RuntimeError("cudaErrorInvalidConfiguration: invalid configuration argument")

        return launch


class FailingCuda(CudaBackend):
    device_type = "cpu"

    def native(self) -> Any:
        return FailingModule()

    def stream(self, device: torch.device) -> int:
        return 0


@pytest.mark.parametrize("op", OPS)
def test_a_failed_launch_names_the_op_its_error_and_every_shape(op: str) -> None:
    args = next(iter(cases(op, "smoke"))).args()
    with pytest.raises(RuntimeError) as caught:
        FailingCuda().run(op, args)
    text = str(caught.value)
    assert text.startswith(f"{op}: cudaErrorInvalidConfiguration: invalid configuration argument (")
    for arg in OPS[op].args:
        if not isinstance(arg, Scalar) and args[arg.name] is not None:
            assert f"{arg.name} {list(args[arg.name].shape)}" in text


def test_a_device_that_is_not_there_is_an_error_with_op_and_shape(gpu: Rig) -> None:
    if gpu.backend != "cuda":
        pytest.skip("Triton takes the device from its tensors")

    class Elsewhere(CudaBackend):
        def native(self) -> Any:
            launch = super().native().rms_norm
            return type("Native", (), {"rms_norm": staticmethod(lambda *a: launch(*a[:-3], 99, *a[-2:]))})

    args = gpu.args(gpu.one_call("rms_norm"))
    with pytest.raises(RuntimeError, match=r"rms_norm: cudaErrorInvalidDevice: .* \(x \[\d+, \d+\]"):
        Elsewhere().run("rms_norm", args)
    gpu.run("rms_norm", args)  # nothing has stuck
    torch.cuda.synchronize()


def test_a_launch_that_triton_cannot_make_names_op_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pykernels.triton import BACKEND, norm

    def launch(**_: Any) -> None:
        raise MemoryError("out of resource: shared memory, Required: 300000, Hardware limit: 232448")

    monkeypatch.setattr(norm, "rms_norm", launch)
    args = next(iter(cases("rms_norm", "smoke"))).args()
    with pytest.raises(RuntimeError, match=r"rms_norm: out of resource: shared memory, .* \(x \[\d+, \d+\], weight"):
        BACKEND.run("rms_norm", args)
