"""Norms and rows in 8 bits in one pass: what is found, what it lowers to, numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter.kernels.norms.hopper_config import Teams
from rewriter.kernels.quantized_rows import hopper, hopper_kernel
from rewriter.ops import device
from rewriter.ops.row_program import Input, Number, Result, RowProgram, Step
from rewriter.rewrite.passes import quantized_rows
from rewriter.site.row_site import rows_p
from tests.support.kernels import simulator

H200 = device.named("h200")
F32, BF16 = jnp.float32, jnp.bfloat16
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


# ------------------------------------------------------------------------ norms
def rms(x: Any, scale: Any) -> Any:
    y = x.astype(F32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def rms_in_float32(x: Any, scale: Any) -> Any:
    y = x.astype(F32)
    y = y / jnp.sqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    return (y * (1 + scale.astype(F32))).astype(x.dtype)


def rms_without_scale(x: Any, scale: Any) -> Any:
    del scale
    y = x.astype(F32)
    return (y * lax.rsqrt((y**2).mean(-1)[..., None] + 1e-5)).astype(x.dtype)


def layer(x: Any, scale: Any) -> Any:
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.var(x, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * scale + scale / 8


def layer_of_squares(x: Any, scale: Any) -> Any:
    module = linen.LayerNorm(dtype=x.dtype)
    return module.apply({"params": {"scale": scale, "bias": -scale}}, x)


def flax_rms(x: Any, scale: Any) -> Any:
    return linen.RMSNorm(dtype=x.dtype).apply({"params": {"scale": scale}}, x)


@jax.jit
def jitted(x: Any, scale: Any) -> Any:
    """In a call of its own, with columns that are computed there."""
    y = x.astype(F32)
    root = lax.rsqrt(jnp.mean(y * y, -1) + 1e-6)
    return (y * root[..., None] * (1 + scale.astype(F32))).astype(x.dtype)


def jitted_twice(x: Any, scale: Any) -> Any:
    return jitted(jitted(x, scale) * x, -scale)


def none(x: Any, scale: Any) -> Any:
    return x * scale


# ------------------------------------------------------------------ quantization
def divided(y: Any) -> Any:
    scale = jnp.max(jnp.abs(y), -1, keepdims=True).astype(F32) / 127
    q = jnp.round(y.astype(F32) / scale)
    return jnp.clip(q, -128, 127).astype(jnp.int8), scale


def times_the_inverse(y: Any) -> Any:
    y = y.astype(F32)
    most = jnp.maximum(jnp.abs(y).max(-1), 1e-5)
    q = jnp.rint(y * (127.0 / most)[..., None])
    return q.astype(jnp.int8), most / 127.0


def in_its_dtype(y: Any) -> Any:
    """As AQT and MaxText write it: the scale has the rows' dtype."""
    bound = jnp.max(jnp.abs(y), -1, keepdims=True)
    scale = jnp.where(bound == 0, jnp.ones_like(bound), bound) / 127
    return jnp.clip(jnp.round(y / scale), -127, 127).astype(jnp.int8), scale


def by_ends(y: Any) -> Any:
    """The larger of the maximum and minus the minimum."""
    y = y.astype(F32)
    most = jnp.maximum(y.max(-1, keepdims=True), -y.min(-1, keepdims=True))
    return jnp.floor(y / (most / 127) + 0.5).astype(jnp.int8), most


def clipped_first(y: Any) -> Any:
    y = y.astype(F32)
    scale = 448.0 / jnp.max(jnp.abs(y), -1, keepdims=True)
    return jnp.clip(y * scale, -448, 448).astype(E4M3), 1 / scale


def limited(y: Any) -> Any:
    scale = jnp.max(jnp.abs(y), -1, keepdims=True) / 57344
    return jnp.maximum(jnp.minimum(y / scale, 57344), -57344).astype(E5M2), scale


def of_qwix(y: Any) -> Any:
    """Absmax calibration with a symmetric range, as qwix does."""
    bound = jnp.max(jnp.abs(y), axis=-1, keepdims=True)
    scale = bound / 127.5
    scale = jnp.where(scale == 0, 1.0, scale).astype(y.dtype)
    return jnp.clip(jnp.round(y / scale), -127.5, 127.5).astype(jnp.int8), scale


NORMS = {
    f.__name__: f
    for f in (
        rms, rms_in_float32, rms_without_scale, layer, layer_of_squares, flax_rms, none,
        jitted, jitted_twice,
    )
}  # fmt: skip
QUANTIZED = {
    f.__name__: f
    for f in (
        divided, times_the_inverse, in_its_dtype, by_ends, clipped_first, limited,
        of_qwix,
    )
}  # fmt: skip


def program(norm: Any, quantized: Any, *, sums: bool, kept: bool) -> Any:
    def run(x: Any, scale: Any, addend: Any) -> Any:
        h = x + addend if sums else x
        y = norm(h, scale)
        outs = quantized(y)
        return (*outs, h) if sums else (*outs, y) if kept else outs

    return run


def given(shape: Any, dtype: Any, seed: int = 0) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    rows = jax.random.normal(keys[0], shape) * jnp.exp(
        2 * jax.random.normal(keys[1], (*shape[:-1], 1))
    )
    scale = 1 + jax.random.normal(keys[1], shape[-1:]) / 4
    addend = jax.random.normal(keys[2], shape)
    return tuple(x.astype(dtype) for x in (rows, scale, addend))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows count as large ones, and a single sum as two."""
    monkeypatch.setattr(hopper, "LEAST_BYTES", 0)
    monkeypatch.setattr(hopper, "LEAST_COLUMNS", 0)


def changed(run: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """A program after the pass, and the only equation of rows in it."""
    after, changes = quantized_rows.PASS(jax.make_jaxpr(run)(*args), H200)
    found = [e for e in after.eqns if e.primitive is rows_p]
    assert len(found) == len(changes)
    return after, found


def kept_out(after: Any) -> list[str]:
    """Equations beside that of rows which compute anything of rows."""
    return [e.primitive.name for e in after.eqns if e.primitive is not rows_p]


def eager(after: Any, *args: Any) -> list[np.ndarray]:
    """Equation by equation: XLA joins none, and leaves out no rounding."""
    with jax.disable_jit():
        return [np.asarray(x) for x in jaxpr_as_fun(after)(*args)]


def simulated(equation: Any, args: Any, config: Any = None) -> list[np.ndarray]:
    """What the kernel's own code gives for an equation's operands."""
    found = dict(equation.params["use"].params)["program"]
    with simulator.simulated_norms():
        return hopper_kernel.computed(found, config, args)


def check(run: Any, args: Any, config: Any = None) -> None:
    """The kernel's numbers are the program's: of 8 bits all but a few in 1000."""
    after, (equation,) = changed(run, *args)
    names = dict(zip(after.jaxpr.invars, args, strict=True))
    kinds = dict(equation.params["use"].params)["program"].inputs
    d = args[0].shape[-1]
    shapes = {"full": (-1, d), "row": (-1,), "column": (d,)}
    before = [e for e in after.eqns if e is not equation]
    env = dict(names)
    for eqn in before:
        if all(hasattr(v, "val") or v in env for v in eqn.invars):
            ins = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
            outs = eqn.primitive.bind(*ins, **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
            env.update(zip(eqn.outvars, outs, strict=True))
    rows = [
        np.asarray(env[v]).reshape(shapes.get(kind, (1,)))
        for v, (kind, _) in zip(equation.invars, kinds, strict=False)
    ]
    made = simulated(equation, rows, config)
    wanted = eager(equation.params["equations"], *(env[v] for v in equation.invars))
    assert len(made) == len(wanted) > 1
    for got, want in zip(made, wanted, strict=True):
        got = got.astype(want.dtype).reshape(want.shape).astype(np.float64)
        want, eight = want.astype(np.float64), want.dtype.itemsize == 1
        assert np.array_equal(np.isnan(got), np.isnan(want))
        same = np.isclose(got, want, 1e-2, 1.0 if eight else 1e-6)
        assert same[~np.isnan(want)].all()
        if eight:
            assert np.mean((got == want) | np.isnan(want)) > 0.98


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("quantized", QUANTIZED)
def test_found(norm: str, quantized: str) -> None:
    """All equations are one, with and without a sum in front and the norm behind."""
    args = given((2, 8, 512), BF16)
    for sums, kept in ((False, False), (True, False), (False, True)):
        run = program(NORMS[norm], QUANTIZED[quantized], sums=sums, kept=kept)
        after, found = changed(run, *args)
        if norm == "none":
            assert not found  # one sum
            continue
        assert len(found) == 1
        assert not {"reduce_sum", "reduce_max", "round"} & {*kept_out(after)}
        wanted = jax.tree.leaves(jax.eval_shape(run, *args))
        avals = jax.eval_shape(jaxpr_as_fun(after), *args)
        assert [(x.shape, x.dtype) for x in avals] == [
            (x.shape, x.dtype) for x in wanted
        ]


CASES = [
    ("rms", "divided", BF16, None),
    ("rms_in_float32", "times_the_inverse", BF16, Teams(1, 2, 2, 2)),
    ("rms_without_scale", "in_its_dtype", jnp.float16, Teams(2, 1, 2, 2, 2)),
    ("layer", "by_ends", F32, None),
    ("layer_of_squares", "clipped_first", BF16, Teams(1, 1, 4, 3, 1)),
    ("flax_rms", "limited", BF16, Teams(1, 4, 1, 2)),
    ("layer", "of_qwix", BF16, None),
    ("jitted", "divided", BF16, None),
    ("jitted_twice", "in_its_dtype", F32, Teams(1, 2, 1, 2)),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("norm", "quantized", "dtype", "config"), CASES)
@pytest.mark.parametrize("more", ["sums", "kept", ""])
def test_simulated(norm: str, quantized: str, dtype: Any, config: Any, more: str):
    """The kernel's own code, a Python thread per warpgroup."""
    run = program(
        NORMS[norm], QUANTIZED[quantized], sums=more == "sums", kept=more == "kept"
    )
    check(run, given((3, 6, 512), dtype), config)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("quantized", [divided, clipped_first, in_its_dtype])
def test_rows_that_are_not_finite(quantized: Any) -> None:
    """A NaN is one in the scale, too, and others' rows stay as they are."""
    x, scale, addend = given((24, 512), F32)
    run = program(rms, quantized, sums=False, kept=True)
    _, (equation,) = changed(run, x, scale, addend)
    before = simulated(equation, [np.asarray(x), np.asarray(scale)])
    for value in (np.nan, np.inf, 0.0):
        other = np.array(x)
        other[5], other[9, 7] = value, value
        made = simulated(equation, [other, np.asarray(scale)])
        for got, want in zip(made, before, strict=True):
            np.testing.assert_array_equal(np.delete(got, (5, 9), 0),
                                          np.delete(want, (5, 9), 0))  # fmt: skip
            if value and got.ndim == 1:
                assert np.isnan(got[[5, 9]]).all()
    check(run, (x.at[5].set(0), scale, addend))


def test_limits_are_those_of_the_conversion() -> None:
    """Roundings and limits in front of a conversion to int8, in every order."""
    x = Input(0)
    step = lambda name, *ins: Step(name, ins, "full", "float32")
    number = lambda value: Number(value, "float32")

    def found(*steps: Step) -> Any:
        last = Step("convert_element_type", (Result(len(steps) - 1),), "full", "int8")
        program = RowProgram((("full", "float32"),), (*steps, last), (Result(0),))
        return hopper_kernel.whole(program, last)

    rounded, one, two = step("round", x), Result(0), Result(1)
    low, high = number(-127.0), number(127.5)
    both = step("max", low, one), step("min", high, two)
    assert found(rounded, *both) == (x, True, (-127, 127))
    assert found(rounded, step("clamp", low, one, high)) == (x, True, (-127, 127))
    assert found(rounded, step("min", one, high)) == (x, True, (-128, 127))
    assert found(rounded) == (x, True, (-128, 127))
    for steps in (
        (step("max", low, x),),  # towards 0
        (rounded, step("max", number(3.0), one)),  # NaN is 0, and not 3
        (rounded, step("max", number(np.nan), one)),
        (rounded, step("max", x, one)),
        (rounded, step("clamp", one, low, high)),
        (rounded, step("add", low, one)),
    ):
        assert found(*steps) == (Result(len(steps) - 1), False, (-128, 127))


# ------------------------------------------------------------- what stays as written
def of_all(y: Any) -> Any:
    """One scale for the whole array."""
    scale = jnp.max(jnp.abs(y)).astype(F32) / 127
    return jnp.round(y / scale).astype(jnp.int8), scale


def of_columns(y: Any) -> Any:
    scale = jnp.max(jnp.abs(y), -2, keepdims=True).astype(F32) / 127
    return jnp.round(y / scale).astype(jnp.int8), scale


def of_groups(y: Any) -> Any:
    groups = y.reshape(*y.shape[:-1], -1, 128)
    q, scale = divided(groups)
    return q.reshape(y.shape), scale


def by_another_row(y: Any) -> Any:
    scale = jnp.max(jnp.abs(y), -1, keepdims=True).astype(F32) / 127
    return jnp.round(y / scale[::-1]).astype(jnp.int8), scale


def by_mean(y: Any) -> Any:
    scale = jnp.mean(jnp.abs(y).astype(BF16), -1, keepdims=True, dtype=BF16)
    return jnp.round(y / scale.sum(0, keepdims=True)).astype(jnp.int8), scale


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "quantized", [of_all, of_columns, of_groups, by_another_row, by_mean]
)
def test_look_alikes(quantized: Any) -> None:
    """Scales that are none of the row: the values stay those of the program."""
    args = given((8, 512), BF16)
    run = program(rms, quantized, sums=False, kept=False)
    after, found = changed(run, *args)
    for equation in found:  # a norm alone may be joined with what it can be
        assert dict(equation.params["use"].params)["program"].depth > 1
    for got, want in zip(jaxpr_as_fun(after)(*args), run(*args), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(want, np.float64), 1e-2, 1.0
        )
    if quantized in (of_all, of_columns, of_groups, by_another_row):
        assert not found


UNLIMITED: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda y: y.astype(E4M3),
    "scaled": lambda y: (y * 60000 / jnp.max(jnp.abs(y), -1, keepdims=True)).astype(
        E5M2
    ),
    "below": lambda y: jnp.minimum(y, 448).astype(E4M3),
    "too far": lambda y: jnp.clip(y, -57344, 57344).astype(E4M3),
    "by a row": lambda y: jnp.clip(y, -jnp.ones_like(y), 448).astype(E4M3),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", UNLIMITED)
def test_floats_beyond_the_largest_stay(name: str) -> None:
    """Devices convert these to the largest number, to an infinity, or to NaN."""
    x, scale, addend = given((8, 512), F32)
    run = program(rms, lambda y: (UNLIMITED[name](y), y), sums=False, kept=False)
    assert not changed(run, x, scale, addend)[1]


@pytest.mark.usefixtures("small")
def test_noise_is_the_programs() -> None:
    """Stochastic rounding adds the program's own numbers."""

    def run(x: Any, scale: Any, noise: Any) -> Any:
        y = rms(x, scale).astype(F32)
        bound = jnp.max(jnp.abs(y), -1, keepdims=True)
        q = jnp.floor(y * (127 / bound) + noise)
        return jnp.clip(q, -127, 127).astype(jnp.int8), bound

    x, scale, _ = given((8, 512), BF16)
    check(run, (x, scale, jax.random.uniform(jax.random.key(3), x.shape)))


# ------------------------------------------------------------- under transformations
@pytest.mark.usefixtures("small")
def test_transformed_it_is_the_program() -> None:
    x, scale, _ = given((8, 512), F32)

    def run(x: Any, scale: Any) -> Any:
        q, by = divided(rms(x, scale))
        return q, by

    after, found = changed(run, x, scale)
    assert found
    made = jaxpr_as_fun(after)
    grad = lambda f: jax.grad(lambda x, scale: (f(x, scale)[by[f]] ** 2).sum(), (0, 1))
    by = {run: 1, made: next(i for i, v in enumerate(after.out_avals) if v.ndim == 2
                             and v.dtype == F32)}  # fmt: skip
    for got, want in zip(grad(made)(x, scale), grad(run)(x, scale), strict=True):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)
    many = jnp.stack([x, 2 * x])
    for got, want in zip(
        jax.vmap(made, (0, None))(many, scale),
        jax.vmap(run, (0, None))(many, scale),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.asarray(got, F32), np.asarray(want, F32), 1e-5, 1.0
        )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_behind_a_replaced_norm(op: str) -> None:
    """The site's own definition is computed; the norm is a result, too."""
    args = given((4, 512), BF16)[:2]
    norm = {"layer_norm": layer, "rms_norm": rms}[op]

    def run(x: Any, scale: Any) -> Any:
        y = norm(x, scale)
        return *divided(y), y

    fast = rewriter.optimize(run, implementation={op: "hopper"})
    jaxpr = jax.make_jaxpr(fast)(*args)
    while not any(e.primitive.name == "rewriter_site" for e in jaxpr.eqns):
        jaxpr = jaxpr.eqns[0].params["jaxpr"]
    after, (_,) = quantized_rows.PASS(jaxpr, H200)
    assert "rewriter_site" not in kept_out(after)
    check(jaxpr_as_fun(jaxpr), args)


def layers(x: Any, scales: Any, weights: Any) -> Any:
    """Layers in a scan, with constants that lie beside them."""

    def one(h: Any, given: Any) -> Any:
        scale, w = given
        q, by = divided(rms(h, scale))
        product = lax.dot_general(
            q, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        )
        return h + (product * by / 127).astype(h.dtype), None

    return lax.scan(one, x, (scales, weights))[0]


def test_chosen_on_hopper_gpus() -> None:
    """Where the rows are large, and XLA would read them more than once."""
    struct = jax.ShapeDtypeStruct
    x, scale = struct((8192, 4096), BF16), struct((4096,), BF16)
    run = lambda x, scale: divided(rms(x, scale))
    report = rewriter.explain(run, target="h200", tune="off")(x, scale)
    assert "in one pass" in str(report)
    assert "in one pass" not in str(
        rewriter.explain(run, target="a100", tune="off")(x, scale)
    )
    few = struct((64, 4096), BF16)
    assert "in one pass" not in str(
        rewriter.explain(run, target="h200", tune="off")(few, scale)
    )
    stacked = struct((3, 4096), BF16), struct((3, 4096, 4096), jnp.int8)
    report = rewriter.explain(layers, target="h200", tune="off")(x, *stacked)
    assert "in one pass" in str(report)
    strict = rewriter.explain(run, target="h200", tune="off", numerics="strict")
    assert "in one pass" not in str(strict(x, scale))
    off = rewriter.explain(run, target="h200", tune="off", disable=("quantized_rows",))
    assert "in one pass" not in str(off(x, scale))


@pytest.mark.parametrize("quantized", [divided, clipped_first, limited, by_ends])
def test_lowers_on_a_cpu(quantized: Any) -> None:
    structs = jax.eval_shape(lambda: given((8192, 2048), BF16))
    run = program(layer, quantized, sums=True, kept=False)
    after, (_,) = changed(run, *structs)
    exported = jax.export.export(jax.jit(jaxpr_as_fun(after)), platforms=["cuda"])
    text = exported(*structs).mlir_module()
    assert text.count("mosaic_gpu_v2") == 1
    assert "stablehlo.reduce" not in text
