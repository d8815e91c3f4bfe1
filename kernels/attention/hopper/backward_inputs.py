"""Inputs of the gradient kernels: numbers of rows, and both sides of the scores.

For dq rows are queries and columns keys. For dk and dv they are swapped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.empty_rows import ZERO
from rewriter.kernels.attention.hopper import block_masks
from rewriter.kernels.attention.hopper.averaged_rows import delta_of
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.backward_problem import Problem
from rewriter.kernels.attention.hopper.dtypes import is_halved
from rewriter.kernels.attention.hopper.forward_kernel import row_sums
from rewriter.kernels.attention.hopper.pallas import LOG2E
from rewriter.kernels.attention.hopper.terms import Terms, terms_of
from rewriter.kernels.attention.hopper.transposed_terms import transposed
from rewriter.kernels.attention.hopper.widths import filled_backward
from rewriter.kernels.shared.halves import split
from rewriter.kernels.shared.hopper import PROCESSORS

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper.block_masks import Masks
    from rewriter.kernels.attention.hopper.use import Use


@dataclass(frozen=True)
class Side:
    """The inputs of a kernel whose rows are queries, or keys.

    Attributes:
        problem: What is known while tracing.
        arrays: The kernel's arrays by name.
        masks: What hides columns from rows, as these scores lie.
        reaches: Whether rows may weigh hidden keys, bool [1]; None if they never do.
    """

    problem: Problem
    arrays: dict[str, Any]
    masks: Masks
    reaches: Array | None = None


@dataclass(frozen=True)
class Inputs:
    """The inputs of all kernels.

    Attributes:
        of_keys: For dk and dv.
        of_queries: For dq.
        empty: Which rows see no key, bool [b, n, t].
        delta: The sum of the result times its cotangent, float32 [b, n, t].
    """

    of_keys: Side
    of_queries: Side
    empty: Array
    delta: Array


def inputs_of(
    use: Use, out: Array, lse: Array, cotangent: Array, config: BackwardTiles
) -> Inputs:
    """Returns the inputs of the kernels; arguments are as in `backward`."""
    numbers, up = use.numbers(), cotangent.astype(use.q.dtype)
    each = up.astype(jnp.float32) * out.astype(jnp.float32)
    delta = each.sum(-1).swapaxes(1, 2)  # one fused reduction, where no dot is one
    hidden = use.hidden()
    terms, extra = terms_of(
        *use.lengths, hidden=hidden, fill_passes=use.fill_passes, **use.extra
    )
    extra.pop("sinks", None)
    empty = lse == -jnp.inf
    if use.empty_rows in ZERO:  # cotangents of padding are dropped
        up = jnp.where(empty.swapaxes(1, 2)[..., None], 0, up)
    rows = _of_rows(use, terms, lse, delta, empty, config)
    turned, extra_turned = transposed(terms, extra)
    if turned.whole_rows:  # of whole tiles, as `OfKeys.shown` reads it
        line = extra_turned["row_terms"]
        extra_turned["row_terms"] = _padded(line, config, 0.0)
    of_keys, of_queries = _problems(use, terms, turned, config)
    wide = use.tensors() | {"g": up}
    if is_halved(use.q.dtype):
        wide = {name: split(x) for name, x in wide.items()}
    named = wide | rows | numbers
    if use.fill is not None:
        named["fills"] = hidden.reshape(1)
    masks = use.masks
    return Inputs(
        with_reach(Side(of_keys, named | extra_turned, masks.transposed, use.reaches)),
        with_reach(Side(of_queries, named | extra, masks, use.reaches)),
        empty,
        delta,
    )


def _of_rows(
    use: Use,
    terms: Terms,
    lse: Array,
    delta: Array,
    empty: Array,
    config: BackwardTiles,
) -> dict[str, Array]:
    """The numbers of queries that kernels read, as [b, n, whole blocks of t]."""
    unit, rest = (1.0 if terms.natural else LOG2E), None
    if terms.unbounded:
        lse, rest = _split(use, lse)
    rows = {
        "lse": _padded(jnp.where(empty, jnp.inf, lse * unit), config, LARGEST),
        "delta": _padded(delta_of(use, empty, delta), config, 0.0),
    }
    if rest is not None:
        rows["rest"] = _padded(rest * LOG2E, config, 0.0)
    return rows


def _problems(
    use: Use, terms: Terms, turned: Terms, config: BackwardTiles
) -> tuple[Problem, Problem]:
    """The problems of dk and dv, and of dq."""
    (b, _, n, _), heads = use.q.shape, use.k.shape[2]
    h, e = (filled_backward(x) for x in use.widths)
    common = {
        "b": b, "h": h, "e": e, "scale": use.scale, "softcap": use.softcap,
        "by_rows": use.by_rows((h, e)), "packed": use.heads,
        "programs": config.programs, "stages": config.stages,
        "warpgroups": config.warpgroups, "claimed": config.claimed,
        "halves": is_halved(use.q.dtype), "ahead": config.ahead,
        "chosen": None if use.fill_passes else use.fill,
    }  # fmt: skip
    parts = key_parts(use, config)
    of_keys = Problem(
        heads=heads * parts, group=n // heads // parts, shared=parts,
        block=config.queries,
        mask=use.seen_by(terms.hides), terms=turned, values=config.stages,
        divided=config.divided, **common,
    )  # fmt: skip
    of_queries = Problem(
        heads=n, group=1, shared=n // heads, block=config.keys,
        mask=use.visible(terms.hides), terms=terms,
        values=config.v_stages or config.stages, **common,
    )  # fmt: skip
    return of_keys, of_queries


def key_parts(use: Use, config: BackwardTiles) -> int:
    """Returns the parts of a key head's query heads that dk and dv are computed for.

    Each part has tiles of its own, and XLA adds up their results. There are more than
    one where tiles are fewer than the device has processors: with 882 keys of 4 heads
    28 tiles of 132.
    """
    (b, _, n, _), (_, s, heads, _) = use.q.shape, use.k.shape
    if config.fused:
        return 1
    rows = 64 if config.divided else 64 * config.warpgroups
    tiles, wanted = b * heads * -(-s // rows), BUSY * (config.programs or PROCESSORS)
    group = n // heads
    able = (x for x in range(1, group) if group % x == 0 and tiles * x >= wanted)
    return next(able, group)


BUSY = 1.5
"""Tiles of keys for each processor, at least, where heads can be divided."""


def with_reach(side: Side) -> Side:
    """Returns the inputs with a table of blocks that masks and segments let be seen."""
    p = side.problem
    reach = block_masks.table(
        p.b, p.mask.t, p.mask.s, p.rows, p.block, side.masks, p.group
    )
    if reach is None:
        return side
    reach = block_masks.every(reach, -(-p.mask.s // p.block), side.reaches)
    return replace(side, arrays=side.arrays | {"reach": reach})


def without_reach(side: Side) -> dict[str, Any]:
    """Returns the arrays without that table, which is one of the problem's blocks."""
    return {name: x for name, x in side.arrays.items() if name != "reach"}


LARGE = 1000.0
"""Larger log-sum-exps do not show the number of keys in a row: that of 4096 scores of
-1e9 is -1e9 itself in float32."""


LARGEST = float(jnp.finfo(jnp.float32).max)
"""For rows of padding: it makes weights 0, and is not infinite as in rows without
keys."""


def _split(use: Use, lse: Array) -> tuple[Array, Array]:
    """Returns log-sum-exps as two terms; the second one is small.

    A bias of -1e9 for a whole row absorbs the digits of the sum. The maxima and sums
    are then computed again, which costs another forward.
    """
    large = jnp.isfinite(lse) & (jnp.abs(lse) > LARGE)
    return lax.cond(
        jnp.any(large), lambda: row_sums(use), lambda: (lse, jnp.zeros_like(lse))
    )


def _padded(x: Array, config: BackwardTiles, value: float) -> Array:
    """Returns [b, n, t] with whole blocks and tiles of t."""
    t = x.shape[2]
    most = max(-(-t // m) * m for m in (config.queries, 64 * config.warpgroups))
    return jnp.pad(x, ((0, 0), (0, 0), (0, most - t)), constant_values=value)
