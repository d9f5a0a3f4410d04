"""torch.library: opcheck and torch.compile(fullgraph=True) for every op, dispatch and its reasons, known kinds, plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pykernels as pk
from pykernels import library, native, registry
from pykernels.contract import OPS, Op, bind_dims
from pykernels.contract.schema import Rule
from pykernels.library import call, observed
from pykernels.testing.factories import cases


def distinct(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments without shared memory or poison: opcheck compares outputs, and NaN differs from itself."""
    return {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()}


def first_case(op: Op) -> dict[str, Any]:
    return distinct(next(iter(cases(op.name, "smoke"))).args())


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_opcheck(op: Op) -> None:
    args = first_case(op)
    overload = getattr(torch.ops.pykernels, op.name).default
    result = torch.library.opcheck(overload, (*args.values(), "cpu"), raise_exception=False)
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_compiles_without_a_graph_break_and_gives_the_same_bits(op: Op) -> None:
    torch._dynamo.reset()
    names = list(first_case(op))

    def step(*values: Any) -> list[torch.Tensor]:
        args = dict(zip(names, values, strict=True))
        call(op, "auto", **args)
        return [args[t.name] for t in op.tensors if t.mutated and args[t.name] is not None]

    eager = step(*first_case(op).values())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*first_case(op).values())
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a.float().nan_to_num(nan=7.0), b.float().nan_to_num(nan=7.0))


def test_an_explicit_backend_is_that_backend_or_an_error_with_its_reasons() -> None:
    on_meta = {"x": torch.ones(2, 8, device="meta")}
    with pytest.raises(
        NotImplementedError, match=r"rms_norm: no backend can serve this call \(cpu: tensors are on meta"
    ):
        registry.resolve(OPS["rms_norm"], on_meta, "cpu")
    with pytest.raises(NotImplementedError, match="no backend serves meta tensors"):
        registry.resolve(OPS["rms_norm"], on_meta, "auto")


def test_an_unknown_backend_is_a_value_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of auto, cpu, .*reference, got 'gpu'"):
        pk.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5, backend="gpu")


def test_auto_never_picks_the_reference() -> None:
    assert all("reference" not in names for names in registry._AUTO.values())


def test_backends_tells_why_one_is_missing() -> None:
    found = pk.backends()
    assert found["cpu"]
    for state in found.values():
        assert bool(state) or state.reasons


def test_an_observer_sees_every_op_and_its_arguments() -> None:
    seen: list[str] = []

    def observer(op: Op, args: Any, run: Any) -> None:
        assert args["x"].shape == (2, 8)
        seen.append(op.name)
        run()

    with observed(observer):
        pk.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5)
    pk.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5)
    assert seen == ["rms_norm"]


# ---- calls of a known kind ------------------------------------------------------------------------------------------
@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that were checked by the registered op, instead of going straight to their backend."""
    monkeypatch.setattr(library, "_known", {})
    names: list[str] = []
    check = library.check

    def counted(op: Op, args: Any, **more: Any) -> Any:
        names.append(op.name)
        return check(op, args, **more)

    monkeypatch.setattr(library, "check", counted)
    return names


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_call_of_a_known_kind_gives_the_same_bits_and_is_not_checked_again(op: Op, dispatched: list[str]) -> None:
    free = first_case(op) | dict.fromkeys(t.name for t in op.outputs)
    dims = bind_dims(op, free)
    derived = [t.name for t in op.outputs if t.allocate and all(d.name in dims for d in t.alternatives[0])]
    results = []
    for _ in range(3):
        args = first_case(op) | dict.fromkeys(derived)
        full = call(op, "cpu", **args)
        results.append([full[t.name] for t in op.tensors if t.mutated and full[t.name] is not None])
    assert dispatched == [op.name] * (1 if op.by_kind else 3)
    for again in results[1:]:
        for a, b in zip(results[0], again, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a.float().nan_to_num(nan=7.0), b.float().nan_to_num(nan=7.0))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_argument_makes_another_kind(op: Op) -> None:
    """What a check could refuse must never pass as known: each tensor's dtype, shape, strides, grad, and each scalar."""
    args = first_case(op)
    kind = library._kind(op, "cpu", args)
    assert (kind is not None) == op.by_kind
    if not op.by_kind:
        return
    others = [library._kind(op, "auto", args)]
    with torch.no_grad():
        others.append(library._kind(op, "cpu", args))
    for name, value in args.items():
        changes: list[Any] = [None if value is not None else 1]
        if isinstance(value, torch.Tensor):
            wide = value.new_empty((*value.shape, 2))
            changes += [wide[..., 0], wide, value.to("meta"), value.to(torch.float64), value.view(value.shape)[None]]
            if value.is_floating_point() and value.element_size() > 1:
                changes.append(value.clone().requires_grad_())
        elif type(value) is not str and value is not None:
            changes += [value + 1, float(value) if isinstance(value, int) else int(value), str(value)]
        elif value is not None:
            changes.append(value + "x")
        others += [library._kind(op, "cpu", args | {name: change}) for change in changes]
    assert kind not in others
    again = first_case(op)
    assert library._kind(op, "cpu", {name: again[name] for name in reversed(again)}) == kind


def test_a_tensor_of_a_class_of_its_own_has_no_kind(dispatched: list[str]) -> None:
    class Own(torch.Tensor):
        pass

    x = torch.ones(2, 8).as_subclass(Own)
    for _ in range(2):
        pk.rms_norm(x, torch.ones(8), eps=1e-5)
    assert dispatched == ["rms_norm"] * 2


def test_what_is_refused_for_its_memory_is_refused_after_a_legal_call_of_its_shapes(dispatched: list[str]) -> None:
    args = first_case(OPS["swap_pages"])
    sides = {name: args[name.replace("_to", "_from")] for name in args if name.endswith("_to")}
    args |= distinct(sides) | {"dst_pages": args["src_pages"]}
    for _ in range(2):
        call(OPS["swap_pages"], "cpu", **args)
    with pytest.raises(ValueError, match="must not share memory"):
        call(OPS["swap_pages"], "cpu", **args | {"k_to": args["k_from"]})
    about_memory = Rule(lambda dims, args: args["x"].data_ptr() % 64 == 0, "x must be aligned", of_memory=True)
    plain = OPS["rms_norm"]
    assert plain.by_kind
    assert not replace(plain, rules=(*plain.rules, about_memory)).by_kind


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watch",
    [Seen, Asked, torch.profiler.profile, lambda: observed(lambda op, args, run: run())],
    ids=["dispatch mode", "function mode", "profiler", "observer"],
)
def test_who_watches_sees_calls_of_a_known_kind_too(watch: Any, dispatched: list[str]) -> None:
    for _ in range(2):
        pk.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5)
    with watch():
        pk.rms_norm(torch.ones(2, 8), torch.ones(8), eps=1e-5)
    assert dispatched == ["rms_norm"] * 2


def test_traces_and_transforms_see_the_op(dispatched: list[str]) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return pk.rms_norm(x, torch.ones(8), eps=1e-5)

    norm(torch.ones(2, 8))
    graph = make_fx(norm)(torch.ones(2, 8))
    assert "pykernels.rms_norm" in graph.code
    with pytest.raises(RuntimeError, match="functionalizing"):  # torch's answer: it never reaches the kernel
        torch.func.functionalize(norm)(torch.ones(2, 8))


def test_kinds_without_end_are_forgotten(dispatched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_MOST_KNOWN", 4)
    for rows in range(1, 20):
        pk.rms_norm(torch.ones(rows, 8), torch.ones(8), eps=1e-5)
        assert len(library._known) <= 4


# ---- recorded plans -------------------------------------------------------------------------------------------------
def test_a_recorded_plan_gives_the_bits_of_the_ops_and_follows_its_buffers() -> None:
    x, w = torch.randn(3, 64), torch.randn(64)
    out = torch.full((3, 64), float("nan"))
    with native.record() as plan:
        pk.rms_norm(x, w, eps=1e-5, out=out, backend="cpu")
    assert len(plan) == 1
    assert out.isnan().all(), "recording must not run the op"
    for _ in range(2):
        x.copy_(torch.randn(3, 64))
        plan.run()
        assert torch.equal(out, pk.rms_norm(x, w, eps=1e-5))
    assert len(plan.run_timed()) == 1


def test_recording_ends_even_when_the_body_raises() -> None:
    with pytest.raises(RuntimeError), native.record():
        raise RuntimeError
    assert not pk.rms_norm(torch.ones(1, 8), torch.ones(8), eps=0.0).isnan().any()


def test_native_signatures_follow_the_contract() -> None:
    """The binding takes exactly the contract's arguments, in its order: a wrong count would shift them silently."""
    module = native.module()
    for op in OPS.values():
        text = getattr(module, op.name).__doc__.splitlines()[0]
        kinds = [part.split(":")[1].strip() for part in text[text.index("(") + 1 : text.rindex(")")].split(", ")]
        expected = {int: "SupportsInt", float: "SupportsFloat", bool: "bool", str: "str"}
        assert len(kinds) == len(op.args), text
        for kind, arg in zip(kinds, op.args, strict=True):
            want = "Tensor" if not hasattr(arg, "type") else expected[arg.type]
            assert want in kind, (op.name, arg.name, kind)
