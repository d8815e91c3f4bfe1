"""What each kernel says of uses of its op, and the text of what it computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from rewriter.ops.device import KNOWN, Device
from rewriter.ops.kernel import Kernel, Spec, spec_of
from rewriter.ops.op import Op
from rewriter.ops.registry import registry
from rewriter.tools.bench_ops import named_uses

SETS = ("small", "targets", "others")
PASSES = ("forward", "vjp", "forward_and_vjp")
DEVICES = {"cpu": Device("cpu", "cpu"), "cuda": KNOWN["h100"], "tpu": KNOWN["tpu_v5e"]}

Uses = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]


def _arrays(dtype: str, **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {n: jax.ShapeDtypeStruct(s, dtype) for n, s in shapes.items()}


def more_uses() -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Returns uses with operands and parameters that no set of shapes has, by op."""
    sizes = _arrays("int32", group_sizes=(4,))
    first = {**sizes, **_arrays("int32", first_row=())}
    rows, wide = (256, 128), (4, 128, 256)
    dots = [
        (_arrays(d, lhs=rows, rhs=rhs) | groups, {"mode": mode, **more})
        for d, groups in (("bfloat16", sizes), ("bfloat16", first), ("float32", sizes))
        for rhs, mode in (
            (wide, "forward"), ((4, 256, 128), "transposed"), (rows, "contracting"),
        )
        for more in ({}, {"out_dtype": "float32", "precision": "highest"})
    ]  # fmt: skip
    halves = [
        (_arrays("bfloat16", x=rows, w=wide) | groups, {"halves": order})
        for groups in (sizes, first)
        for order in ("gate_up", "up_gate")
    ]
    matrices = _arrays("int8", w=(128, 256)) | _arrays("float32", w_scale=(1, 256))
    turned = _arrays("int8", w=(256, 128)) | _arrays("float32", w_scale=(1, 256))
    units = {"x": (2, 64, 128), "w_gate": (128, 256), "w_up": (128, 256)}
    biased = {**units, "b_gate": (256,), "b_up": (256,)}
    adapted = {**units, "rows_gate": (2, 64, 256), "rows_up": (2, 64, 256)}
    how = {"activation": "swish", "beta": 1.7, "clip_up": (-7.0, 7.0), "up_shift": 1.0}
    return {
        "ragged_dot": dots,
        "quantized_ragged_dot": [
            (_arrays("bfloat16", lhs=rows) | _arrays("int8", rhs=(4, 256, 128)) | groups
             | _arrays("float32", rhs_scale=(4, 256)), {"mode": "transposed"})
            for groups in (sizes, first)
        ],
        "ragged_gated_linear_unit": halves,
        "quantized_dot": [
            (_arrays("bfloat16", x=(2, 8, 128)) | matrices, {}),
            (_arrays("bfloat16", x=(8, 128)) | turned, {"mode": "transposed"}),
        ],
        "packed_dot": [
            (_arrays("bfloat16", x=(8, 128)) | _arrays("int8", w=shape)
             | _arrays("bfloat16", w_scale=(1, 512)),
             {"packing": f"{axis} turns low signed int8", "widen": "bfloat16 *scale"})
            for axis, shape in (("k", (64, 512)), ("n", (128, 256)))
        ],
        "scored_attention": [
            (_arrays("float32", q=(1, 64, 4, 32), k=(1, 64, 2, 32), v=(1, 64, 2, 32)),
             {"scale": 0.25})
        ],
        "gated_linear_unit": [
            (_arrays(d, **shapes), params)
            for d in ("bfloat16", "float32")
            for shapes in (units, biased, adapted)
            for params in ({}, how, {"out_dtype": "float32", "precision": "high"})
        ],
    }  # fmt: skip


def uses(op: Op) -> Iterator[tuple[str, Spec]]:
    """Yields uses of an op and their names."""
    for name in SETS:
        for i, spec in enumerate(named_uses(op.name, name)):
            yield f"{name}_{i}", spec
    for i, (operands, params) in enumerate(more_uses().get(op.name, ())):
        yield f"more_{i}", spec_of(op, operands, params)


def declared(op: Op) -> dict[str, Any]:
    """Returns what an op declares."""
    fields = ("out", "defaults", "parallel", "flat", "parts", "form_of", "tiled")
    spread = op.spread(dict(op.defaults))
    return {
        **{name: repr(getattr(op, name)) for name in fields},
        "operands": [repr(o) for o in op.operands],
        "sharding": None if spread is None else {
            "along": sorted(spread.along), "sums": sorted(spread.sums),
            "follows": dict(spread.follows), "dims": dict(spread.dims or {}),
        },
    }  # fmt: skip


def texts(op: Op, spec: Spec) -> dict[str, Any]:
    """Returns all that is said of a use: by the op, and by each of its kernels."""
    operands = {n: jax.ShapeDtypeStruct(s, spec.dtype(n)) for n, s in spec.shapes}
    params = dict(spec.params)
    made: dict[str, Any] = {
        "reference": _text(lambda **a: op.reference(**a, **params), operands)
    }
    for field in ("general", "usual"):
        if (function := getattr(op, field)) is not None:
            made[field] = _text(lambda f=function, **a: f(**a, **params), operands)
    if op.cost is not None:
        sizes = dict(spec.shapes), dict(spec.dtypes), params
        made["cost"] = [_said(lambda p=p: op.cost(*sizes, p)) for p in PASSES]
    if op.sample is not None:
        key = jax.eval_shape(lambda: jax.random.key(0))
        draws = {
            "": op.sample,
            **(op.distributions(operands) if op.distributions else {}),
        }
        for name, draw in draws.items():
            made[f"sample {name}"] = _text(
                lambda key, draw=draw: draw(key, operands, params), {"key": key}
            )
    for kernel in registry().kernels(op.name):
        made[kernel.name] = _of_kernel(kernel, spec, operands, params)
    return made


def _of_kernel(
    kernel: Kernel, spec: Spec, operands: dict[str, Any], params: dict[str, Any]
) -> dict[str, Any]:
    device = DEVICES[kernel.platforms[0]]
    limits, speed, space = kernel.limits, kernel.speed, kernel.space
    made: dict[str, Any] = {
        "version": kernel.version,
        "platforms": kernel.platforms,
        "traits": repr(kernel.traits),
        "supports": _said(lambda: limits.supports(spec)),
        "runs_on": [_said(lambda d=d: limits.runs_on(d)) for d in DEVICES.values()],
        "deterministic": _said(lambda: limits.deterministic(None)),
        "profitable": [_said(lambda p=p: speed.profitable(spec, p)) for p in DEVICES],
        "modelled": [
            _said(lambda p=p: speed.modelled(spec, device, p)) for p in PASSES
        ],
    }
    if speed.estimate is not None:
        for name, p in itertools.product(DEVICES, PASSES):
            made[f"estimate {name} {p}"] = _said(
                lambda n=name, p=p: dict(speed.estimate(spec, DEVICES[n], p))
            )
    if kernel.traits.saves is not None:
        made["saves"] = _said(lambda: kernel.traits.saves(spec))
    for name, each in (("space", space), ("backward_space", kernel.backward_space)):
        if each is not None:
            made[name] = [
                _said(lambda e=each: e.default(spec, device)),
                _said(lambda e=each: list(e.configs(spec, device))),
            ]
    if limits.supports(spec).ok:
        made |= _computed(kernel, spec, operands, params)
    return made


def _computed(
    kernel: Kernel, spec: Spec, operands: dict[str, Any], params: dict[str, Any]
) -> dict[str, Any]:
    """The text of each function of a kernel, with the default configs."""
    device = DEVICES[kernel.platforms[0]]
    space, behind = kernel.space, kernel.backward_space
    made: dict[str, Any] = {}

    def forward(residuals: bool, **arrays: Any) -> Any:
        config = {"config": space.default(spec, device)} if space else {}
        more = {"residuals": True} if residuals else {}
        return kernel.forward(**arrays, **params, **config, **more)

    made["forward"] = _text(lambda **a: forward(False, **a), operands)
    if kernel.backward is None:
        return made
    made["with residuals"] = _text(lambda **a: forward(True, **a), operands)
    out, saved = jax.eval_shape(lambda a: forward(True, **a), operands)
    behind = kernel.backward_space

    def backward(out: Any, residuals: Any, cotangent: Any, **arrays: Any) -> Any:
        config = {"config": behind.default(spec, device)} if behind else {}
        out = out if kernel.traits.saves_out else None
        given = {"out": out, "residuals": residuals, "cotangent": cotangent}
        return dict(kernel.backward(**arrays, **given, **params, **config))

    given = {**operands, "out": out, "residuals": saved, "cotangent": out}
    made["backward"] = _text(backward, given)
    if kernel.together is not None:
        both = lambda **a: kernel.together(**a, **params)
        made["together"] = _text(both, {**operands, "cotangent": out})
    return made


def _text(function: Callable[..., Any], arrays: Mapping[str, Any]) -> str:
    """The text of a function's jaxpr, or of its error."""
    try:
        return str(jax.make_jaxpr(lambda a: function(**a))(dict(arrays)))
    except Exception as why:
        return f"{type(why).__name__}: {why}"[:500]


def _said(ask: Callable[[], Any]) -> str:
    try:
        return repr(ask())
    except Exception as why:
        return f"{type(why).__name__}: {why}"[:500]


def kernels() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the name of each op and use, and what makes its texts."""
    for name in registry().ops():
        op = registry().op(name)
        yield f"op/{name}", lambda op=op: declared(op)
        for use, spec in uses(op):
            yield f"op/{name}/{use}", lambda op=op, spec=spec: texts(op, spec)
