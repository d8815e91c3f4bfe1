"""Attention in memory that grows with t + s, in plain XLA: tiles and a running softmax.

Queries are taken in blocks of rows, keys in blocks of columns; a tile of
scores exists only while it is used. The loops over key blocks run between
bounds computed from window, offset, prefix and lengths, so that blocks no
query sees cost nothing. Source: Rabe and Staats, "Self-attention Does Not
Need O(n²) Memory" (2021), and Dao et al., "FlashAttention" (2022), for the
backward pass from the row's log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

    from rewriter.device import Device
    from rewriter.kernel import Spec

AXES = {
    "q": "btnh", "k": "bskh", "v": "bske", "bias": "bnts", "mask": "bnts",
    "dropout": "bnts", "q_segments": "bt", "kv_segments": "bs",
    "kv_lengths": "b", "offset": "b", "prefix": "b", "alibi": "n", "sinks": "n",
    "scale_factor": "", "out": "btne", "cotangent": "btne", "lse": "bnt",
}  # fmt: skip
"""Every array's axes. All but t and s of k, v, out and lse may have size 1."""


@dataclass(frozen=True)
class Blocks:
    """How scores are cut into tiles: the config of both passes.

    Attributes:
        rows: Rows of a tile, for one query head per key head.
        keys: Columns of a tile.
        tile: Scores held at once, those of several heads and batch entries included:
            2 MiB in f32, so that a tile stays in a CPU's cache.
        lines: Entries of k held at once, the bound for a tile of few rows.
    """

    rows: int = 512
    keys: int = 512
    tile: int = 1 << 19
    lines: int = 1 << 19


DEFAULT = Blocks()


LARGE = Blocks(1024, 1024, 1 << 26, 1 << 26)
"""For GPUs, where a step costs a launch and no cache holds a tile."""

LARGER = Blocks(2048, 2048, 1 << 28, 1 << 28)
"""For GPUs, where no block can be left out."""


def configs(spec: Spec, device: Device) -> list[Blocks]:
    """Returns blocks worth measuring, few: each takes seconds to compile."""
    t, s = spec.shape("q")[1], spec.shape("k")[1]
    if device.platform == "cpu":
        sizes = [(256, 512), (512, 1024), (1024, 512), (1024, 1024)]
        found = [Blocks(r, k, 1 << 19) for r, k in sizes]
        found += [Blocks(512, 512, 1 << 21, 1 << 20)]
    else:
        found = [LARGE, LARGER, Blocks(4096, 4096, 1 << 28, 1 << 28)]
    return [b for b in found if b.rows < 2 * t or b.keys < 2 * s]


def default(spec: Spec, device: Device) -> Blocks:
    """Returns blocks for a CPU's cache, or for a GPU's many cores."""
    if device.platform == "cpu":
        return DEFAULT
    return LARGER if spec.param("window") == (None, None) else LARGE


FAR = 1 << 30
"""Farther than any key; keeps position arithmetic inside int32."""


@dataclass(frozen=True)
class _Sizes:
    """How the problem is cut: block sizes, and batch entries and heads per step."""

    b: int
    t: int
    s: int
    heads: int
    group: int
    rows: int
    keys: int
    some_b: int
    some_heads: int

    @property
    def blocks(self) -> int:
        return -(-self.t // self.rows)

    @property
    def steps(self) -> int:
        return (self.b // self.some_b) * (self.heads // self.some_heads)


def _divisor(n: int, most: int) -> int:
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


def _even(n: int, most: int) -> int:
    """Returns a block size up to `most` that cuts n into nearly equal blocks."""
    blocks = -(-n // most)
    size = -(-n // blocks)
    return min(n, (size + 7) // 8 * 8)


def _sizes(q: Array, k: Array, blocks: Blocks) -> _Sizes:
    b, t, n, _ = q.shape
    s, heads = k.shape[1:3]
    group = n // heads
    most, lines = blocks.rows, blocks.lines
    rows = _even(t, max(most // 8, min(most, 2 * most // group)))
    keys = _even(s, blocks.keys)
    if t * group < most // 2:
        # Few rows, as in decoding: longer blocks, up to so many keys of all heads.
        width = heads * k.shape[3]
        longest = min(lines // width, most * blocks.keys // (t * group))
        keys = _even(s, max(blocks.keys, longest))
    pairs = max(1, min(blocks.tile // (rows * group), lines // k.shape[3]) // keys)
    some_heads = _divisor(heads, pairs)
    some_b = _divisor(b, pairs // heads) if some_heads == heads else 1
    return _Sizes(b, t, s, heads, group, rows, keys, some_b, some_heads)


@dataclass(frozen=True)
class _Problem:
    """The operands and parameters of one call."""

    arrays: dict[str, Array]
    sizes: _Sizes
    zero: Array
    scale: float
    window: tuple[int | None, int | None]
    shift: int
    softcap: float | None
    empty_rows: str
    out_dtype: Any
    wide: Any

    def full(self, shape: tuple[int, ...], dtype: Any, value: float = 0) -> Array:
        """Returns a constant array that can start a loop's carry."""
        return jnp.full(shape, value, dtype) + self.zero.astype(dtype)

    def cut(self, name: str, at: dict[str, tuple[Any, int]]) -> Array:
        """Returns an operand's slice at (start, size) by axis letter."""
        x = self.arrays[name]
        starts, sizes = self.place(AXES[name], x.shape, at)
        return x if sizes == x.shape else lax.dynamic_slice(x, starts, sizes)

    def place(
        self, axes: str, shape: tuple[int, ...], at: dict[str, tuple[Any, int]]
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Returns the starts and sizes of a slice; axes of size 1 stay whole."""
        whole = [size == 1 or x not in at for x, size in zip(axes, shape, strict=True)]
        starts = [
            jnp.int32(0 if w else at[x][0]) for w, x in zip(whole, axes, strict=True)
        ]
        sizes = [
            size if w else at[x][1]
            for w, x, size in zip(whole, axes, shape, strict=True)
        ]
        return starts, tuple(sizes)

    def factor(self) -> Array | float:
        """Returns what multiplies q kᵀ."""
        if "scale_factor" not in self.arrays:
            return self.scale
        return self.arrays["scale_factor"].astype(self.wide) * self.scale

    def over_steps(self, body: Callable[[_Step, Any], Any], carry: Any) -> Any:
        """Runs ``carry = body(step, carry)`` for each part of batch and heads."""
        return _loop(0, self.sizes.steps, lambda i, c: body(_Step(self, i), c), carry)


def _loop(start: Any, end: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    if isinstance(start, int) and isinstance(end, int):
        if start >= end:
            return carry
        if end == start + 1:
            return body(start, carry)
    start, end = jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)
    return lax.fori_loop(start, end, body, carry)


def _problem(q: Array, k: Array, v: Array, given: dict[str, Any]) -> _Problem:
    params: dict[str, Any] = {
        "scale": 1.0, "window": (None, None), "shift": 0, "softcap": None,
        "empty_rows": "nan", "out_dtype": None,
    }  # fmt: skip
    arrays = {"q": q, "k": k, "v": v}
    sizes = _sizes(q, k, given.pop("config", None) or DEFAULT)
    for name, value in given.items():
        if name in params:
            params[name] = value
        elif value is not None:
            arrays[name] = value
    params["out_dtype"] = jnp.dtype(params["out_dtype"] or q.dtype)
    wide = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    # A zero that varies over the same mesh axes as the operands: inside
    # jax.shard_map a loop's first carry must vary as its last.
    zero = jnp.zeros((), wide)
    for x in arrays.values():
        first = x[(0,) * x.ndim]
        zero = zero + jnp.where(first == first, jnp.zeros((), wide), 0)
    return _Problem(arrays=arrays, sizes=sizes, zero=zero, wide=wide, **params)


class _Step:
    """Some batch entries and heads, with their keys and values ready for dots.

    Arrays for dots have axes c, the batch entries and key heads in one, and r,
    the query heads of a key head and the queries of a block in one: XLA:CPU
    copies the operands of a dot with more axes than [c, r, h] [c, s, h].
    """

    def __init__(self, p: _Problem, number: Any):
        z = p.sizes
        per_b = z.heads // z.some_heads
        n = z.some_heads * z.group
        self.p = p
        self.here = {
            "b": (number // per_b * z.some_b, z.some_b),
            "k": (number % per_b * z.some_heads, z.some_heads),
            "n": (number % per_b * n, n),
        }
        # Turned once for all blocks of rows, or tile by tile if there is but one.
        self.turned = None
        if z.blocks > 1:
            self.turned = {x: self.turn(p.cut(x, self.here)) for x in "kv"}
        self.offset = p.shift
        if "offset" in p.arrays:
            self.offset = self.offset + self.per_batch("offset")

    def turn(self, x: Array) -> Array:
        """Returns [b, s, k, h] as [c, s, h]."""
        x = x.swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    def mean(self) -> Array:
        """Returns the mean of v over all keys, [c, e]."""
        mean = self.p.cut("v", self.here).astype(self.p.wide).mean(1)
        return mean.reshape(-1, mean.shape[-1])

    def columns(self, into: Array) -> Array:
        """Returns where to sum a cotangent of k or v: [c, h, s], or into itself.

        With one block of rows a tile is visited once, and needs no sum.
        """
        if self.turned is None:
            return into
        z = self.p.sizes
        shape = (z.some_b * z.some_heads, into.shape[3], z.s)
        return self.p.full(shape, self.p.wide)

    def add_columns(self, into: Array, columns: Array) -> Array:
        """Returns `into` [b, s, k, h] plus what was summed for this step."""
        if self.turned is None:
            return columns
        z = self.p.sizes
        x = columns.reshape(z.some_b, z.some_heads, -1, z.s).transpose(0, 3, 1, 2)
        starts, sizes = self.p.place("bskh", into.shape, self.here)
        x = x.astype(into.dtype) + lax.dynamic_slice(into, starts, sizes)
        return lax.dynamic_update_slice(into, x, starts)

    def per_batch(self, name: str) -> Array:
        """Returns an operand [b] as int32 [b, 1, 1, 1, 1]."""
        x = self.p.cut(name, self.here).astype(jnp.int32)
        return x[:, None, None, None, None]

    def per_head(self, name: str) -> Array:
        """Returns an operand [n] as [1, k, g, 1, 1]."""
        x = self.p.cut(name, self.here).astype(self.p.wide)
        return self.heads_apart(x, at=0)[None, :, :, None, None]

    def heads_apart(self, x: Array, *, at: int) -> Array:
        """Returns x with its head axis, of size n or 1, split into (k, g)."""
        z = self.p.sizes
        apart = (1, 1) if x.shape[at] == 1 else (z.some_heads, z.group)
        return x.reshape(x.shape[:at] + apart + x.shape[at + 1 :])

    def over_blocks(self, body: Callable[[_Block, Any], Any], carry: Any) -> Any:
        """Runs ``carry = body(block, carry)`` for each block of rows."""
        blocks = self.p.sizes.blocks
        return _loop(0, blocks, lambda i, c: body(_Block(self, i), c), carry)


class _Block:
    """Some rows of a step: a block of queries against all its keys."""

    def __init__(self, step: _Step, i: Any):
        self.step, self.p = step, step.p
        z = self.p.sizes
        self.nominal = i * z.rows
        # The last block is moved up to stay inside: its first rows are done twice.
        self.start = _least(self.nominal, z.t - z.rows)
        self.here = {**step.here, "t": (self.start, z.rows)}
        self.t = self.start + lax.broadcasted_iota(jnp.int32, (z.rows, 1), 0)

    def rows(self, name: str) -> Array:
        """Returns rows of an operand [b, t, n, h] as [c, r, h]."""
        return self.merge(self.p.cut(name, self.here))

    def merge(self, x: Array) -> Array:
        """Returns [b, t, n, h] as [c, r, h]."""
        z = self.p.sizes
        x = self.step.heads_apart(x, at=2).transpose(0, 2, 3, 1, 4)
        return x.reshape(z.some_b * z.some_heads, z.group * z.rows, -1)

    def per_row(self, x: Array) -> Array:
        """Returns [1, k, g, 1, 1] at every row: [c, r]."""
        z = self.p.sizes
        x = jnp.broadcast_to(x[..., 0], (z.some_b, z.some_heads, z.group, z.rows))
        return x.reshape(z.some_b * z.some_heads, z.group * z.rows)

    def each_row(self, x: Array) -> Array:
        """Returns [t] repeated for every head of a group: [r]."""
        return jnp.tile(x, self.p.sizes.group)

    def queries(self) -> Array:
        """Returns q [c, r, h], scaled already if that rounds nothing away."""
        q = self.rows("q")
        if q.dtype == self.p.wide:
            return q * jnp.asarray(self.p.factor(), self.p.wide)
        return q

    def lse(self) -> Array:
        """Returns the rows' log-sum-exp [c, r]."""
        z = self.p.sizes
        lse = self.p.cut("lse", self.here)
        return lse.reshape(z.some_b * z.some_heads, z.group * z.rows)

    def store(self, into: Array, rows: Array, axes: str = "btne") -> Array:
        """Returns `into` with rows [c, r(, e)] written to their place."""
        z = self.p.sizes
        shape = (z.some_b, z.some_heads * z.group, z.rows)
        rows = rows.reshape(shape + rows.shape[2:])
        if axes == "btne":
            rows = rows.swapaxes(1, 2)
        starts, _ = self.p.place(axes, into.shape, self.here)
        return lax.dynamic_update_slice(into, rows.astype(into.dtype), starts)

    def bounds(self) -> tuple[Any, Any, Any]:
        """Returns key blocks: where they start, are seen whole until, and end.

        Between the last two, positions must be compared one by one. With a
        limit on the left that is so from the start.
        """
        p, z, step = self.p, self.p.sizes, self.step
        left, right = p.window
        low, whole, high = 0, z.s, z.s
        offset = step.offset
        least = offset if isinstance(offset, int) else jnp.min(offset)
        most = offset if isinstance(offset, int) else jnp.max(offset)
        if right is not None:
            whole = self.start + least + min(right, FAR) + 1
            high = self.start + z.rows + most + min(right, FAR)
        if left is not None:
            low = self.start + least - min(left, FAR)
        if "prefix" in p.arrays and p.window != (None, None):
            low, high = 0, jnp.maximum(high, jnp.max(step.per_batch("prefix")))
        if "kv_lengths" in p.arrays:
            lengths = step.per_batch("kv_lengths")
            whole = jnp.minimum(whole, jnp.min(lengths))
            high = jnp.minimum(high, jnp.max(lengths))
        low = _clip(low, z.s) // z.keys
        high = (_clip(high, z.s) + z.keys - 1) // z.keys
        whole = _least(_clip(whole, z.s) // z.keys, high)
        return (low, whole, high) if left is None else (low, low, high)

    def over_keys(
        self, body: Callable[[_Tile, Any], Any], carry: Any, every: bool = False
    ) -> Any:
        """Runs ``carry = body(tile, carry)`` for each key block some row sees."""
        low, whole, high = self.bounds()
        if every:
            low, whole, high = 0, 0, -(-self.p.sizes.s // self.p.sizes.keys)

        def run(start: Any, end: Any, edge: bool, carry: Any) -> Any:
            return _loop(start, end, lambda j, c: body(_Tile(self, j, edge), c), carry)

        if low is not whole:
            carry = run(low, whole, False, carry)
        return run(whole, high, True, carry)


def _clip(x: Any, high: int) -> Any:
    return max(0, min(x, high)) if isinstance(x, int) else jnp.clip(x, 0, high)


def _least(x: Any, y: Any) -> Any:
    static = isinstance(x, int) and isinstance(y, int)
    return min(x, y) if static else jnp.minimum(x, y)


class _Tile:
    """One block of rows against one block of keys: scores [c, r, s].

    Masks and biases are [b|1, k|1, g|1, t|1, s|1].
    """

    def __init__(self, block: _Block, j: Any, edge: bool):
        self.block, self.p, self.edge = block, block.p, edge
        z = self.p.sizes
        self.nominal = j * z.keys
        ragged = edge and z.s % z.keys
        self.start = _least(self.nominal, z.s - z.keys) if ragged else self.nominal
        self.here = {**block.here, "s": (self.start, z.keys)}
        self.s = self.start + lax.broadcasted_iota(jnp.int32, (1, z.keys), 1)

    def columns(self, x: Array, axis: int = 1) -> Array:
        """Returns this block of keys of an array."""
        return lax.dynamic_slice_in_dim(x, self.start, self.p.sizes.keys, axis)

    def keys(self) -> Array:
        """Returns this block of k, [c, s, h]."""
        return self.turned("k")

    def values(self) -> Array:
        """Returns this block of v, [c, s, e], wide."""
        return self.turned("v").astype(self.p.wide)

    def turned(self, name: str) -> Array:
        """Returns this block of k or v as [c, s, h]."""
        step = self.block.step
        if step.turned is None:
            return step.turn(self.p.cut(name, self.here))
        return self.columns(step.turned[name])

    def part(self, name: str) -> Array:
        """Returns this tile of an operand [b|1, n|1, t|1, s|1]."""
        return self.block.step.heads_apart(self.p.cut(name, self.here), at=1)

    def add(self, name: str, into: Array, x: Array) -> Array:
        """Returns `into`, shaped as the operand, plus x [c, r, s] on its tile."""
        x = self.apart(x)
        starts, sizes = self.p.place(AXES[name], into.shape, self.here)
        old = lax.dynamic_slice(into, starts, sizes)
        apart = self.block.step.heads_apart(old, at=1).shape
        over = tuple(i for i in range(5) if apart[i] == 1 and x.shape[i] > 1)
        new = x.sum(over, keepdims=True).reshape(sizes)
        return lax.dynamic_update_slice(into, old + new, starts)

    def add_columns(self, into: Array, x: Array) -> Array:
        """Returns `into`, as `_Step.columns` made it, plus x [c, h, s] here."""
        if self.block.step.turned is not None:
            return lax.dynamic_update_slice_in_dim(
                into, self.columns(into, 2) + x, self.start, 2
            )
        starts, sizes = self.p.place("bskh", into.shape, self.here)
        z = self.p.sizes
        x = x.reshape(z.some_b, z.some_heads, -1, z.keys).transpose(0, 3, 1, 2)
        x = x.astype(into.dtype) + lax.dynamic_slice(into, starts, sizes)
        return lax.dynamic_update_slice(into, x, starts)

    def apart(self, x: Array) -> Array:
        """Returns [c, r, s] as [b, k, g, t, s]."""
        z = self.p.sizes
        return x.reshape(z.some_b, z.some_heads, z.group, z.rows, z.keys)

    def relative(self) -> Array:
        """Returns key position less query position, [b|1, 1, 1, t, s]."""
        return self.s - self.block.t - self.block.step.offset

    def fresh(self) -> list[Array]:
        """Returns whether a key is not also in the block before, if it may be."""
        z = self.p.sizes
        return [self.s >= self.nominal] if self.edge and z.s % z.keys else []

    def seen(self) -> list[Array]:
        """Returns the masks, bool, broadcastable to the tile."""
        p, step = self.p, self.block.step
        masks = [self.part("mask")] if "mask" in p.arrays else []
        if "q_segments" in p.arrays:
            q = p.cut("q_segments", self.here)[:, None, None, :, None]
            k = p.cut("kv_segments", self.here)[:, None, None, None, :]
            masks.append(q == k)
        if not self.edge:
            return masks
        left, right = p.window
        window = []
        if left is not None:
            window.append(self.s >= self.block.t + step.offset - min(left, FAR))
        if right is not None:
            window.append(self.s <= self.block.t + step.offset + min(right, FAR))
        if window:
            inside = window[0] & window[-1]
            if "prefix" in p.arrays:
                inside = inside | (self.s < step.per_batch("prefix"))
            masks.append(inside)
        if "kv_lengths" in p.arrays:
            masks.append(self.s < step.per_batch("kv_lengths"))
        return masks + self.fresh()

    def scores(self, queries: Array) -> tuple[Array, Array | None]:
        """Returns the masked scores and, with a soft cap, tanh(scores / cap)."""
        p, step = self.p, self.block.step
        x = jnp.einsum(
            "crh,csh->crs", queries, self.keys(), preferred_element_type=p.wide
        )
        if queries.dtype != p.wide:
            x = x * p.factor()
        bent = None
        if p.softcap is not None:
            bent = jnp.tanh(x / p.softcap)
            x = bent * p.softcap
        flat, x = x.shape, self.apart(x)
        if "bias" in p.arrays:
            x = x + self.part("bias").astype(p.wide)
        if "alibi" in p.arrays:
            x = x + step.per_head("alibi") * self.relative().astype(p.wide)
        for seen in self.seen():
            x = jnp.where(seen, x, -jnp.inf)
        return x.reshape(flat), bent

    def dropout(self) -> Array:
        """Returns the dropout factors at full size, [c, r, s]."""
        z = self.p.sizes
        shape = (z.some_b, z.some_heads, z.group, z.rows, z.keys)
        full = jnp.broadcast_to(self.part("dropout").astype(self.p.wide), shape)
        return full.reshape(-1, z.group * z.rows, z.keys)


def forward(
    q: Array, k: Array, v: Array, *, residuals: bool = False, **given: Any
) -> Any:
    """Returns attention, as `reference` does, in memory that grows with t + s.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        residuals: Whether to return ``(result, (lse,))``, lse [b, n, t] in
            float32 (float64 for float64 inputs), -inf for rows without keys.
        **given: The other operands and parameters of `reference`, and `Blocks` as
            ``config``.
    """
    p = _problem(q, k, v, given)
    z, wide = p.sizes, p.wide
    n, e = q.shape[2], v.shape[3]

    def one_step(step: _Step, carry: Any) -> Any:
        mean = step.mean()[:, None] if p.empty_rows == "mean" else 0
        fill = {"nan": jnp.nan, "mean": mean, "zero": 0}[p.empty_rows]

        def one_block(block: _Block, carry: Any) -> Any:
            out, lse = carry
            top, total, acc = _rows_forward(block, e)
            empty = (total == 0)[..., None]
            result = acc / jnp.where(empty, 1, total[..., None])
            out = block.store(out, jnp.where(empty, fill, result))
            return out, block.store(lse, top + jnp.log(total), "bnt")

        return step.over_blocks(one_block, carry)

    start = p.full((z.b, z.t, n, e), p.out_dtype), p.full((z.b, n, z.t), wide)
    out, lse = p.over_steps(one_step, start)
    if p.empty_rows == "mean" and "dropout" in p.arrays:
        fix = lambda: _dropped_mean(p, out, lse)
        out = lax.cond(jnp.any(lse == -jnp.inf), fix, lambda: out)
    return (out, (lse,)) if residuals else out


def _rows_forward(block: _Block, e: int) -> tuple[Array, Array, Array]:
    """Returns a block's row maxima and sums [c, r], and p v [c, r, e]."""
    p = block.p
    queries = block.queries()

    def body(tile: _Tile, carry: Any) -> Any:
        top, total, acc = carry
        x, _ = tile.scores(queries)
        top, total, weights, fade = _running(x, top, total)
        if "dropout" in p.arrays:
            weights = weights * tile.dropout()
        new = jnp.einsum("crs,cse->cre", weights, tile.values())
        return top, total, acc * fade[..., None] + new

    top, total = _start(block)
    return block.over_keys(body, (top, total, p.full((*top.shape, e), p.wide)))


def _start(block: _Block) -> tuple[Array, Array]:
    """Returns row maxima and sums [c, r] before the first key."""
    p, z = block.p, block.p.sizes
    shape = (z.some_b * z.some_heads, z.group * z.rows)
    # Finite, so that exp(x - top) is 0, not NaN, in a row without keys so far.
    top = p.full(shape, p.wide, float(jnp.finfo(p.wide).min))
    total = p.full(shape, p.wide)
    if "sinks" in p.arrays:
        top = jnp.maximum(top, block.per_row(block.step.per_head("sinks")))
        total = total + 1
    return top, total


def _running(x: Array, top: Array, total: Array) -> tuple[Array, ...]:
    """Returns new maxima, new sums, the tile's weights, and what to fade by."""
    higher = jnp.maximum(top, x.max(-1))
    weights = jnp.exp(x - higher[..., None])
    fade = jnp.exp(top - higher)
    return higher, total * fade + weights.sum(-1), weights, fade


def _dropped_mean(p: _Problem, out: Array, lse: Array) -> Array:
    """Returns out with each empty row set to the mean over s of dropout · v."""
    p = replace(p, arrays={**p.arrays, "out": out, "lse": lse})

    def one_block(block: _Block, out: Array) -> Array:
        def body(tile: _Tile, acc: Array) -> Array:
            kept = _kept(tile)
            return acc + jnp.einsum("crs,cse->cre", kept, tile.values())

        old = block.rows("out")
        acc = p.full(old.shape, p.wide)
        acc = block.over_keys(body, acc, every=True) / p.sizes.s
        new = jnp.where(block.lse()[..., None] == -jnp.inf, acc, old)
        return block.store(out, new)

    return p.over_steps(lambda step, c: step.over_blocks(one_block, c), out)


def _kept(tile: _Tile) -> Array:
    """Returns the dropout factors [c, r, s], 0 for keys that came before."""
    kept = tile.dropout()
    for fresh in tile.fresh():
        kept = jnp.where(fresh, kept, 0)
    return kept


def backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array,
    residuals: tuple[Array, ...],
    cotangent: Array,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangents of every float operand, in memory as `forward`.

    Scores are computed again tile by tile from lse. An operand [t, s], such as
    a full bias, has a cotangent of its own size.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        out: [b, t, n, e], from `forward`.
        residuals: ``(lse,)``, from `forward`.
        cotangent: [b, t, n, e].
        **given: The other operands and parameters of `reference`, and `Blocks` as
            ``config``.
    """
    p = _problem(q, k, v, {**given, "out": out, "lse": residuals[0],
                           "cotangent": cotangent})  # fmt: skip
    wide = p.wide
    names = ("bias", "alibi", "sinks", "dropout", "scale_factor")
    grads = {x: p.full(p.arrays[x].shape, wide) for x in names if x in p.arrays}
    grads |= {x: p.full(p.arrays[x].shape, p.arrays[x].dtype) for x in "qkv"}

    def one_step(step: _Step, grads: dict[str, Array]) -> dict[str, Array]:
        columns = step.columns(grads["k"]), step.columns(grads["v"])
        grads, columns = step.over_blocks(_rows_backward, (grads, columns))
        for name, x in zip("kv", columns, strict=True):
            grads[name] = step.add_columns(grads[name], x)
        return grads

    grads = p.over_steps(one_step, grads)
    grads |= _empty_backward(p, grads)
    return {name: g.astype(p.arrays[name].dtype) for name, g in grads.items()}


def _rows_backward(block: _Block, carry: Any) -> Any:
    """Adds one block of rows to the cotangents; k's and v's are set apart."""
    p, z, step, wide = block.p, block.p.sizes, block.step, block.p.wide
    lse = block.lse()
    empty = lse == -jnp.inf
    top, rest = _lse_parts(block, lse)
    again = block.each_row(block.t[:, 0]) < block.nominal
    if z.t % z.rows:
        empty = empty | again  # done by the block before
    top = jnp.where(empty, jnp.inf, top)[..., None]
    rest, empty = rest[..., None], empty[..., None]
    up = jnp.where(empty, 0, block.rows("cotangent").astype(wide))
    delta = up * jnp.where(empty, 0, block.rows("out").astype(wide))
    delta = delta.sum(-1, keepdims=True)
    queries, plain = block.queries(), block.rows("q").astype(wide)
    # Transposed once here, since a dot over rows of a tile is slow on CPU.
    up_t = up.swapaxes(1, 2)
    queries_t = (plain * p.factor()).swapaxes(1, 2)

    def body(tile: _Tile, carry: Any) -> Any:
        dq, dk, dv, grads = carry
        x, bent = tile.scores(queries)
        weights = jnp.exp(x - top - rest)
        d = jnp.einsum("cre,cse->crs", up, tile.values())
        used = weights
        if "dropout" in p.arrays:
            kept = tile.dropout()
            used = weights * kept
            grads = {
                **grads,
                "dropout": tile.add("dropout", grads["dropout"], weights * d),
            }
            d = d * kept
        dv = tile.add_columns(dv, jnp.einsum("cer,crs->ces", up_t, used))
        d = weights * (d - delta)
        if "bias" in p.arrays:
            grads = {**grads, "bias": tile.add("bias", grads["bias"], d)}
        if "alibi" in p.arrays:
            slope = (tile.apart(d) * tile.relative().astype(wide)).sum((0, 3, 4))
            grads = {**grads, "alibi": _add_heads(step, grads["alibi"], slope)}
        if bent is not None:
            d = d * (1 - bent * bent)
        keys = tile.keys().astype(wide)
        dq = dq + jnp.einsum("crs,csh->crh", d, keys)
        dk = tile.add_columns(dk, jnp.einsum("chr,crs->chs", queries_t, d))
        return dq, dk, dv, grads

    grads, (dk, dv) = carry
    inner = {x: grads[x] for x in ("bias", "alibi", "dropout") if x in grads}
    start = p.full(queries.shape, wide), dk, dv, inner
    dq, dk, dv, inner = block.over_keys(body, start)
    grads = {**grads, **inner}
    if "scale_factor" in p.arrays:
        grads["scale_factor"] = grads["scale_factor"] + (dq * plain).sum() * p.scale
    if "sinks" in p.arrays:
        sinks = block.per_row(step.per_head("sinks"))[..., None]
        share = jnp.exp(sinks - top - rest) * delta
        share = share.reshape(z.some_b, z.some_heads, z.group, z.rows).sum((0, 3))
        grads["sinks"] = _add_heads(step, grads["sinks"], -share)
    dq = dq * p.factor()
    if z.t % z.rows:
        starts, sizes = p.place("btnh", grads["q"].shape, block.here)
        old = block.merge(lax.dynamic_slice(grads["q"], starts, sizes))
        dq = jnp.where(again[:, None], old.astype(wide), dq)
    grads["q"] = block.store(grads["q"], dq)
    return grads, (dk, dv)


def _lse_parts(block: _Block, lse: Array) -> tuple[Array, Array]:
    """Returns lse [c, r] as a sum of two terms, the second small.

    A bias of -1e9 on a whole row takes the digits of log(sum) out of their sum
    with the maximum. Such rows get both terms by going over the keys again.
    """
    p, zero = block.p, jnp.zeros_like(lse)
    if "bias" not in p.arrays:
        return lse, zero

    def again() -> tuple[Array, Array]:
        queries = block.queries()
        top, total = _start(block)

        def body(tile: _Tile, carry: Any) -> Any:
            return _running(tile.scores(queries)[0], *carry)[:2]

        top, total = block.over_keys(body, (top, total))
        return top, jnp.where(total > 0, jnp.log(total), 0)

    large = jnp.isfinite(lse) & (jnp.abs(lse) > 1000)
    return lax.cond(jnp.any(large), again, lambda: (lse, zero))


def _add_heads(step: _Step, into: Array, x: Array) -> Array:
    """Returns `into` [n] plus x [k, g] at this step's heads."""
    (start, size) = step.here["n"]
    old = lax.dynamic_slice_in_dim(into, start, size)
    return lax.dynamic_update_slice_in_dim(into, old + x.reshape(size), start, 0)


def _empty_backward(p: _Problem, grads: dict[str, Array]) -> dict[str, Array]:
    """Returns the cotangents that rows without keys add to, where they do."""
    z, wide = p.sizes, p.wide
    empty = p.arrays["lse"] == -jnp.inf
    if p.empty_rows == "zero" or "sinks" in p.arrays or not _may_be_empty(p):
        return {}
    dv = grads["v"]
    if p.empty_rows == "nan":
        bad = empty.reshape(z.b, z.heads, -1).any(-1)[:, None, :, None]
        return {"v": jnp.where(bad, jnp.nan, dv)}
    if "dropout" in p.arrays:
        names = {"v": dv, "dropout": grads["dropout"]}
        return lax.cond(
            jnp.any(empty), lambda: _dropped_mean_backward(p, names), lambda: names
        )
    up = p.arrays["cotangent"].astype(wide)
    up = jnp.where(empty.swapaxes(1, 2)[..., None], up, 0).sum(1) / z.s
    up = up.reshape(z.b, 1, z.heads, z.group, -1).sum(3)
    return {"v": (dv.astype(wide) + up).astype(dv.dtype)}


def _may_be_empty(p: _Problem) -> bool:
    masks = {"mask", "q_segments", "kv_lengths", "bias"}
    return p.window != (None, None) or bool(masks & p.arrays.keys())


def _dropped_mean_backward(p: _Problem, grads: dict[str, Array]) -> dict[str, Array]:
    """Returns grads of v and dropout plus those through `_dropped_mean`."""
    z, wide = p.sizes, p.wide

    def one_block(block: _Block, carry: Any) -> Any:
        mine = block.lse() == -jnp.inf
        if z.t % z.rows:
            mine = mine & (block.each_row(block.t[:, 0]) >= block.nominal)
        up = jnp.where(mine[..., None], block.rows("cotangent").astype(wide), 0) / z.s

        def body(tile: _Tile, carry: Any) -> Any:
            dv, dropout = carry
            kept = _kept(tile)
            dv = tile.add_columns(dv, jnp.einsum("cre,crs->ces", up, kept))
            d = jnp.einsum("cre,cse->crs", up, tile.values())
            for fresh in tile.fresh():
                d = jnp.where(fresh, d, 0)
            return dv, tile.add("dropout", dropout, d)

        return block.over_keys(body, carry, every=True)

    def one_step(step: _Step, grads: dict[str, Array]) -> dict[str, Array]:
        dv = step.columns(grads["v"])
        dv, dropout = step.over_blocks(one_block, (dv, grads["dropout"]))
        dv = step.add_columns(grads["v"], dv)
        return {"v": dv, "dropout": dropout}

    return p.over_steps(one_step, grads)


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` takes this use: known, non-empty sizes, floats."""
    if spec.symbolic:
        return no("symbolic", "sizes must be known, but some are symbolic")
    checks = [
        no("empty", f"{name} has shape {shape}, and an axis of size 0")
        for name, shape in spec.shapes
        if 0 in shape
    ]
    for name in ("q", "k", "v"):
        if not jnp.issubdtype(spec.dtype(name), jnp.floating):
            checks.append(no("dtype", f"{name} is {spec.dtype(name)}, not a float"))
    return all_of(YES, *checks)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns whether `forward` is likely to beat the program as written.

    On an H200 (``tests/bench/results/tuning_h200.json``) it takes 0.8 of XLA's time in
    float32, and a third of its memory under a causal mask. In 16 bits XLA is faster
    where a program keeps its scores in 16 bits, so that there it is chosen only where
    the scores would take 32 GiB. cuDNN, where it may be used, takes a tenth.

    The measure is what the program holds in f32: its scores, and its turned
    copies of k and v. Measured on 2 cores of an AMD EPYC (Zen 4), f32, jax
    0.10.2 and 0.12.0, original time over ours, forward | with gradient, under
    changing load; scores MiB + k and v MiB in brackets:

    causal b1 t128 n8 h64 [0.5 + 0.5]      1.0 | 1.0
    causal b1 t256 n8 h64 [2 + 1]          1.0 | 1.2
    full   b32 t64 n8 h64 [4 + 8]          0.8 to 1.2 | 0.8
    full   b16 t128 n8 h64 [8 + 8]         0.8 to 1.4 | 1.4
    causal b1 t512 n4 h64 [4 + 1]          2.0 | 1.4
    causal b1 t512 n8 h64 [8 + 2]          1.4 | 2.4
    causal b1 t1024 n8 h64 [32 + 4]        2.3 | 3.2
    causal b1 t2048 n8 h64 [128 + 8]       4.2 | 6.9
    full   b1 t2048 n8 h64 [128 + 8]       5.1 | 3.2
    full   b16 t256 n8 h32 [32 + 8]        0.9 to 4.9 | 1.6
    t1 s1024 b4 n8 h64 [0.1 + 16]          0.8 to 1.2 | 0.7
    t1 s2048 b4 n8 h64 [0.3 + 32]          2.0 to 3.0 | 1.3
    t1 s32768 b4 n8 h64 [4 + 512]          4.4 | 1.4
    """
    b, t, n, h = spec.shape("q")
    s, heads, e = spec.shape("k")[1], spec.shape("k")[2], spec.shape("v")[3]
    scores, lines = 4 * b * n * t * s, 4 * b * s * heads * (h + e)
    mib = 1 << 20
    if platform != "cpu":
        return _pays_on_gpu(spec, platform, scores)
    if (scores >= 4 * mib and min(t, s) >= 256) or scores + lines >= 24 * mib:
        return YES
    text = (
        f"scores of {scores / mib:.1f} MiB and keys and values of"
        f" {lines / mib:.1f} MiB are so small that XLA is as fast"
    )
    return no("small", text)


def _pays_on_gpu(spec: Spec, platform: str, scores: int) -> Verdict:
    if platform != "cuda":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if spec.symbolic or scores >= 32 << 30:
        return no("symbolic", "sizes must be known") if spec.symbolic else YES
    if scores < 128 << 20:
        return no("small", f"scores of {scores >> 20} MiB, for which XLA is as fast")
    if spec.has("mask") and spec.shape("mask")[2] > 1:
        return no("mask", "under a table of masks XLA is faster on cuda")
    if jnp.dtype(spec.dtype("q")).itemsize > 2:
        return YES
    return no("platform", "XLA's dense attention in 16 bits is faster on cuda")
