"""Attention of up to 64 queries and keys, a head at a time in each warpgroup.

A warpgroup takes the heads of some batch entries, one after the other, and copies the
next ones while it computes. All scores of a head are in its registers. So one kernel
gives all gradients: weights and their changes go through shared memory once, which
turns them for dv and dk. A warpgroup keeps to one head, and sums up the cotangent of
its bias over entries in registers. Warpgroups side by side take the heads of one entry.

No sums meet in memory: results are the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.empty_rows import PASSES
from rewriter.kernels.attention.hopper import pallas, panels
from rewriter.kernels.attention.hopper.extra_operands import table_type
from rewriter.kernels.attention.hopper.pallas import LOG2E
from rewriter.kernels.attention.hopper.short import ROWS
from rewriter.kernels.attention.hopper.use import Use, head_in_array
from rewriter.kernels.attention.hopper.widths import filled_backward

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Heads

LARGE = 1000.0
"""Larger log-sum-exps do not show the number of keys: see `backward_inputs`."""


@dataclass(frozen=True)
class Problem:
    """The problem as known while tracing.

    Attributes:
        b: Batch entries.
        n: Heads.
        t: Queries.
        s: Keys.
        h: The width of q and k in shared memory.
        e: That of v.
        scale: Multiplies products.
        last: The last key that query 0 sees, if that depends on the query.
        bias: The number of tables of biases, 0 for none.
        passes: Whether rows that see no key pass a gradient on.
        warpgroups: Warpgroups of a block.
        stages: Heads of a warpgroup that shared memory holds.
        programs: Blocks.
        packed: The heads of operands in the arrays that are read.
        joined: The heads of cotangents in the array that holds them.
        swapped: Operands whose heads lie before positions.
    """

    b: int
    n: int
    t: int
    s: int
    h: int
    e: int
    scale: float
    last: int | None
    bias: int
    passes: bool
    warpgroups: int
    stages: int
    programs: int
    packed: tuple[tuple[str, Heads], ...]
    joined: tuple[tuple[str, Heads], ...] = ()
    swapped: tuple[str, ...] = ()

    @property
    def entries(self) -> int:
        """Batch entries that are computed at the same time."""
        most = self.programs * self.warpgroups // self.n
        return -(-self.b // -(-self.b // min(most, self.b)))

    @property
    def blocks(self) -> int:
        """Blocks that have work."""
        return -(-self.entries * self.n // self.warpgroups)

    def width(self, name: str) -> int:
        """Columns of an operand in shared memory."""
        return self.h if name in ("q", "k") else self.e

    def swizzle(self, name: str) -> int:
        """Bytes of a row of an operand's panels."""
        return pallas.swizzle(self.width(name), ROWS)

    def copies(self, names: tuple[str, ...]) -> int:
        """The copies that bring some operands."""
        return sum(panels.copies(self.width(x), self.swizzle(x), True) for x in names)


def problem_of(use: Use, config: Any, swapped: tuple[str, ...] = ()) -> Problem:
    """Returns the problem of a use."""
    (b, t, n, _), s = use.q.shape, use.k.shape[1]
    h, e = (filled_backward(x) for x in use.widths)
    right = use.window[1]
    last = None if right is None else right + use.shift
    bias = 0 if use.bias is None else use.bias.shape[1]
    return Problem(
        b, n, t, s, h, e, use.scale, last, bias, use.empty_rows in PASSES,
        config.warpgroups, config.stages, config.programs, use.heads,
        tuple(sorted(use.joined.items())), swapped,
    )  # fmt: skip


def forward(use: Use, config: Any, swapped: tuple[str, ...] = ()) -> Any:
    """Returns the result [b, t, n, e], and the log-sum-exp of rows [b, n, t].

    Args:
        use: The use, as `short.takes` wants it.
        config: The tiles.
        swapped: Names among q, k and v whose heads lie before positions.
    """
    p = problem_of(use, config, swapped)
    named = use.tensors() | _tables(use)
    named |= {name: named[name].swapaxes(1, 2) for name in swapped}
    out = {
        "out": jax.ShapeDtypeStruct((p.b, p.t, p.n, use.v.shape[3]), use.q.dtype),
        "lse": jax.ShapeDtypeStruct((p.b, p.n, ROWS), jnp.float32),
    }
    made, lse = _call(_Forward, p, named, out)
    return made, lse[:, :, : p.t]


def backward(
    use: Use, out: Array, lse: Array, cotangent: Array, config: Any
) -> dict[str, Array]:
    """Returns the cotangents of q, k, v and a bias, or of `Use.joined` as one array.

    Args:
        use: The use, as `short.takes` wants it.
        out: [b, t, n, e].
        lse: float32 [b, n, t].
        cotangent: [b, t, n, e].
        config: The tiles.
    """
    p = problem_of(use, config)
    rows = jnp.pad(lse, ((0, 0), (0, 0), (0, ROWS - p.t)))
    named = use.tensors() | {"g": cotangent.astype(use.q.dtype), "o": out, "lse": rows}
    named |= _tables(use)
    types, joined = {}, dict(p.joined)
    for name in "qkv":
        x = getattr(use, name)
        if name in joined:
            shape = (*x.shape[:2], joined[name].all, x.shape[3])
            types["joined"] = jax.ShapeDtypeStruct(shape, use.q.dtype)
        else:
            types[f"d{name}"] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if p.bias:
        shape = (p.entries * p.n, ROWS, ROWS)
        types["dbias"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    made = dict(zip(types, _call(_Backward, p, named, types), strict=True))
    grads = {x.removeprefix("d"): made[x] for x in types if x != "dbias"}
    if use.bias is not None:
        sums = made["dbias"].reshape(p.entries, p.n, ROWS, ROWS).sum(0)
        sums = sums if p.bias > 1 else sums.sum(0, keepdims=True)
        grads["bias"] = sums[None, :, : p.t, : p.s].astype(use.bias.dtype)
    return grads


def _tables(use: Use) -> dict[str, Array]:
    """The bias as it is copied: rows and columns of whole tiles."""
    if use.bias is None:
        return {}
    bias = use.bias[0].astype(table_type(use.bias.dtype))
    more = [(0, 0), *((0, ROWS - x) for x in bias.shape[1:])]
    return {"bias": jnp.pad(bias, more)}


def _call(
    kind: type[_Short], p: Problem, named: dict[str, Array], out: dict[str, Any]
) -> Any:
    scratch = kind.scratch(p, named)

    def body(*references: Any, **memory: Any) -> None:
        given = dict(zip((*named, *out), references, strict=True))
        kind(p, given, memory).run()

    run = pallas.kernel(
        body, kind.name, list(out.values()), scratch, p.blocks, p.warpgroups
    )
    return run(*named.values())


class _Short:
    """Common code of both passes: a warpgroup's heads, and their copies."""

    name: str
    read: tuple[str, ...]
    """The operands that are copied for each head, and written over by results."""

    def __init__(self, p: Problem, given: dict[str, Any], memory: dict[str, Any]):
        names = {x: f"{x}_rows" for x in self.read}
        self.p, self.given = p, given
        self.memory = panels.with_rows(memory, names, True)
        self.warpgroup = lax.axis_index(pallas.WARPGROUP)
        self.lane = lax.axis_index(pallas.PROGRAM) * p.warpgroups + self.warpgroup
        self.head = lax.rem(self.lane, jnp.int32(p.n))
        self.first = lax.div(self.lane, jnp.int32(p.n))

    @classmethod
    def scratch(cls, p: Problem, named: dict[str, Array]) -> dict[str, Any]:
        """Returns shared memory by name."""
        places, dtype = p.stages * p.warpgroups, named["q"].dtype
        made = {
            x: panels.panels((places, ROWS, p.width(x)), dtype, p.swizzle(x))
            for x in cls.read
        }
        made["ready"] = pallas.barriers(places, cls.copies(p))
        if p.bias:
            shape = (p.warpgroups, ROWS, ROWS)
            made["bias"] = pallas.table_tiles(shape, named["bias"].dtype)
            made["bias_ready"] = pallas.barriers(p.warpgroups)
        return made

    @classmethod
    def copies(cls, p: Problem) -> int:
        """Copies for one head."""
        return p.copies(cls.read)

    @property
    def steps(self) -> Any:
        """The number of this warpgroup's heads."""
        p = self.p
        left = p.b - self.first + (p.entries - 1)
        count = lax.div(left, jnp.int32(p.entries))
        return jnp.where(self.first < p.entries, count, 0)

    def run(self) -> None:
        """Computes this warpgroup's heads."""
        p, steps = self.p, self.steps
        for turn in range(p.stages):
            self.fetch(turn, turn < steps)
        self.fetch_bias(steps > 0)
        carry = lax.fori_loop(0, steps, self.compute, self.begin())
        plgpu.wait_smem_to_gmem(0)
        pallas.when(steps > 0)(lambda: self.end(carry))

    def slot(self, turn: Any) -> Any:
        """The place of a head in shared memory."""
        stages = self.p.stages
        return self.warpgroup * stages + lax.rem(jnp.int32(turn), jnp.int32(stages))

    def entry(self, turn: Any) -> Any:
        """The batch entry of a turn."""
        return self.first + turn * self.p.entries

    def fetch(self, turn: Any, wanted: Any) -> None:
        """Copies the operands of a turn, if it is wanted."""

        @pallas.when(wanted)
        def _() -> None:
            slot = self.slot(turn)
            for name in self.read:
                self.send(name, self.entry(turn), slot)
            self.send_rows(self.entry(turn), slot)

    def send(self, name: str, entry: Any, slot: Any) -> None:
        """Copies the rows of an operand; those that it lacks are zeros."""
        head = head_in_array(self.p.packed, name, self.head)
        rows = pl.ds(pallas.opaque(0)[0], ROWS)
        at = (entry, head, rows) if name in self.p.swapped else (entry, rows, head)
        place = self.memory[f"{name}_rows"].at[slot]
        for source, target in panels.parts(self.given[name], at, place):
            plgpu.copy_gmem_to_smem(source, target, self.memory["ready"].at[slot])

    def send_rows(self, entry: Any, slot: Any) -> None:
        """Copies numbers of rows."""

    def fetch_bias(self, wanted: Any) -> None:
        """Copies the table of this warpgroup's head, and waits for it."""
        if not self.p.bias:
            return
        x, mine = self.memory, self.warpgroup
        head = self.head if self.p.bias > 1 else 0

        @pallas.when(wanted)
        def _() -> None:
            table, ready = self.given["bias"].at[head], x["bias_ready"].at[mine]
            plgpu.copy_gmem_to_smem(table, x["bias"].at[mine], ready)
            plgpu.barrier_wait(ready)

    def refill(self, turn: Any) -> None:
        """Copies the operands of a later turn in place of those of the last one."""
        after = turn - 1 + self.p.stages
        wanted = (turn > 0) & (after < self.steps)
        pallas.when(wanted)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        self.fetch(after, wanted)

    def scores(self, found: Array) -> Array:
        """Returns scores from products, to the base of two, -inf for unseen keys."""
        p = self.p
        if p.bias:
            table = self.memory["bias"].at[self.warpgroup][...]
            narrow = str(table.dtype) == "bfloat16"
            table = pallas.widened(table) if narrow else table.astype(jnp.float32)
            found = (found * p.scale + table) * LOG2E
        else:
            found = found * (p.scale * LOG2E)
        last = pallas.rows(p.s - 1)
        if p.last is not None:
            last = jnp.minimum(pallas.row_positions(ROWS) + p.last, last)
        elif p.s == ROWS:
            return found
        return pallas.hide(found, None, last)

    def put(self, x: Array, place: str, output: str, turn: Any) -> None:
        """Writes rows over an operand, and from there to a result."""
        p, slot = self.p, self.slot(turn)
        joined = output.removeprefix("d") in dict(p.joined)
        to = self.given["joined" if joined else output]
        panels.put(self.memory[place].at[slot], x.astype(to.dtype))
        plgpu.commit_smem()
        head = head_in_array(p.joined, output.removeprefix("d"), self.head)
        at = self.entry(turn), pl.ds(pallas.opaque(0)[0], ROWS), head
        rows = self.memory[f"{place}_rows"].at[slot]
        for target, source in panels.parts(to, at, rows):
            plgpu.copy_smem_to_gmem(source, target)

    # What differs:
    def begin(self) -> Any:
        """Returns what is summed up over turns, before the first."""
        return jnp.int32(0)

    def compute(self, turn: Any, carry: Any) -> Any:
        """Computes a head, and returns the sums with its share."""
        raise NotImplementedError

    def end(self, carry: Any) -> None:
        """Writes the sums."""


class _Forward(_Short):
    """The result, and log-sum-exps."""

    name = "attention_short"
    read = ("q", "k", "v")

    @classmethod
    def scratch(cls, p: Problem, named: dict[str, Array]) -> dict[str, Any]:
        """Returns shared memory by name."""
        lines = {"sums": plgpu.SMEM((p.warpgroups, ROWS), jnp.float32)}
        return super().scratch(p, named) | lines

    def compute(self, turn: Any, carry: Any) -> Any:
        """Computes and stores a head's result."""
        p, x, slot = self.p, self.memory, self.slot(turn)
        plgpu.barrier_wait(x["ready"].at[slot])

        def products(scores: Any, out: Any) -> Any:
            panels.add_scores(scores, x["q"].at[slot], x["k"].at[slot])
            found = lax.optimization_barrier(scores[...])
            self.refill(turn)
            found = self.scores(found)
            top = found.max(axis=1)
            weights = jnp.exp2(found - pallas.along(top, found.shape))
            total = weights.sum(axis=1)
            narrow = lax.optimization_barrier(weights.astype(self.given["q"].dtype))
            panels.add_rows(out, narrow, x["v"].at[slot])
            return out[...], top, total

        made, top, total = panels.run_scoped(
            products, [(ROWS, ROWS)], [(ROWS, p.e)], True
        )
        made = made * pallas.along(1.0 / total, made.shape)
        lse = top * (1 / LOG2E) + jnp.log(total)
        lse = jnp.where(top == -jnp.inf, top, lse)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()  # all warps have read v
        x["sums"].at[self.warpgroup][...] = lse
        self.put(made, "v", "out", turn)
        place = self.given["lse"].at[self.entry(turn), self.head]
        plgpu.copy_smem_to_gmem(x["sums"].at[self.warpgroup], place)
        return carry


class _Backward(_Short):
    """All gradients."""

    name = "attention_short_backward"
    read = ("q", "k", "v", "g", "o")

    @classmethod
    def scratch(cls, p: Problem, named: dict[str, Array]) -> dict[str, Any]:
        """Returns shared memory by name."""
        places, shape = p.stages * p.warpgroups, (p.warpgroups, ROWS, ROWS)
        dtype = named["q"].dtype
        return super().scratch(p, named) | {
            "lse": plgpu.SMEM((places, ROWS), jnp.float32),
            # Operands of a product are swizzled alike.
            "weights": pallas.tiles(shape, dtype, p.swizzle("g")),
            "changes": pallas.tiles(shape, dtype, p.swizzle("q")),
        }

    @classmethod
    def copies(cls, p: Problem) -> int:
        """Copies for one head."""
        return super().copies(p) + 1

    def send_rows(self, entry: Any, slot: Any) -> None:
        """Copies log-sum-exps of rows."""
        plgpu.copy_gmem_to_smem(
            self.given["lse"].at[entry, self.head], self.memory["lse"].at[slot],
            self.memory["ready"].at[slot],
        )  # fmt: skip

    def begin(self) -> Any:
        """Returns zeros for the bias's cotangent, if there is one."""
        return pallas.zeros((ROWS, ROWS)) if self.p.bias else jnp.int32(0)

    def compute(self, turn: Any, carry: Any) -> Any:
        """Computes and stores a head's gradients."""
        p, x, slot, mine = self.p, self.memory, self.slot(turn), self.warpgroup
        shape, dtype = (ROWS, ROWS), self.given["q"].dtype
        plgpu.barrier_wait(x["ready"].at[slot])

        def products(scores: Any, changes: Any, dq: Any, dk: Any, dv: Any) -> Any:
            panels.add_scores(scores, x["q"].at[slot], x["k"].at[slot])
            panels.add_scores(changes, x["g"].at[slot], x["v"].at[slot])
            delta = self.delta(slot)
            left = p.copies(("v",))
            found = plgpu.wgmma_accumulator_load(scores, wait_n=left)
            found = lax.optimization_barrier(found)
            weights, empty = self.weights(self.scores(found), slot)
            weights = lax.optimization_barrier(weights)
            x["weights"].at[mine][...] = weights.astype(dtype)
            change = lax.optimization_barrier(changes[...])
            change = weights * (change - pallas.along(delta, shape))
            if p.last is not None:  # hidden values may be anything
                change = jnp.where(weights == 0.0, 0.0, change)
            if not p.passes:
                change = jnp.where(pallas.along(empty, shape) == -jnp.inf, 0.0, change)
            narrow = lax.optimization_barrier(change.astype(dtype))
            x["changes"].at[mine][...] = narrow
            plgpu.commit_smem()
            self.refill(turn)
            panels.add_rows(dv, x["weights"].at[mine], x["g"].at[slot], turned=True)
            panels.add_rows(dk, x["changes"].at[mine], x["q"].at[slot], turned=True)
            panels.add_rows(dq, narrow, x["k"].at[slot])
            return (dq[...], dk[...], dv[...]), change

        sums = [(ROWS, p.h), (ROWS, p.h), (ROWS, p.e)]
        made, change = panels.run_scoped(products, (shape, shape), sums, True)
        dq, dk, dv = made
        plgpu.commit_smem()  # all warps have read the operands
        self.put(dv, "v", "dv", turn)
        self.put(dk * p.scale, "k", "dk", turn)
        self.put(dq * p.scale, "q", "dq", turn)
        return carry + change if p.bias else carry

    def delta(self, slot: Any) -> Array:
        """Returns the sums of the result times its cotangent: [64]."""
        total = None
        for i in range(self.memory["o"].at[slot].shape[0]):
            o, g = (self.memory[n].at[slot, i][...].astype(jnp.float32) for n in "og")
            each = (o * g).sum(axis=1)
            total = each if total is None else total + each
        return total

    def weights(self, scores: Array, slot: Any) -> tuple[Array, Array]:
        """Returns weights, and log-sum-exps of rows.

        The exponentials are relative to a row's maximum, and digits of its log-sum-exp
        are not lost where a bias of a whole row absorbs them.
        """
        lse = pallas.loaded(self.memory["lse"].at[slot], pallas.ROWS)
        top = scores.max(axis=1)
        least = jnp.where(top == -jnp.inf, 0.0, top)
        weights = jnp.exp2(scores - pallas.along(least, scores.shape))
        ratio = jnp.exp2(least - lse * LOG2E)
        if self.p.bias:
            large = jnp.abs(lse) > LARGE
            ratio = jnp.where(large, 1.0 / weights.sum(axis=1), ratio)
        ratio = jnp.where(top == -jnp.inf, 0.0, ratio)
        ratio = jnp.where(lse == -jnp.inf, jnp.nan, ratio)
        return weights * pallas.along(ratio, weights.shape), lse

    def end(self, carry: Any) -> None:
        """Writes the sum of the bias's cotangents."""
        if self.p.bias:
            pallas.store_rows(self.given["dbias"].at[self.lane], carry)
