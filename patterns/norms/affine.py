"""The scale and bias of a norm, read off the terms of its form."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.normal_form import TRUE, Algebra, Poly
from rewriter.find.finder import Finder
from rewriter.find.reading import Operand, Refused, operand, values_named
from rewriter.patterns.norms.form import HALF, Form
from rewriter.program.graph import Graph


def affine(find: Finder, form: Form, outside: bool) -> tuple[Poly, Poly]:
    """Reads scale and bias of a norm of rows.

    Raises:
        Refused: If they vary along other axes than the normalised ones, or with
            `outside` do not.
    """
    alg, d = find.algebra, set(form.normalised)
    scale, bias = terms(alg, form)
    if not outside:
        for name, p in (("scale", scale), ("bias", bias)):
            _require_normalised_axes(find, name, p, d)
    else:
        require_outside(alg, form, scale, bias)
    return scale, bias


def terms(alg: Algebra, form: Form) -> tuple[Poly, Poly]:
    """Reads scale and bias off the terms with and without the root.

    Raises:
        Refused: If one is a product of arrays.
    """
    scale: Poly = {}
    bias: Poly = {}
    leaf = alg.atom("leaf", form.x, form.at)
    factor = 1 / (math.sqrt(form.count) * math.sqrt(form.alpha))
    for (flag, mono), c in form.poly.items():
        powers = dict(mono)
        if powers.get(form.base) != HALF:
            bias[flag, mono] = c
        elif powers.get(leaf) == 1:
            rest = tuple(f for f in mono if f[0] not in (form.base, leaf))
            scale = alg.add(scale, {(flag, rest): c * factor})
    for name, p in (("scale", scale), ("bias", bias)):
        _require_one_array(alg, name, p)
    return scale, bias


def require_outside(alg: Algebra, form: Form, scale: Poly, bias: Poly) -> None:
    """Checks that a scale and bias may be applied to the op's result.

    Raises:
        Refused: If they are not one array each that varies along a normalised axis, or
            a condition chooses among them.
    """
    d = set(form.normalised)
    if len(scale) != 1 or len(bias) > 1 or not alg.ids(scale) & d:
        raise Refused("scale", "the scale varies along other axes too", score=0.4)
    chosen = any(flag != TRUE for flag, _ in scale)
    own = {alg.defs[a][1] for p in (scale, bias) for a in alg.poly_leaves(p)}
    if chosen or form.x in own:  # what is not finite stays so, times 0
        raise Refused(
            "scale",
            "a condition selects the result, and no scale multiplies it",
            score=0.4,
        )


def _require_one_array(alg: Algebra, name: str, p: Poly) -> None:
    """Refuses products of arrays that the program does not compute.

    It multiplies the result by one after the other, which may be a number where their
    product overflows.
    """
    for _, mono in p:
        if sum(abs(e) for a, e in mono if alg.kind(a) == "leaf") > 1:
            raise Refused(
                name,
                f"the {name} would be a product of arrays, which may overflow",
                difference=alg.show({(TRUE, mono): 1.0}),
                score=0.4,
            )


def _require_normalised_axes(find: Finder, name: str, p: Poly, d: set[int]) -> None:
    """Checks that scale or bias varies along the normalised axes only."""
    alg = find.algebra
    ids = alg.ids(p)
    joined = any(
        alg.index_ids(a) & d and alg.index_ids(a) - d
        for atom in alg.poly_leaves(p)
        for a in alg.defs[atom][2]
    )
    of_digits = not ids - d and any(
        isinstance(a, tuple) and a[0] in ("div", "mod")
        for atom in alg.poly_leaves(p)
        for a in alg.defs[atom][2]
    )
    if (
        joined
        or of_digits
        or (ids and not ids & d and name == "scale" and is_parameter(find, p))
    ):
        raise Refused(
            "group",
            f"the {name} does not vary with the normalised axis: a "
            "group, instance or batch norm",
            score=0.6,
        )
    if ids - d:
        raise Refused(name, f"the {name} varies along other axes too", score=0.4)


def is_parameter(find: Finder, p: Poly) -> bool:
    """A single leaf with one varying axis, such as a scale per channel.

    A value computed from positions alone, such as a ramp, is no parameter.
    """
    alg = find.algebra
    leaves = alg.poly_leaves(p)
    return len(leaves) == 1 and all(
        sum(a is not None for a in alg.defs[x][2]) == 1
        and not all(_of_integers(find.graph, v) for v in values_named(alg.defs[x][1]))
        for x in leaves
    )


def _of_integers(graph: Graph, value: int) -> bool:
    """Whether a value is computed from integers and numbers alone."""
    seen, queue = {value}, [value]
    while queue:
        value = queue.pop()
        node = graph.node_of(value)
        if node is not None:
            queue += {*node.ins} - seen
            seen.update(node.ins)
        elif graph.scalar(value) is None and (
            value in graph.constants
            or not jnp.issubdtype(graph.dtype(value), jnp.integer)
        ):
            return False
    return True


def scale_and_bias(
    alg: Algebra, op: str, d: tuple[Any, ...], scale: Poly, bias: Poly
) -> dict[str, Operand]:
    """The operands of the affine part; a scale of 1 is none."""
    operands, c = {}, alg.as_constant(scale)
    if c is None or abs(c - 1) > 1e-6:
        operands["scale"] = operand(scale, d)
    if bias and op == "rms_norm":
        raise Refused("bias", "an RMS norm has no bias", score=0.3)
    if bias:
        operands["bias"] = operand(bias, d)
    return operands
