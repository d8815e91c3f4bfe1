"""The form of attention with a function of scores: what follows from attention.

The products of queries and keys, times `scale`, go through the function, and the result
is attended by: through a softmax, or as the weights themselves. Small arrays that the
function reads are operands: arrays that broadcast against the scores, and tables of
which it reads one number for each score.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention.normalisation import divided
from rewriter.ops.form import Form, special_form
from rewriter.ops.op import Op, Operand, Sharding
from rewriter.ops.score import NONE, SOFTMAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.cost import Dtypes, Shapes
    from rewriter.ops.kernel import Spec
    from rewriter.ops.op import Sample
    from rewriter.ops.score import Score

ARRAYS = tuple(f"score_{i}" for i in range(8))
"""Operands that broadcast against the scores."""

TABLES = tuple(f"table_{i}" for i in range(4))
"""Operands of which a function reads one number for each score."""

OWN = frozenset({*ARRAYS, *TABLES})
"""The operands that attention itself does not have."""

OWN_PARAMS = frozenset({"score", "normalisation", "divisor"})
"""The parameters that attention itself does not have."""

LEFT_OUT = frozenset({"alibi"})
"""Operands of attention that such a function has a part of its own for."""


def scored_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of attention with a function of scores.

    Args:
        op: Attention.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    defaults = {n: x for n, x in op.defaults.items() if n != "softcap"}
    form = Form(
        operands=_operands(op),
        compute=scored,
        sizes=_sizes,
        sharding=_sharding,
        sample=_sample,
        defaults={
            **defaults, "score": None, "normalisation": SOFTMAX, "divisor": None,
        },
    )  # fmt: skip
    return special_form(op, name, about, form)


def scored(
    attend: Callable[..., Array],
    /,
    *,
    score: Score | None = None,
    normalisation: str = SOFTMAX,
    divisor: Score | None = None,
    **given: Any,
) -> Array:
    """Returns attention by a function of its scores.

    Operands are documented where the op is declared.

    Args:
        attend: Computes attention, with a function of all scores as ``computed``.
        score: The function; None leaves the scores.
        normalisation: How weights are made of its values: a name of
            `rewriter.ops.score`.
        divisor: The function of a query's sum of weights that divides, for ``"sum"``;
            None for the sum itself.
        **given: The operands and parameters of attention, and those of the function.

    Returns:
        [b, t, n, e].
    """
    arrays = {n: given.pop(n) for n in (*ARRAYS, *TABLES) if n in given}
    if score is None:
        return attend(**given)

    def computed(products: Array) -> Array:
        t, s = products.shape[-2:]
        rows = jax.lax.broadcasted_iota(jnp.int32, (1, 1, t, 1), 2)
        columns = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, s), 3)
        return score(products, rows, columns, arrays)

    def weighed(values: Array, keep: Array | None) -> Array:
        values = values if keep is None else jnp.where(keep, values, 0)
        if normalisation == NONE:
            return values
        rows = jax.lax.broadcasted_iota(jnp.int32, (1, 1, values.shape[2], 1), 2)
        total = values.sum(-1, keepdims=True)
        return values / divided(total, rows, divisor, arrays)

    if normalisation != SOFTMAX:
        return attend(**given, computed=computed, weighed=weighed)
    return attend(**given, computed=computed)


def as_attention(spec: Spec) -> Spec:
    """Returns the use of attention that a use of the form is, without its function."""
    return dataclasses.replace(
        spec,
        op="attention",
        shapes=tuple(_of_attention(dict(spec.shapes)).items()),
        dtypes=tuple(_of_attention(dict(spec.dtypes)).items()),
        params=tuple((n, x) for n, x in spec.params if n not in OWN_PARAMS),
    )


# ------------------------------------------------------------ what a form declares
def _operands(op: Op) -> tuple[Operand, ...]:
    own = [
        Operand(
            name, "b|1 n|1 t|1 s|1", doc="Any dtype: read by the function of scores."
        )
        for name in ARRAYS
    ]
    own += [
        Operand(
            name, f"b|1 n|1 {letter}",
            doc="A table: the function of scores reads one of its numbers.",
        )
        for name, letter in zip(TABLES, "rxyz", strict=True)
    ]  # fmt: skip
    kept = (o for o in op.operands if o.name not in LEFT_OUT)
    return (*kept, *own)


def _sharding(params: Mapping[str, Any]) -> Sharding:
    """How a use is split: sequences and heads; a function knows no other positions."""
    del params
    return Sharding(frozenset("bn"), follows={"k": "n"})


def _sizes(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any]
) -> tuple[Shapes, Dtypes]:
    """Those of attention; the work of the function does not count."""
    del params
    return _of_attention(shapes), _of_attention(dtypes)


def _of_attention(named: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of the operands of attention."""
    return {n: x for n, x in named.items() if n not in OWN}


def _sample(
    draw: Sample, key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Realistic operands: numbers near 1 for floats, and small whole numbers."""
    own = {n: x for n, x in operands.items() if n in OWN}
    made = dict(draw(key, _of_attention(operands), params))
    for i, (name, x) in enumerate(own.items()):
        one = jax.random.fold_in(key, i)
        if jnp.issubdtype(x.dtype, jnp.floating):
            value = jax.random.uniform(one, x.shape, minval=0.5, maxval=1.5)
        else:
            value = jax.random.bernoulli(one, 0.8, x.shape)
        made[name] = value.astype(x.dtype)
    return made
