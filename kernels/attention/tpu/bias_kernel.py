"""The gradient of a bias on a TPU: dS, summed over the axes where the bias has size 1.

It is a kernel of its own, so that programs that add a constant, such as a mask, leave
it out. The summed axes come last in its grid.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from rewriter.kernels.attention.tpu import operands, schedule
from rewriter.kernels.attention.tpu.backward_kernel import (
    of_results,
    only_seen,
    per_row,
    read,
)
from rewriter.kernels.attention.tpu.config import BackwardBlocks, backward_vmem
from rewriter.kernels.attention.tpu.operands import Place
from rewriter.kernels.attention.tpu.scores import Problem, Tile
from rewriter.kernels.shared import pallas_tpu
from rewriter.kernels.shared.pallas_tpu import LANES

if TYPE_CHECKING:
    from jax import Array


def gradient(p: Problem, config: BackwardBlocks, arrays: Mapping[str, Array]) -> Array:
    """Returns the bias's cotangent, float32 [b|1, n|1, t|1, s|1].

    Args:
        p: The use.
        config: Sizes of blocks; those of `p` are not read.
        arrays: As `backward_kernel.backward` takes them.
    """
    p = p.blocks(config.rows, config.keys, edges=True)
    many, per = p.cut.blocks
    table = schedule.states(p.cut, {n: arrays[n] for n in p.names & schedule.HIDING})
    each = table.shape[0] > 1
    scalars = operands.numbers(p, arrays)
    kept = [size > 1 for size in arrays["bias"].shape]
    order = sorted(range(4), key=lambda i: not kept[i])  # those that are kept first

    def at(*ids: Any) -> Place:
        return Place(*(ids[order.index(i)] for i in range(4)))

    given = operands.inputs(p, arrays, at) | of_results(p, config, arrays, at)
    thin = config.rows if kept[2] else 1, config.keys if kept[3] else 1
    sizes = (p.b, p.n, many, per)

    def place(i: Place) -> tuple[Any, ...]:
        where = (i.b, i.n, i.row, i.key)
        return tuple(x if k else 0 for x, k in zip(where, kept, strict=True))

    names = ["states", *scalars, *given, "out", "sum"]

    def body(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        ids = [pl.program_id(order.index(i)) for i in range(4)]
        state = (ids[0] * many + ids[2] if each else ids[2]) * per + ids[3]
        summed = [i for i in range(4) if not kept[i] and sizes[i] > 1]
        first = _all(ids[i] == 0 for i in summed)
        last = _all(ids[i] == sizes[i] - 1 for i in summed)
        numbers = operands.of_batch({n: named[n] for n in scalars}, ids[0])
        step = _Step(p, config, named, numbers, ids[2], ids[3])
        _when(first, step.start)
        pl.when(named["states"][state] == 2)(lambda: step.update(False))
        pl.when(named["states"][state] == 1)(lambda: step.update(True))
        _when(last, step.finish)

    tables = (*operands.wide(arrays), 4, 4)
    (made,) = pallas_tpu.call(
        body,
        "attention_bias_gradient",
        pallas_tpu.Grid(tuple(sizes[i] for i in order), sum(kept)),
        [x.block for x in given.values()],
        [operands.block((1, 1, *thin), at, place)],
        [pallas_tpu.shaped(arrays["bias"].shape, jnp.float32, arrays["q"])],
        [pallas_tpu.VMEM(thin, jnp.float32)],
        prefetched=1 + len(scalars),
        vmem=backward_vmem(config, 0, p.h, p.e, arrays["q"].dtype.itemsize, tables),
    )(
        jnp.asarray(table, jnp.int32).reshape(-1),
        *scalars.values(),
        *(x.array for x in given.values()),
    )
    return made


def _all(conditions: Any) -> Any:
    return functools.reduce(lambda x, y: x & y, conditions, True)


def _when(condition: Any, do: Any) -> None:
    if condition is True:
        do()
    else:
        pl.when(condition)(do)


@dataclass(frozen=True)
class _Step:
    """One step of the kernel.

    Attributes:
        p: The use.
        config: Its blocks.
        refs: All references, by name.
        numbers: Scalars of the batch entry.
        row: The block of queries.
        key: The block of keys.
    """

    p: Problem
    config: BackwardBlocks
    refs: Mapping[str, Any]
    numbers: Mapping[str, Any]
    row: Any
    key: Any

    def start(self) -> None:
        self.refs["sum"][...] = jnp.zeros_like(self.refs["sum"])

    def finish(self) -> None:
        self.refs["out"][0, 0] = self.refs["sum"][...]

    def update(self, part: bool) -> None:
        """Adds one block of scores."""
        for tile in Tile.of_block(
            self.p, self.refs, self.numbers, self.row, self.key, self.config
        ):
            self.add(tile, part)

    def add(self, tile: Tile, part: bool) -> None:
        """Adds the changes of some scores."""
        p, x = self.p, self.refs
        dot = lambda a, b: pallas_tpu.dot(a, b, (1, 1), p.precision)
        q, k, v, up = (read(p, x, n, tile, part) for n in ("q", "k", "v", "up"))
        kept = [_column(row) for row in per_row(x, tile)]
        scores, _ = tile.scores(dot(q, k), part)
        for less in kept[:-1]:
            scores = scores - less
        change = dot(up, v)
        if "dropout" in x:
            share = tile.dropout(part)
            change = jnp.where(share == 0.0, 0.0, change * share)
        weights = p.power(scores)
        change = only_seen(weights * (change - kept[-1]), weights, part)
        rows, keys = tile.row_slice, tile.key_slice
        if x["sum"].shape[0] == 1:
            change, rows = change.sum(0, keepdims=True), slice(0, 1)
        if x["sum"].shape[1] == 1:
            change, keys = change.sum(1, keepdims=True), slice(0, 1)
        x["sum"][rows, keys] += change


def _column(row: Array) -> Array:
    """Returns [1, rows] as [rows, 1]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]
