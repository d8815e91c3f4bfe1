"""Norms of rows and their gradients on a TPU, each in one pass over memory.

A block holds whole rows. The kernel computes a few rows and `WIDTH` columns of them at
a time, so that all of it stays in registers. The columns are read again from VMEM for
each sum that needs the one before. The gradients compute the statistics from the rows
again, so that nothing is saved for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.norms.tpu import SUMS, Rows, chunk_of, rows_of, vmem
from rewriter.kernels.shared import pallas_tpu
from rewriter.ops import tpu

if TYPE_CHECKING:
    from jax import Array

WIDTH = 256
"""Columns that are computed at once."""

UNROLLED = 16
"""The most chunks of `WIDTH` columns with unrolled code; wider rows take a loop.

A turn of a loop waits for its sums. Gradients of RMS norms of 4096 rows and 16384
columns take 1067 thousand cycles on v5e with one chunk in a turn. They take 597 with 8
and 575 with 16, by the TPU compiler's simulator (libtpu 0.0.50).
"""


@dataclass(frozen=True)
class Norm:
    """One norm to compute.

    Attributes:
        centred: Whether the mean is subtracted, as a layer norm does.
        eps: Added to the mean square.
        of_squares: As `layer_norm.reference` has it.
        m: Rows.
        d: Columns.
    """

    centred: bool
    eps: float
    of_squares: bool
    m: int
    d: int


def normalized(
    norm: Norm,
    x: Array,
    given: dict[str, Array],
    dtype: Any,
    config: Rows,
    addend: Array | None = None,
) -> Sequence[Array]:
    """Returns the norm of rows and, with an addend, the sums that it normalises.

    Args:
        norm: What is computed.
        x: [m, d].
        given: scale [d], bias [d] and epsilon [], if present.
        dtype: The result's dtype.
        config: The blocks.
        addend: As x, added to it first.

    Returns:
        [m, d], and the sum as x.
    """

    def body(refs: dict[str, Any], out: Sequence[Any], block: Any) -> None:
        del block
        x = out[1] if "addend" in refs else refs["x"]

        def chunk(rows: Any, _: Any) -> None:
            if "addend" in refs:
                _over_columns(norm.d, lambda columns: add(rows, columns))
            mean, inverse = _statistics(norm, {**refs, "x": x}, rows)

            def write(columns: Any) -> None:
                y = (_wide(x, rows, columns) - mean) * inverse
                if "scale" in refs:
                    y = y * _wide(refs["scale"], slice(None), columns)
                if "bias" in refs:
                    y = y + _wide(refs["bias"], slice(None), columns)
                out[0][rows, columns] = y.astype(out[0].dtype)

            _over_columns(norm.d, write)

        def add(rows: Any, columns: Any) -> None:
            y = _wide(refs["x"], rows, columns) + _wide(refs["addend"], rows, columns)
            x[rows, columns] = y.astype(x.dtype)

        _over_rows(out[0].shape[0], norm.d, chunk)

    arrays, out = {"x": x}, [pallas_tpu.shaped((norm.m, norm.d), dtype, x)]
    if addend is not None:
        arrays["addend"] = addend
        out.append(pallas_tpu.shaped((norm.m, norm.d), x.dtype, x))
    return _call("norm", norm, arrays, given, out, [], config, body)


def cotangents(
    norm: Norm,
    x: Array,
    cotangent: Array,
    given: dict[str, Array],
    config: Rows,
    addend: Array | None = None,
) -> dict[str, Array]:
    """Returns the cotangents of x [m, d] and, in float32, of `given`.

    Args:
        norm: What is computed.
        x: [m, d].
        cotangent: [m, d].
        given: scale [d], bias [d] and epsilon [], if present.
        config: The blocks.
        addend: As x, added to its cotangent.
    """
    names = [n for n in ("scale", "bias", "epsilon") if n in given]

    def body(refs: dict[str, Any], out: Sequence[Any], block: Any) -> None:
        sums = dict(zip(names, out[1:], strict=True))
        size = out[0].shape[0]

        def chunk(rows: Any, first: Any) -> None:
            left = norm.m - (block * size + first)  # rows past these are undefined
            _gradient(norm, refs, out[0], sums, rows, left)

        _over_rows(size, norm.d, chunk)

    out = [pallas_tpu.shaped((norm.m, norm.d), x.dtype, x)]
    sums, parts = [], _parts(norm, config)
    for name in names:
        width = tpu.LANES if name == "epsilon" else norm.d
        sums.append(pallas_tpu.shaped((parts * SUMS, width), jnp.float32, x))
    arrays = {"x": x, "cotangent": cotangent}
    if addend is not None:
        arrays["addend"] = addend
    made = _call("norm_backward", norm, arrays, given, out, sums, config, body)
    grads = {n: s.sum(0) for n, s in zip(names, made[1:], strict=True)}
    if "epsilon" in grads:
        grads["epsilon"] = grads["epsilon"].sum()
    return {"x": made[0], **grads}


def _gradient(
    norm: Norm,
    refs: dict[str, Any],
    dx: Any,
    sums: dict[str, Any],
    rows: Any,
    left: Any,
) -> None:
    """The gradients of a chunk of rows: ``r·(g − mean(g) − n·mean(g·n))``."""
    mean, inverse = _statistics(norm, refs, rows)

    def both(columns: Any) -> tuple[Array, Array]:
        n = (_wide(refs["x"], rows, columns) - mean) * inverse
        return n, _wide(refs["cotangent"], rows, columns)

    def scaled(columns: Any, g: Array) -> Array:
        return g * _wide(refs["scale"], slice(None), columns) if "scale" in refs else g

    def products(columns: Any) -> list[Array]:
        n, g = both(columns)
        g = scaled(columns, g)
        made = [g * n, g] if norm.centred else [g * n]
        return [*made, n] if corrects else made

    # In 16 bits rows are not so far from 0 that the remainder of a rounded mean
    # matters.
    corrects = norm.centred and refs["x"].dtype == jnp.float32
    along, *level = (s / norm.d for s in _summed(norm.d, products))
    if corrects:
        level = [level[0] - along * level[1]]

    def write(columns: Any) -> None:
        n, outer = both(columns)
        y = scaled(columns, outer) - n * along
        y = y - level[0] if level else y
        y = inverse * y
        y = y + _wide(refs["addend"], rows, columns) if "addend" in refs else y
        dx[rows, columns] = y.astype(dx.dtype)
        for name, term in (("scale", outer * n), ("bias", outer)):
            if name in sums:
                sums[name][:, columns] += _by_register(term, left)

    _over_columns(norm.d, write)
    if "epsilon" in sums:
        term = (-0.5 * norm.d) * along * inverse * inverse
        first = lax.broadcasted_iota(jnp.int32, (term.shape[0], tpu.LANES), 1) == 0
        sums["epsilon"][...] += _by_register(jnp.where(first, term, 0.0), left)


def _statistics(norm: Norm, refs: dict[str, Any], rows: Any) -> tuple[Any, Array]:
    """The mean of rows, 0 if not centred, and the inverse root of their mean square."""
    mean: Any = 0.0
    if norm.centred:
        (total,) = _summed(norm.d, lambda c: [_wide(refs["x"], rows, c)])
        mean = total / norm.d

    def squares(columns: Any) -> list[Array]:
        y = _wide(refs["x"], rows, columns) - mean
        return [y * y]

    (total,) = _summed(norm.d, squares)
    square = total / norm.d + norm.eps
    if norm.of_squares:
        square = square + (mean * mean - mean * mean)  # inf - inf, or 0
    if "epsilon" in refs:
        square = square + refs["epsilon"][0]
    return mean, lax.rsqrt(square)


def _wide(ref: Any, rows: Any, columns: Any) -> Array:
    return ref[rows, columns].astype(jnp.float32)


def _over_rows(size: int, width: int, chunk: Callable[[Any, Any], None]) -> None:
    """Runs ``chunk(rows, first row)`` over a block."""
    rows = chunk_of(width)
    if size < rows:
        chunk(pl.ds(0, size), 0)
        return

    def turn(i: Any, _: Any) -> None:
        first = pl.multiple_of(i * rows, rows)
        chunk(pl.ds(first, rows), first)

    lax.fori_loop(0, size // rows, turn, None)


def _over_columns(d: int, write: Callable[[Any], None]) -> None:
    """Runs ``write(columns)`` over all columns."""
    _turns(d // WIDTH, lambda i, _: write(_columns(i)))
    if d % WIDTH:
        write(pl.ds(d - d % WIDTH, d % WIDTH))


def _summed(d: int, terms: Callable[[Any], list[Array]]) -> list[Array]:
    """Returns sums over all columns, [rows, 1] each.

    First adds columns that are a register apart, then the columns of one register.
    """

    def turn(i: Any, sums: Sequence[Array] | None) -> list[Array]:
        new = [_by_lane(t) for t in terms(_columns(i))]
        return new if sums is None else [a + b for a, b in zip(sums, new, strict=True)]

    sums = _turns(d // WIDTH, turn)
    made = [jnp.sum(s, 1, keepdims=True) for s in sums or []]
    if d % WIDTH:
        rest = terms(pl.ds(d - d % WIDTH, d % WIDTH))
        more = [jnp.sum(t, 1, keepdims=True) for t in rest]
        made = [a + b for a, b in zip(made, more, strict=True)] if made else more
    return made


def _turns(count: int, turn: Callable[[Any, Any], Any]) -> Any:
    """Runs ``carry = turn(i, carry)``, the first with None; returns the last."""

    def several(i: Any, carry: Any, turns: int = UNROLLED) -> Any:
        for k in range(turns):
            carry = turn(i * UNROLLED + k, carry)
        return carry

    whole, rest = divmod(count, UNROLLED)
    if not whole:
        return several(0, None, rest)
    carry = lax.fori_loop(1, whole, several, several(0, None))
    return several(whole, carry, rest)


def _columns(i: Any) -> Any:
    first = i * WIDTH if isinstance(i, int) else pl.multiple_of(i * WIDTH, WIDTH)
    return pl.ds(first, WIDTH)


def _by_lane(x: Array) -> Array:
    """Returns sums of columns a register apart: [rows, WIDTH] to [rows, LANES]."""
    parts = [x[:, i : i + tpu.LANES] for i in range(0, x.shape[1], tpu.LANES)]
    return sum(parts[1:], parts[0])


def _by_register(x: Array, left: Any) -> Array:
    """Returns sums over the first `left` rows: to [SUMS, columns]."""
    x = pallas_tpu.masked(x, 0, 0, left)
    if x.shape[0] % SUMS == 0:
        parts = [x[i : i + SUMS] for i in range(0, x.shape[0], SUMS)]
        return sum(parts[1:], parts[0])
    total = jnp.sum(x, axis=0, keepdims=True)
    first = lax.broadcasted_iota(jnp.int32, (SUMS, x.shape[1]), 0) == 0
    return jnp.where(first, total, 0.0)


def _parts(norm: Norm, config: Rows) -> int:
    return min(config.parts, -(-norm.m // rows_of(norm.m, norm.d, config)))


def _call(
    name: str,
    norm: Norm,
    arrays: dict[str, Array],
    given: dict[str, Array],
    out: Sequence[Any],
    sums: Sequence[Any],
    config: Rows,
    body: Callable[..., None],
) -> Sequence[Array]:
    """Runs ``body(references by name, results, number of block)`` for each block.

    Results are arrays of rows, `out`, followed by `sums` over rows.
    """
    size, parts = rows_of(norm.m, norm.d, config), _parts(norm, config)
    count = -(-norm.m // size)
    steps = -(-count // parts)
    last = count - 1
    # The last part may have more steps than blocks: those stay at the last block.
    even = parts * steps == count

    def at(p: Any, s: Any) -> Any:
        number = p * steps + s if parts > 1 else s
        return number if even else jnp.minimum(number, last), 0

    block = pl.BlockSpec((size, norm.d), at)
    others = _others(norm, given)
    inputs = [block] * len(arrays) + [spec for spec, _ in others.values()]
    operands = [*arrays.values(), *(x for _, x in others.values())]
    items = sum(a.dtype.itemsize for a in (*arrays.values(), *out))
    names = [*arrays, *others]

    def run(*refs: Any) -> None:
        part, step = pl.program_id(0), pl.program_id(1)
        made = refs[len(inputs) :]

        @pl.when(step == 0)
        def _() -> None:
            for total in made[len(out) :]:
                total[...] = jnp.zeros_like(total)

        number = part * steps + step

        given = dict(zip(names, refs[: len(inputs)], strict=True))
        if even:
            body(given, made, number)
        else:
            pl.when(number < count)(lambda: body(given, made, number))

    return pallas_tpu.call(
        run,
        name,
        pallas_tpu.Grid((parts, steps), 1),
        inputs,
        [block] * len(out)
        + [pl.BlockSpec((SUMS, s.shape[1]), lambda p, s: (p, 0)) for s in sums],
        [*out, *sums],
        vmem=vmem(norm.d, size, items),
    )(*operands)


def _others(norm: Norm, given: dict[str, Array]) -> dict[str, tuple[Any, Array]]:
    """The operands that all blocks read, by name: where they lie, and the arrays."""
    others = {}
    for name in ("scale", "bias"):
        if name in given:
            line = pl.BlockSpec((1, norm.d), lambda p, s: (0, 0))
            others[name] = line, given[name].reshape(1, norm.d)
    if "epsilon" in given:
        epsilon = given["epsilon"].astype(jnp.float32).reshape(1)
        others["epsilon"] = pl.BlockSpec(memory_space=pallas_tpu.SMEM), epsilon
    return others
