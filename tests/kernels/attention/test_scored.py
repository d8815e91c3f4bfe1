"""The plain kernel for functions of scores, beside every operand of attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rewriter.kernels.attention import SCORED
from rewriter.kernels.attention.scored_form import as_attention
from rewriter.kernels.attention.xla import Blocks
from rewriter.kernels.attention.xla.scored import KERNEL
from rewriter.ops.kernel import spec_of
from rewriter.ops.score import (
    Ref,
    Score,
    cast_step,
    lookup_step,
    named_step,
    number,
    position_step,
    primitive_step,
)
from tests import slow

pytestmark = pytest.mark.once

B, T, S, N, KEYS, H = 2, 24, 40, 4, 2, 8
draw = np.random.default_rng(0)
GIVEN: dict[str, Any] = {
    "q": draw.normal(size=(B, T, N, H)),
    "k": draw.normal(size=(B, S, KEYS, H)),
    "v": draw.normal(size=(B, S, KEYS, H)),
    "score_0": draw.uniform(0.5, 1.5, size=(1, N, 1, 1)),
    "table_0": draw.normal(size=(1, N, 9)),
}
GIVEN = {n: x.astype("float32") for n, x in GIVEN.items()}
UP = draw.normal(size=(B, T, N, H)).astype("float32")
BLOCKS = Blocks(8, 16, 1 << 9, 1 << 9)

MORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "window": {"window": (7, 3)},
    "mask": {"mask": draw.random((B, 1, T, S)) < 0.6},
    "lengths": {"kv_lengths": np.array([33, 8])},
    "segments": {
        "q_segments": np.arange(T)[None] // 10, "kv_segments": np.arange(S)[None] // 15,
    },
    "sinks": {"sinks": draw.normal(size=N).astype("float32")},
    "dropout": {"dropout": (draw.random((B, N, T, S)) < 0.8).astype("float32") / 0.8},
    "scale": {"scale_factor": np.float32(0.7)},
    "bias": {"bias": draw.normal(size=(1, N, T, S)).astype("float32")},
    "no keys, zero": {"kv_lengths": np.array([0, 20]), "empty_rows": "zero"},
    "no keys, mean": {"kv_lengths": np.array([0, 20]), "empty_rows": "mean"},
    "no keys, passing": {"kv_lengths": np.array([0, 20]), "empty_rows": "mean_passing"},
}  # fmt: skip


def function() -> Score:
    """Returns tanh(product) · score_0 + softplus(table_0[|t - s| % 9])."""
    steps: list[Any] = []

    def add(step: Any) -> Ref:
        steps.append(step)
        return Ref("step", len(steps) - 1)

    away = add(primitive_step(lax.sub_p, {}, (Ref("row"), Ref("column")), "int32"))
    away = add(primitive_step(lax.abs_p, {}, (away,), "int32"))
    place = add(position_step("remainder", away, number(9, "int32")))
    found = add(lookup_step(Ref("array", "table_0"), place, "float32"))
    found = add(named_step("logaddexp", (found, number(0, "float32")), "float32"))
    bent = add(named_step("relu", (Ref("product"),), "float32"))
    bent = add(primitive_step(lax.sin_p, {"accuracy": None}, (bent,), "float32"))
    made = jax.make_jaxpr(lambda x, y: x * y)(1.0, 1.0).eqns[0]
    both = (bent, Ref("array", "score_0"))
    bent = add(primitive_step(made.primitive, made.params, both, "float32"))
    out = add(primitive_step(lax.add_p, {}, (bent, found), "float32"))
    return Score(tuple(steps), out, "float32")


WEIGHED = ("nothing", "window", "mask", "lengths", "segments", "dropout", "scale")
"""What masks weights that are no softmax, or multiplies them."""

NORMALISED = (
    ("nothing", "softmax"), ("window", "none"), ("mask", "sum"),
    *((more, "softmax") for more in MORE if more != "nothing"),
    *((more, how) for more in WEIGHED for how in ("none", "sum")),
)  # fmt: skip


def divisor() -> Score:
    """Returns |sum| + score_1 · row + 1."""
    made = jax.make_jaxpr(lambda x, y: jnp.abs(x) + x * y)(1.0, 1.0).eqns
    size, times, plus = ((e.primitive, e.params) for e in made)
    steps = (
        primitive_step(*size, (Ref("product"),), "float32"),
        cast_step(Ref("row"), "float32"),
        primitive_step(*times, (Ref("step", 1), Ref("array", "score_1")), "float32"),
        primitive_step(*plus, (Ref("step", 0), Ref("step", 2)), "float32"),
        primitive_step(*plus, (Ref("step", 3), number(1, "float32")), "float32"),
    )
    return Score(steps, Ref("step", 4), "float32")


@pytest.mark.parametrize(("more", "how"), slow.first(4, NORMALISED, True))
def test_beside_every_operand(more: str, how: str) -> None:
    extra = MORE[more]
    params = {n: x for n, x in extra.items() if n in ("window", "empty_rows")}
    params |= {"scale": 0.4, "score": function(), "normalisation": how}
    if how == "sum":
        extra = {**extra, "score_1": draw.uniform(size=(1, N, 1, 1)).astype("float32")}
        params["divisor"] = divisor()
    operands = {**GIVEN, **{n: x for n, x in extra.items() if n not in params}}
    moving = {n: x for n, x in operands.items() if x.dtype == np.float32}

    def reference(given: Any) -> Any:
        return SCORED.reference(**{**operands, **given}, **params)

    def ours(given: Any) -> Any:
        given = {**operands, **given}
        out, saved = KERNEL.forward(**given, **params, residuals=True, config=BLOCKS)
        back = KERNEL.backward(
            **given, **params, out=out, residuals=saved, cotangent=UP, config=BLOCKS
        )
        return out, back

    def wanted(given: Any) -> Any:
        out, back = jax.vjp(reference, given)
        return out, back(jnp.asarray(UP))[0]

    (got, gradients), (want, exact) = jax.jit(ours)(moving), jax.jit(wanted)(moving)
    np.testing.assert_allclose(got, want, atol=2e-5)
    for name in moving:
        size = np.abs(exact[name]).max() + 1e-2
        assert np.abs(gradients[name] - exact[name]).max() < 3e-5 * size, name


def test_what_a_kernel_must_compute_is_known() -> None:
    score = function()
    assert {"sin", "relu", "lookup", "position_remainder"} <= score.primitives
    assert score.arrays == ("score_0", "table_0")
    spec = spec_of(SCORED, GIVEN, {"score": score})
    assert KERNEL.limits.supports(spec).ok
    assert not {"table_0", "score_0"} & {*as_attention(spec).operands}
    passing = spec.with_params({"empty_rows": "nan_passing"})
    assert not KERNEL.limits.supports(passing).ok


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_places_in_tables_may_differ_by_head(lead: tuple[int, ...]) -> None:
    table = draw.normal(size=(2, 3, 9)).astype("float32")
    index = draw.integers(-1, 9, size=(*(1,) * (2 - len(lead)), *lead, 4, 5))
    step = lookup_step(Ref("array", "table_0"), Ref("column"), "float32", 0.5)
    got = step.run(table, index)
    rows = np.broadcast_to(index, (2, 3, 4, 5))
    wide = np.broadcast_to(table[:, :, None], (2, 3, 4, 9))
    want = np.where(rows < 0, 0.5, np.take_along_axis(wide, np.maximum(rows, 0), -1))
    np.testing.assert_array_equal(got, want)


def test_a_gpu_computes_tiles_where_some_are_hidden() -> None:
    """As measured on an H100: without a window, and with tables, XLA is faster."""

    def pays(platform: str, tokens: int = 4096, **changed: Any) -> bool:
        shape = jax.ShapeDtypeStruct((1, tokens, 16, 64), jnp.float32)
        operands = dict.fromkeys("qkv", shape)
        if changed.pop("table", False):
            operands["table_0"] = jax.ShapeDtypeStruct((1, 16, 9), jnp.float32)
        spec = spec_of(SCORED, operands, {"score": function(), **changed})
        return KERNEL.speed.profitable(spec, platform).ok

    assert pays("cuda", window=(None, 0))
    assert pays("cuda", tokens=1 << 15)  # no memory for scores
    assert not pays("cuda")
    assert not pays("cuda", window=(None, 0), table=True)
    assert not pays("tpu", window=(None, 0))
    assert pays("cpu", table=True)
