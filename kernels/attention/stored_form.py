"""The form of attention whose keys and values are numbers of few bits.

A cache of keys and values may hold 8 bits for each number, with scales for each head,
each token, or each token and head. They are widened as the program does, by steps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.ops.op import Op, Operand, Sharding
from rewriter.ops.stored import FEW_BITS, LEVELS, numbers_of
from rewriter.ops.widening import applied, param_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.cost import Cost, Dtypes, Shapes
    from rewriter.ops.kernel import Spec

STEPS = {name: param_of(name) for name in "kv"}
"""The parameter with the steps of keys and of values; None where they are floats."""

ADDED = ("scale", "zero")
"""What an array of numbers may have beside it."""


def added_to(name: str) -> dict[str, str]:
    """Returns the operands that an array of numbers may have beside it.

    Example:
        >>> added_to("k")
        {'scale': 'k_scale', 'zero': 'k_zero'}
    """
    return {what: f"{name}_{what}" for what in ADDED}


OWN = frozenset(x for name in STEPS for x in added_to(name).values())
"""The operands that attention does not have."""


def stored_keys_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of attention whose keys and values may be of few bits.

    Args:
        op: Attention.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    return dataclasses.replace(
        op,
        name=name,
        form_of=op.name,
        about=about,
        operands=_operands(op),
        defaults={**op.defaults, **dict.fromkeys(STEPS.values())},
        reference=functools.partial(attended, op.reference),
        usual=None,
        cost=functools.partial(_cost, op),
        sharding=functools.partial(_sharding, op),
        sample=functools.partial(_sample, op),
        distributions=None,
    )


def attended(attend: Callable[..., Array], /, **given: Any) -> Array:
    """Returns attention to keys and values that are widened first.

    Operands are documented where the op is declared.

    Args:
        attend: Computes attention to floats.
        **given: Operands and parameters. `widen_k` and `widen_v` are the steps of
            keys and values, see `rewriter.ops.widening`.
    """
    return attend(**widened(given))


def widened(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns operands and parameters of attention, from those of the form."""
    made = {n: x for n, x in given.items() if n not in OWN}
    for name, param in STEPS.items():
        steps = made.pop(param, None)
        if steps is not None:
            beside = {what: given.get(own) for what, own in added_to(name).items()}
            made[name] = applied(made[name], steps, **beside)
    return made


def as_attention(spec: Spec) -> Spec:
    """Returns the use of attention that a use of the form is, once it is widened."""
    kinds = {
        name: spec.dtype("q")
        for name, param in STEPS.items()
        if spec.param(param) is not None
    }
    return dataclasses.replace(
        spec,
        op="attention",
        shapes=tuple((n, s) for n, s in spec.shapes if n not in OWN),
        dtypes=tuple((n, kinds.get(n, d)) for n, d in spec.dtypes if n not in OWN),
        params=tuple((n, x) for n, x in spec.params if n not in STEPS.values()),
    )


# ------------------------------------------------------------ what a form declares
def _operands(op: Op) -> tuple[Operand, ...]:
    *some, last = FEW_BITS
    kinds = f"Stored as {', '.join(some)} or {last}, or floats."
    found: list[Operand] = []
    for one in op.operands:
        if one.name in STEPS:
            one = dataclasses.replace(one, doc=f"{one.doc} {kinds}")
        found.append(one)
    for name in STEPS:
        axes = " ".join(f"{x}|1" for x in op.operand(name).axes.split())
        found += [
            Operand(f"{name}_scale", axes, doc=f"A factor of {name}; 1 if absent."),
            Operand(f"{name}_zero", axes, doc=f"An addend of {name}; 0 if absent."),
        ]
    return tuple(found)


def _sharding(op: Op, params: Mapping[str, Any]) -> Sharding | None:
    """How a use is split, as attention; keys are gathered, not passed around."""
    rule = op.spread(params)
    return rule and dataclasses.replace(rule, ring=None)


def _cost(
    op: Op,
    shapes: Shapes,
    dtypes: Dtypes,
    params: Mapping[str, Any],
    mode: str = "forward",
) -> Cost:
    """Attention's operations, and bytes of the numbers; scales do not count."""
    assert op.cost is not None
    own = (
        {n: x for n, x in given.items() if n not in OWN} for given in (shapes, dtypes)
    )
    return op.cost(*own, params, mode)


def _sample(
    op: Op, key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Realistic operands, of attention's size once they are widened."""
    assert op.sample is not None
    floats = {
        n: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if n in STEPS else x
        for n, x in operands.items()
        if n not in OWN
    }
    made = dict(op.sample(key, floats, params))
    for name in STEPS:
        dtype = operands[name].dtype
        few = jnp.dtype(dtype).name in FEW_BITS
        made[name] = numbers_of(made[name], dtype) if few else made[name].astype(dtype)
        size = 1 / LEVELS if few and jnp.issubdtype(dtype, jnp.integer) else 1.0
        for what, own in added_to(name).items():
            if own in operands:
                x = operands[own]
                made[own] = jnp.full(x.shape, size if what == "scale" else 0, x.dtype)
    return made
