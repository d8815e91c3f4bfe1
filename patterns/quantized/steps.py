"""The steps between stored numbers and the matrix that a product reads.

Looks like casts, products, sums and layout, from an array of few bits to an operand.
Must hold  each step joins one value of the program to all numbers of a group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp

from rewriter.algebra.canonicalize import TRANSPARENT
from rewriter.algebra.canonicalize.repeated_rows import repeated_rows
from rewriter.algebra.normal_form import Index, OverBudget
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import Refused
from rewriter.ops.stored import FEW_BITS
from rewriter.ops.widening import BIAS, ROWS, SCALE, ZERO
from rewriter.program.graph import Graph, Node

LAYOUT = TRANSPARENT | {"transpose", "reshape", "squeeze", "expand_dims"}
"""What moves all numbers of an array."""

SPREAD = LAYOUT | {"broadcast_in_dim"}
"""What stands between an array of scales and the product with it."""

STORED = frozenset(map(jnp.dtype, FEW_BITS))
"""Dtypes of stored numbers."""

SIGNS = {"mul": "*", "div": "/", "sub": "-", "add": "+"}
FACTORS = frozenset("*/")

REACH = 24
"""The most equations between stored numbers and a matrix."""


def few_bits(find: Finder) -> frozenset[int]:
    """The values of a program that are arrays of few bits, looked up once."""
    if "few bits" not in find.cache:
        g = find.graph
        found = (v for v, aval in enumerate(g.avals) if _is_stored(aval))
        find.cache["few bits"] = frozenset(found)
    return find.cache["few bits"]


def _is_stored(aval: object) -> bool:
    return getattr(aval, "dtype", None) in STORED and len(aval.shape) >= 2


def stored_above(find: Finder, value: int) -> int | None:
    """The largest array of few bits that a value is made of by local steps, or None."""
    g, few = find.graph, few_bits(find)

    def is_first(value: int) -> bool:
        """Whether it is an array of few bits, and no cast of one, as int8 of int4."""
        node = g.node_of(value)
        cast = node is not None and node.prim == "convert_element_type"
        return value in few and not (cast and node.ins[0] in few)

    def goes_on(node: Node) -> bool:
        local = node.prim in SIGNS or _one_operand(node)
        return local and not is_first(node.outs[0])

    found, queue, seen = [], deque([value]), {value}
    while queue and len(seen) < 2 * REACH:
        value = queue.popleft()
        found += [value] * is_first(value)
        node = g.node_of(value)
        if node is not None and goes_on(node):
            above = (_operand(node, value),) if _one_operand(node) else node.ins
            queue += [v for v in above if v not in seen]
            seen.update(above)
    return max(found, key=lambda v: _size(g.shape(v)), default=None)


def rounded_here(find: Finder, stored: int, dot: Node) -> bool:
    """Whether numbers of few bits are rounded from floats in the body of a product.

    Training with simulated rounding does so, and XLA has no array to read again.
    """
    node = find.graph.node_of(under_layout(find, stored))
    if node is None or node.prim != "convert_element_type":
        return False
    if not same_body(find, node, dot):
        return False
    old = find.graph.dtype(node.ins[0])
    return bool(jnp.issubdtype(old, jnp.floating)) and old.itemsize > 1


def same_body(find: Finder, node: Node, other: Node) -> bool:
    """Whether two equations run as often as each other: in one body of the program."""
    place = find.regions.place
    return place(node.scope).scope is place(other.scope).scope


def _one_operand(node: Node) -> bool:
    return node.prim in LAYOUT or node.prim == "convert_element_type"


def _operand(node: Node, value: int) -> int:
    """What layout, a cast or a barrier makes a value of.

    A barrier has several operands, each with its own result.
    """
    return node.ins[node.outs.index(value) if len(node.ins) > 1 else 0]


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n if isinstance(n, int) else 1
    return size


@dataclass(frozen=True)
class Joined:
    """An array that a step joins to the numbers.

    Attributes:
        name: ``"scale"``, ``"zero"``, ``"rows"`` or ``"bias"``.
        value: The operand of the equation.
        leaf: The array below its layout.
        at: The equation.
    """

    name: str
    value: int
    leaf: int
    at: Node


@dataclass(frozen=True)
class Steps:
    """Steps between stored numbers and a matrix, or between a product and a result.

    Attributes:
        first: The array that the steps begin with.
        text: The steps; see `rewriter.ops.widening`.
        joined: The arrays in them.
        nodes: The equations, the last one first, each with its operand that counts.
    """

    first: int
    text: str
    joined: tuple[Joined, ...]
    nodes: tuple[tuple[Node, int], ...]


def widening(find: Finder, matrix: int, stored: int) -> Steps:
    """The steps from stored numbers to a matrix.

    Args:
        find: The search.
        matrix: The operand of a product.
        stored: The array of few bits that is above it.

    Raises:
        Refused: If something else is between them.
    """
    g, text, nodes = find.graph, [], []
    joined: list[Joined] = []
    value = matrix
    while value != stored:
        node = g.node_of(value)
        if node is None or len(nodes) > REACH:
            raise _refused("the stored numbers are not only scaled and moved")
        if _one_operand(node):
            source = _operand(node, value)
            if node.prim == "convert_element_type":
                text.append(str(g.dtype(value)))
        elif node.prim in SIGNS:
            source, step, one = _join(find, node, stored)
            text.append(step)
            joined += one
        else:
            raise _refused(f"the stored numbers go through {node.prim}")
        nodes.append((node, source))
        value = source
    _require_one_of_each(joined)
    # Layout of the numbers themselves belongs to them: below is the program's array.
    return Steps(
        under_layout(find, stored), " ".join(text[::-1]), tuple(joined), tuple(nodes)
    )


def _require_one_of_each(joined: Sequence[Joined]) -> None:
    names = [j.name for j in joined]
    for name in (SCALE, ZERO):
        if names.count(name) > 1:
            raise _refused(f"the stored numbers have {names.count(name)} {name}s")


def _refused(text: str) -> Refused:
    return Refused("dequantised", text, score=0.6)


def _join(find: Finder, node: Node, stored: int) -> tuple[int, str, tuple[Joined, ...]]:
    """(numbers, step, what it joins) of a product or a sum with stored numbers.

    Raises:
        Refused: If both operands are made of them, or they are what is subtracted.
    """
    own = [stored_above(find, i) == stored for i in node.ins]
    if own.count(True) != 1 or (node.prim in ("sub", "div") and own[1]):
        raise _refused(f"the stored numbers are joined by {node.prim} in another way")
    k = own.index(True)
    return node.ins[k], *join_of(find, node, node.ins[1 - k])


def join_of(find: Finder, node: Node, other: int) -> tuple[str, tuple[Joined, ...]]:
    """The step that joins a value, and the array in it unless it is a number."""
    sign = SIGNS[node.prim]
    number = find.number(other)
    if number is not None:
        return f"{sign}{float(number)!r}", ()
    name = SCALE if sign in FACTORS else ZERO
    return f"{sign}{name}", (Joined(name, other, least_below(find, other), node),)


def under_layout(find: Finder, value: int) -> int:
    """The array below layout; one that is taken out of a stack is an array."""
    return _under(find, value, LAYOUT - {"squeeze"})


def under_spread(find: Finder, value: int) -> int:
    """The array below layout and broadcasts."""
    return _under(find, value, SPREAD - {"squeeze"})


def least_below(find: Finder, value: int) -> int:
    """The array below layout and broadcasts; below a cast, if it is smaller there.

    So it is where numbers are repeated before a cast.
    """
    g, found = find.graph, under_spread(find, value)
    node = g.node_of(found)
    if node is not None and node.prim == "convert_element_type":
        below = under_spread(find, node.ins[0])
        if _size(g.shape(below)) < _size(g.shape(found)):
            return below
    return found


def _under(find: Finder, value: int, prims: frozenset[str]) -> int:
    graph = find.graph
    node = graph.node_of(value)
    while node is not None and (
        (node.prim in prims and len(node.ins) == 1)
        or ("broadcast_in_dim" in prims and _repeats(graph, node))
    ):
        value = node.ins[0]
        node = graph.node_of(value)
    return value


def repeats_above(find: Finder, joined: Iterable[Joined]) -> frozenset[int]:
    """Gathers between joined arrays and what is below their layout: to look through."""
    graph, found = find.graph, set()
    for value, leaf in ((j.value, j.leaf) for j in joined):
        while value != leaf:
            node = graph.node_of(value)
            assert node is not None
            if node.prim == "gather":
                found.add(value)
            value = node.ins[0]
    return frozenset(found)


def _repeats(graph: Graph, node: Node) -> bool:
    """Whether an equation takes each row of an array several times in turn."""
    return node.prim == "gather" and repeated_rows(graph, node) is not None


def moved_below(
    find: Finder, ev: RegionEvaluator, value: int, steps: Steps, args: tuple[Index, ...]
) -> tuple[Index, ...]:
    """The indices of the program's array, from those of the numbers above a value.

    Args:
        find: The search.
        ev: An evaluator.
        value: What the steps end with.
        steps: The steps.
        args: The indices of what is below all of them.

    Raises:
        OverBudget: If the numbers are moved in a way that is not followed.
    """
    value = steps.nodes[-1][1] if steps.nodes else value
    while value != steps.first:
        node = find.graph.node_of(value)
        assert node is not None
        moved = ev.moved(node, value, args)
        if moved is None:
            raise OverBudget("a layout of stored numbers that is not followed")
        value, args = moved
    return args


def behind(
    find: Finder, product: int, scaled: bool, narrow: bool = False
) -> Iterator[tuple[int, Steps]]:
    """Results below a product, with the steps to each; those that reach furthest first.

    Args:
        find: The search.
        product: The product of rows and a matrix.
        scaled: Whether the matrix has scales already: there is then no other one.
        narrow: Whether rows are numbers of few bits too. Then they may have scales, and
            a bias may be added.
    """
    g, value = find.graph, product
    left = [SCALE] * (not scaled) + [ROWS, BIAS] * narrow
    text: list[str] = []
    joined: list[Joined] = []
    nodes: list[tuple[Node, int]] = []
    made: list[tuple[int, Steps]] = [(product, Steps(product, "", (), ()))]
    while len(nodes) < REACH:
        node = only_user(find, value, product)
        if node is None:
            break
        (new,) = node.outs
        ends = False
        if node.prim == "convert_element_type":
            if not jnp.issubdtype(g.dtype(new), jnp.floating):
                break
            text.append(str(g.dtype(new)))
            ends = g.dtype(new).itemsize < g.dtype(value).itemsize or bool(joined)
        elif (one := join_behind(find, node, value, left)) is not None:
            text.append(one[0])
            joined += one[1]
            left = _after(left, one[1])
            ends = True
        elif node.prim not in LAYOUT:
            break
        nodes.append((node, value))
        value = new
        if ends:
            steps = Steps(product, " ".join(text), tuple(joined), tuple(nodes[::-1]))
            made.append((value, steps))
    yield from reversed(made)


def only_user(find: Finder, value: int, product: int) -> Node | None:
    """The only equation that reads a value, if it runs as often as the product."""
    g, users = find.graph, find.graph.users(value)
    if len(users) != 1 or value in g.results or len(users[0].outs) != 1:
        return None
    (node,) = users
    return node if same_body(find, node, g.node_of(product)) else None


def join_behind(
    find: Finder, node: Node, value: int, left: Sequence[str]
) -> tuple[str, tuple[Joined, ...]] | None:
    """The step of an equation that joins something to a product; None for another one.

    Args:
        find: The search.
        node: The equation.
        value: The product, or what is made of it.
        left: The names of arrays that may still be joined, factors before a bias.
    """
    if node.prim not in ("mul", "div", "add") or len(set(node.ins)) == 1:
        return None
    if node.prim == "div" and node.ins[1] == value:
        return None
    other = node.ins[1 - node.ins.index(value)]
    if node.prim == "mul" and {SCALE, ROWS} <= set(left):
        pair = _factors(find, node, other)
        if pair is not None:
            return f"*{SCALE}*{ROWS}", pair
    step, one = join_of(find, node, other)
    adds = node.prim == "add"
    fitting = [name for name in left if (name == BIAS) == adds]
    if not one:
        return (step, ()) if BIAS in left else None
    if not fitting:
        return None
    return f"{step[0]}{fitting[0]}", (replace(one[0], name=fitting[0]),)


def _factors(find: Finder, node: Node, other: int) -> tuple[Joined, ...] | None:
    """The arrays whose product is as large as what it multiplies; None for others.

    Args:
        find: The search.
        node: The equation that multiplies by the product.
        other: The product.
    """
    g, made = find.graph, find.graph.node_of(other)
    if made is None or made.prim != "mul" or len(set(made.ins)) != 2:
        return None
    whole = _size(g.shape(other))
    leaves = [under_spread(find, i) for i in made.ins]
    smaller = all(_size(g.shape(leaf)) < whole for leaf in leaves)
    same = {g.dtype(i) for i in (*made.ins, *node.outs)} == {g.dtype(other)}
    if not (smaller and same) or find.number(made.ins[0]) is not None:
        return None
    names = (SCALE, ROWS)
    return tuple(
        Joined(name, i, leaf, node)
        for name, i, leaf in zip(names, made.ins, leaves, strict=True)
    )


def _after(left: Sequence[str], joined: Sequence[Joined]) -> list[str]:
    """The names of arrays that may still be joined: none behind a bias."""
    names = {j.name for j in joined}
    return [] if BIAS in names else [name for name in left if name not in names]


def arguments(
    ev: RegionEvaluator, value: int, args: tuple[Index, ...], steps: Steps
) -> tuple[tuple[Index, ...], dict[int, tuple[Index, ...]]]:
    """Follows indices of a result up through steps.

    Args:
        ev: An evaluator.
        value: The result of the steps.
        args: Its indices.
        steps: The steps.

    Returns:
        The indices of what the steps begin with, and those of each joined value.
    """
    of_joined: dict[int, tuple[Index, ...]] = {}
    by_node: dict[int, list[Joined]] = {}
    for j in steps.joined:
        by_node.setdefault(id(j.at), []).append(j)
    for node, source in steps.nodes:
        moved = ev.moved(node, value, args)
        if moved is not None:
            source, args = moved
        elif id(node) in by_node:
            for j in by_node[id(node)]:
                of_joined[j.value] = ev.aligned(j.value, args)
            args = ev.aligned(source, args)
        else:
            args = ev.aligned(source, args)
        value = source
    return args, of_joined
