"""Finds biases that may hold -inf: they hide keys, as a mask does.

Where a mask with a finite fill hides the other keys of a row, the program weighs those
that the mask hides. A site would take such a row for one without keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize.primitives import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.find.reading import size
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.softmax import Softmax
from rewriter.program.graph import Graph, Node
from rewriter.support.assumptions import FINITE

MOST_EQUATIONS = 200
"""How many equations are followed; beyond them a bias may be infinite."""

OPEN = "the numbers of an argument say so"

_MOVING = frozenset({"transpose", "gather", "reshape"})
_LOGARITHMS = frozenset({"log", "log1p"})
_OPAQUE = frozenset(
    {
        "cond",
        "while",
        "scan",
        "dynamic_update_slice",
        "pure_callback",
        "io_callback",
        "top_k",
        "custom_root",
        "custom_linear_solve",
        *("rsqrt", "tan", "atanh", "erf_inv", "lgamma", "digamma"),
    }
)
"""Equations whose result may be infinite for reasons that are not looked at."""
_GROWING = frozenset(
    {"exp", "exp2", "expm1", "pow", "integer_pow", "square", "abs", "sqrt", "cosh"}
)
"""Equations that may give inf for an infinite operand of either sign."""
_OF_ITS_OPERANDS = (
    LAYOUT_PRIMITIVES
    | TRANSPARENT
    | {"convert_element_type", "stop_gradient", "gather", "concatenate", "pad",
       "add", "add_any", "select_n", "max", "min", "clamp",
       "reduce_precision", "reduce_max", "reduce_min",
       "reduce_sum", "cumsum", "sort"}
)  # fmt: skip


@dataclass(frozen=True)
class Finiteness:
    """What is known of a bias.

    Attributes:
        why_not: Why it is expected to hold -inf; None if it is not.
        is_open: Whether it may, by the numbers that the program is given.
    """

    why_not: str | None = None
    is_open: bool = False


def finiteness_of(softmax: Softmax, axes: Axes) -> Finiteness:
    """Returns whether a bias may hold -inf.

    A logarithm, a quotient and a constant of -inf may make it so. So may an
    argument that all heads share: such arrays are masks. An argument with numbers of
    its own for each head is a learned bias: its numbers are looked at when the program
    runs.
    """
    if FINITE in softmax.find.assumed:
        return Finiteness()
    alg, is_open = softmax.alg, False
    graph = softmax.find.graph
    atoms = set(alg.poly_leaves(softmax.bias))
    for atom in atoms if softmax.function is None else {*atoms, softmax.function}:
        for value in softmax.values_of([atom]):
            why = _why(graph, value, _heads(softmax, axes, atom, value))
            if why is not None and why != OPEN:
                return Finiteness(why)
            is_open |= why == OPEN
    return Finiteness(is_open=is_open)


def _heads(softmax: Softmax, axes: Axes, atom: int, value: int) -> Set[int] | None:
    """The dimensions of a leaf's value along which heads differ.

    None, if heads differ by the step of a loop, or by a piece of a joined array. Where
    attention has no axis of heads, that of the batch may be one, as under `jax.vmap`.
    Then an array with numbers for each row and key of the batch counts as one of heads.
    """
    alg = softmax.alg
    _, name, places = alg.defs[atom]
    rank = len(softmax.find.graph.shape(value))
    heads, own = {*axes.n}, [alg.index_ids(at) for at in places]
    if size(alg, axes.n) == 1:
        of_scores = all(any(ids & {*axis} for ids in own) for axis in (axes.t, axes.s))
        heads = {*axes.b} if of_scores else set()
    differ = {d for d, ids in enumerate(own) if ids & heads}
    if name in softmax.joined:
        return None if differ else frozenset()
    return None if any(d >= rank for d in differ) else differ


def _why(graph: Graph, value: int, heads: Set[int] | None) -> str | None:
    """Why a value may hold -inf, by the equations that make it.

    Where these change its sign, what may hold inf is looked for. An argument counts
    only where its sign stays: masks of 0 and 1 are turned into large numbers that way.
    What a loop reads at each step counts as of heads.

    Args:
        graph: The program.
        value: The bias, or a part of it.
        heads: Its dimensions along which heads differ; None if they differ anyway.
    """
    inputs = {graph.top.env[v] for v in graph.top.jaxpr.invars}
    seen, queue, is_open = {(value, 0)}, [(value, heads, 0)], False
    while queue:
        if len(seen) > MOST_EQUATIONS:
            return "it is made of too many equations"
        current, heads, turns = queue.pop()
        sign = 1 if turns % 2 else -1
        if not jnp.issubdtype(graph.dtype(current), jnp.floating):
            continue
        const, node = graph.constants.get(current), graph.node_of(current)
        if const is not None:
            if (np.asarray(const, np.float64) == sign * np.inf).any():
                return "the program has an infinite number in it"
        elif node is None:
            if heads is not None and not heads and not turns and current in inputs:
                return "it is an argument that all heads share"
            is_open = True
        elif node.prim in _OPAQUE or node.prim.startswith("scatter"):
            is_open = True
        elif node.prim in _LOGARITHMS and sign < 0:
            return "it is a logarithm"
        elif node.prim == "div" and not graph.scalar(node.ins[1]):
            return "it is divided by numbers that may be zero"
        else:
            for i, turned in _sources(graph, node, sign):
                later = turns + turned if turns + turned < 3 else 1
                if (i, later) not in seen:
                    seen.add((i, later))
                    queue.append((i, _below(graph, node, i, heads), later))
    return OPEN if is_open else None


def _below(
    graph: Graph, node: Node, operand: int, heads: Set[int] | None
) -> Set[int] | None:
    """An operand's dimensions along which heads differ; None where that is open."""
    shape, out = graph.shape(operand), graph.shape(node.outs[0])
    if heads is None:
        return None
    if node.prim == "broadcast_in_dim":
        to = node.params["broadcast_dimensions"]
        heads = {d for d, at in enumerate(to) if at in heads}
    elif heads and (node.prim in _MOVING or len(shape) != len(out)):
        return None
    return {d for d in heads if shape[d] != 1}


def _sources(graph: Graph, node: Node, sign: int) -> Sequence[tuple[int, bool]]:
    """The operands by which a result may be infinite, and whether its sign changes."""
    numbers = [graph.scalar(i) for i in node.ins]
    known = [n is not None and math.isfinite(n) for n in numbers]
    floors = {"max": known, "clamp": known[:1]}.get(node.prim, ())
    if sign < 0 and any(floors):
        return ()
    if node.prim in ("sub", "neg"):
        turned = (False, True) if node.prim == "sub" else (True,)
        return list(zip(node.ins, turned, strict=True))
    if node.prim in ("mul", "div"):
        negative = any(k and n < 0 for k, n in zip(known, numbers, strict=True))
        return [(i, negative) for i in node.ins]
    if node.prim in _GROWING:
        return [(i, True) for i in node.ins]
    return [(i, False) for i in node.ins if node.prim in _OF_ITS_OPERANDS]
