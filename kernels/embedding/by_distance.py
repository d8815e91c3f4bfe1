"""Sums of rows whose ids depend on the distance of two positions alone.

    rows [t, s, d]   ids[i, j] = f(j - i)   →   sums along t + s - 1 diagonals, by f

So do gradients of the buckets of relative positions. The rows of each distance are
added up first, in one pass over them. Then there are as few rows as distances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.embedding import forms, limits, xla
from rewriter.kernels.embedding.consecutive_ids import profitable
from rewriter.kernels.embedding.estimate import estimate
from rewriter.kernels.shared.diagonals import along_diagonals
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Speed
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether the ids of a use are proved to be those of distances."""
    if not spec.has("ids") or not spec.param("across"):
        text = "the ids are not proved to depend on a distance alone"
        return no("distances", text)
    return limits.rows_to_add(spec)


def forward(
    *, rows: jax.Array, ids: jax.Array, across: int, residuals: bool = False,
    **given: Any,
) -> Any:  # fmt: skip
    """Returns the sums, as `reference` does; with `residuals`, that nothing is saved.

    Devices may have some of the rows each. Then a device adds up by id, unless its
    rows are whole ones of the square.
    """
    dtype = rows.dtype
    if across:
        rows, ids = of_distances(rows, ids, across)
    out = xla.BY_ID.forward(rows=rows, ids=ids, **given).astype(dtype)
    return (out, ()) if residuals else out


def of_distances(
    rows: jax.Array, ids: jax.Array, across: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the rows of each distance, in float32 at least, and its id.

    Args:
        rows: [..., m, d].
        ids: [..., m].
        across: As in `reference`.
    """
    *lead, m, d = rows.shape
    square = rows.reshape(*lead, m // across, across, d)
    sums = along_diagonals(jnp.moveaxis(square, -1, -3))
    ids = ids.reshape(*lead, m // across, across)
    ids = jnp.concatenate([ids[..., :0:-1, 0], ids[..., 0, :]], axis=-1)
    return jnp.moveaxis(sums, -2, -1), ids


KERNEL = XLA.kernel(
    "embedding", forward, forms.backward, supports,
    Speed(profitable, estimate=estimate),
    name="by_distance", saves=None, deterministic=xla.deterministic,
)  # fmt: skip
