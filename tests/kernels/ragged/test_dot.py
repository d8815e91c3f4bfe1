"""Ragged dot kernel against a float64 calculation in numpy, gradients included."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from rewriter.kernels.ragged.dot import KERNELS, OP, tiled
from rewriter.kernels.ragged.dot.reference import sample
from rewriter.ops.kernel import spec_of
from tests import slow

MODES = ("forward", "transposed", "contracting")
# Relative to the largest entry, for sums of up to 300 products.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}

# name: (m, k, n, group sizes)
SIZES: dict[str, tuple[int, int, int, list[int]]] = {
    "even": (64, 8, 12, [16] * 4),
    "uneven": (70, 9, 5, [3, 40, 0, 20, 7]),
    "one group": (33, 8, 8, [33]),
    "one row": (1, 8, 8, [0, 1, 0]),
    "empty ends": (40, 8, 8, [0, 0, 40, 0, 0]),
    "all empty": (40, 8, 8, [0, 0, 0]),
    "rows left over": (50, 8, 8, [3, 0, 20]),
    "ones": (17, 3, 2, [1] * 17),
    "more groups than rows": (5, 4, 3, [0, 1] * 5),
    "last tile": (300, 4, 4, [299, 1]),
    "first tile": (300, 4, 4, [1, 299]),
    "wide": (20, 1, 1, [7, 13]),
    "too many": (20, 4, 4, [15, 9, 3]),
}


def exact(lhs: Any, rhs: Any, sizes: Any, mode: str) -> Any:
    """Returns the ragged dot in float64, one group at a time."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    ends = np.minimum(np.cumsum(sizes), len(lhs))
    starts = np.concatenate([[0], ends[:-1]])
    ranges = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
    if mode == "contracting":
        return np.stack([lhs[r].T @ rhs[r] for r in ranges])
    rhs = rhs.swapaxes(1, 2) if mode == "transposed" else rhs
    out = np.zeros((len(lhs), rhs.shape[2]))
    for r, matrix in zip(ranges, rhs, strict=True):
        out[r] = lhs[r] @ matrix
    return out


def exact_grads(lhs: Any, rhs: Any, sizes: Any, up: Any, mode: str) -> Any:
    """Returns the cotangents of lhs and rhs in float64."""
    if mode == "contracting":
        return exact(rhs, up, sizes, "transposed"), exact(lhs, up, sizes, "forward")
    if mode == "transposed":
        pair = exact(up, rhs, sizes, "forward"), exact(up, lhs, sizes, "contracting")
        return pair
    return exact(up, rhs, sizes, "transposed"), exact(lhs, up, sizes, "contracting")


def make(case: str, mode: str, dtype: str = "float32", seed: int = 0) -> Any:
    m, k, n, sizes = SIZES[case]
    r = np.random.default_rng(seed)
    g = len(sizes)
    right = {"forward": (g, k, n), "transposed": (g, n, k), "contracting": (m, n)}
    up = (g, k, n) if mode == "contracting" else (m, n)
    arrays = [r.standard_normal(x).astype(dtype) for x in ((m, k), right[mode], up)]
    return (*arrays, np.array(sizes, "int32"))


LOOP = next(k for k in KERNELS if k.name == "memory_bounded")
TILED = next(k for k in KERNELS if k.name == "tiled")
SMALL = tiled.Tiles(rows=8, entries=200)  # several tiles a group, several parts


def both(lhs: Any, rhs: Any, sizes: Any, up: Any, kernel: Any = LOOP, **params: Any):
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes}
    out, residuals = kernel.forward(**arrays, **params, residuals=True)
    assert kernel.backward is not None
    grads = kernel.backward(
        **arrays, **params, out=None, residuals=residuals, cotangent=up
    )
    return out, grads["lhs"], grads["rhs"]


def run(lhs: Any, rhs: Any, sizes: Any, up: Any, mode: str, **more: Any) -> Any:
    # Unoptimised code compiles in half the time; test_dtypes has the usual code.
    options = {"xla_backend_optimization_level": 0}
    call = jax.jit(lambda *x: both(*x, mode=mode, **more), compiler_options=options)
    return call(lhs, rhs, sizes, up)


def close(got: Any, want: Any, dtype: str) -> None:
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    size = max(1.0, np.abs(want).max(initial=0.0))
    assert np.abs(got - want).max(initial=0.0) <= TOLERANCE[dtype] * size


EVERY_MODE = ("uneven", "rows left over", "last tile", "too many")
PAIRS = [
    (case, mode)
    for i, case in enumerate(SIZES)
    for mode in (MODES if case in EVERY_MODE else MODES[i % 3 : i % 3 + 1])
]


KINDS: dict[str, dict[str, Any]] = {
    "loop": {}, "small_tiles": {"kernel": TILED, "config": SMALL},
    "tiled": {"kernel": TILED},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "mode", "kind"),
    [
        *slow.first(
            20, [(*p, k) for p in PAIRS for k in ("loop", "small_tiles")], several=True
        ),
        *slow.first(4, [(*p, "tiled") for p in PAIRS], several=True),
    ],
)
def test_value_and_gradients(case: str, mode: str, kind: str) -> None:
    more = KINDS[kind]
    lhs, rhs, up, sizes = make(case, mode)
    out, *grads = run(lhs, rhs, sizes, up, mode, **more)
    close(out, exact(lhs, rhs, sizes, mode), "float32")
    for got, want in zip(grads, exact_grads(lhs, rhs, sizes, up, mode), strict=True):
        close(got, want, "float32")


DTYPES = ("float64", "float16", "bfloat16")


@pytest.mark.parametrize(
    ("mode", "dtype"),
    slow.unless(
        lambda *of: of in [*zip(MODES, DTYPES, strict=True), ("forward", "bfloat16")],
        itertools.product(MODES, DTYPES),
        several=True,
    ),
)
@pytest.mark.parametrize("kernel", [LOOP, TILED], ids=["loop", "tiled"])
def test_dtypes(mode: str, dtype: str, kernel: Any) -> None:
    with jax.enable_x64(dtype == "float64"):
        lhs, rhs, up, sizes = make("uneven", mode, dtype)
        results = jax.jit(lambda *x: both(*x, kernel, mode=mode))(lhs, rhs, sizes, up)
        want = (exact(lhs, rhs, sizes, mode), *exact_grads(lhs, rhs, sizes, up, mode))
        for got, x in zip(results, want, strict=True):
            assert got.dtype == dtype
            close(got, x, dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", [LOOP, TILED], ids=["loop", "tiled"])
def test_out_dtype(mode: str, kernel: Any) -> None:
    lhs, rhs, _, sizes = make("uneven", mode, "bfloat16")
    given = map(jnp.asarray, (lhs, rhs, sizes))
    out = kernel.forward(*given, mode=mode, out_dtype="float32")
    assert out.dtype == jnp.float32
    close(out, exact(lhs, rhs, sizes, mode), "float32")


@pytest.mark.parametrize("seed", range(8))
def test_adversarial_sizes(seed: int) -> None:
    r = np.random.default_rng(seed)
    m, g = 257, 16
    share = r.dirichlet(np.full(g, [0.01, 0.1, 1.0, 10.0][seed % 4]))
    sizes = r.multinomial(m - 19 * (seed % 2), share).astype("int32")
    lhs, rhs = (r.standard_normal(x).astype("f") for x in ((m, 8), (g, 8, 8)))
    for kernel in JITTED:
        got = kernel(lhs, rhs, sizes)
        close(got, exact(lhs, rhs, sizes, "forward"), "float32")


JITTED = [
    jax.jit(lambda *x: LOOP.forward(*x)),
    jax.jit(lambda *x: TILED.forward(*x, config=tiled.Tiles(16, 1 << 9))),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["uneven", "rows left over", "all empty", "too many"])
def test_agrees_with_lax(case: str, mode: str) -> None:
    lhs, rhs, up, sizes = make(case, mode)
    call = lambda a, b: OP.reference(a, b, sizes, mode=mode)
    if mode == "contracting":  # lax has no gradient of it
        got, want = LOOP.forward(lhs, rhs, sizes, mode=mode), call(lhs, rhs)
        close(got, np.asarray(want), "float32")
        return
    out, *grads = run(lhs, rhs, sizes, up, mode)
    want, pull = jax.vjp(call, lhs, rhs)
    if mode == "forward":
        np.testing.assert_array_equal(want, lax.ragged_dot(lhs, rhs, sizes))
    for got, x in zip((out, *grads), (want, *pull(up)), strict=True):
        close(got, np.asarray(x), "float32")


HUGE = 2**31 - 1
BACK = [[6, -2, 10, 4], [-3, 10, 10, 4], [30, -10, 2, 2], [20, HUGE, 5, 5]]
BEYOND = [[HUGE, 1, 0, 0], [20, HUGE - 20, 0, 0], [10, 10, 6, -2], [-1] * 4]


@pytest.mark.parametrize("kernel", [LOOP, TILED], ids=["loop", "tiled"])
def test_sizes_that_count_no_rows(kernel: Any) -> None:
    """A size below zero moves the next group back; a huge one takes the rows left."""
    draw, shapes = np.random.default_rng(7), ((24, 3), (4, 3, 2), (24, 2))
    lhs, rhs, up = (jnp.asarray(draw.normal(size=s), "f4") for s in shapes)
    more = {"mode": "forward", "kernel": kernel}
    own = jax.jit(lambda sizes: both(lhs, rhs, sizes, up, **more))

    @jax.jit
    def of_jax(sizes):
        out, pull = jax.vjp(lambda a, b: lax.ragged_dot(a, b, sizes), lhs, rhs)
        return out, *pull(up)

    for sizes in BEYOND + (BACK if kernel is LOOP else []):
        given = jnp.asarray(sizes, jnp.int32)
        for got, want in zip(own(given), of_jax(given), strict=True):
            close(got, np.asarray(want), "float32")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", [LOOP, TILED], ids=["loop", "tiled"])
def test_nan_in_unused_rows(mode: str, kernel: Any) -> None:
    lhs, rhs, up, sizes = make("rows left over", mode)
    used = sizes.sum()
    want = (exact(lhs, rhs, sizes, mode), *exact_grads(lhs, rhs, sizes, up, mode))
    lhs[used:] = np.nan
    if mode == "contracting":
        rhs[used:] = np.nan
    else:
        up[used:] = np.nan
        rhs[1] = np.nan  # the empty group's matrix
    results = run(lhs, rhs, sizes, up, mode, kernel=kernel)
    for got, x in zip(results, want, strict=True):
        close(got, x, "float32")


@pytest.mark.parametrize(
    ("mode", "axes"),
    slow.unless(
        lambda mode, axes: mode == "forward" or axes == (0, 0, 0),
        itertools.product(MODES, [(0, 0, 0), (0, None, None), (None, None, 0)]),
        several=True,
    ),
)
@pytest.mark.parametrize("kernel", [LOOP, TILED], ids=["loop", "tiled"])
def test_vmap(mode: str, axes: tuple[int | None, ...], kernel: Any) -> None:
    lhs, rhs, _, sizes = make("uneven", mode)
    stacked = [
        x if a is None else np.stack([x, y])
        for a, x, y in zip(
            axes, (lhs, rhs, sizes), (2 * lhs, -rhs, sizes[::-1]), strict=True
        )
    ]
    call = lambda *x: kernel.forward(*x, mode=mode)
    got = jax.jit(jax.vmap(call, axes))(*stacked)
    for i in range(2):
        mine = [x if a is None else x[i] for a, x in zip(axes, stacked, strict=True)]
        close(got[i], exact(mine[0], mine[1], mine[2], mode), "float32")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for(platform: str) -> None:
    lhs, rhs, up, sizes = make("uneven", "forward")
    for mode in MODES:
        lhs, rhs, up, sizes = make("uneven", mode)
        call = jax.jit(lambda *x, mode=mode: both(*x, mode=mode))
        exported = jax.export.export(call, platforms=[platform])(lhs, rhs, sizes, up)
        assert exported.platforms == (platform,)


@pytest.mark.parametrize("mode", MODES)
def test_inside_shard_map(mode: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    lhs, rhs, up, sizes = make("uneven", mode)
    spec = PartitionSpec("x")
    call = jax.shard_map(
        lambda *x: both(*x, mode=mode), mesh=mesh, in_specs=spec, out_specs=spec
    )
    out, *_ = jax.jit(call)(lhs, rhs, sizes, up)
    close(out, exact(lhs, rhs, sizes, mode), "float32")


def test_supports_says_why_not() -> None:
    kernel = LOOP
    array = lambda shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
    fine = {"lhs": array((8, 4)), "rhs": array((2, 4, 3)), "group_sizes": array((2,))}
    assert kernel.supports(spec_of(OP, fine, {})).ok
    for name, bad, code in (
        ("lhs", array((0, 4)), "empty"),
        ("lhs", array((8, 4), "int8"), "dtype"),
        ("rhs", array((4, 3)), "rank"),
    ):
        verdict = kernel.supports(spec_of(OP, {**fine, name: bad}, {}))
        assert [r.code for r in verdict.reasons] == [code]


def test_one_group_stays_as_written() -> None:
    array = jax.ShapeDtypeStruct
    for groups in (1, 2):
        operands = {
            "lhs": array((8, 4), jnp.float32),
            "rhs": array((groups, 4, 3), jnp.float32),
            "group_sizes": array((groups,), jnp.int32),
        }
        verdict = LOOP.profitable(spec_of(OP, operands, {}), "cpu")
        assert verdict.ok == (groups == 2)


def test_sample() -> None:
    array = jax.ShapeDtypeStruct
    operands = {
        "lhs": array((40, 4), jnp.bfloat16), "rhs": array((3, 4, 5), jnp.bfloat16),
        "group_sizes": array((3,), jnp.int32),
    }  # fmt: skip
    made = jax.jit(lambda key: sample(key, operands, {}))(jax.random.key(0))
    assert {n: (x.shape, x.dtype) for n, x in made.items()} == {
        n: (x.shape, x.dtype) for n, x in operands.items()
    }
    assert made["group_sizes"].sum() == 40
