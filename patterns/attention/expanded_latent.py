"""Latent attention before its weights are absorbed: keys are products of a latent.

Formula    k[b, s, n] = [latent[b, s] w_k[n], k_rope[b, s]], v[b, s, n] = latent[b, s]
           w_v[n]; then attention of few queries
Looks like attention whose keys and values, or parts of keys, are products of one array
           with two matrices, or with two parts of one matrix.
Must hold  both products read the same rows of the array, and nothing else reads the
           products. Other keys are the same for all heads, or there are none.
           Numerics are "fast": products are added up in another order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, is_coarse
from rewriter.algebra.canonicalize.contraction import dot_arguments
from rewriter.algebra.normal_form import Algebra, Index, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.precision import precision_of
from rewriter.find.reading import Group, Operand, Reading, Refused, operand
from rewriter.patterns.attention import read
from rewriter.patterns.attention.latent import Part, atom_of, queries_of
from rewriter.patterns.attention.read import ANCHORS, DOT, STEPS
from rewriter.patterns.quantized.operands import readings
from rewriter.program.graph import Node
from rewriter.program.walk import values_above

NAME = "expanded_latent_attention"
LAYOUT = LAYOUT_PRIMITIVES | TRANSPARENT | {"slice", "split"}
THROUGH = LAYOUT | {"concatenate", "convert_element_type"}
"""Equations between the products and the contractions that read them."""

FEWER = 4
"""How many times fewer queries than keys there must be."""

NEAR = 40
"""The most values above a contraction that are looked at."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of latent attention before its weights are absorbed."""
    scores = find.regions.above(anchor.ins[0], DOT)
    values = [node for node, _ in find.regions.below(anchor.outs[0], DOT)]
    if any(_few_queries(find, n) for n in scores) and _share(find, scores, values):
        ends = (*scores, *values)
        turned = lambda find, reading: expanded(find, reading, ends)
        yield from readings(find, anchor, NAME, read.propose, turned)


def _few_queries(find: Finder, scores: Node) -> bool:
    """Whether queries are fewer than keys, and scores too: else absorbing is slower."""
    made, *both = (_size(find, i) for i in (*scores.outs, *scores.ins[:2]))
    return FEWER * min(both) <= max(both) and made < max(both)


def _size(find: Finder, value: int) -> int:
    size = 1
    for n in find.graph.shape(value):
        size *= n if isinstance(n, int) else 1
    return size


def _share(find: Finder, scores: list[Node], values: list[Node]) -> bool:
    """Whether products above keys and above values read one array."""
    keys, others = (
        {i for n in _products_above(find, nodes) for i in n.ins[:2]}
        for nodes in (scores, values)
    )
    return not keys.isdisjoint(others)


def _products_above(find: Finder, nodes: list[Node]) -> list[Node]:
    """The products that the operands of some nodes are made of by layout."""
    graph = find.graph
    goes_on = lambda node: node.prim in THROUGH
    above = values_above(
        graph, [i for n in nodes for i in n.ins[:2]], goes_on, most=NEAR
    )
    made = (graph.node_of(value) for value in above)
    return [n for n in made if n is not None and n.prim == "dot_general"]


# ------------------------------------------------------------------ the reading
def expanded(find: Finder, reading: Reading, ends: Sequence[Node]) -> Reading:
    """Turns a reading of attention into one of keys and values made of a latent.

    Args:
        find: The search.
        reading: The reading of attention.
        ends: The contractions of keys and of values.

    Raises:
        Refused: If they are made otherwise, or numerics are not "fast".
        OverBudget: If a form grows too large.
    """
    if reading.params.get("unshifted") or reading.joined:
        raise Refused("keys", "keys are in several arrays", score=0.2)
    alg = reading.algebra
    q, k, v = (reading.operands[name] for name in "qkv")
    (value,) = v.parts
    heads = q.parts[0][1][2]  # of grouped ones, each has the matrix of its group
    of_values, *more = _parts(find, reading, value, heads)
    parts = [p for part in k.parts for p in _parts(find, reading, part, heads)]
    made = [p for p in parts if isinstance(p, _Product)]
    rest = [p for p in parts if not isinstance(p, _Product)]
    one = len(made) == 1 and len(rest) <= 1 and not more
    if not one or not isinstance(of_values, _Product):
        raise Refused("keys", "keys and values are no products of an array", score=0.2)
    (of_keys,) = made
    of_values = of_values.summed_over(of_keys.summed)
    if of_keys.latent != of_values.latent:
        raise Refused("latent", "keys and values are made of other rows", score=0.3)
    _require_no_other_reader(find, (of_keys.node, of_values.node), ends)
    if not find.fast:
        text = "queries by a matrix in place of all keys: numerics='fast' lets that"
        raise Refused("numerics", text, score=0.8)
    queries = queries_of(alg, q, [_width(alg, p) for p in parts])
    queries = queries if parts[0] is of_keys else queries[::-1]
    own = dict(zip(("q", "q_rope"), queries, strict=False))
    own |= of_keys.operands("w_k") | of_values.operands("w_v")
    for form, groups in rest:
        own["k_rope"] = _shared(alg, form, groups)
    others = {n: o for n, o in reading.operands.items() if n not in ("q", "k", "v")}
    params = _with_precision(find, reading, (of_keys.node, of_values.node), ends)
    return dataclasses.replace(
        reading, op=NAME, operands={**others, **own}, params=params, proof=reading
    )


def _width(alg: Algebra, part: _Product | Part) -> int:
    groups = part.matrix[1][1:] if isinstance(part, _Product) else part[1]
    return math.prod(alg.sizes[i] for i in groups[-1])


def _shared(alg: Algebra, form: Poly, groups: tuple[Group, ...]) -> Operand:
    """Other keys, without an axis of heads.

    Raises:
        Refused: If heads have keys of their own.
    """
    if alg.ids(form) & set(groups[2]):
        raise Refused("heads", "heads have other keys of their own", score=0.3)
    return operand(form, groups[0], groups[1], groups[3])


def _require_no_other_reader(
    find: Finder, products: Sequence[Node], ends: Sequence[Node]
) -> None:
    """Raises `Refused` if products are read by more than the attention."""
    graph, queue, seen = find.graph, [v for n in products for v in n.outs], set()
    while queue:
        value = queue.pop()
        if value in graph.results:
            raise Refused("keys", "the program returns its keys or values", score=0.3)
        for node in graph.users(value):
            if id(node) in seen or any(node is end for end in ends):
                continue
            seen.add(id(node))
            if node.prim not in THROUGH:
                text = f"keys or values are also read by {node.prim}"
                raise Refused("keys", text, score=0.3)
            queue += node.outs


def _with_precision(
    find: Finder, reading: Reading, products: Sequence[Node], ends: Sequence[Node]
) -> dict[str, Any]:
    """The parameters, with the precision of all products.

    Raises:
        Refused: If the attention asks for fewer digits than the other products.
    """
    outs = lambda nodes: [v for n in nodes for v in n.outs]
    there = precision_of(find.graph, outs(ends))
    asked = precision_of(find.graph, outs((*products, *ends)))
    if asked is None or asked == there:
        return dict(reading.params)
    if there is not None:
        raise Refused("precision", f"products at {there!r} and {asked!r}", score=0.4)
    return {**reading.params, "precision": asked}


# ------------------------------------------------------------ keys as products
@dataclass(frozen=True)
class _Product:
    """Keys or values as a product of an array and a matrix.

    Attributes:
        algebra: The algebra of its forms.
        node: The equation.
        latent: The array, and its axes: sequences, keys, columns.
        matrix: The matrix, and its axes: columns of the array, heads, width.
        summed: The index of the array's columns.
    """

    algebra: Algebra
    node: Node
    latent: Part
    matrix: Part
    summed: int

    def summed_over(self, index: int) -> _Product:
        """The same with another index of the array's columns."""
        if self.algebra.sizes[index] != self.algebra.sizes[self.summed]:
            raise Refused("latent", "keys and values are made of others", score=0.2)
        to = {self.summed: index}
        moved = [
            (
                self.algebra.subst(form, to),
                tuple(tuple(to.get(i, i) for i in g) for g in axes),
            )
            for form, axes in (self.latent, self.matrix)
        ]
        return dataclasses.replace(self, latent=moved[0], matrix=moved[1], summed=index)

    def operands(self, name: str) -> dict[str, Operand]:
        """The array and the matrix as operands."""
        (form, groups), (matrix, axes) = self.latent, self.matrix
        return {"latent": operand(form, *groups), name: operand(matrix, *axes)}


def _parts(
    find: Finder, reading: Reading, part: Part, heads: Group
) -> list[_Product | Part]:
    """Keys or values in parts along their width, each a product where it is one.

    Args:
        find: The search.
        reading: The reading of attention.
        part: Keys or values.
        heads: The indices of heads of queries.

    Raises:
        Refused: If they are no array.
        OverBudget: If a form grows too large.
    """
    alg, (_, (b, s, _, wide)) = reading.algebra, part
    groups = (b, s, heads, wide)
    ev = find.evaluator(reading.value)
    if reading.evaluator is not None:
        ev.loops = reading.evaluator.loops
    value, args = _above_layout(find, ev, *atom_of(alg, part, "keys"))
    node = find.graph.node_of(value) if isinstance(value, int) else None
    if node is None:
        return [part]
    if node.prim == "dot_general":
        return [_product(find, ev, node, args, groups) or part]
    if node.prim != "concatenate":
        return [part]
    if len(wide) != 1:
        raise Refused("keys", "keys have several axes of width", score=0.2)
    found, start, (width,) = [], 0, wide
    for piece in node.ins:
        size = find.graph.shape(piece)[node.params["dimension"]]
        if start + size > alg.sizes[width]:
            raise Refused("keys", "keys are joined along another axis", score=0.2)
        at = alg.new_index(size)
        moved = tuple(
            alg.subst_index(a, {width: alg.affine(at, 1, start)}) for a in args
        )
        moved = tuple(
            at if axis == node.params["dimension"] else a
            for axis, a in enumerate(moved)
        )
        own = (*groups[:3], (at,))
        first, there = _above_layout(find, ev, piece, moved)
        inner = find.graph.node_of(first)
        made = None
        if inner is not None and inner.prim == "dot_general":
            made = _product(find, ev, inner, there, own)
        found.append(made or (ev.poly(piece, moved, "layout"), own))
        start += size
    return found


def _above_layout(
    find: Finder, ev: RegionEvaluator, value: Any, args: tuple[Index, ...]
) -> tuple[Any, tuple[Index, ...]]:
    """The value and indices above layout and casts between floats."""
    while isinstance(value, int):
        node = find.graph.node_of(value)
        if node is None or node.prim in ("concatenate", "dot_general"):
            break
        if node.prim == "convert_element_type":
            kinds = [find.graph.dtype(v) for v in (value, node.ins[0])]
            floats = all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)
            if not floats or is_coarse(kinds[0]):
                break
            value = node.ins[0]
            continue
        moved = ev.moved(node, value, args) if node.prim in LAYOUT else None
        if moved is None or moved[0] is None:
            break
        value, args = moved
    return value, args


def _product(
    find: Finder, ev: RegionEvaluator, node: Node, args: tuple[Index, ...],
    groups: tuple[Group, ...],
) -> _Product | None:  # fmt: skip
    """Keys or values as a product, with some axes; None if they are another one."""
    alg = find.algebra
    left, right, bound = dot_arguments(ev, node, args)
    contracted = node.params["dimension_numbers"][0][0]
    if len(bound) != 1 or len(contracted) != 1:
        return None
    summed = alg.new_index(alg.sizes[bound[0]])
    forms = [
        ev.poly(v, tuple(summed if a == bound[0] else a for a in side), "layout")
        for v, side in zip(node.ins, (left, right), strict=True)
    ]
    keys, (b, s, n, wide) = set(groups[1]), groups
    of_rows = [bool(alg.ids(form) & keys) for form in forms]
    if of_rows.count(True) != 1:
        return None
    rows, matrix = forms if of_rows[0] else forms[::-1]
    if alg.ids(rows) - {*b, *s, summed} or alg.ids(matrix) - {*n, *wide, summed}:
        return None
    c = (summed,)
    return _Product(alg, node, (rows, (b, s, c)), (matrix, (c, n, wide)), summed)


PATTERN = ReaderPattern(NAME, ANCHORS, propose, STEPS, looks_above=True)
