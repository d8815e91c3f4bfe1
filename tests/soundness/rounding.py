"""Runs a program whose every result is off by its last bits, as rounding may be.

The method is Monte Carlo arithmetic (Parker, 1997): what differs between such runs is
what rounding alone decides, whatever the order of sums. Only what depends on operands
is changed, since what a mask lets through is exact.

Runs take turns in how they add the products of a matrix product: as they are, from the
end, or those above zero apart from those below. If products overflow, their order
decides between an infinity and NaN. So does a fused multiply-add, which rounds no
product: with it an infinity stays one when a product of the other sign overflows.

Where a product is added to something or summed up, half of the runs round it once more,
as a fused multiply-add does. Scores of 1e30 and their own maximum then differ by 1e22.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

BITS = 2
"""How many units in the last place a result is off by, at most."""

EXACT = frozenset({
    "abs", "argsort", "broadcast_in_dim", "ceil", "clamp", "concatenate",
    "convert_element_type", "copy", "dynamic_slice", "expand_dims", "floor", "gather",
    "max", "min", "neg", "pad", "reduce_max", "reduce_min", "reshape", "rev", "round",
    "select_n", "sign", "slice", "sort", "split", "squeeze", "stop_gradient", "top_k",
    "transpose", "dynamic_update_slice", "scatter",
})  # fmt: skip
"""Primitives that round nothing."""

BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold what a call runs."""

CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint",
})  # fmt: skip


Bind = Callable[..., Any]
"""Gives what an equation does, of its operands, and of which of them are products."""


def rounded(
    run: Callable[[Sequence[Any]], Sequence[Any]],
    values: Sequence[Any],
    operands: Sequence[int],
    seed: int,
) -> list[np.ndarray]:
    """Results of a run in which every rounding is another.

    Args:
        run: A function of arguments to arrays.
        values: The arguments.
        operands: Which of them count.
        seed: What the roundings are drawn from.
    """
    traced = jax.make_jaxpr(lambda *given: run(list(given)))(*values)
    draw = np.random.default_rng(seed)
    depends = [i in operands for i in range(len(values))]
    given = [jnp.asarray(v) for v in values]
    bind = ORDERS[seed % len(ORDERS)]
    if seed % 2:
        bind = functools.partial(_fused, bind, draw)
    none = [False] * len(given)
    out = _run(traced.jaxpr, traced.consts, given, depends, none, draw, bind)
    return [np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x, *_ in out]


def _run(
    jaxpr: Any,
    consts: Sequence[Any],
    given: Sequence[Any],
    depends: Sequence[bool],
    products: Sequence[bool],
    draw: np.random.Generator,
    bind: Bind,
) -> list[tuple[Any, bool, bool]]:
    """Results of a program, whether each depends on operands, and is a product."""
    known: dict[Any, tuple[Any, bool, bool]] = {}
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        known[var] = value, False, False
    for var, *of in zip(jaxpr.invars, given, depends, products, strict=True):
        known[var] = tuple(of)

    def read(atom: Any) -> tuple[Any, bool, bool]:
        return (atom.val, False, False) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        of = [read(a) for a in eqn.invars]
        args, counts, products = ([x[i] for x in of] for i in range(3))
        name = eqn.primitive.name
        if name in CALLS:
            body = next(eqn.params[k] for k in BODIES if k in eqn.params)
            inner, own = getattr(body, "jaxpr", body), getattr(body, "consts", ())
            found = _run(inner, own, args, counts, products, draw, bind)
        else:
            some = any(counts)
            outs = bind(eqn, args, products) if some else _bind(eqn, args)
            outs = list(outs) if eqn.primitive.multiple_results else [outs]
            if some and name not in EXACT:
                outs = [_off(x, draw) for x in outs]
            product = name == "mul" or (name in EXACT and any(products))
            found = [(x, some, product) for x in outs]
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _fused(
    bind: Bind,
    draw: np.random.Generator,
    eqn: Any,
    args: Sequence[Any],
    products: Sequence[bool],
) -> Any:
    """What an equation gives; a product that it adds or sums up is rounded anew."""
    if eqn.primitive.name in ("add", "sub", "reduce_sum"):
        both = zip(args, products, strict=True)
        args = [_off(x, draw) if new else x for x, new in both]
    return bind(eqn, args, products)


def _bind(eqn: Any, args: Sequence[Any], products: Any = ()) -> Any:
    """What an equation gives, as it is."""
    return eqn.primitive.bind(*args, **eqn.params)


def _backwards(eqn: Any, args: Sequence[Any], products: Any = ()) -> Any:
    """The same, of a matrix product from the end along the axes that it sums."""
    if eqn.primitive.name == "dot_general":
        contracted, _ = eqn.params["dimension_numbers"]
    elif eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracted, _ = numbers.dot_dimension_numbers
        if set(numbers.lhs_ragged_dimensions) & set(contracted[0]):
            return _bind(eqn, args)  # groups lie along it
    else:
        return _bind(eqn, args)
    turned = [jax.lax.rev(x, axes) for x, axes in zip(args, contracted, strict=False)]
    return _bind(eqn, [*turned, *args[len(turned) :]])


def _by_sign(eqn: Any, args: Sequence[Any], products: Any = ()) -> Any:
    """The same, of a matrix product with products above zero apart from those below.

    Only what is not finite comes of that. Numbers stay as they are, and so do products
    with operands that are not finite, since zero times those is NaN.
    """
    together = _bind(eqn, args)
    if eqn.primitive.name not in ("dot_general", "ragged_dot_general"):
        return together
    (a, b), more = args[:2], args[2:]
    if not bool(jnp.isfinite(a).all() & jnp.isfinite(b).all()):
        return together
    product = lambda x, y: _bind(eqn, [x, y, *more])
    above, below = (lambda x: jnp.maximum(x, 0)), (lambda x: jnp.maximum(-x, 0))
    positive = product(above(a), above(b)) + product(below(a), below(b))
    negative = product(above(a), below(b)) + product(below(a), above(b))
    finite = jnp.isfinite(positive) & jnp.isfinite(negative)
    return jnp.where(finite, together, positive - negative)


ORDERS: tuple[Bind, ...] = (_bind, _backwards, _by_sign)
"""How runs take turns."""


def _off(x: Any, draw: np.random.Generator) -> Any:
    """An array whose numbers are off by their last bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_off(x.real, draw), _off(x.imag, draw))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    step = BITS * float(jnp.finfo(x.dtype).eps)
    wide = np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)
    with np.errstate(all="ignore"):
        moved = wide * (1 + step * draw.uniform(-1, 1, size=wide.shape))
    kept = np.where(np.abs(moved) > float(jnp.finfo(x.dtype).max), wide, moved)
    return jnp.asarray(kept, jnp.float32).astype(x.dtype)
