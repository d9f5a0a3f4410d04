"""Ranges around phases, layers and ops: they nest as the model does, close after errors, and are nothing when off."""

from __future__ import annotations

import timeit
from collections.abc import Iterator

import pytest
import torch

import pykernels as pk
from pykernels import library, ranges
from pykernels.ranges import annotated, span


class Tree:
    """A domain that keeps what was pushed as `(path, name)` in order, and what is still open."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append(tuple(self.open))

    def pop(self) -> None:
        self.open.pop()

    def children(self, *path: str) -> list[str]:
        return [s[-1] for s in self.seen if s[:-1] == path]


def norm() -> None:
    pk.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5, backend="reference")


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[pk.Generator]:
    pytest.importorskip("gguf")
    monkeypatch.setenv("PYKERNELS_PLAN", "0")
    try:
        yield pk.Generator.from_pretrained("smollm2")
    except ValueError as error:
        pytest.skip(str(error))


def test_phases_hold_layers_and_layers_hold_ops(generator: pk.Generator) -> None:
    tree = Tree()
    with annotated(tree):
        generator.generate(["The capital of France is"], pk.SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert tree.open == []
    assert tree.children() == ["prefill", "decode", "decode"]
    layers = [f"layer {i}" for i in range(generator.config.num_layers)]
    assert tree.children("prefill") == ["embedding", *layers, "head", "sample"]
    assert tree.children("decode") == 2 * ["embedding", *layers, "head", "sample"]
    attended = [
        "rms_norm",
        "linear",
        "rope_append_kv",
        "{}",
        "linear",
        "rms_norm",
        "linear",
        "gated_activation",
        "linear",
    ]
    for phase, attention, times in (("prefill", "paged_prefill_attention", 1), ("decode", "paged_decode_attention", 2)):
        ops = [attention if name == "{}" else name for name in attended]
        assert all(tree.children(phase, layer) == times * ops for layer in layers)
        assert tree.children(phase, "head") == times * ["rms_norm", "linear"]


def test_without_ops_only_the_outer_ranges_are_pushed() -> None:
    tree = Tree()
    with annotated(tree, ops=False), span("phase"):
        norm()
    assert tree.seen == [("phase",)]


def test_ranges_close_when_an_op_fails() -> None:
    tree = Tree()
    with pytest.raises(ValueError, match="backend"), annotated(tree), span("layer", 3):
        pk.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5, backend="none")
    assert tree.open == []
    assert tree.seen == [("layer 3",)]

    def fails(op: object, args: object, run: object) -> None:
        raise RuntimeError("inside")

    with annotated(tree), library.observed(fails), pytest.raises(RuntimeError, match="inside"):
        norm()
    assert tree.open == []
    assert tree.seen[1:] == [("rms_norm",)]


def test_the_inner_domain_is_the_one_in_use() -> None:
    outer, inner = Tree(), Tree()
    with annotated(outer, ops=False), span("a"):
        with annotated(inner, ops=False), span("b"):
            pass
        with span("c"):
            pass
    assert (outer.seen, inner.seen) == ([("a",), ("a", "c")], [("b",)])


def test_ranges_that_are_off_are_one_object_and_no_observer() -> None:
    tree = Tree()
    with annotated(tree):
        pass
    assert span("prefill") is span("layer", 7)
    assert library._observers == []
    with span("prefill"):
        norm()
    assert tree.seen == []


def test_ranges_that_are_off_cost_less_than_a_thousandth_of_a_step(generator: pk.Generator) -> None:
    def off() -> None:
        with span("layer", 1):
            pass

    each = min(timeit.repeat(off, number=2000, repeat=15)) / 2000
    tree = Tree()
    params = pk.SamplingParams(max_new_tokens=8, ignore_eos=True)
    with annotated(tree, ops=False):
        generator.generate(["Hello"], params)
    spans = len(tree.seen) / len(tree.children())  # in a step
    generator.engine.steps.clear()
    generator.generate(["Hello"], params)
    step = min(s.seconds for s in generator.engine.steps if s.phase == "decode")
    assert spans * each < 1e-3 * step, f"{spans:.0f} ranges of {1e9 * each:.0f} ns in a step of {1e3 * step:.1f} ms"


def test_nvtx_ranges_are_push_and_pop_in_our_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = pytest.importorskip("nvtx")
    calls: list[tuple[str, object]] = []

    class Fake:
        def get_event_attributes(self, message: str) -> str:
            calls.append(("attributes", message))
            return message

        def push_range(self, attributes: str) -> None:
            calls.append(("push", attributes))

        def pop_range(self) -> None:
            calls.append(("pop", None))

    asked: list[str] = []
    monkeypatch.setattr(nvtx, "get_domain", lambda name: asked.append(name) or Fake())
    with annotated(ranges.Nvtx(), ops=False):
        for _ in range(2):
            with span("decode"):
                pass
    assert asked == ["pykernels"]
    assert calls == [("attributes", "decode"), *2 * [("push", "decode"), ("pop", None)]]


def test_the_installed_nvtx_takes_our_ranges() -> None:
    pytest.importorskip("nvtx")
    with annotated(ranges.Nvtx()), span("decode"):
        norm()


def test_torch_s_profiler_sees_the_ranges_nested() -> None:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile, annotated(ranges.TorchRanges()), span("phase"):
        norm()
    events = {e.name: e for e in profile.events()}
    outer, inner = events["phase"].time_range, events["rms_norm"].time_range
    assert outer.start <= inner.start
    assert inner.end <= outer.end
