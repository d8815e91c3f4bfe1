"""Prepares the operands of attention: arrays, and the blocks that a kernel reads.

q, k and v become [b, n, t, h], so that a block is queries by width. XLA transposes them
unless they are already in that order. Other operands are not transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.attention.tpu import schedule

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.tpu.schedule import Steps
    from rewriter.kernels.attention.tpu.scores import Problem

TABLES = ("bias", "mask", "dropout")
NUMBERS = ("offset", "kv_lengths", "prefix")


@dataclass(frozen=True)
class Place:
    """The place of a step: batch entry, query head, blocks of queries and of keys."""

    b: Any
    n: Any
    row: Any
    key: Any

    def head(self, group: int) -> Any:
        """Returns the key head that a group of so many query heads reads."""
        return self.n if group == 1 else lax.div(self.n, jnp.int32(group))


At = Callable[..., Place]
"""Maps indices of a grid and references of scalars to the place."""


@dataclass(frozen=True)
class Input:
    """An array, and the block of it that a step reads."""

    array: Array
    block: pl.BlockSpec


def block(
    shape: tuple[int, ...], at: At, index: Callable[[Place], tuple[Any, ...]]
) -> pl.BlockSpec:
    """Returns blocks of a shape, one at each place."""
    return pl.BlockSpec(shape, lambda *ids: index(at(*ids)))


def heads_first(x: Array) -> Array:
    """Returns [b, t, n, h] as [b, n, t, h]."""
    return jnp.swapaxes(x, 1, 2)


def inputs(
    p: Problem, arrays: Mapping[str, Array], at: At, turned: bool = False
) -> dict[str, Input]:
    """Returns a kernel's inputs, by name.

    Args:
        p: The use, with its blocks.
        arrays: q [b, n, t, h], k, v [b, heads, s, h|e], and the others as they are
            given; those that `p` does not name are left out.
        at: Where a step is.
        turned: Whether scores are [keys, rows].
    """
    rows, keys, group = p.cut.rows, p.cut.keys, p.group
    found = {
        "q": Input(
            arrays["q"], block((1, 1, rows, p.h), at, lambda x: (x.b, x.n, x.row, 0))
        )
    }
    for name, width in (("k", p.h), ("v", p.e)):
        index = lambda x: (x.b, x.head(group), x.key, 0)
        found[name] = Input(arrays[name], block((1, 1, keys, width), at, index))
    for name in TABLES:
        if name in p.names:
            found[name] = _table(p, arrays[name], at)
    if "q_segments" in p.names:
        found |= _segments(p, arrays, at, turned)
    if "alibi" in p.names:
        found["alibi"] = per_head(arrays["alibi"], rows, at)
    if "row_heads" in p.names:
        index = lambda x: (0, x.row, 0)
        found["row_heads"] = Input(arrays["row_heads"], block((1, rows, 1), at, index))
    if "scale_factor" in p.names:
        factor = arrays["scale_factor"].astype(jnp.float32).reshape(1, 1, 1)
        found["scale_factor"] = Input(factor, block((1, 1, 1), at, lambda x: (0, 0, 0)))
    return found


def per_head(x: Array, rows: int, at: At) -> Input:
    """Returns an operand [n], or [n, t, 1], as float32 [1, rows|1, 1]."""
    x = x.astype(jnp.float32).reshape(x.shape[0], -1, 1)
    each = x.shape[1] > 1
    index = lambda i: (i.n, i.row if each else 0, 0)
    return Input(x, block((1, rows if each else 1, 1), at, index))


def wide(arrays: Mapping[str, Array]) -> tuple[int, ...]:
    """Returns the bytes of a number of each table of all queries and keys."""
    found = [arrays[n] for n in TABLES if n in arrays]
    return tuple(x.dtype.itemsize for x in found if 1 not in x.shape[2:])


def _table(p: Problem, x: Array, at: At) -> Input:
    """Prepares an operand [b|1, n|1, t|1, s|1]; thin ones take 32 bits, booleans 8."""
    thin = 1 in x.shape[2:]
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int32 if thin else jnp.int8)
    elif thin:
        x = x.astype(jnp.float32)
    many, heads, t, s = (size > 1 for size in x.shape)
    shape = (1, 1, p.cut.rows if t else 1, p.cut.keys if s else 1)

    def index(i: Place) -> tuple[Any, ...]:
        return (
            i.b if many else 0, i.n if heads else 0, i.row if t else 0,
            i.key if s else 0,
        )  # fmt: skip

    return Input(x, block(shape, at, index))


def _segments(
    p: Problem, arrays: Mapping[str, Array], at: At, turned: bool
) -> dict[str, Input]:
    """Segments along both axes of the scores: one as a column, one as a row."""
    found = {}
    for name, size, column in (
        ("q_segments", p.cut.rows, not turned),
        ("kv_segments", p.cut.keys, turned),
    ):
        x = arrays[name].astype(jnp.int32)
        many, of_rows = x.shape[0] > 1, name == "q_segments"
        x = x[:, :, None] if column else x[:, None]
        shape = (1, size, 1) if column else (1, 1, size)

        def index(
            i: Place, many: bool = many, of_rows: bool = of_rows, column: bool = column
        ) -> tuple[Any, ...]:
            here = i.row if of_rows else i.key
            return (i.b if many else 0, *((here, 0) if column else (0, here)))

        found[name] = Input(x, block(shape, at, index))
    return found


def update(listed: Steps, word: Any, do: Callable[[bool], None]) -> None:
    """Calls ``do(part)`` once at a step, unless the step has no work.

    Args:
        listed: All steps: there is code only for kinds of blocks that occur.
        word: The step.
        do: Computes a block of scores; some may be hidden if `part` is true.
    """
    whole, part = listed.kinds
    if whole:
        pl.when((word & schedule.PART) == 0)(lambda: do(False))
    if part:
        kind = word & (schedule.PART | schedule.IDLE)
        pl.when(kind == schedule.PART)(lambda: do(True))


def numbers(p: Problem, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the scalars of batch entries that are present, int32 [b|1]."""
    names = [n for n in NUMBERS if n in p.names]
    return {n: arrays[n].astype(jnp.int32) for n in names}


def of_batch(refs: Mapping[str, Any], b: Any) -> dict[str, Any]:
    """Returns the scalars of a batch entry, from their references."""
    return {n: ref[b if ref.shape[0] > 1 else 0] for n, ref in refs.items()}
