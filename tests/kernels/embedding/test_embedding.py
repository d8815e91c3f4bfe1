"""Sums of rows by their ids, as sites, under every transformation against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.ops.op import Part
from rewriter.ops.registry import registry
from rewriter.site import site
from tests import slow
from tests.support import transforms

NAME = "embedding"
OP = registry().op(NAME)
BY_ID = ("in_float32", "in_order")
ROWS = {"rows": (6, 4), "ids": (6,)}
INTO = {**ROWS, "table": (5, 4)}
COUNTED = {"rows": (2, 6, 4)}
FEW = ("jit_grad", "jvp", "vmap_of_grad", "grad_of_vmap_first")
RNG = np.random.default_rng(4)
ODD = np.array([3, -1, 3, 4, 5, -7, 0, 3, 100, 4, 0, 3], np.int32)
NUMBERS = RNG.normal(size=(12, 8)).astype(np.float32)


def _both(
    kernel: str,
    shapes: dict[str, tuple[int, ...]],
    params: dict[str, Any],
    op: Any = OP,
    dtype: str = "float32",
) -> tuple[Any, Any, list[jax.Array]]:
    params = {"size": 5, **params} if op is OP else params
    specs = {
        n: jax.ShapeDtypeStruct(s, "int32" if n == "ids" else dtype)
        for n, s in shapes.items()
    }
    operands = op.sample(jax.random.key(2), specs, params)

    def bound(*args: jax.Array) -> jax.Array:
        given = dict(zip(shapes, args, strict=True))
        return site.bind(op, given, params, (("default", kernel),))

    def plain(*args: jax.Array) -> jax.Array:
        return op.reference(**dict(zip(shapes, args, strict=True)), **params)

    return bound, plain, [operands[n] for n in shapes]


@pytest.mark.parametrize(
    "transform", slow.unless(FEW.__contains__, transforms.TRANSFORMS)
)
@pytest.mark.parametrize("kernel", BY_ID)
def test_every_transform_of_sums_into_a_table(kernel: str, transform: str) -> None:
    transforms.check(transform, *_both(kernel, INTO, {}))


@pytest.mark.parametrize("transform", slow.first(2, FEW))
@pytest.mark.parametrize("start", [0, 2])
def test_transforms_of_sums_of_counted_rows(start: int, transform: str) -> None:
    params = {"start": start, "period": 3}
    transforms.check(transform, *_both("counted", COUNTED, params))


@pytest.mark.parametrize("transform", slow.first(1, FEW))
@pytest.mark.parametrize("kernel", BY_ID)
def test_transforms_of_sums(kernel: str, transform: str) -> None:
    transforms.check(transform, *_both(kernel, ROWS, {"outside": "clip"}))


@pytest.mark.parametrize("transform", slow.first(2, FEW))
@pytest.mark.parametrize("outside", ["nan", "clip"])
def test_transforms_of_lookups(outside: str, transform: str) -> None:
    op, shapes = registry().op("embedding_lookup"), {"table": (2, 5, 4), "ids": (2, 3)}
    both = _both("in_float32", shapes, {"outside": outside}, op)
    transforms.check(transform, *both)


@pytest.mark.parametrize("transform", slow.first(1, FEW))
def test_transforms_of_lookups_of_counted_rows(transform: str) -> None:
    op, params = registry().op("embedding_lookup"), {"period": 3, "start": 1}
    both = _both("counted", {"table": (5, 4)}, {**params, "count": 6}, op)
    transforms.check(transform, *both)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("period", [0, 3, 6])
def test_parts_of_the_rows_add_up(period: int, with_table: bool, count: int) -> None:
    """Each device has some of the rows; positions may begin anywhere in a part."""
    given = {"rows": jnp.asarray(NUMBERS)}
    if with_table:
        given["table"] = jnp.ones((9, 8))
    params = {"outside": "clip", "size": 9, "start": 2 * (period > 0), "period": period}
    if not period:
        given["ids"] = jnp.asarray(ODD)
    local, m = OP.spread(params).local, 12 // count
    total = 0
    for k in range(count):
        own = {n: x[k * m : k * m + m] if n != "table" else x for n, x in given.items()}
        operands, static = local(own, params, {"m": Part(k, count)})
        total += OP.reference(**operands, **static)
    want = OP.reference(**given, **params)
    np.testing.assert_allclose(total, want, rtol=1e-5, atol=1e-6)


def _sums(kernel: str, rows: Any, ids: Any, table: Any = None, **params: Any) -> Any:
    given = {"rows": rows, "ids": ids, "table": table}
    given = {n: jnp.asarray(x) for n, x in given.items() if x is not None}
    kernels = (("default", kernel),)
    return jax.jit(lambda g: site.bind(OP, g, params, kernels))(given)


def _exact(rows: Any, ids: np.ndarray, size: int, outside: str) -> np.ndarray:
    out = np.zeros((size, rows.shape[-1]))
    for row, k in zip(np.asarray(rows, np.float64), ids.astype(np.int64), strict=True):
        k = min(max(k, 0), size - 1) if outside == "clip" else k
        if 0 <= k < size:
            out[k] += row
    return out


OUTSIDE = [
    ("float32", "drop", 5, "int8"),
    ("bfloat16", "clip", 200, "uint8"),
    ("float16", "drop", 200, "uint32"),
    ("bfloat16", "drop", 5, "int32"),
    ("float32", "clip", 5, "int16"),
]


@pytest.mark.parametrize("kernel", BY_ID)
def test_ids_outside(kernel: str) -> None:
    """Tables smaller and larger than the rows; ids on both sides of them."""

    def both(cases: list[Any]) -> list[Any]:
        return [
            (
                site.bind(OP, given, params, (("default", kernel),)),
                OP.reference(**given, **params),
            )
            for given, params in cases
        ]

    cases = [
        (
            {"rows": jnp.asarray(NUMBERS, dtype), "ids": jnp.asarray(ODD.astype(kind))},
            {"size": size, "outside": outside},
        )
        for dtype, outside, size, kind in OUTSIDE
    ]
    for (given, params), (got, own) in zip(
        cases, jax.jit(lambda: both(cases))(), strict=True
    ):
        dtype = given["rows"].dtype
        want = _exact(given["rows"], np.asarray(given["ids"]), **params)
        bound = np.abs(np.asarray(own, np.float64) - want).max()
        bound = max(bound, np.abs(want).max() * float(jnp.finfo(dtype).eps))
        assert got.dtype == dtype
        assert np.abs(np.asarray(got, np.float64) - want).max() <= bound, params


@pytest.mark.parametrize("kernel", BY_ID)
@pytest.mark.parametrize("size", [5, 200])
def test_what_is_not_finite_stays_in_its_row(size: int, kernel: str) -> None:
    rows = NUMBERS.copy()
    rows[0, 1], rows[1, 2], rows[3, 4], rows[4, 0] = np.nan, np.inf, np.inf, np.nan
    rows[2, 3], rows[7, 3] = np.inf, -np.inf
    table = np.ones((size, 8), np.float32) if size == 5 else None
    params = {"size": size, "outside": "clip" if size == 5 else "drop"}
    got = _sums(kernel, rows, ODD, table, **params)
    want = OP.reference(
        rows=jnp.asarray(rows), ids=jnp.asarray(ODD),
        table=None if table is None else jnp.asarray(table), **params,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", BY_ID)
def test_sixteen_bits_are_added_up_in_32(kernel: str) -> None:
    """In bfloat16, 256 + 1 is 256."""
    rows = jnp.ones((1024, 1), jnp.bfloat16)
    ids = jnp.zeros(1024, jnp.int32)
    assert _sums(kernel, rows, ids, size=1)[0] == 1024
    table = jnp.full((2000, 1), 1024, jnp.bfloat16)
    assert _sums(kernel, rows, ids, table, size=2000)[0] == 2048


def test_sums_in_order_repeat() -> None:
    """The same bits, whatever rows of other ids lie between."""
    alone = _sums("in_order", NUMBERS[:6], np.zeros(6, np.int32), size=3)[0]
    mixed = np.stack([NUMBERS[:6], NUMBERS[6:]], 1).reshape(12, 8)
    ids = np.tile(np.array([0, 2], np.int32), 6)
    np.testing.assert_array_equal(_sums("in_order", mixed, ids, size=3)[0], alone)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("kernel", BY_ID)
@pytest.mark.parametrize("size", [2, 512, 30522])
def test_on_a_gpu(size: int, kernel: str) -> None:
    """Thousands of rows of 16 bits that collide, against float64."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(16384, 256)), jnp.bfloat16)
    ids = (rng.random(16384) ** 4 * size).astype(np.int32)
    want = np.zeros((size, 256))
    np.add.at(want, ids, np.asarray(rows, np.float64))
    got = np.asarray(_sums(kernel, rows, ids, size=size), np.float64)
    assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max()


SQUARE = RNG.normal(size=(3, 4, 5, 8)).astype(np.float32)
AWAY = np.arange(5)[None] - np.arange(4)[:, None]


@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("outside", ["drop", "clip"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_distance(dtype: str, outside: str, with_table: bool) -> None:
    """Some distances name no row, or a number that is not finite."""
    rows, ids = SQUARE.copy(), np.stack([2 * AWAY, AWAY // 2, abs(AWAY)])
    rows[0, 0, 1, 2], rows[1, 2, 2, 3], rows[2, 3, 0, 1] = np.nan, np.inf, -np.inf
    flat = jnp.asarray(rows, dtype).reshape(3, 20, 8)
    ids = ids.reshape(3, 20).astype(np.int32)
    table = np.ones((3, 5, 8)) if with_table else None
    start = None if table is None else jnp.asarray(table, dtype)
    got = _sums("by_distance", flat, ids, start, size=5, outside=outside, across=5)
    exact = [_exact(x, k, 5, outside) for x, k in zip(flat, ids, strict=True)]
    want = np.stack(exact) + (0 if table is None else table)
    assert got.dtype == dtype
    rtol = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol, rtol)


@pytest.mark.parametrize("transform", slow.first(2, FEW))
def test_transforms_of_rows_of_a_distance(transform: str) -> None:
    bound, plain, (rows, _) = _both(
        "by_distance", {"rows": (20, 4), "ids": (20,)}, {"across": 5}
    )
    ids = jnp.asarray(abs(AWAY).reshape(20), jnp.int32)
    given = lambda fn: lambda rows: fn(rows, ids)
    transforms.check(transform, given(bound), given(plain), [rows])


@pytest.mark.parametrize(("count", "across"), [(2, 5), (4, 5), (5, 0)])
def test_parts_of_a_square_are_whole_rows_of_it(count: int, across: int) -> None:
    params = {"size": 5, "across": 5}
    given = {"rows": jnp.ones((20 // count, 8)), "ids": jnp.zeros(20 // count, int)}
    _, static = OP.spread(params).local(given, params, {"m": Part(0, count)})
    assert static["across"] == across
