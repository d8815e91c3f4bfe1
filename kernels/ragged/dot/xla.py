"""Ragged dot group by group, in plain XLA: work grows with rows, not groups.

XLA's own lowering on CPU multiplies every row by every group's matrix. Here a
loop over the groups holds a loop over the tiles of rows that the group has;
an empty group costs one step that does nothing. Tiles have a fixed size, so
the last one of a group reaches into its neighbours, whose rows are masked:
at most m / rows + g tiles in all.

On a GPU a loop pays from some number of rows on. Where rows are symbolic, the exported
program decides when it is compiled: XLA keeps one branch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.core import min_dim

from rewriter.kernels.ragged.dot import estimate
from rewriter.kernels.ragged.dot.ranges import as_ragged_dot_has
from rewriter.kernels.ragged.dot.reference import reference
from rewriter.kernels.ragged.dot.use import Use
from rewriter.kernels.ragged.dot.use import forward as forward_of
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.loops import zero_after
from rewriter.kernels.shared.products import unturned
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: non-empty sizes, floats.

    The number of rows may be symbolic; widths and the number of groups may not.
    """
    checks = [
        no("empty", f"{name} has shape {shape}, and an axis of size 0")
        for name, shape in spec.shapes
        if 0 in shape
    ]
    for name in ("lhs", "rhs"):
        if not jnp.issubdtype(spec.dtype(name), jnp.floating):
            checks.append(no("dtype", f"{name} is {spec.dtype(name)}, not a float"))
    ranks = {"lhs": 2, "rhs": 2 if spec.param("mode") == "contracting" else 3}
    for name, rank in ranks.items():
        if len(spec.shape(name)) != rank:
            text = f"{name} has shape {spec.shape(name)}, not {rank} axes"
            checks.append(no("rank", text))
    checks += [
        no("symbolic", f"{name} has shape {shape}: all but rows must be known")
        for name, shape in spec.shapes
        if not all(isinstance(d, int) for d in shape[name in _of_rows(spec) :])
    ]
    return all_of(*checks)


def _of_rows(spec: Spec) -> tuple[str, ...]:
    """The operands whose first axis are the rows."""
    return ("lhs", "rhs") if spec.param("mode") == "contracting" else ("lhs",)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns whether `forward` is likely to beat XLA's lowering: 2 groups do.

    On a GPU `estimate` decides; of symbolic rows the program does when it runs.

    Measured on 2 cores of an AMD EPYC (Zen 4), f32, jax 0.10.2 and 0.12.0,
    original time over ours, forward | with gradients, (m, k, n, g):

    2048 512 512 1     1.1 to 1.4 | 1.0
    2048 512 512 2     1.7 to 1.9 | 1.9
    2048 512 512 4     3.5 | 3.7
    2048 512 512 8     5 to 8 | 6 to 10
    2048 512 512 64    35 to 83 | 31 to 51
    64 128 128 2       0.9 to 1.2 | 1.1
    64 128 128 4       2.6 | 2.6
    8 1024 1024 8      3 to 7 | 4
    """
    (groups,) = spec.shape("group_sizes")
    if platform == "cuda" and spec.symbolic:
        never = no("model", "estimated to be slower than XLA for any number of rows")
        return YES if least_rows(spec, platform) else never
    if platform != "cpu":
        return estimate.best(spec, platform, "memory_bounded")
    if groups < 2:
        return no("one group", "with one group XLA is as fast")
    return YES


def tile_rows(m: int, groups: int) -> int:
    """Returns the rows of a tile: about those of a group, from 16 to 256.

    On a CPU (AMD EPYC), 32 rows took 30 ms, 64 rows 36 ms and 128 rows 54 ms. There m
    was 2048, k and n were 512, and there were 64 groups. Even and uneven groups took
    the same time.

    Of a symbolic number of rows it is 64, or all of them if they are fewer.
    """
    if not isinstance(m, int):
        return min_dim(64, m)
    size = 16
    while size < min(256, m // groups):
        size *= 2
    return min(m, size)


@dataclass(frozen=True)
class Tile:
    """The config of both passes.

    Attributes:
        rows: Rows multiplied at once; None for `tile_rows`.
        dense_below: Rows below which XLA computes a use whose rows are known only when
            the program runs.
    """

    rows: int | None = None
    dense_below: int = 0


def default(spec: Spec, device: Device) -> Tile:
    """Returns the rule of thumb, which depends on rows per group."""
    if not spec.symbolic or device.platform == "cpu":
        return Tile()
    return Tile(dense_below=least_rows(spec, device.platform) or 0)


def least_rows(spec: Spec, platform: str) -> int | None:
    """Returns from how many rows on a loop is faster on a GPU; None for never."""
    known = (2**k for k in range(4, 21))
    pays = lambda m: estimate.best(with_rows(spec, m), platform, "memory_bounded").ok
    return next((m for m in known if pays(m)), None)


def with_rows(spec: Spec, rows: int) -> Spec:
    """Returns the use with a number in the place of symbolic rows."""
    number = lambda d: d if isinstance(d, int) else rows
    shapes = ((name, tuple(map(number, shape))) for name, shape in spec.shapes)
    return replace(spec, shapes=tuple(shapes))


def configs(spec: Spec, device: Device) -> list[Tile]:
    """Returns tiles worth measuring; on GPUs few steps, since each costs a launch."""
    m = spec.shape("lhs")[0]
    sizes = (32, 64, 128, 256) if device.platform == "cpu" else (512, 1024)
    return [Tile(n) for n in sizes if n <= m]


def _product(use: Use, config: Tile | None, first_row: Array | None = None) -> Array:
    """The result, by a loop over groups and tiles of their rows."""
    m, config = use.lhs.shape[0], config or Tile()
    size = config.rows or tile_rows(m, use.group_sizes.shape[0])
    run = _contracted if use.contracting else _ragged
    looped = lambda: run(use, _ranges(use.group_sizes, m, first_row), min_dim(size, m))
    if isinstance(m, int) or not config.dense_below or first_row is not None:
        return looped()
    few = jnp.asarray(m, jnp.int32) < config.dense_below
    operands = use.lhs, use.rhs, use.group_sizes
    how = {"mode": use.mode, "out_dtype": str(use.dtype), "precision": use.precision}
    return lax.cond(few, lambda: reference(*operands, **how), looped)


forward = functools.partial(forward_of, _product)
"""Returns the ragged dot, as `reference` does."""


def backward(
    *operands: Array,
    out: Array | None = None,
    residuals: tuple[Array, ...] = (),
    cotangent: Array,
    first_row: Array | None = None,
    config: Any = None,
    product: Callable[..., Array] = forward,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangents of lhs and rhs, each a ragged dot itself.

    Args:
        *operands: The first fields of `Use`.
        out: Not needed.
        residuals: Empty.
        cotangent: As the result of `forward`.
        first_row: As in `forward`.
        config: As in `forward`.
        product: A `forward` that computes them.
        **given: The other fields of `Use`.
    """
    del out, residuals
    use = Use(*operands, **given)
    lhs, rhs, up = use.lhs, use.rhs, cotangent
    left, right = {
        "forward": ((up, rhs, "transposed"), (lhs, up, "contracting")),
        "transposed": ((up, rhs, "forward"), (up, lhs, "contracting")),
        "contracting": ((rhs, up, "transposed"), (lhs, up, "forward")),
    }[use.mode]
    how = {"precision": use.precision, "config": config, "first_row": first_row}
    return {
        name: product(a, b, use.group_sizes, mode=mode, out_dtype=str(x.dtype), **how)
        for name, x, (a, b, mode) in (("lhs", lhs, left), ("rhs", rhs, right))
    }


def _ragged(use: Use, ranges: tuple[Array, Array], size: int) -> Array:
    lhs, rhs, dtype, precision = use.lhs, use.rhs, use.dtype, use.precision
    m, form = lhs.shape[0], "mk,nk->mn" if use.transposed else "mk,kn->mn"
    wide = _wide(lhs, rhs)

    def one_group(group: Any, start: Any, end: Any, out: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(rhs, group, 0, keepdims=False)

        def one_tile(first: Any, valid: Array, out: Array) -> Array:
            rows = unturned(lax.dynamic_slice_in_dim(lhs, first, size))
            new = jnp.einsum(
                form, rows, matrix, precision=precision, preferred_element_type=wide
            )
            old = lax.dynamic_slice_in_dim(out, first, size)
            new = old + jnp.where(valid, new.astype(dtype), 0)  # a row may be of two
            return lax.dynamic_update_slice_in_dim(out, new, first, 0)

        return _over_tiles(start, end, m, size, one_tile, out)

    zero = zero_after(lhs, rhs, *ranges, dtype=dtype)
    out = jnp.zeros((m, use.columns), dtype) + zero
    return _over_groups(ranges, one_group, out)


def _contracted(use: Use, ranges: tuple[Array, Array], size: int) -> Array:
    lhs, rhs, dtype, precision = use.lhs, use.rhs, use.dtype, use.precision
    (m, k), n, groups = lhs.shape, rhs.shape[1], ranges[0].shape[0]
    wide = _wide(lhs, rhs)
    nothing = zero_after(lhs, rhs, *ranges)

    def product(first: Any, valid: Array) -> Array:
        left = jnp.where(valid, lax.dynamic_slice_in_dim(lhs, first, size), 0)
        right = jnp.where(valid, lax.dynamic_slice_in_dim(rhs, first, size), 0)
        return jnp.einsum(
            "mk,mn->kn", left, right, precision=precision, preferred_element_type=wide
        )

    def in_place(group: Any, start: Any, end: Any, out: Array) -> Array:
        # A sixth faster than a sum per group that is then copied.
        def one_tile(first: Any, valid: Array, out: Array) -> Array:
            old = lax.dynamic_index_in_dim(out, group, 0, keepdims=False)
            new = old + product(first, valid)
            return lax.dynamic_update_index_in_dim(out, new, group, 0)

        return _over_tiles(start, end, m, size, one_tile, out)

    def summed(group: Any, start: Any, end: Any, out: Array) -> Array:
        total = jnp.zeros((k, n), wide) + nothing.astype(wide)
        add = lambda first, valid, total: total + product(first, valid)
        total = _over_tiles(start, end, m, size, add, total)
        return lax.dynamic_update_index_in_dim(out, total.astype(dtype), group, 0)

    out = jnp.zeros((groups, k, n), dtype) + nothing.astype(dtype)
    body = in_place if dtype == wide else summed
    return _over_groups(ranges, body, out)


def _ranges(group_sizes: Array, m: int, first_row: Array | None) -> tuple[Array, Array]:
    """The first and last row bounds of each group."""
    if first_row is None:
        return as_ragged_dot_has(group_sizes, m)
    ends = jnp.cumsum(group_sizes.astype(jnp.int32)) + first_row
    starts = jnp.concatenate([first_row.reshape(1), ends[:-1]])
    return jnp.clip(starts, 0, m), jnp.clip(ends, 0, m)


def _over_groups(
    ranges: tuple[Array, Array], body: Callable[..., Array], out: Array
) -> Array:
    """Runs ``out = body(group, start, end, out)`` over the groups' row ranges."""
    starts, ends = ranges

    def step(group: Any, out: Array) -> Array:
        return body(group, starts[group], ends[group], out)

    return lax.fori_loop(jnp.int32(0), jnp.int32(starts.shape[0]), step, out)


def _over_tiles(
    start: Any, end: Any, m: int, size: int, body: Callable[..., Array], out: Array
) -> Array:
    """Runs ``out = body(first row, valid rows [size, 1], out)`` over a range."""
    rows, last = (jnp.asarray(n, jnp.int32) for n in (size, m - size))

    def step(i: Any, out: Array) -> Array:
        nominal = start + i * rows
        first = jnp.minimum(nominal, last)
        row = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        return body(first, (row >= nominal) & (row < end), out)

    return lax.fori_loop(jnp.int32(0), (end - start + rows - 1) // rows, step, out)


def _wide(*arrays: Array) -> Any:
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


KERNEL = XLA.kernel(
    "ragged_dot", forward, backward, supports,
    Speed(profitable, estimate=estimate.estimate),
    Space(Tile, default, configs, symbolic=True),
)  # fmt: skip
