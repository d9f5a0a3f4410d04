"""The contract: binding of dimensions, error text, one wrong argument of every kind for every op."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pykernels.contract import OPS, Op, Scalar, Tensor, allocate, bind_dims, check, device_of
from pykernels.library import call
from pykernels.testing.compare import same_bits
from pykernels.testing.factories import cases


def base(op: Op) -> dict[str, Any]:
    """Arguments that the contract accepts, of a case in which as many optional tensors as possible are present."""
    found = [case.args() for case in cases(op.name, "smoke")]
    return max(found, key=lambda args: sum(value is not None for value in args.values()))


def refuses(op: Op, args: dict[str, Any], kind: type[Exception], *words: str) -> None:
    """The public call raises `kind` with these words, and writes nothing before."""
    written = {t.name: args[t.name] for t in op.tensors if t.mutated and isinstance(args[t.name], torch.Tensor)}
    before = {name: value.detach().clone() for name, value in written.items() if value.device.type == "cpu"}
    with pytest.raises(kind) as caught:
        call(op, "cpu", **args)
    text = str(caught.value)
    for word in (op.name, *words):
        assert word in text, text
    assert "\n" not in text
    for name, value in before.items():
        assert same_bits(written[name].detach(), value).all(), f"{name} was written"


def tensor_arguments() -> list[Any]:
    return [pytest.param(op, t, id=f"{op.name}-{t.name}") for op in OPS.values() for t in op.tensors]


def scalar_arguments() -> list[Any]:
    return [
        pytest.param(op, a, id=f"{op.name}-{a.name}") for op in OPS.values() for a in op.args if isinstance(a, Scalar)
    ]


@pytest.mark.parametrize(("op", "arg"), tensor_arguments())
def test_something_that_is_not_a_tensor_is_a_type_error(op: Op, arg: Tensor) -> None:
    refuses(op, base(op) | {arg.name: [1, 2, 3]}, TypeError, f"{arg.name} must be a torch.Tensor, got list")


@pytest.mark.parametrize(("op", "arg"), tensor_arguments())
def test_a_wrong_rank_names_the_expected_shape(op: Op, arg: Tensor) -> None:
    wrong = torch.zeros((1,) * 4 if all(len(s) != 4 for s in arg.alternatives) else (1, 1))
    refuses(op, base(op) | {arg.name: wrong}, ValueError, f"{arg.name} must have shape", str(list(wrong.shape)))


@pytest.mark.parametrize(("op", "arg"), tensor_arguments())
def test_a_wrong_dtype_names_the_expected_ones(op: Op, arg: Tensor) -> None:
    args = base(op)
    like = args[arg.name]
    if like is None:
        dims = bind_dims(op, args)
        like = torch.zeros([dims.get(d.name, 1) for d in arg.alternatives[0]])
    wrong = like.to(torch.complex64)
    refuses(op, args | {arg.name: wrong}, ValueError, arg.name, "complex64")


@pytest.mark.parametrize(("op", "arg"), tensor_arguments())
def test_a_wrong_device_names_both(op: Op, arg: Tensor) -> None:
    args = base(op)
    if args[arg.name] is None:
        pytest.skip("no case has this optional argument")
    if arg.name == device_of(op, args)[1]:
        pytest.skip("this tensor decides the device")
    refuses(op, args | {arg.name: args[arg.name].to("meta")}, ValueError, arg.name, "must be on cpu", "meta")


@pytest.mark.parametrize(("op", "arg"), tensor_arguments())
def test_a_tensor_that_requires_grad_is_refused(op: Op, arg: Tensor) -> None:
    args = base(op)
    if args[arg.name] is None or not args[arg.name].is_floating_point() or args[arg.name].element_size() == 1:
        pytest.skip("only floats can require grad")
    wrong = args[arg.name].detach().clone().requires_grad_()
    refuses(op, args | {arg.name: wrong}, ValueError, f"{arg.name} must not require grad")
    with torch.no_grad():
        check(op, args | {arg.name: wrong})


@pytest.mark.parametrize(("op", "arg"), tensor_arguments())
def test_a_strided_last_dimension_is_refused(op: Op, arg: Tensor) -> None:
    args = base(op)
    value = args[arg.name]
    if arg.layout != "last" or value is None or value.dim() == 0 or value.shape[-1] < 2:
        pytest.skip("no last dimension to stride")
    wrong = torch.stack((value, value), dim=-1)[..., 0]
    refuses(op, args | {arg.name: wrong}, ValueError, f"{arg.name} must have a contiguous last dimension")


@pytest.mark.parametrize(("op", "arg"), tensor_arguments())
def test_a_missing_required_tensor_is_a_type_error(op: Op, arg: Tensor) -> None:
    if arg.optional or arg.role == "out":
        pytest.skip("may be left out")
    refuses(op, base(op) | {arg.name: None}, TypeError, f"{arg.name} must be a torch.Tensor, got None")


@pytest.mark.parametrize(("op", "arg"), scalar_arguments())
def test_a_wrong_scalar_is_refused(op: Op, arg: Scalar) -> None:
    args = base(op)
    refuses(op, args | {arg.name: object()}, TypeError, arg.name)
    if arg.choices:
        refuses(op, args | {arg.name: "nonsense"}, ValueError, arg.name, "'nonsense'", arg.choices[0])
    if arg.type is float:
        refuses(op, args | {arg.name: float("nan")}, ValueError, f"{arg.name} must be a number")
    if arg.minimum is not None:
        refuses(
            op, args | {arg.name: arg.type(arg.minimum - 2)}, ValueError, f"{arg.name} must be >", str(arg.minimum)[:1]
        )


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_each_tensor_with_one_dimension_too_many_rows_is_refused(op: Op) -> None:
    """Growing one dimension that another tensor has bound gives an error that says who bound it."""
    args = base(op)
    dims = bind_dims(op, args)
    tried = 0
    for arg in op.tensors[1:]:
        value = args[arg.name]
        if value is None or value.dim() == 0:
            continue
        shape = next(s for s in arg.alternatives if len(s) == value.dim())
        for axis, dim in enumerate(shape):
            others = [t for t in op.tensors if t is not arg and args[t.name] is not None]
            shared = any(
                dim.name == d.name for t in others for s in t.alternatives if len(s) == args[t.name].dim() for d in s
            )
            if dim.name and shared:
                grown = torch.cat(
                    (
                        value.float(),
                        value.float().narrow(axis, 0, 1)
                        if value.shape[axis]
                        else torch.zeros([1 if i == axis else n for i, n in enumerate(value.shape)]),
                    ),
                    axis,
                )
                with pytest.raises(ValueError, match="must"):
                    check(op, args | {arg.name: grown.to(value.dtype)})
                tried += 1
    assert tried or len([t for t in op.tensors if args[t.name] is not None]) < 2, dims


RULES: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (
        "prefill_attention",
        lambda a: {"k": a["k"][:, :1].repeat(1, 5, 1), "v": a["v"][:, :1].repeat(1, 5, 1)},
        "multiple of num_kv_heads",
    ),
    (
        "paged_decode_attention",
        lambda a: {"k_scale": torch.ones(()), "v_scale": None},
        "k_scale and v_scale must be given",
    ),
    ("rms_norm", lambda a: {"residual": None, "residual_out": a["x"].clone()}, "residual_out needs a residual"),
    ("rotary_embedding", lambda a: {"inv_freq": torch.ones(a["q"].shape[-1])}, "more than half of head_dim"),
    ("swap_pages", lambda a: {"k_scale_to": torch.ones(())}, "of both sides must be given for int8"),
    (
        "swap_pages",
        lambda a: {"k_to": a["k_from"][1:], "v_to": torch.empty_like(a["v_from"][1:])},
        "must not share memory with k_from",
    ),
    (
        "swap_pages",
        lambda a: {"k_to": torch.empty_like(a["k_from"]), "v_to": a["v_from"]},
        "v_to must not share memory",
    ),
    (
        "linear",
        lambda a: {"weight": a["weight"].flatten().view(torch.uint8)[:-1].clone(), "weight_format": "q4_1"},
        "exactly the bytes",
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), RULES, ids=[f"{r[0]}-{r[2][:12]}" for r in RULES])
def test_a_broken_rule_says_what_must_hold(
    name: str, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    args = next(iter(cases(name, "smoke"))).args()
    refuses(OPS[name], args | change(args), ValueError, words)


def test_scales_of_the_two_sides_of_a_swap_are_of_one_kind() -> None:
    case = next(c for c in cases("swap_pages") if c.name == "int8_token")
    args = case.args()
    static = {"v_scale_to": torch.ones(args["v_to"].shape[2])}
    refuses(OPS["swap_pages"], args | static, ValueError, "scales of both sides must be of one kind")


def test_a_call_with_caches_in_host_memory_runs_on_the_device_of_its_pages_and_wants_them_pinned() -> None:
    op = OPS["swap_pages"]
    args = next(iter(cases(op.name, "smoke"))).args()
    pages = {name: args[name].to("meta") for name in ("src_pages", "dst_pages")}
    assert device_of(op, args | pages) == (torch.device("meta"), "src_pages")
    text = r"k_from must be on meta \(the device of src_pages\) or in pinned host memory, got cpu memory that is not pinned"
    with pytest.raises(ValueError, match=text):
        check(op, args | pages)
    check(op, args | pages, fake=True)
    with pytest.raises(ValueError, match=r"dst_pages must be on meta \(the device of src_pages\), got cpu"):
        check(op, args | {"src_pages": pages["src_pages"]}, fake=True)


def test_error_text_has_bound_dimensions_and_who_bound_them() -> None:
    op = OPS["rms_norm"]
    args = {
        "x": torch.zeros(2, 8),
        "weight": torch.zeros(9),
        "eps": 1e-5,
        "residual": None,
        "out": None,
        "residual_out": None,
    }
    text = "rms_norm: weight must have shape [hidden] with hidden=8 (from x), got [9]"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call(op, "cpu", **args)


def test_outputs_are_allocated_with_the_declared_shape_and_dtype() -> None:
    for op in OPS.values():
        args = base(op)
        derived = [t for t in op.outputs if t.allocate]
        dims = bind_dims(op, args)
        free = dict(args, **{t.name: None for t in derived})
        known = bind_dims(op, free)
        derived = [t for t in derived if all(d.name in known for d in t.alternatives[0] if d.name)]
        full = allocate(op, dict(args, **{t.name: None for t in derived}))
        for t in derived:
            assert list(full[t.name].shape) == [d.value(dims) for d in t.alternatives[0]], (op.name, t.name)


def test_costs_are_positive_and_finite() -> None:
    for op in OPS.values():
        for case in cases(op.name, "smoke"):
            args = case.args()
            cost = op.cost(bind_dims(op, args), args)
            assert cost.flops >= 0
            assert 0 <= cost.bytes < 1e12


def test_causal_attention_costs_half_of_full_attention() -> None:
    from pykernels.contract.attention import visible_pairs

    assert visible_pairs(1000, 1000, False, -1, -1) == 1000 * 1000
    assert visible_pairs(1000, 1000, True, -1, -1) == 1000 * 1001 // 2
    assert visible_pairs(10, 1000, True, -1, -1) == 10 * 1000 - 45
    assert visible_pairs(1, 1000, True, 99, 0) == 100
    assert visible_pairs(5, 3, True, -1, -1) == 1 + 2 + 3


@pytest.mark.parametrize("q_len", [0, 1, 2, 7])
@pytest.mark.parametrize("k_len", [0, 1, 5, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs_are_those_that_the_mask_lets_through(q_len: int, k_len: int, causal: bool) -> None:
    from pykernels.contract.attention import visible_pairs

    for left, right in itertools.product((-1, 0, 1, 4, 100), repeat=2):
        limit = 0 if causal else right
        seen = [
            (left < 0 or j >= i + k_len - q_len - left) and (limit < 0 or j <= i + k_len - q_len + limit)
            for i in range(q_len)
            for j in range(k_len)
        ]
        assert visible_pairs(q_len, k_len, causal, left, right) == sum(seen), (left, right)
