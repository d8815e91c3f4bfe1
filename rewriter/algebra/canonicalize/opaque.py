"""Says which values stay opaque, since the machine's result may not be the form's."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.algebra.canonicalize.exact_values import is_counted, is_exact, is_position
from rewriter.algebra.canonicalize.intervals import interval, of_dtype, within
from rewriter.algebra.canonicalize.primitives import FULL
from rewriter.algebra.normal_form import Poly
from rewriter.program.graph import Node

ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
CHOOSING = frozenset({"max", "min", "clamp", "select_n"})
"""What computes with numbers, and may take arrays out of a form."""

WRAPPING = frozenset({
    "add", "sub", "mul", "neg", "abs", "integer_pow", "square", "reduce_sum", "cumsum",
})  # fmt: skip
"""Primitives whose integer results may exceed the dtype."""


def rounds(ev: Any, node: Node, value: int, args, form: Poly) -> bool:
    """Whether a float side value may not be what its form says.

    So it is if a number of it stands for others that are near, as 3 for 2.999999. So it
    is too if arrays leave a number alone, as in `x - x`, `0 * x` and `x / x`.
    """
    chooses = node.prim in CHOOSING
    if kind_of(ev.g.dtype(value)) != "f" or not (chooses or node.prim in ARITHMETIC):
        return False
    if ev.ideal or not ev.is_side(value):
        return False
    forms = [
        ev.poly(i, ev.aligned(i, args), FULL)
        for i in node.ins
        if kind_of(ev.g.dtype(i)) == "f"
    ]
    numbers = {abs(c) for p in (form, *forms) for c in p.values()}
    if not numbers.isdisjoint(map(abs, ev.alg.blurred)):
        return True
    if chooses or any(mono for _, mono in form):
        return False
    forms = [p for p in forms if any(m for _, m in p)]
    return not all(is_position(ev.alg, p) for p in forms)


def may_differ(ev: Any, node: Node, value: int, form: Poly, mode: str) -> bool:
    """Whether a value stays opaque, since its form may differ from its value."""
    if ev.ideal:
        return False
    if mode != FULL or not ev.is_side(value):
        casts = node.prim in ("convert_element_type", "stop_gradient")
        return not casts and _may_wrap(ev, node, value, form)
    if is_exact(ev.alg, ev.g, node, form):
        return False
    dtype = ev.g.dtype(value)
    counted = kind_of(dtype) == "i" and is_counted(ev.alg, form, dtype)
    if ev.at_hand is None or ev.at_hand(value):
        # The number of a block and that of its first row are told as one number.
        one = counted and ev.at_hand is not None and ev.g.shape(value) == ()
        return not (one and _is_of_loop_counters(ev, form))
    return kind_of(dtype) != "f" and not counted


def _is_of_loop_counters(ev: Any, form: Poly) -> bool:
    """Whether a form's leaves are all given to a body, as a loop's counter is."""
    names = (ev.alg.defs[leaf][1] for leaf in ev.alg.poly_leaves(form))
    return all(n.__class__ is int and ev.g.node_of(n) is None for n in names)


def _may_wrap(ev: Any, node: Node, value: int, form: Poly) -> bool:
    """Whether an integer may wrap around, and so differ from its form.

    Without known bounds, sums and products of 8 and 16 bits are assumed to wrap, and
    sums of products of 32 bits.
    """
    dtype = ev.g.dtype(value)
    if ev.private or kind_of(dtype) != "i":
        return False
    if node.prim == "dot_general" and within(of_dtype(dtype), interval(ev.g, value)):
        return True
    lo, hi = ev.alg.bounds(form)
    if math.isinf(lo) or math.isinf(hi):
        return np.dtype(dtype).itemsize < 4 and node.prim in WRAPPING
    info = jnp.iinfo(dtype)
    return lo < info.min or hi > info.max
