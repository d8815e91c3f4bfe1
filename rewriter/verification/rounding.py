"""Finds the coarsest rounding on the way to each result of a program.

A float32 result that was computed in bfloat16 is as exact as bfloat16. Bits that only a
comparison reads, such as positions of a mask, do not round what comes out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from rewriter import _jax

LEVELS = ("", "float64", "float32", "float16", "bfloat16")
"""From exact to coarse; float16 represents all types with about eleven bits."""

PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated")
MOVES = frozenset({
    "convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze",
    "slice", "dynamic_slice", "concatenate", "gather", "select_n", "neg", "abs", "rev",
    "copy", "iota", "stop_gradient", "reduce_max", "reduce_min", "max", "min", "pad",
    "sharding_constraint", "optimization_barrier", "expand_dims", "split", "tie_in",
})  # fmt: skip
"""Primitives that round nothing, except casts to narrower types."""

DEVICE = {"gpu": 3, "tpu": 4}
"""Levels of products of float32 at default precision: TF32, and bfloat16 on TPUs."""


def coarsest(program: ClosedJaxpr) -> list[str]:
    """Returns, for each result, the dtype of the coarsest rounding behind it.

    Args:
        program: The program.

    Returns:
        Names such as ``"bfloat16"``; ``""`` where nothing is rounded.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> f = lambda x: jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32)
        >>> coarsest(jax.make_jaxpr(f)(1.0))
        ['bfloat16']
    """
    jaxpr = program.jaxpr
    return [LEVELS[n] for n in _body(jaxpr, [0] * len(jaxpr.invars))]


def _body(body: Any, results: Sequence[int]) -> list[int]:
    jaxpr = getattr(body, "jaxpr", body)
    known: dict[Any, int] = dict(zip(jaxpr.invars, results, strict=True))

    def read(atom: Any) -> int:
        return 0 if _jax.is_literal(atom) else known.get(atom, 0)

    for eqn in jaxpr.eqns:
        ins = [read(a) if _is_float(a.aval) else 0 for a in eqn.invars]
        for var, level in zip(eqn.outvars, _equation(eqn, ins), strict=True):
            known[var] = level if _is_float(var.aval) else 0
    return [max(read(a), 0) for a in jaxpr.outvars]


def _equation(eqn: Any, ins: list[int]) -> list[int]:
    kind = _jax.call_kind(eqn)
    body = _jax.call_body(eqn)
    if kind == "scan":
        return _scan(eqn, ins)
    if body is not None and len(getattr(body, "jaxpr", body).invars) == len(ins):
        return _body(body, ins)
    worst = max([0, *ins, *(_inside(b) for b in jaxprs_in_params(eqn.params))])
    return [max(worst, _own(eqn, v.aval)) for v in eqn.outvars]


def _scan(eqn: Any, ins: list[int]) -> list[int]:
    body, n_consts, n_carry, _ = _jax.scan_parts(eqn)
    outs: list[int] = []
    for _ in range(n_carry + 1):  # a turn reads the roundings of the turn before
        outs = _body(body, ins)
        carry = ins[n_consts : n_consts + n_carry]
        more = [max(a, b) for a, b in zip(carry, outs, strict=False)]
        if more == carry:
            break
        ins = [*ins[:n_consts], *more, *ins[n_consts + n_carry :]]
    return outs


def _inside(jaxpr: Any) -> int:
    """The coarsest of all equations in a body."""
    found = [0]
    for eqn in jaxpr.eqns:
        found += [_own(eqn, v.aval) for v in eqn.outvars]
        found += [_inside(b) for b in jaxprs_in_params(eqn.params)]
    return max(found)


def _own(eqn: Any, aval: Any) -> int:
    """The rounding of an equation itself."""
    if not _is_float(aval):
        return 0
    level = level_of(aval.dtype)
    name = eqn.primitive.name
    if name in MOVES:
        source = eqn.invars[0].aval if eqn.invars else aval
        narrower = _is_float(source) and level_of(source.dtype) < level
        return level if narrower else 0
    if name in PRODUCTS and level == 2 and not _is_high(eqn.params.get("precision")):
        return DEVICE.get(jax.default_backend(), level)
    return level


def _is_high(precision: Any) -> bool:
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(p == jax.lax.Precision.HIGHEST for p in parts)


def level_of(dtype: Any) -> int:
    """Returns a float dtype's place in `LEVELS`; narrower ones count as bfloat16."""
    name = {"complex64": "float32", "complex128": "float64"}.get(str(dtype), str(dtype))
    return LEVELS.index(name) if name in LEVELS else len(LEVELS) - 1


def _is_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
