"""The cotangent of a table whose numbers are added to scores by distance, as T5's.

Such a score is ``scale * product + away[column - row + t - 1]``. So it is attention
with a bias, whose cotangent has a kernel. Its sums along the diagonals are the
cotangents of the numbers of distances. The bias is made for this kernel alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper.backward_config import first_fitting_backward
from rewriter.kernels.attention.hopper.extra_operands import extra_of
from rewriter.kernels.attention.hopper.functions import AWAY
from rewriter.kernels.attention.hopper.hoisting import DISTANCE, hoisted
from rewriter.kernels.attention.hopper.widths import filled_backward
from rewriter.kernels.attention.scored_form import OWN, OWN_PARAMS, TABLES
from rewriter.kernels.attention.xla.scored import TOO_MANY
from rewriter.kernels.shared.diagonals import along_diagonals, spread
from rewriter.ops.score import LOOKUP, PRODUCT, Ref, Score

if TYPE_CHECKING:
    from jax import Array

CASTS = frozenset({"convert_element_type", "copy"})


def of_distances(given: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the cotangents of tables, or none if the function is another one.

    Args:
        given: Operands and parameters, and the result's ``cotangent``.
    """
    (_, t, _, h), s = given["q"].shape, given["k"].shape[1]
    read = {x: given[x] for x in OWN if x in given}
    apart = hoisted(given["score"], read, t, s)
    scale, parts = scale_of(apart.score), [x for x in apart.parts if x.kind == DISTANCE]
    if scale is None or len(parts) != 1:
        return {}
    (part,) = parts
    tables = {x: read[x] for x in part.part.arrays if x in TABLES}
    if not tables or any(x.dtype != jnp.float32 for x in tables.values()):
        return {}
    away, back = jax.vjp(lambda x: apart.read(read | x, t, s)[part.name], tables)
    if 4 * away.shape[0] * away.shape[1] * t * s >= TOO_MANY:
        return {}
    own = (*OWN, *OWN_PARAMS, "config")
    plain = {x: value for x, value in given.items() if x not in own}
    plain |= {"bias": spread(away, t), "scale": scale * plain.get("scale", 1.0)}
    sizes = filled_backward(h), filled_backward(given["v"].shape[3])
    config = first_fitting_backward(*sizes, extra_of(plain))
    grads = hopper.backward(**plain, config=config) if config is not None else {}
    if "bias" not in grads:
        return {}
    return back(along_diagonals(grads["bias"]).astype(away.dtype))[0]


def scale_of(score: Score) -> float | None:
    """Returns the scale of the product, if only a number of its distance is added.

    Args:
        score: What remains of a function whose repeating parts are read.
    """
    if score.product_dtype != "float32":
        return None
    known: list[tuple[float, int] | None] = []

    def of(ref: Ref) -> tuple[float, int] | None:
        if ref.kind == PRODUCT:
            return 1.0, 0
        return known[ref.name] if ref.kind == "step" else None

    for step in score.steps:
        ins, made = [of(ref) for ref in step.ins], None
        if step.dtype != "float32":
            pass
        elif step.name == LOOKUP and str(step.ins[0].name).startswith(AWAY):
            made = 0.0, 1
        elif step.name in CASTS:
            made = ins[0]
        elif step.name == "mul":
            made = _scaled(step.ins, ins)
        elif step.name in ("add", "add_any") and None not in ins:
            (a, x), (c, y) = ins  # type: ignore[misc]
            made = (a + c, x + y)
        known.append(made)
    found = of(score.out)
    return found[0] if found is not None and found[1] == 1 else None


def _scaled(refs: tuple[Ref, ...], known: list[Any]) -> tuple[float, int] | None:
    """A product times a number."""
    for number, other in ((0, 1), (1, 0)):
        if refs[number].kind == "number" and known[other] is not None:
            scale, count = known[other]
            return (scale * float(refs[number].value), 0) if not count else None
    return None
