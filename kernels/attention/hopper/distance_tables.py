"""The cotangent of a table whose numbers are added to scores by distance, as T5's.

Such a score is ``function(product) + away[column - row + t - 1]``. So it is attention
by a function, with a bias behind it, whose cotangent has a kernel. Its sums along the
diagonals are the cotangents of the numbers of distances. The bias is made for this
kernel alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper.backward_config import first_fitting_backward
from rewriter.kernels.attention.hopper.extra_operands import extra_of
from rewriter.kernels.attention.hopper.functions import AWAY
from rewriter.kernels.attention.hopper.hoisting import DISTANCE, hoisted, pruned
from rewriter.kernels.attention.hopper.widths import filled_backward
from rewriter.kernels.attention.scored_form import OWN, OWN_PARAMS, TABLES
from rewriter.kernels.attention.xla.scored import TOO_MANY
from rewriter.kernels.shared.diagonals import along_diagonals, spread
from rewriter.ops.score import LOOKUP, PRODUCT, Ref, Score

if TYPE_CHECKING:
    from jax import Array


def of_distances(given: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the cotangents of tables, or none if the function is another one.

    Args:
        given: Operands and parameters, and the result's ``cotangent``.
    """
    (_, t, _, h), s = given["q"].shape, given["k"].shape[1]
    read = {x: given[x] for x in OWN if x in given}
    apart = hoisted(given["score"], read, t, s)
    rest, parts = without_distances(apart.score), list(apart.parts)
    of_distance = [x for x in parts if x.kind == DISTANCE]
    if rest is None or len(of_distance) != 1:
        return {}
    part = parts.pop(parts.index(of_distance[0]))
    tables = {x: read[x] for x in part.part.arrays if x in TABLES}
    elsewhere = {*rest.arrays, *(name for x in parts for name in x.part.arrays)}
    if not tables or not elsewhere.isdisjoint(tables):
        return {}
    if any(x.dtype != jnp.float32 for x in tables.values()):
        return {}
    away, back = jax.vjp(lambda x: apart.read(read | x, t, s)[part.name], tables)
    if 4 * away.shape[0] * away.shape[1] * t * s >= TOO_MANY:
        return {}
    own = (*OWN, *OWN_PARAMS, "config")
    plain = {x: value for x, value in given.items() if x not in own}
    plain["bias"] = spread(away, t)
    if rest.out.kind != PRODUCT:
        made = apart.read(read, t, s)
        plain |= {"score": rest, "read": {x: made[x] for x in rest.arrays}}
    sizes = filled_backward(h), filled_backward(given["v"].shape[3])
    config = first_fitting_backward(*sizes, extra_of(hopper.flat(plain)))
    grads = hopper.backward(**plain, config=config) if config is not None else {}
    if "bias" not in grads:
        return {}
    return back(along_diagonals(grads["bias"]).astype(away.dtype))[0]


def without_distances(score: Score) -> Score | None:
    """Returns a function without the number of a distance that is added at its end.

    Nothing is returned if that is not all that it does with such numbers.

    Args:
        score: What remains of a function whose repeating parts are read.
    """
    if score.out.kind != "step":
        return None
    last = score.steps[score.out.name]
    if last.name not in ("add", "add_any") or last.dtype != "float32":
        return None
    for ref, other in (last.ins, last.ins[::-1]):
        rest = pruned(replace(score, out=other))
        if _is_distance(score, ref) and not any(map(_is_away, rest.arrays)):
            return rest
    return None


def _is_distance(score: Score, ref: Ref) -> bool:
    """Whether an operand is the number of a distance, in float32."""
    step = score.steps[ref.name] if ref.kind == "step" else None
    if step is None or step.name != LOOKUP or step.dtype != "float32":
        return False
    return _is_away(step.ins[0].name)


def _is_away(name: Any) -> bool:
    return str(name).startswith(AWAY)
