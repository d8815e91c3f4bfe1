"""How exactly a region multiplies: the precision that its products ask for.

A float32 product on a GPU or a TPU keeps fewer digits than its operands have, unless
the program asks for more. The op that replaces a region must ask for as many.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from rewriter.find.reading import Reading, Refused
from rewriter.ops.kernel import Spec
from rewriter.ops.op import Op
from rewriter.program.graph import Graph

PARAM = "precision"
"""The parameter of ops that multiply: None for JAX's default, ``"high"``,
``"highest"``, or the name of an algorithm of `jax.lax.DotAlgorithmPreset`."""

ORDER = (None, "high", "highest")
"""Precisions from the fewest digits to the most."""

NARROW = 2
"""Bytes of floats whose products are exact in every precision."""

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot"})


def with_precision(
    graph: Graph, op: Op, reading: Reading, spec: Spec, values: Iterable[int]
) -> tuple[Reading, Spec]:
    """Returns a reading and its use with the precision of the region's products.

    Args:
        graph: The program.
        op: The op of the reading. It gets the parameter only if its reference takes it.
        reading: The region.
        spec: The shapes and dtypes of the op there.
        values: The values of the region.

    Raises:
        Refused: If the region's products ask for more digits than the op keeps.
    """
    if not _affected(op, spec) or (asked := precision_of(graph, values)) is None:
        return reading, spec
    if not _takes_precision(op):
        if exceeds(asked, _precision_of_reference(op, spec)):
            text = f"the program multiplies at precision {asked!r}"
            more = f"its reference may take `{PARAM}=None` for its products"
            raise Refused(PARAM, f"{text}, and {op.name} does not: {more}", score=0.9)
        return reading, spec
    if asked not in ORDER and len(_affected(op, spec)) < len(_floats(op, spec)):
        asked = ORDER[-1]  # an algorithm is for operands of one dtype
    params = {**dict(spec.params), PARAM: asked}
    return (
        dataclasses.replace(reading, params={**reading.params, PARAM: asked}),
        dataclasses.replace(spec, params=tuple(sorted(params.items()))),
    )


def depends_on_precision(op: Op, spec: Spec) -> bool:
    """Returns whether an op takes a precision that changes its result in a use."""
    return _takes_precision(op) and bool(_affected(op, spec))


def precision_of(graph: Graph, values: Iterable[int]) -> str | None:
    """Returns the precision of the products that give some values of a program.

    Of several it is the highest one. Different algorithms give ``"highest"``.
    """
    nodes = (graph.node_of(value) for value in values)
    once = {id(n): n for n in nodes if n is not None}.values()
    return _highest(p for node in once for p in _asked(node.prim, node.params))


def exceeds(asked: str | None, given: str | None) -> bool:
    """Returns whether products ask for more digits than a parameter promises."""
    if asked == given or asked is None or given == ORDER[-1]:
        return False
    known = asked in ORDER and given in ORDER
    return not known or ORDER.index(asked) > ORDER.index(given)


def _highest(precisions: Iterable[str | None]) -> str | None:
    asked = set(precisions)
    if len(asked) == 1:
        return asked.pop()
    if asked <= set(ORDER):
        return max(asked, key=ORDER.index, default=None)
    return ORDER[-1]


def _asked(name: str, params: dict[str, Any]) -> Iterator[str | None]:
    """The precisions of an equation's products, those of its bodies too."""
    if name in PRODUCTS:
        yield _name(params.get("precision"))
        return
    for body in jaxprs_in_params(params):
        for eqn in body.eqns:
            yield from _asked(eqn.primitive.name, eqn.params)


def _name(precision: Any) -> str | None:
    """A product's precision by its name; that of the operand with the most digits."""
    several = precision if isinstance(precision, tuple) else (precision,)
    return _highest(map(_name_of_one, several))


def _name_of_one(precision: Any) -> str | None:
    if precision is None or precision == jax.lax.Precision.DEFAULT:
        return None
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    name = getattr(precision, "name", ORDER[-1])
    return None if name == "DEFAULT" else name


def _floats(op: Op, spec: Spec) -> list[str]:
    """The op's required operands of floats."""
    return [
        o.name
        for o in op.operands
        if o.required
        and spec.has(o.name)
        and jnp.issubdtype(spec.dtype(o.name), jnp.floating)
    ]


def _affected(op: Op, spec: Spec) -> list[str]:
    """Those whose products depend on the precision.

    Products of 8-bit floats are exact too. Their sums are not: a Hopper GPU keeps 14
    bits of them, unless a program asks for more.
    """
    sizes = {n: jnp.dtype(spec.dtype(n)).itemsize for n in _floats(op, spec)}
    narrow = len(sizes) > 1 and max(sizes.values()) == 1
    return [n for n, size in sizes.items() if size > NARROW or narrow]


@functools.cache
def _takes_precision(op: Op) -> bool:
    taken = inspect.signature(op.reference, follow_wrapped=False).parameters
    return PARAM in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values())


def _precision_of_reference(op: Op, spec: Spec) -> str | None:
    """The precision of the products in an op's own definition."""
    shapes = {
        name: jax.ShapeDtypeStruct(spec.shape(name), spec.dtype(name))
        for name in spec.operands
    }
    defined = functools.partial(op.reference, **dict(spec.params))
    body = jax.make_jaxpr(lambda given: defined(**given))(shapes)
    every = [p for e in body.eqns for p in _asked(e.primitive.name, e.params)]
    return _highest(every) if every else ORDER[-1]
