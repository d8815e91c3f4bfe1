"""How a loss is split over devices: its rows, and its classes.

Devices that have some of the classes each reduce them to a few numbers of each row. The
loss is made of these: collectives move numbers of rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.cross_entropy.rows import (
    Loss,
    Sum,
    finite,
    labels_of_rows,
    shares_of_rows,
    signed,
)
from rewriter.ops.op import Part, Sharding

OF_ALL = (
    "z_loss", "outside", "of_log_probabilities", "whole_slopes", "mixed", "fill",
    "nan_at", "out_dtype",
)  # fmt: skip
"""Parameters that have to do with all classes alone."""


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns that each device may have some of the rows, and some of the classes."""
    del params
    return Sharding(
        frozenset({"..."}),
        merges=frozenset({"v"}),
        local=_local,
        finish=_finish,
        unseen=frozenset({"first"}),
    )


def _local(
    operands: Mapping[str, jax.Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, jax.Array], Mapping[str, Any]]:
    """Asks for what is reduced over some of the classes, and says which these are."""
    if "v" not in parts:
        return operands, params
    part, size = parts["v"], _classes(operands)
    labels = {n: operands[n] for n in ("labels", "other") if n in operands}
    if params["outside"] in ("clip", "promise"):
        most = size * part.count - 1
        labels = {n: jnp.clip(signed(a), 0, most) for n, a in labels.items()}
    first = jnp.asarray(part.index, jnp.int32) * jnp.int32(size)
    own = {k: v for k, v in params.items() if k not in OF_ALL}
    own |= {"reduced": True, "outside": "zero"}
    return {**operands, **labels, "first": first[None]}, own


def _classes(operands: Mapping[str, jax.Array]) -> int:
    """The number of classes of a part."""
    return (operands["w"] if "w" in operands else operands["logits"]).shape[-1]


def _finish(
    out: jax.Array,
    operands: Mapping[str, jax.Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> jax.Array:
    """The losses, of the numbers that each device has reduced its classes to."""
    if "v" not in parts:
        return out
    part, size, smoothing = parts["v"], _classes(operands), params["label_smoothing"]
    how = {k: params[k] for k in (*OF_ALL[:-1], "label_smoothing", "used")}
    other, share = operands.get("other"), operands.get("share")
    loss = Loss(size * part.count, **how).of(shares_of_rows(share, out.dtype))
    labels = loss.labels(labels_of_rows(operands["labels"], other))
    own, weight, *rest = jnp.unstack(out, axis=-1)
    picked, below = rest[0], rest[1:]
    if other is not None:
        picked, below = jnp.stack(rest[:2]), rest[2:]
    own, kept = lax.stop_gradient((own, weight))
    top = finite(lax.pmax(jnp.where(kept == 0, -jnp.inf, own), part.axes))
    # A weight of no logits stays 0, and an infinite one stays so.
    less = jnp.where(jnp.isfinite(kept) & (kept != 0), own - top, 0)
    picks, first = loss.picks(labels), part.index * size
    known = loss.known(picks)
    here = known & (picks >= first) & (picks < first + size)
    picked = loss.without_slopes(picked, labels) - top
    target = loss.joined(jnp.where(here, (1 - smoothing) * picked, 0))
    if below:
        target = target + smoothing / loss.classes * (below[0] + size * less)
    weight, target = lax.psum((weight * jnp.exp(less), target), part.axes)
    row, none = loss.total(Sum(top, weight)), jnp.zeros_like(top)
    value = loss.value(row, jnp.where(known, top, 0), none, labels) - target
    return value.astype(params["out_dtype"] or value.dtype)
