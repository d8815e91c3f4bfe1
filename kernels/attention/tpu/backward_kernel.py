"""The gradients of attention on a TPU: blocks of scores, computed again.

Scores are recomputed from the statistics that the forward saved for each row. They are
transposed, [keys, rows], so that values of a row lie along lanes, as in memory. Of five
products, only the one for dq transposes a block. One kernel computes all gradients. It
loops over blocks of queries as the forward does, while dk and dv of all keys stay in
VMEM, through all query heads of a key head. Where VMEM is too small for them, two
kernels share the work: seven products. Source: Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.attention.tpu import operands, schedule
from rewriter.kernels.attention.tpu.config import BackwardBlocks, backward_vmem
from rewriter.kernels.attention.tpu.forward_kernel import rows_before
from rewriter.kernels.attention.tpu.operands import Input, Place
from rewriter.kernels.attention.tpu.scores import Problem, Tile
from rewriter.kernels.shared import pallas_tpu

if TYPE_CHECKING:
    from jax import Array

FUSED, BY_KEYS, BY_ROWS = "fused", "by keys", "by rows"
"""The gradients that a kernel computes: all; dk and dv; dq."""


def backward(
    p: Problem, config: BackwardBlocks, arrays: Mapping[str, Array], dtype: Any
) -> tuple[Array, Array, Array]:
    """Returns dq [b, n, t, h], dk and dv [b, heads, s, h|e].

    Args:
        p: The use.
        config: Sizes of blocks; those of `p` are not read.
        arrays: As the forward's, and two more. ``up`` [b, n, t, e] is the result's
            cotangent. ``kept`` float32 [b, n, 2 or 3, t] is what to subtract from
            scores, infinite for rows without keys, and the sum of the result times its
            cotangent. Its last axis is padded to whole blocks.
        dtype: The results' dtype.
    """
    p = p.blocks(config.rows, config.keys, edges=True)
    if config.fused:
        made = _call(p, config, arrays, dtype, FUSED)
        return made["q"], made["k"], made["v"]
    made = _call(p, config, arrays, dtype, BY_KEYS)
    return _call(p, config, arrays, dtype, BY_ROWS)["q"], made["k"], made["v"]


def _call(
    p: Problem,
    config: BackwardBlocks,
    arrays: Mapping[str, Array],
    dtype: Any,
    kind: str,
) -> dict[str, Array]:
    """Runs the kernel of some gradients; returns them by their operand's name."""
    hiding = {n: arrays[n] for n in p.names & schedule.HIDING}
    by_keys = kind == BY_KEYS
    listed = schedule.steps(schedule.states(p.cut, hiding), by_keys)
    scalars = operands.numbers(p, arrays)
    at = _places(p, listed, by_keys)
    given = operands.inputs(p, arrays, at, turned=True)
    given |= of_results(p, config, arrays, at)
    results, scratch = _results(p, config, arrays, dtype, kind, at)
    tables = listed.table
    names = [*tables, *scalars, *given, *results, *(f"{n} sum" for n in scratch)]

    def body(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        step = pl.program_id(2 if by_keys else 3)
        word = listed.at(refs[:1], pl.program_id(0), step)
        numbers = {n: named[n] for n in scalars}
        _Step(p, config, kind, named, numbers, listed, word).run()

    grid = (p.b, p.heads, listed.count, p.group)
    grid = grid if by_keys else (p.b, p.heads, p.group, listed.count)
    parallel = 3 if kind == BY_ROWS else 2
    call = pallas_tpu.call(
        body,
        f"attention backward {kind}".replace(" ", "_"),
        pallas_tpu.Grid(grid, parallel),
        [x.block for x in given.values()],
        [spec for spec, _ in results.values()],
        [shape for _, shape in results.values()],
        list(scratch.values()),
        prefetched=len(tables) + len(scalars),
        vmem=backward_vmem(
            config, p.cut.s if kind == FUSED else 0, p.h, p.e,
            arrays["q"].dtype.itemsize, operands.wide(arrays),
        ),
    )  # fmt: skip
    made = call(*tables.values(), *scalars.values(), *(x.array for x in given.values()))
    return dict(zip((n[1:] for n in results), made, strict=True))


def _places(p: Problem, listed: schedule.Steps, by_keys: bool) -> operands.At:
    """The place of a step of the grid: its batch entry, head and blocks."""

    def at(*ids: Any) -> Place:
        if by_keys:
            b, head, step, g, *tables = ids
        else:
            b, head, g, step, *tables = ids
        word = listed.at(tables[:1], b, step)
        line, other = schedule.major(word), schedule.minor(word)
        row, key = (other, line) if by_keys else (line, other)
        return Place(b, head * p.group + g, row, key)

    return at


def _of_rows(i: Place) -> tuple[Any, ...]:
    return i.b, i.n, i.row, 0


def of_results(
    p: Problem, config: BackwardBlocks, arrays: Mapping[str, Array], at: operands.At
) -> dict[str, Input]:
    """Returns the inputs that come from the result: its cotangent, numbers of rows."""
    shape = (1, 1, arrays["kept"].shape[2], config.rows)
    block = operands.block((1, 1, config.rows, p.e), at, _of_rows)
    of_kept = operands.block(shape, at, lambda i: (i.b, i.n, 0, i.row))
    return {"up": Input(arrays["up"], block), "kept": Input(arrays["kept"], of_kept)}


def _results(
    p: Problem,
    config: BackwardBlocks,
    arrays: Mapping[str, Array],
    dtype: Any,
    kind: str,
    at: operands.At,
) -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
    """The block and shape of each result, and memory for its sums, by name."""
    results, scratch = {}, {}
    if kind != BY_KEYS:
        shape = (p.b, p.n, p.cut.t, p.h)
        results["dq"] = (
            operands.block((1, 1, config.rows, p.h), at, _of_rows),
            pallas_tpu.shaped(shape, dtype, arrays["q"]),
        )
        scratch["q"] = pallas_tpu.VMEM((1, config.rows, p.h), jnp.float32)
    if kind != BY_ROWS:
        every = kind == FUSED
        blocks = p.cut.blocks[1] if every else 1
        of_keys = lambda i: (i.b, i.head(p.group), 0 if every else i.key, 0)
        for name, width in (("k", p.h), ("v", p.e)):
            size = (1, 1, p.cut.s if every else config.keys, width)
            results[f"d{name}"] = (
                operands.block(size, at, of_keys),
                pallas_tpu.shaped((p.b, p.heads, p.cut.s, width), dtype, arrays["q"]),
            )
            scratch[name] = pallas_tpu.VMEM((blocks, config.keys, width), jnp.float32)
    return results, scratch


@dataclass(frozen=True)
class _Step:
    """One step of the kernel.

    Attributes:
        p: The use.
        config: Its blocks.
        kind: What the kernel computes.
        refs: All references, by name; ``"q sum"`` and so on are scratch.
        numbers: References to scalars of batch entries.
        listed: All steps.
        word: This one.
    """

    p: Problem
    config: BackwardBlocks
    kind: str
    refs: Mapping[str, Any]
    numbers: Mapping[str, Any]
    listed: schedule.Steps
    word: Any

    @property
    def row(self) -> Any:
        """The block of queries."""
        take = schedule.minor if self.kind == BY_KEYS else schedule.major
        return take(self.word)

    @property
    def key(self) -> Any:
        """The block of keys."""
        take = schedule.major if self.kind == BY_KEYS else schedule.minor
        return take(self.word)

    def run(self) -> None:
        bits = self.word
        begins, ends = (bits & schedule.LATER) == 0, (bits & schedule.MORE) == 0
        if self.kind == BY_KEYS:
            g, last = pl.program_id(3), pl.num_programs(3) - 1
            begins, ends = begins & (g == 0), ends & (g == last)
            pl.when(begins)(lambda: self.clear("k", "v"))
        else:
            pl.when(begins)(lambda: self.clear("q"))
        if self.kind == FUSED:
            g, step = pl.program_id(2), pl.program_id(3)
            last = pl.num_programs(2) - 1, pl.num_programs(3) - 1
            pl.when((g == 0) & (step == 0))(lambda: self.clear("k", "v"))
        numbers = operands.of_batch(self.numbers, pl.program_id(0))
        operands.update(self.listed, bits, functools.partial(self.update, numbers))
        if self.kind == BY_KEYS:
            pl.when(ends)(lambda: self.store("k", "v"))
        else:
            pl.when(ends)(lambda: self.store("q"))
        if self.kind == FUSED:
            done = (g == last[0]) & (step == last[1])
            pl.when(done)(lambda: self.store("k", "v"))

    def clear(self, *names: str) -> None:
        """Begins sums."""
        for name in names:
            sums = self.refs[f"{name} sum"]
            lax.fori_loop(0, sums.shape[0], functools.partial(_clear, sums), None)

    def store(self, *names: str) -> None:
        """Writes sums, except those beyond the edge."""
        for name in names:
            sums, out = self.refs[f"{name} sum"], self.refs[f"d{name}"]
            factor = 1.0 if name == "v" else self.p.scale
            whole, rest = divmod(out.shape[2], sums.shape[1])
            if whole:
                each = functools.partial(_store, sums, out, factor, sums.shape[1])
                lax.fori_loop(0, whole, each, None)
            if rest:
                _store(sums, out, factor, rest, whole)

    def update(self, numbers: Mapping[str, Any], part: bool) -> None:
        """Adds one block of scores to the gradients."""
        for tile in Tile.of_block(
            self.p, self.refs, numbers, self.row, self.key, self.config, turned=True
        ):
            self.add(tile, part)

    def add(self, tile: Tile, part: bool) -> None:
        """Adds some scores to the gradients."""
        p, x = self.p, self.refs
        dot = lambda a, b, axes: pallas_tpu.dot(a, b, axes, p.precision)
        q, k, v, up = (read(p, x, n, tile, part) for n in ("q", "k", "v", "up"))
        *kept, delta = per_row(x, tile)
        scores, bent = tile.scores(dot(k, q, (1, 1)), part)
        for less in kept:
            scores = scores - less
        weights = used = p.power(scores)
        change = dot(v, up, (1, 1))
        if "dropout" in x:
            share = tile.dropout(part)
            used = weights * share
            change = jnp.where(share == 0.0, 0.0, change * share)
        if self.kind != BY_ROWS:
            self.sum("v", tile, dot(used.astype(up.dtype), up, (1, 0)))
        change = only_seen(weights * (change - delta), weights, part)
        if bent is not None:
            change = change * (1.0 - bent * bent)
        change = change.astype(q.dtype)
        if self.kind != BY_ROWS:
            self.sum("k", tile, dot(change, q, (1, 0)))
        if self.kind != BY_KEYS:
            x["q sum"][0, tile.row_slice] += dot(change, k, (0, 0))

    def sum(self, name: str, tile: Tile, added: Array) -> None:
        """Adds to dk or dv of the tile's keys."""
        block = self.key if self.kind == FUSED else 0
        self.refs[f"{name} sum"][block, tile.key_slice] += added


def read(
    p: Problem, refs: Mapping[str, Any], name: str, tile: Tile, part: bool
) -> Array:
    """Returns rows of q or up, or keys of k or v; zeros beyond the edge."""
    cut = p.cut
    if name in ("q", "up"):
        x, end = refs[name][0, 0, tile.row_slice, :], cut.t
        ragged, start = cut.t % cut.rows, tile.row + tile.first
    else:
        x, end = refs[name][0, 0, tile.key_slice, :], cut.s
        ragged, start = cut.s % cut.keys, tile.key + tile.start
    return rows_before(x, end - start) if part and ragged else x


def only_seen(changes: Array, weights: Array, part: bool) -> Array:
    """Returns changes of scores, 0 where scores are hidden.

    Hidden weights are 0, but 0 times NaN is NaN.

    Args:
        changes: Changes of scores, shaped like the weights.
        weights: The weights.
        part: Whether any may be hidden.
    """
    return jnp.where(weights == 0.0, 0.0, changes) if part else changes


def per_row(refs: Mapping[str, Any], tile: Tile) -> list[Array]:
    """Returns the saved statistics of rows, [1, rows] each: see `backward`."""
    kept = refs["kept"][0, 0, :, tile.row_slice]
    return [kept[i : i + 1] for i in range(kept.shape[0])]


def _clear(sums: Any, i: Any, _: None = None) -> None:
    sums[i] = jnp.zeros(sums.shape[1:], sums.dtype)


def _store(
    sums: Any, out: Any, factor: float, rows: int, i: Any, _: None = None
) -> None:
    """Writes so many rows of the i-th block."""
    size = sums.shape[1]
    start = i * size if isinstance(i, int) else pl.multiple_of(i * size, size)
    value = sums[i, :rows] * factor
    out[0, 0, pl.ds(start, rows), :] = value.astype(out.dtype)
