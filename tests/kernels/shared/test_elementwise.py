"""Elementwise functions in kernels for GPUs: what they may hold, and numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rewriter.kernels.shared import (
    elementwise,
    elementwise_exact,
    elementwise_fast,
    elementwise_gpu,
)
from rewriter.kernels.shared.elementwise import program
from tests.kernels.attention.test_hopper import needs_hopper
from tests.slow import first
from tests.support.kernels import lines
from tests.support.kernels.float64 import float64
from tests.support.kernels.simulated_gpu import elementwise_numbers

Function = Callable[..., Any]

FUNCTIONS: dict[str, Function] = {
    "abs": lambda x, i, j: jnp.abs(x),
    "add, mul, sub": lambda x, i, j: (x + 2.5) * x - i,
    "acos, asin": lambda x, i, j: jnp.arccos(jnp.sin(x)) + jnp.arcsin(jnp.cos(x)),
    "acosh": lambda x, i, j: jnp.arccosh(1 + jnp.abs(x)),
    "asinh": lambda x, i, j: jnp.arcsinh(x),
    "atan": lambda x, i, j: jnp.arctan(x),
    "atan2": lambda x, i, j: jnp.arctan2(x, j - 20.5),
    "atanh": lambda x, i, j: jnp.arctanh(jnp.sin(x) * 0.9),
    "cbrt": lambda x, i, j: jnp.cbrt(x),
    "ceil": lambda x, i, j: jnp.ceil(x * 3),
    "clamp": lambda x, i, j: lax.clamp(-0.5, x, 1.5),
    "cos, sin": lambda x, i, j: jnp.cos(x * 3) + jnp.sin(x * i),
    "cosh, sinh": lambda x, i, j: jnp.cosh(x) - jnp.sinh(x / 2),
    "div": lambda x, i, j: x / (1 + x * x) + x / 3,
    "erf": lambda x, i, j: lax.erf(x) + lax.erfc(x / 2),
    "exp": lambda x, i, j: jnp.exp(x) + jnp.exp2(x),
    "expm1": lambda x, i, j: jnp.expm1(x / 8),
    "floor": lambda x, i, j: jnp.floor(x * 4),
    "floor of a logarithm": lambda x, i, j: jnp.floor(jnp.log(jnp.abs(x)) * 8),
    "integer_pow": lambda x, i, j: x**3 + (x * x + 1) ** -2 + lax.integer_pow(x, 0),
    "is_finite": lambda x, i, j: jnp.where(jnp.isfinite(1 / (i - 3.0)), x, 7.0),
    "log": lambda x, i, j: jnp.log(jnp.abs(x) + 0.01),
    "log1p": lambda x, i, j: jnp.log1p(jnp.abs(x) * 0.01) + jnp.log1p(j * 1.0),
    "logistic": lambda x, i, j: jax.nn.sigmoid(x * 4),
    "max, min": lambda x, i, j: jnp.maximum(x, jnp.minimum(0.3, i - j)),
    "pow": lambda x, i, j: jnp.power(jnp.abs(x) + 0.1, 1.3),
    "round": lambda x, i, j: jnp.round(x * 2),
    "round away": lambda x, i, j: lax.round(x * 2, lax.RoundingMethod.AWAY_FROM_ZERO),
    "rsqrt, sqrt": lambda x, i, j: lax.rsqrt(x * x + 0.1) + jnp.sqrt(jnp.abs(x)),
    "sign": lambda x, i, j: jnp.sign(x) + jnp.sign(i - j),
    "square": lambda x, i, j: jnp.square(x) + jnp.square(i - j),
    "tan": lambda x, i, j: jnp.tan(x / 4),
    "tanh": lambda x, i, j: jnp.tanh(x) + 100 * jnp.tanh(x / 1000),
    "softplus": lambda x, i, j: jax.nn.softplus(x),
    "bfloat16": lambda x, i, j: jnp.sin(x.astype(jnp.bfloat16)) * jnp.bfloat16(1.1),
    "float16": lambda x, i, j: (x.astype(jnp.float16) * jnp.float16(3.3)) + 1,
    "reduce_precision": lambda x, i, j: lax.reduce_precision(x, 8, 7),
    "comparisons": lambda x, i, j: (
        (x > 0.1) * 1 + (x <= 0.5) * 2 + (i == j) * 4 + (i != 5) * 8 + (i < j) * 16
        + (x >= 0.0) * 32
    ),
    "logic": lambda x, i, j: ((x > 0) & (i > j)) * 1.0 + ((x < 0) | ~(i > j)) * 2.0,
    "xor": lambda x, i, j: ((x > 0) ^ (i > j)) * 1.0,
    "quotients": lambda x, i, j: (i - 20) // 7 + (i - 20) // (j - 7),
    "truncated quotients": lambda x, i, j: lax.div(i - 20, j - 7) + lax.div(i - j, 3),
    "remainders": lambda x, i, j: (i - 20) % 7 + lax.rem(i - 20, j - 7),
    "bits": lambda x, i, j: ((i - 9) & j) + ((i << 3) | j) + ((i - 40) >> 2) + ~i,
    "shifts": lambda x, i, j: (
        lax.shift_left(i, j) + lax.shift_right_arithmetic(i - 40, j)
        + lax.shift_right_logical(i - 40, j)
    ),
    "unsigned": lambda x, i, j: (i.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 8,
    "to integers": lambda x, i, j: (x * 1e10).astype(jnp.int32),
    "to floats": lambda x, i, j: (i * 100000).astype(jnp.float32) / (j + 1),
    "of logic": lambda x, i, j: jnp.where(x.astype(bool), i, j) + (x > 0).astype(int),
}  # fmt: skip
EXACT = {
    "floor of a logarithm", "comparisons", "quotients", "remainders", "bits", "shifts",
    "unsigned", "to integers", "logic", "xor", "truncated quotients", "sign",
}  # fmt: skip
SIZE = 64


def traced(function: Function) -> Any:
    """Returns a function of scalars as a program, with a result in float32."""
    of = lambda x, i, j: function(x, i, j).astype(jnp.float32)
    given = [jax.ShapeDtypeStruct((), x) for x in ("float32", "int32", "int32")]
    return program(jax.make_jaxpr(of)(*given))


def numbers() -> tuple[np.ndarray, ...]:
    """Returns floats, some of them special, and the numbers of rows and columns."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SIZE, SIZE)).astype(np.float32) * 2
    x[0, :8] = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30]
    i, j = np.meshgrid(*(np.arange(SIZE, dtype=np.int32),) * 2, indexing="ij")
    return x, i, j


@pytest.mark.once
def test_each_primitive_is_tried() -> None:
    tried = {line.name for f in FUNCTIONS.values() for line in traced(f).lines}
    rare = {"add_any", "one_minus_square"}  # of derivatives
    assert elementwise.INSTRUCTIONS.keys() - rare <= tried
    assert elementwise_exact.COMPUTE.keys() == elementwise.INSTRUCTIONS.keys()
    assert elementwise_fast.FAST.keys() <= elementwise.INSTRUCTIONS.keys()


@pytest.mark.once
@pytest.mark.parametrize("part", first(1, range(6)))
def test_programs_are_the_functions(part: int) -> None:
    x, i, j = numbers()
    for name, f in list(FUNCTIONS.items())[part::6]:
        made = traced(f)
        assert made.supports().ok, name
        got = lines.evaluated(made, [x, i, j])[0]
        want = f(*map(jnp.asarray, (x, i, j))).astype(jnp.float32)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.once
def test_ranges_of_integers() -> None:
    made = traced(lambda x, i, j: jnp.abs(i - j) * 2 + jnp.clip(i, 3, 9))
    ranges = made.ranges([None, (0, 10), (0, 20)])
    assert (3, 49) in ranges
    wide = traced(lambda x, i, j: i * j * i * j)
    assert None in wide.ranges([None, (0, 1 << 20), (0, 1 << 20)])[3:]


@pytest.mark.once
def test_what_decides_is_computed_as_by_xla() -> None:
    made = traced(lambda x, i, j: jnp.where(jnp.log(x) > 1, jnp.log(x + 1), 0.0))
    names = [made.lines[at].name for at in sorted(made.decisive)]
    assert names == ["log"]
    logs = [at for at in made.needed if made.lines[at].name == "log"]
    assert len(logs) == 2


@pytest.mark.once
def test_a_function_is_refused_with_the_reason() -> None:
    given = jax.make_jaxpr(lambda x: lax.lgamma(x) + lax.rem(x, 2.0))(1.0)
    text = " ".join(r.text for r in program(given).supports().reasons)
    assert "lgamma" in text
    assert "remainders of floats" in text


OF_A_NUMBER: dict[str, Callable[..., Any]] = {
    "cap": lambda x, i, j, r: r * jnp.tanh(x / r),
    "cap by an inverse": lambda x, i, j, r: jnp.tanh(x * (1 / r)) * r,
    "decay": lambda x, i, j, r: (
        x * jnp.exp(-r * 0.1 * jnp.abs(i - j).astype(jnp.float32))
    ),
    "slopes": lambda x, i, j, r: x - r * jnp.abs(i - j),
    "logarithm": lambda x, i, j, r: x - r * jnp.log1p(1.0 * jnp.maximum(i - j, 0)),
    "of both": lambda x, i, j, r: r * x * r + 2.5 * x + x * (i + 2 * j) * 0.1,
    "sigmoid": lambda x, i, j, r: jax.nn.sigmoid(-2 * x / r) - x / 1.7,
    "chosen": lambda x, i, j, r: jnp.where(r * x > 0.5, x / r, x - 3 * jnp.exp(x / 4)),
    "hidden": lambda x, i, j, r: jnp.where(j <= i, x * r, jnp.finfo(jnp.float32).min),
    "wide distances": lambda x, i, j, r: x + (100000 * i - 99999 * j).astype("float32"),
    "narrow": lambda x, i, j, r: (i - j).astype(jnp.bfloat16) * jnp.bfloat16(1.1) + x,
}  # fmt: skip
"""Functions that read one number for all of a tile."""


@pytest.mark.once
@pytest.mark.parametrize("slope", [False, True])
@pytest.mark.parametrize("name", OF_A_NUMBER)
def test_numbers_with_factors_taken_along(name: str, slope: bool) -> None:
    """Against the function itself in float64, with what GPUs do done by NumPy."""
    of = OF_A_NUMBER[name]
    f = lambda x, i, j, r: of(x, i, j, r).astype(x.dtype)
    both = lambda x, *more: jax.jvp(lambda x: f(x, *more), (x,), (jnp.ones_like(x),))
    kinds = ("float32", "int32", "int32", "float32")
    scalars = [jax.ShapeDtypeStruct((), kind) for kind in kinds]
    made = program(jax.make_jaxpr(both if slope else f)(*scalars))
    x, i, j = numbers()
    x[0, :8] = [0.0, -0.0, 1.0, -1.0, 1e-9, -3e-3, 0.01, 1e-30]
    for r in (0.7, 30.0, -3.0, 1e4):
        for scale in (1.0, 64**-0.5, 1e-9):
            given, most = [x, i, j, np.full_like(x, r)], (0, SIZE - 1)
            with elementwise_numbers.simulated():
                got = elementwise_gpu.evaluate_scaled(
                    made, given, [None, most, most], [3], scale
                )
            with float64():
                wide = x.astype(np.float64) * np.float64(np.float32(scale))
                want = both(wide, i, j, np.float64(r))
            for g, w in zip(got, want, strict=False):
                error = {"rtol": 2e-5, "atol": 2e-6, "err_msg": f"{r} {scale}"}
                np.testing.assert_allclose(g, w, **error)


@pytest.mark.once
@pytest.mark.parametrize("r", [0.0, 1e-40, 1e-30, 1e30, 3e38, np.inf, np.nan, -np.inf])
def test_extreme_numbers_with_factors_taken_along(r: float) -> None:
    """The same entries are finite as written; no slopes by what counts as 1e-38."""
    compared = 1 if 0 < abs(r) < 1e-38 else 2
    for name in ("cap", "decay", "slopes", "of both", "sigmoid"):
        f = OF_A_NUMBER[name]
        both = lambda x, *rest, f=f: jax.jvp(lambda x: f(x, *rest), (x,), (x * 0 + 1,))
        scalars = [jax.ShapeDtypeStruct((), x) for x in ("float32", "int32", "int32")]
        made = program(jax.make_jaxpr(both)(*scalars, jnp.float32(1)))
        x, i, j = numbers()
        x[0] = np.where(np.isfinite(x[0]), x[0], 0)
        given = [x, i, j, np.full_like(x, r)]
        with elementwise_numbers.simulated():
            found = elementwise_gpu.evaluate_scaled(
                made, given, [None, (0, SIZE - 1), (0, SIZE - 1)], [3], 0.125
            )
        with np.errstate(all="ignore"):
            args = x * np.float32(0.125), i, j, np.float32(r)
            wanted = f(*args), both(*args)[1]
        pairs = zip(found, map(np.asarray, wanted), strict=True)
        for got, want in itertools.islice(pairs, compared):
            same = functools.partial(np.testing.assert_array_equal, err_msg=name)
            same(np.isfinite(got), np.isfinite(want))
            same(np.isnan(got), np.isnan(want))


@pytest.mark.once
def test_factors_are_joined() -> None:
    """A decay takes one product before its exponential, and no sums of integers."""
    of = OF_A_NUMBER["decay"]
    scalars = [jax.ShapeDtypeStruct((), x) for x in ("float32", "int32", "int32")]
    made = program(jax.make_jaxpr(of)(*scalars, jnp.float32(1)))
    x, i, j = numbers()
    floats = {n: x.astype(np.float32) for n, x in ((1, i), (2, j))}
    with elementwise_numbers.simulated() as counted:
        elementwise_gpu.evaluate_scaled(
            made, [x, i, j, np.full_like(x, 0.1)], [None, (0, 63), (0, 63)], [3], 0.125,
            floats,
        )  # fmt: skip
    assert counted["addi"] == counted["subi"] == 0
    assert counted["ex2"] == 1
    assert counted["mulf"] == 3  # of x, of distances, and of both


def all_in_one_kernel() -> Callable[[Any], tuple[Any, ...]]:
    """Returns a kernel that gives every function's numbers, [2 functions, 64, 64].

    The first half is as written, the second with factors taken along.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir

    from rewriter.kernels.attention.hopper import pallas

    programs = [traced(f) for f in FUNCTIONS.values()]
    shape = plgpu.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, layout=pallas.TILE)

    def applied(evaluate: Any, program: Any, x: Any) -> Any:
        @plgpu.inline_mgpu(arg_types=(pallas.TILE,), return_type=shape)
        def emit(context: Any, x: Any) -> Any:
            del context
            iota = lambda axis: mgpu.FragmentedArray.broadcasted_iota(
                ir.IntegerType.get_signless(32), x.shape, axis, x.layout, is_signed=True
            )
            given = [x, iota(0), iota(1)]
            (made,) = evaluate(program, given, [None, (0, SIZE - 1), (0, SIZE - 1)])
            return made

        return emit(x)

    def body(source: Any, out: Any, tile: Any, made: Any, ready: Any) -> None:
        plgpu.copy_gmem_to_smem(source, tile, ready.at[0])
        plgpu.barrier_wait(ready.at[0])
        x = tile[...]
        ways = elementwise_gpu.evaluate, elementwise_gpu.evaluate_scaled
        for k, (by, one) in enumerate(itertools.product(ways, programs)):
            made[...] = applied(by, one, x)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(made, out.at[k])
            plgpu.wait_smem_to_gmem(0)

    out = [jax.ShapeDtypeStruct((2 * len(programs), SIZE, SIZE), jnp.float32)]
    scratch = {
        "tile": pallas.table_tiles((SIZE, SIZE), jnp.float32),
        "made": pallas.table_tiles((SIZE, SIZE), jnp.float32),
        "ready": pallas.barriers(1),
    }
    return jax.jit(pallas.kernel(body, "elementwise", out, scratch, 1, 1))


@pytest.mark.once
def test_every_primitive_has_instructions() -> None:
    """Those of a kernel are made without a GPU, also of shifts by what is not known."""
    x, _, _ = numbers()
    exported = jax.export.export(all_in_one_kernel(), platforms=["cuda"])(x)
    assert "mosaic_gpu" in exported.mlir_module()


@pytest.mark.gpu
@needs_hopper
def test_numbers_on_a_gpu() -> None:
    """All in one kernel, each beside XLA on the same device."""
    x, i, j = numbers()
    (got,) = all_in_one_kernel()(x)
    for k, (name, f) in enumerate([*FUNCTIONS.items()] * 2):
        run = f if "float16" in name else jax.jit(f)  # XLA rounds less where compiled
        want = np.asarray(run(*map(jnp.asarray, (x, i, j))).astype(jnp.float32))
        if name in EXACT:
            np.testing.assert_array_equal(got[k], want, err_msg=name)
        else:
            error = {"rtol": 2e-5, "atol": 2e-6, "err_msg": name}
            np.testing.assert_allclose(got[k], want, **error)
