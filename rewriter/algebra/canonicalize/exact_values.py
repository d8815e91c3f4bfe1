"""Decides which values around an op are analysed, and which stay opaque.

An op's operands are made of *side values*: masks, biases, scales, positions, anything
that does not depend on what the op computes. A side value stays the program's own
array, computed by the program's own equations. It is analysed only if its form is exact
in the machine's numbers and says something that an op can use:

    position   whole numbers made of `iota`, whose bounds show that no step wraps around
               or is rounded
    choice     one of a few numbers, selected by booleans, such as a mask or its fill
    masked     an array where a mask keeps it, a large fill elsewhere
    slope      a position times a number or an array, as ALiBi adds it

So a stable softmax stays stable, and a comparison of floats compares those floats.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize.constants import in_dtype
from rewriter.algebra.canonicalize.dtypes import is_lossless, kind_of
from rewriter.algebra.canonicalize.intervals import held_by, of_dtype, within
from rewriter.algebra.normal_form import EXACT, TRUE, Algebra, Monomial, Poly
from rewriter.program.graph import Graph, Node

FILL = 1e3
"""Numbers from this size on count as fills of masks."""


def is_exact(alg: Algebra, graph: Graph, node: Node, form: Poly) -> bool:
    """Whether a side value may be expanded; see the module's docstring.

    Args:
        alg: Where the form is.
        graph: The program.
        node: The equation that makes the value.
        form: The value's form.
    """
    dtype = graph.dtype(node.outs[0])
    kind = kind_of(dtype)
    if kind == "i":
        return is_position(alg, form) and within(alg.bounds(form), held_by(dtype))
    if kind != "f":
        return False
    if all(not mono for _, mono in form):
        return all(_is_representable(c, dtype) for c in form.values())
    if is_position(alg, form):
        return within(alg.bounds(form), exact_integers(dtype))
    casts = node.prim == "convert_element_type"
    if casts and not is_lossless(graph.dtype(node.ins[0]), dtype):
        return False
    return _is_masked(alg, node, form) or _is_slope(alg, form)


def exact_integers(dtype: Any) -> tuple[float, float]:
    """The bounds within which a float dtype holds every integer."""
    most = 2.0 ** (jnp.finfo(dtype).nmant + 1)
    return -most, most


def _is_representable(c: float, dtype: Any) -> bool:
    """Whether an integer exists in a dtype; other numbers are rounded already."""
    whole = math.isfinite(c) and c == int(c)
    return not whole or float(in_dtype(c, dtype)) == c


def is_counted(alg: Algebra, p: Poly, dtype: Any) -> bool:
    """Whether a form is whole numbers of known bounds that a dtype holds.

    So is the product of a loop's step with the rows of a block. A body inside the loop
    makes it, and around that body it can be made anew.
    """
    integers = kind_of(dtype) == "i" and _is_whole_form(alg, p)
    return integers and within(alg.bounds(p), held_by(dtype))


def is_position(alg: Algebra, p: Poly) -> bool:
    """Whether a form is an integer made of positions, or a choice of such."""
    if not _is_whole_form(alg, p):
        return False
    factors = [a for _, mono in p for a, _ in mono]
    return not factors or any(_has_position(alg, a) for a in factors)


def _is_whole_form(alg: Algebra, p: Poly) -> bool:
    """Whether a form is sums and products of whole numbers."""
    for (_, mono), c in p.items():
        if len(mono) == 1 and mono[0][1] == 1 and alg.kind(mono[0][0]) == "relu":
            inner = alg.thaw(alg.defs[mono[0][0]][1])  # divided by a number that c has
            if not _is_whole_form(alg, alg.scale(inner, c)):
                return False
        elif not (
            float(c).is_integer()
            and all(e.__class__ is int and e > 0 for _, e in mono)
            and all(_is_whole(alg, a) for a, _ in mono)
        ):
            return False
    return True


def with_wraps(alg: Algebra, p: Poly, dtype: Any) -> Poly | None:
    """The machine integer that a sum is: less 2^n where it is too large for n bits.

    So `i + 1` is exact for any run-time position `i`. Where a mask keeps only keys
    before it, the mask implies that the sum is not too large.

    Args:
        alg: Where the form is.
        p: The sum: positions and one other integer at most.
        dtype: The integers' dtype.

    Returns:
        The form; None for other sums, or if the sum never wraps around.
    """
    if kind_of(dtype) != "i" or not _is_moved_position(alg, p):
        return None
    (least, most), (lo, hi) = of_dtype(dtype), alg.bounds(p)
    period = most - least + 1
    if lo < least - period or hi > most + period or most >= EXACT:
        return None
    out = p
    above = alg.compare("ge", alg.add(p, alg.const(-most - 1)), True)
    below = alg.compare("ge", alg.add(alg.const(least - 1), p, -1.0), True)
    for flag, sign in ((above, -1.0), (below, 1.0)):
        out = alg.add(out, alg.scale(alg.of_bool(flag), sign * period))
    return out


def _is_moved_position(alg: Algebra, p: Poly) -> bool:
    """Whether a form is a sum of positions, one other integer and a number."""
    leaves = 0
    for (flag, mono), c in p.items():
        if flag != TRUE or not float(c).is_integer() or len(mono) > 1:
            return False
        for atom, e in mono:
            leaves += alg.kind(atom) == "leaf"
            plain = alg.kind(atom) == "iota" or (
                alg.kind(atom) == "leaf" and abs(c) == 1 and _is_whole(alg, atom)
            )
            if e != 1 or not plain:
                return False
    return leaves == 1


def _is_whole(alg: Algebra, atom: int) -> bool:
    kind = alg.kind(atom)
    if kind == "relu":
        inner = alg.thaw(alg.defs[atom][1])
        return all(float(c).is_integer() for c in inner.values()) and all(
            e == 1 and _is_whole(alg, a) for _, mono in inner for a, e in mono
        )
    if kind == "fn":
        return alg.defs[atom][1] == "sign" and is_position(
            alg, alg.thaw(alg.defs[atom][2])
        )
    return kind == "iota" or (kind == "leaf" and alg.defs[atom][1] in alg.integers)


def _has_position(alg: Algebra, atom: int) -> bool:
    if alg.kind(atom) in ("relu", "fn"):
        return any(_has_position(alg, a) for a in alg.children(atom))
    return alg.kind(atom) == "iota"


def _is_masked(alg: Algebra, node: Node, p: Poly) -> bool:
    """Whether a form is one array where a condition holds, and large numbers elsewhere.

    A product with 0 is no choice of zero: 0 times NaN is NaN.
    """
    arrays = {mono for _, mono in p if mono}
    if len(arrays) != 1 or node.prim in ("mul", "div"):
        return False
    (mono,) = arrays
    return _is_array(alg, mono) and all(
        c == 1 if inner else flag != TRUE and abs(c) >= FILL
        for (flag, inner), c in p.items()
    )


def _is_array(alg: Algebra, mono: Monomial) -> bool:
    return len(mono) == 1 and mono[0][1] == 1 and alg.kind(mono[0][0]) == "leaf"


def _is_slope(alg: Algebra, p: Poly) -> bool:
    """Whether a form is linear in positions, with one array of slopes at most."""
    arrays = set()
    for (flag, mono), c in p.items():
        if not mono:
            if flag == TRUE or abs(c) < FILL:
                return False
            continue
        kinds = sorted(alg.kind(a) for a, _ in mono)
        plain = all(e == 1 for _, e in mono)
        if not plain or kinds not in (["iota"], ["iota", "leaf"]):
            return False
        arrays |= {a for a, _ in mono if alg.kind(a) == "leaf"}
    return len(arrays) <= 1
