"""What elementwise equations make of each of the 256 bytes.

Looks like shifts, masks, remainders, choices and casts between an array of bytes and an
           array of halves of bytes.
Must hold  every equation takes one place of one array, and numbers. Then the equations
           are run on all bytes, and the results say which half they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.find.finder import Finder
from rewriter.program.graph import Node

CALLS = {"floor_divide": jnp.floor_divide, "remainder": jnp.remainder}
"""JAX's own calls, which are an equation here."""

ELEMENTWISE = frozenset({
    "and", "or", "xor", "not", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "add", "sub", "mul", "div", "rem", "neg", "abs", "sign",
    "max", "min", "clamp", "convert_element_type", "select_n", "eq", "ne", "lt", "le",
    "gt", "ge", *CALLS,
})  # fmt: skip
"""What is run on bytes."""

MOST = 24
"""The most equations."""

BYTES = np.arange(256)


@dataclass(frozen=True)
class Elementwise:
    """Equations that take one place of one array.

    Attributes:
        first: The array.
        nodes: The equations, in order.
    """

    first: int
    nodes: tuple[Node, ...]

    def of(self, find: Finder, numbers: np.ndarray) -> np.ndarray:
        """What the equations make of some elements of the array.

        Args:
            find: The search.
            numbers: The elements.
        """
        dtype, known = find.graph.dtype, {}
        known[self.first] = numbers.astype(dtype(self.first))
        for node in self.nodes:
            given = []
            for i in node.ins:
                if i not in known:
                    known[i] = np.full(numbers.shape, find.number(i), dtype(i))
                given.append(known[i])
            (out,) = node.outs
            known[out] = _bound(node, given).astype(dtype(out))
        return np.asarray(known[self.nodes[-1].outs[0] if self.nodes else self.first])


def _bound(node: Node, given: list[jax.Array]) -> jax.Array:
    """What an equation gives of some numbers."""
    if node.prim in CALLS:
        return CALLS[node.prim](*given)
    return node.eqn.primitive.bind(*given, **node.eqn.params)


def elementwise(find: Finder, value: int) -> Elementwise | None:
    """The elementwise equations above a value, up to one array; None if there is none.

    Args:
        find: The search.
        value: A value.
    """
    graph, nodes, firsts = find.graph, [], set()
    seen: set[int] = set()

    def walk(value: int) -> None:
        if value in seen or find.number(value) is not None or len(nodes) > MOST:
            return
        seen.add(value)
        node = graph.node_of(value)
        if node is None or node.prim not in ELEMENTWISE:
            firsts.add(value)
            return
        for i in node.ins:
            walk(i)
        nodes.append(node)

    walk(value)
    if len(firsts) != 1 or len(nodes) > MOST:
        return None
    return Elementwise(firsts.pop(), tuple(nodes))


@dataclass(frozen=True)
class Half:
    """A half of a byte, and what is added to it.

    Attributes:
        half: ``"low"`` or ``"high"``.
        sign: ``"signed"`` or ``"unsigned"``.
        added: An integer.
    """

    half: str
    sign: str
    added: int


def half_of(made: np.ndarray) -> Half | None:
    """Returns which half of bytes some numbers are; None if they are none.

    Args:
        made: What is made of each of the bytes 0 to 255.

    Example:
        >>> half_of(BYTES // 16 - 8)
        Half(half='high', sign='unsigned', added=-8)
    """
    for half, unsigned in (("low", BYTES & 15), ("high", BYTES >> 4)):
        signed = (unsigned ^ 8) - 8
        for sign, numbers in (("unsigned", unsigned), ("signed", signed)):
            (added, *others) = set((made.astype(np.int64) - numbers).tolist())
            if not others:
                return Half(half, sign, added)
    return None


def made_of_bytes(find: Finder, steps: list[Elementwise]) -> Half | None:
    """The half that equations make of bytes, those of the last array first.

    Args:
        find: The search.
        steps: Equations, each of the array that the next ones make.
    """
    first = find.graph.dtype(steps[-1].first)
    if first.name not in ("int8", "uint8"):
        return None
    numbers = BYTES.astype(np.uint8).astype(first)
    with jax.ensure_compile_time_eval():
        for step in reversed(steps):
            numbers = step.of(find, numbers)
    if not np.issubdtype(numbers.dtype, np.integer):
        return _of_few_bits(numbers)
    return half_of(numbers)


def _of_few_bits(numbers: np.ndarray) -> Half | None:
    """The same of numbers of four bits, which NumPy knows no integers of."""
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        return None
    return half_of(numbers.astype(np.int64))
