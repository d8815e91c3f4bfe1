"""Paged attention on a TPU: each step reads some pages of one sequence in place.

The queries of all heads are rows of one block. The keys of all heads on the pages of a
step are its columns, as they lie in memory: each is read once. A row sees the columns
of its own head; the others' scores take less time than reading the keys. If a step
holds NaN or infinity, each head is weighed alone, without the columns that its sequence
does not see, which may belong to another sequence. A running softmax goes over the
steps of a sequence, and sequences without a page left take no step.
Sources: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023); Dao et al., "FlashAttention" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.attention.empty_rows import AVERAGED, NAN
from rewriter.kernels.attention.pages import AXES, numbered
from rewriter.kernels.attention.tpu.forward_kernel import (
    LEAST,
    across,
    each_head,
    is_broken,
)
from rewriter.kernels.attention.tpu.schedule import divided
from rewriter.kernels.attention.tpu.scores import LOG2E
from rewriter.kernels.attention.tpu_pages.config import Chunk, Sizes, vmem
from rewriter.kernels.attention.tpu_pages.schedule import Seen, Steps, seen, steps
from rewriter.kernels.attention.visibility import Visibility
from rewriter.kernels.shared import pallas_tpu
from rewriter.kernels.shared.pallas_tpu import LANES

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Problem:
    """One use of paged attention.

    Attributes:
        t: Queries of a sequence and head.
        s: Keys of a sequence's pages.
        n: Query heads.
        heads: Key heads.
        size: Keys of a page.
        heads_axis: The pools' axis of heads.
        scale: Multiplies scores.
        softcap: The largest score, or None.
        window: How far a query sees to the left and right.
        empty_rows: The result of a row without keys.
    """

    t: int
    s: int
    n: int
    heads: int
    size: int
    heads_axis: int
    scale: float
    softcap: float | None
    window: tuple[int | None, int | None]
    empty_rows: str

    @property
    def order(self) -> str:
        """How heads k and positions z of a page lie."""
        return ("kz", "kz", "zk")[self.heads_axis]

    def columns(self, pages: int) -> dict[str, np.ndarray]:
        """Of a chunk's columns position and head, of rows head and position."""
        order, axes = self.order, {"k": self.heads, "z": self.size}
        at = np.indices([pages, *(axes[x] for x in order)], np.int32)
        at = at.reshape(3, 1, -1)
        place, head = at[1 + order.index("z")], at[1 + order.index("k")]
        row = np.arange(self.n * self.t, dtype=np.int32)[:, None]
        return {
            "places": at[0] * self.size + place,
            "heads": head,
            "row_heads": row // self.t // (self.n // self.heads),
            "row_places": row % self.t,
        }


def forward(
    *,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    table: Array,
    config: Chunk,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    sinks: Array | None = None,
    heads_axis: int = 2,
    wraps: bool = True,
    fills: bool = False,
    promises: bool = False,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    softcap: float | None = None,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
    **rest: Any,
) -> Array:
    """Returns paged attention [b, t, n, e].

    Parameters of attention are as in its `reference`, those of pages as in
    `rewriter.kernels.attention.paged_form.attended`.

    Args:
        q: [b, t, n, h].
        k_pages: A pool of pages, with axes by ``heads_axis``.
        v_pages: The same for values.
        table: int [b|1, p].
        config: The number of pages that a step reads.
        kv_lengths: int [b|1].
        offset: int [b|1].
        sinks: float [n].
        **rest: Parameters that supported uses leave at their defaults.
    """
    del promises  # which has to do with gradients alone
    del rest
    b, t, n, h = q.shape
    axes = AXES[heads_axis]
    pool = dict(zip(axes, k_pages.shape, strict=True))
    table = jnp.broadcast_to(table, (b, table.shape[1]))
    s = table.shape[1] * pool["z"]
    p = Problem(
        t, s, n, pool["k"], pool["z"], heads_axis, scale, softcap, window,
        "zero" if sinks is not None else empty_rows,
    )  # fmt: skip
    every = p.empty_rows in AVERAGED
    visible = seen(b, t, s, kv_lengths, offset, window, shift, every)
    pages, beyond = numbered(table, pool["p"], wraps)
    listed = steps(pages, visible.first // p.size, visible.last // p.size, config.pages)
    rows = q.swapaxes(1, 2).reshape(b, n * t, h)
    extra = {} if sinks is None else {"sinks": _per_row(sinks, t)}
    dtype = jnp.dtype(out_dtype or q.dtype)
    out = _call(p, config, visible, listed, rows, (k_pages, v_pages), extra, dtype)
    out = out.reshape(b, n, t, -1).swapaxes(1, 2)
    if fills:
        out = jnp.where(beyond[:, None, None, None], jnp.nan, out)
    return out


def _per_row(x: Array, t: int) -> Array:
    return jnp.repeat(x.astype(jnp.float32), t)[:, None]


def _call(
    p: Problem,
    config: Chunk,
    visible: Seen,
    listed: Steps,
    q: Array,
    pools: tuple[Array, Array],
    extra: Mapping[str, Array],
    dtype: Any,
) -> Array:
    """The result [b, rows, e] of queries [b, rows, h]."""
    (b, rows, h), e, many = q.shape, pools[1].shape[3], config.pages
    chunks = listed.words.shape[0] // b
    scalars = {
        "words": listed.words, "pages": listed.pages, "begin": listed.begin,
        "end": listed.end, "limit": visible.limit, "start": visible.start,
        "first": visible.first, "last": visible.last,
    }  # fmt: skip

    def sequence(step: Any, words: Any, *_: Any) -> tuple[Any, ...]:
        return divided(words[step], chunks)[0], 0, 0

    def constant(step: Any, *_: Any) -> tuple[Any, ...]:
        return 0, 0

    given = {"q": (q, pl.BlockSpec((1, rows, h), sequence))}
    for name, x in {**p.columns(many), **extra}.items():
        given[name] = jnp.asarray(x), pl.BlockSpec(x.shape, constant)
    for name, pool in zip("kv", pools, strict=True):
        array, shape = _pages(p, pool)
        for i in range(many):
            given[f"{name}{i}"] = array, pl.BlockSpec(shape, _page(p, many, i))
    scratch = {
        "top": pallas_tpu.VMEM((rows, LANES), jnp.float32),
        "total": pallas_tpu.VMEM((rows, LANES), jnp.float32),
        "sum": pallas_tpu.VMEM((rows, e), jnp.float32),
    }
    names = [*scalars, *given, "out", *scratch]

    def body(*refs: Any) -> None:
        _Step(p, many, chunks, dict(zip(names, refs, strict=True))).run()

    itemsize = max(x.dtype.itemsize for x in pools)
    columns = p.size * p.heads
    use = Sizes(b, rows, chunks * many, columns, h, e, itemsize)
    call = pallas_tpu.call(
        body,
        "paged_attention",
        pallas_tpu.Grid((listed.count,), 0),
        [block for _, block in given.values()],
        [pl.BlockSpec((1, rows, e), sequence)],
        [pallas_tpu.shaped((b, rows, e), dtype, q)],
        list(scratch.values()),
        prefetched=len(scalars),
        vmem=vmem(config, use),
    )
    return call(*scalars.values(), *(x for x, _ in given.values()))[0]


def _pages(p: Problem, pool: Array) -> tuple[Array, tuple[int, ...]]:
    """A pool in the kernel's shape, and the shape of one page."""
    width = pool.shape[3]
    if p.heads_axis == 0:
        return pool, (p.heads, 1, p.size, width)
    columns = p.heads * p.size
    return pool.reshape(pool.shape[0], columns, width), (1, columns, width)


def _page(p: Problem, many: int, i: int) -> Any:
    """The block of one page of a step's chunk."""

    def at(step: Any, _: Any, pages: Any, *__: Any) -> tuple[Any, ...]:
        page = pages[step * many + i]
        return (0, page, 0, 0) if p.heads_axis == 0 else (page, 0, 0)

    return at


@dataclass(frozen=True)
class _Step:
    """One step of the kernel.

    Attributes:
        p: The use.
        many: Pages of a step.
        chunks: Chunks of a sequence, at most.
        refs: All references, by name.
    """

    p: Problem
    many: int
    chunks: int
    refs: Mapping[str, Any]

    def run(self) -> None:
        x = self.refs
        row, chunk = divided(x["words"][pl.program_id(0)], self.chunks)
        pl.when(chunk == x["begin"][row])(self.start)
        self.add(self.scores(row, chunk), row, chunk)
        pl.when(chunk == x["end"][row])(self.finish)

    def start(self) -> None:
        """Begins a sequence."""
        x, shape = self.refs, self.refs["top"].shape
        x["sum"][...] = jnp.zeros_like(x["sum"])
        if "sinks" in x:
            sink = x["sinks"][...] * LOG2E
            top = jnp.maximum(sink, LEAST)
            x["top"][...] = jnp.broadcast_to(top, shape)
            x["total"][...] = jnp.broadcast_to(jnp.exp2(sink - top), shape)
        else:
            x["top"][...] = jnp.full(shape, LEAST)
            x["total"][...] = jnp.zeros(shape)

    def scores(self, row: Any, chunk: Any) -> Array:
        """Scores of a chunk in units of log2(e): [rows, columns]."""
        p, x = self.p, self.refs
        product = pallas_tpu.dot(x["q"][0], self.joined("k"), (1, 1), "highest")
        scores = product * p.scale
        if p.softcap is not None:
            scores = p.softcap * jnp.tanh(scores / p.softcap)
        scores = scores * LOG2E
        place = x["places"][...] + chunk * (self.many * p.size)
        kept = place < x["limit"][row]
        view = Visibility(p.t, p.s, *p.window)
        if view.is_windowed:
            at = x["row_places"][...] + x["start"][row]
            kept = jnp.broadcast_to(kept, scores.shape)
            if view.left is not None:
                kept = kept & (place >= view.first(at))
            if view.right is not None:
                kept = kept & (place <= view.last(at))
        own = x["heads"][...] == x["row_heads"][...]
        if p.empty_rows not in AVERAGED:
            return jnp.where(own & kept, scores, -jnp.inf)
        own = own & (place < p.s)
        return jnp.where(own, jnp.where(kept, scores, LEAST), -jnp.inf)

    def joined(self, name: str) -> Array:
        """The keys or values of all pages of a chunk, [columns, h]."""
        parts = []
        for i in range(self.many):
            page = self.refs[f"{name}{i}"]
            x = page[:, 0] if self.p.heads_axis == 0 else page[0]
            if x.ndim == 3:
                x = x.reshape(-1, x.shape[-1])
            parts.append(x)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)

    def add(self, scores: Array, row: Any, chunk: Any) -> None:
        """Adds the values of a chunk with these scores."""
        p, x = self.p, self.refs
        before = x["top"][...]
        top = jnp.maximum(before, scores.max(1, keepdims=True))
        weights = jnp.exp2(scores - top[:, :1])
        fade = jnp.exp2(before - top)
        x["top"][...] = top
        x["total"][...] = x["total"][...] * fade + weights.sum(1, keepdims=True)
        values = self.joined("v")
        weights = weights.astype(values.dtype)
        added = pallas_tpu.dot(weights, values, (1, 0), "highest")
        kept = x["sum"][...] * across(fade, added.shape[1])
        x["sum"][...] = kept + added

        @pl.when(is_broken(added))
        def by_head() -> None:
            place, head = self.rows_of(values.shape)
            place = place + chunk * (self.many * p.size)
            seen = (place >= x["first"][row]) & (place <= x["last"][row])
            own = jnp.where(seen, values.astype(jnp.float32), 0.0)
            heads = head, x["row_heads"][...], p.heads
            more = each_head(weights, own.astype(values.dtype), *heads, "highest")
            x["sum"][...] = kept + more

    def rows_of(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Of a chunk's values the position in it and the head, int32 [columns, e]."""
        p = self.p
        at = lax.broadcasted_iota(jnp.int32, shape, 0)
        columns, inner = p.heads * p.size, {"k": p.heads, "z": p.size}[p.order[1]]
        page, at = lax.div(at, jnp.int32(columns)), lax.rem(at, jnp.int32(columns))
        found = lax.div(at, jnp.int32(inner)), lax.rem(at, jnp.int32(inner))
        place = page * p.size + found[p.order.index("z")]
        return place, found[p.order.index("k")]

    def finish(self) -> None:
        """Writes the result of a sequence."""
        x = self.refs
        total = across(x["total"][...], x["sum"].shape[1])
        out = x["sum"][...] / jnp.where(total == 0.0, 1.0, total)
        fill = jnp.nan if self.p.empty_rows in NAN else 0.0
        out = jnp.where(total == 0.0, fill, out)
        x["out"][0] = out.astype(x["out"].dtype)
