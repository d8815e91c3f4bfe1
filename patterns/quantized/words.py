"""Quantized dot of words: eight numbers of four bits in each integer of 32 bits.

Formula    as of a quantized dot, with q[8 i + j, n] the bits 4 p[j] to 4 p[j] + 3 of
           words[i, n]; or the same along n
Looks like shifts of words by 0, 4, ... 28 and a mask of 15, as GPTQ and AWQ store
           matrices. Numbers may then be put into another order within each eight.
Must hold  each bit of a number is one bit of one word, or its highest bit again. So the
           equations are run on words of one bit, and the results say which numbers
           they are. Zero points may be packed alike: they stay the program's array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize.computed_positions import computed
from rewriter.algebra.canonicalize.repeated_rows import repeated_rows
from rewriter.algebra.normal_form import Index
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import Reading, Refused, flat_indices, operand
from rewriter.ops.packing import EACH, WORDS, Packing
from rewriter.patterns.quantized import small_integers
from rewriter.patterns.quantized.steps import stored_above
from rewriter.program.graph import Node
from rewriter.program.walk import values_above

SHIFTS = frozenset({"shift_right_arithmetic", "shift_right_logical"})
LINEAR = SHIFTS | {"shift_left", "and", "convert_element_type"}
"""What moves bits, or leaves some out: with a number or an array of constants."""

JOINS = {"concatenate": "dimension", "stack": "axis"}
ENDS = SHIFTS | frozenset({"and", "gather", *JOINS})
"""What the numbers of words may come from."""

REACH = 60
"""The most values above a product that are looked at for a reason."""

BITS = np.array([0, *(1 << b for b in range(32))], np.uint32)
"""Words of one bit, and of none."""


def numbers_of_words(find: Finder) -> frozenset[int]:
    """The values of a program that may be numbers of words, looked up once."""
    if "numbers of words" not in find.cache:
        g = find.graph
        shifted = any(
            node.prim in SHIFTS and _has_words(g.avals[node.outs[0]])
            for node in g.nodes
        )
        found = {
            v
            for node in (g.nodes if shifted else ())
            if node.prim in ENDS and len(node.outs) == 1 and not _repeats(find, node)
            for v in node.outs
            if len(g.shape(v)) >= 2 and jnp.issubdtype(g.dtype(v), jnp.integer)
        }
        find.cache["numbers of words"] = frozenset(found)
    return find.cache["numbers of words"]


def _has_words(aval: Any) -> bool:
    return aval.dtype in (jnp.int32, jnp.uint32) and len(aval.shape) >= 2


def _repeats(find: Finder, node: Node) -> bool:
    return node.prim == "gather" and (
        repeated_rows(find.graph, node) is not None or _order(find, node) is None
    )


def packed(find: Finder, reading: Reading) -> Reading:
    """The reading with the words in place of the numbers.

    Raises:
        Refused: If the numbers are not those of words.
        OverBudget: If a form grows too large.
    """
    alg = reading.algebra
    ((form, groups),) = reading.operands["w"].parts
    ((_, ((atom, _),)),) = form
    _, value, args = alg.defs[atom]
    transposed = reading.params.get("mode") == "transposed"
    axes = dict(zip("nk" if transposed else "kn", groups, strict=True))
    for axis in "kn":
        found = _along(find, reading, value, args, axes, axis)
        if found is not None:
            break
    else:
        raise refused("the numbers are not those of words")
    made, packing, own = found
    ev = find.evaluator(reading.value, names={value: value})
    ((words, at),) = made.leaves
    numbers = alg.of_atom(ev.leaf(words, at))
    parts = own["n"], own["k"]
    kept = parts if transposed else parts[::-1]
    whole = int(np.prod([alg.sizes[i] for i in (*kept[0], *kept[1])]))
    flat = [i for a in at for i in flat_indices(a)]
    if flat != [*kept[0], *kept[1]] or whole != np.prod(find.graph.shape(words)):
        raise refused("the words lie in another order, or are a part of an array")
    if words not in ev.place.defined:
        raise refused("the words are made where they are not at hand", 0.3)
    steps = str(reading.params["widen"])
    if steps:
        dtype = find.graph.dtype(value)
        steps = small_integers.in_floats(find, reading, packing, dtype)
    return dataclasses.replace(
        reading,
        op="packed_dot",
        operands={**reading.operands, "w": operand(numbers, *kept)},
        params={**reading.params, "widen": steps, "packing": str(packing)},
        proof=reading,
    )


def refused(text: str, score: float = 0.5) -> Refused:
    """A reason against a packing."""
    return Refused("packing", text, score=score)


def _along(
    find: Finder,
    reading: Reading,
    value: int,
    args: tuple[Index, ...],
    axes: dict[str, tuple[int, ...]],
    axis: str,
) -> tuple[_Made, Packing, dict[str, tuple[int, ...]]] | None:
    """The words of numbers that are packed along an axis, or None.

    Args:
        find: The search.
        reading: The product.
        value: The numbers.
        args: Their indices.
        axes: Those of each axis.
        axis: ``"k"`` or ``"n"``.
    """
    alg, own = reading.algebra, axes[axis]
    if not own or alg.sizes[own[-1]] % EACH:
        return None
    digit, kept = own[-1], own[:-1]
    if alg.sizes[digit] > EACH:
        more = alg.new_index(alg.sizes[digit] // EACH)
        last = alg.new_index(EACH)
        to = {digit: alg.cat(more, last, EACH)}
        digit, kept = last, (*kept, more)
        args = tuple(alg.subst_index(a, to) for a in args)
    ev = find.evaluator(reading.value, names={value: value})
    try:
        made = _walk(find, ev, value, args, digit, None)
    except Refused:
        return None
    if len(made.leaves) != 1:
        return None
    packing = _packing(made, axis)
    return None if packing is None else (made, packing, {**axes, axis: kept})


# ----------------------------------------------------------------- what numbers are
@dataclass(frozen=True)
class _Made:
    """Integers that are made of words.

    Attributes:
        leaves: The arrays of words, each with its indices.
        of: Gives the integers of some words at a place among eight.
    """

    leaves: frozenset[tuple[int, tuple[Index, ...]]]
    of: Callable[[np.ndarray, int], np.ndarray]


def _packing(made: _Made, axis: str) -> Packing | None:
    """How the numbers lie in words; None if they are something else."""
    places, signs = [], set()
    with jax.ensure_compile_time_eval():
        for at in range(EACH):
            numbers = np.asarray(made.of(BITS, at)).astype(np.int64)
            for place in range(EACH):
                half = (BITS.astype(np.int64) >> 4 * place) & 15
                both = {"unsigned": half, "signed": (half ^ 8) - 8}
                equal = [s for s, x in both.items() if np.array_equal(numbers, x)]
                if equal:
                    places.append(place)
                    signs |= set(equal)
    if sorted(places) != list(range(EACH)) or len(signs) != 1:
        return None
    (sign,) = signs
    dtype = "uint8" if sign == "unsigned" else "int8"
    return Packing(axis, WORDS, "".join(map(str, places)), sign, dtype)


def _walk(
    find: Finder,
    ev: RegionEvaluator,
    value: int,
    args: tuple[Index, ...],
    digit: Index,
    before: Any,
) -> _Made:
    """What integers are made of.

    Args:
        find: The search.
        ev: An evaluator.
        value: The integers.
        args: Their indices.
        digit: The index of eight numbers.
        before: The array that was seen before, so that a search ends.

    Raises:
        Refused: If they are made otherwise.
    """
    g = find.graph
    number = find.number(value)
    if number is not None:
        fixed = np.asarray(int(number), g.dtype(value))
        return _Made(frozenset(), lambda words, _: np.full(words.shape, fixed))
    node = g.node_of(value)
    array = computed(g, value)
    if array is not None:
        return _constants(array, args, digit)
    if node is None:
        return _words(find, value, args, digit)
    if node.prim in JOINS:
        return _joined(find, ev, node, args, digit)
    if node.prim == "gather":
        return _reordered(find, ev, node, args, digit)
    if node.prim in LINEAR:
        return _moved_bits(find, ev, node, args, digit)
    moved = ev.moved(node, value, args)
    if moved is None or moved[0] is None:
        return _words(find, value, args, digit)
    return _walk(find, ev, *moved, digit, value)


def _words(find: Finder, value: int, args: Any, digit: Index) -> _Made:
    """An array of words."""
    if not _has_words(find.graph.avals[value]):
        raise refused("the numbers are not those of words of 32 bits", 0.1)
    if any(digit in flat_indices(a) for a in args):
        raise refused("numbers of a word are not at its places", 0.2)
    dtype = find.graph.dtype(value)
    return _Made(frozenset({(value, args)}), lambda words, _: words.view(dtype))


def _constants(array: np.ndarray, args: tuple[Index, ...], digit: Index) -> _Made:
    """Constants, one for each place."""
    if any(a is not None and a != digit for a in args) or array.size not in (1, EACH):
        raise refused("numbers are shifted by other amounts in other words", 0.3)
    flat = array.reshape(-1)
    at = lambda words, j: np.full(words.shape, flat[j % flat.size])
    return _Made(frozenset(), at)


def _joined(
    find: Finder, ev: RegionEvaluator, node: Node, args: tuple[Index, ...], digit: Index
) -> _Made:
    """Eight arrays in turns."""
    axis, new = int(node.params[JOINS[node.prim]]), node.prim == "stack"
    one = new or all(find.graph.shape(i)[axis] == 1 for i in node.ins)
    if len(node.ins) != EACH or not one or args[axis] != digit:
        raise refused("the numbers are not eight arrays in turns", 0.1)
    own = (*args[:axis], *(() if new else (None,)), *args[axis + 1 :])
    made = [_walk(find, ev, i, own, digit, node.outs[0]) for i in node.ins]
    if len({x.leaves for x in made}) != 1:
        raise refused("the numbers are not of the same words")
    return _Made(made[0].leaves, lambda words, j: made[j].of(words, j))


def _reordered(
    find: Finder, ev: RegionEvaluator, node: Node, args: tuple[Index, ...], digit: Index
) -> _Made:
    """Numbers in another order within each eight."""
    alg, found = find.algebra, _order(find, node)
    if found is None:
        raise refused("the numbers are gathered in an order that is not known", 0.6)
    axis, order, at = found
    if alg.mod(args[at], EACH) != digit:
        raise refused("numbers of other words are put beside each other", 0.6)
    other = alg.new_index(EACH)
    rest = [a for d, a in enumerate(args) if d != at]
    rest.insert(axis, alg.subst_index(args[at], {digit: other}))
    made = _walk(find, ev, node.ins[0], tuple(rest), other, node.outs[0])
    return _Made(made.leaves, lambda words, j: made.of(words, order[j]))


def _order(find: Finder, node: Node) -> tuple[int, tuple[int, ...], int] | None:
    """The order within eights that a gather gives an axis.

    Returns:
        The axis of the array, the number that comes to each place, and the axis of the
        result; None for other gathers.
    """
    g, numbers = find.graph, node.params["dimension_numbers"]
    shape, sizes = g.shape(node.ins[0]), node.params["slice_sizes"]
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    (axis,) = numbers.start_index_map
    whole = all(
        n == m or d == axis for d, (n, m) in enumerate(zip(shape, sizes, strict=True))
    )
    places = computed(g, node.ins[1])
    result = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    if not whole or tuple(numbers.collapsed_slice_dims) != (axis,) or places is None:
        return None
    flat = places.reshape(-1)
    if len(result) != 1 or flat.size != shape[axis] or flat.size % EACH:
        return None
    first = flat[:EACH]
    every = np.arange(0, flat.size, EACH)[:, None] + first
    if sorted(first) != list(range(EACH)) or not np.array_equal(every.ravel(), flat):
        return None
    return axis, tuple(map(int, first)), result[0]


def _moved_bits(
    find: Finder, ev: RegionEvaluator, node: Node, args: tuple[Index, ...], digit: Index
) -> _Made:
    """Shifted or masked integers."""
    g, (out,) = find.graph, node.outs
    made = [_walk(find, ev, i, ev.aligned(i, args), digit, out) for i in node.ins]
    if not all(jnp.issubdtype(g.dtype(i), jnp.integer) for i in (*node.ins, out)):
        raise refused("the numbers are no integers", 0.1)
    leaves = frozenset().union(*(x.leaves for x in made))
    both = [bool(x.leaves) for x in made]
    if both.count(True) != 1 or (not both[0] and node.prim != "and"):
        raise refused("words are shifted by words", 0.1)
    dtype = g.dtype(out)

    def of(words: np.ndarray, j: int) -> np.ndarray:
        given = [np.asarray(x.of(words, j)) for x in made]
        given = [x.astype(g.dtype(i)) for x, i in zip(given, node.ins, strict=True)]
        bound = node.eqn.primitive.bind(*given, **node.eqn.params)
        return np.asarray(bound).astype(dtype)

    return _Made(leaves, of)


def note_refused(find: Finder, looking: Finder, anchor: Node) -> None:
    """Notes why the numbers of words were not read as a product's matrix.

    Args:
        find: The search.
        looking: The one in which the product was read.
        anchor: The product.
    """
    missed = looking.misses.get(("quantized_dot", anchor.outs[0]))
    if missed is None or all(stored_above(looking, i) is None for i in anchor.ins):
        return
    above = values_above(find.graph, anchor.ins, find.local, most=REACH)
    if any(_is_gathered(find, value) for value in above):
        text = "scales are gathered by an index of each row, as GPTQ's g_idx: rows of"
        find.missed("packed_dot", anchor, refused(f"{text} a group lie in any order"))
    find.missed("packed_dot", anchor, missed[1])


def _is_gathered(find: Finder, value: int) -> bool:
    """Whether rows of an array are taken in an order that a program is given."""
    node = find.graph.node_of(value)
    gathers = node is not None and node.prim == "gather"
    return gathers and computed(find.graph, node.ins[1]) is None
