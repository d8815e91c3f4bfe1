"""Quantized dot of packed numbers: two of four bits in each byte, or eight in a word.

Formula    as of a quantized dot, with q[2 i + c, n] or q[i + c k/2, n] the half c of
           bytes[i, n]; or the same along n
Looks like a quantized dot whose numbers are two arrays of halves of bytes behind each
           other, or in turns. Halves are made by shifts and masks.
Must hold  both halves are of the same byte, and are put at places as above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from rewriter.algebra.normal_form import Algebra, Index
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Group,
    Reading,
    Refused,
    flat_indices,
    operand,
    split_digits,
)
from rewriter.ops.packing import Packing
from rewriter.patterns.quantized import codebooks, dot, words
from rewriter.patterns.quantized.bytes import (
    Elementwise,
    Half,
    elementwise,
    made_of_bytes,
)
from rewriter.patterns.quantized.dot import ANCHORS
from rewriter.patterns.quantized.operands import other_search, readings, size_of
from rewriter.patterns.quantized.steps import STORED, few_bits
from rewriter.program.graph import Node

NAME = "packed_dot"
JOINS = {"concatenate": "dimension", "stack": "axis"}
"""What puts arrays behind each other, and its parameter with the axis."""

UNPACKED = {"int8": "int8", "uint8": "uint8", "int4": "int8", "uint4": "uint8"}
"""The dtype of a byte for each number, by the program's dtype."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of a product whose numbers are packed in bytes."""
    if few_bits(find):
        yield from readings(find, anchor, NAME, dot.propose, packed)
    if few := words.numbers_of_words(find):
        looking = _other_numbers(find, "words", few)
        yield from readings(find, anchor, NAME, dot.propose, words.packed, looking)
        words.note_refused(find, looking, anchor)
    if few := codebooks.lookups(find):
        looking = _other_numbers(find, "codebooks", few)
        yield from readings(find, anchor, NAME, dot.propose, _looked_up, looking)


def _other_numbers(find: Finder, name: str, few: frozenset[int]) -> Finder:
    """A search in which other values are the numbers of a product's matrix."""
    looking = other_search(find, f"{NAME} of {name}")
    looking.cache["few bits"] = few
    return looking


def _looked_up(find: Finder, reading: Reading) -> Reading:
    """The reading of what is looked up by packed numbers."""
    return codebooks.packed(find, reading, (packed, words.packed))


def packed(find: Finder, reading: Reading) -> Reading:
    """The reading with the bytes in place of the numbers.

    Raises:
        Refused: If the numbers are not two halves of bytes.
        OverBudget: If a form grows too large.
    """
    alg = reading.algebra
    ((form, groups),) = reading.operands["w"].parts
    ((_, ((atom, _),)),) = form
    _, value, args = alg.defs[atom]
    kind = find.graph.dtype(value)
    behind = elementwise(find, value)
    if behind is None:
        raise _refused("the numbers are made of several arrays", 0.1)
    ev = find.evaluator(reading.value, names={value: value})
    value, args = _moved(find, ev, behind.first, args)
    node = find.graph.node_of(value)
    if node is None or node.prim not in JOINS or len(node.ins) != 2:
        raise _refused("the numbers are not two arrays behind each other", 0.1)
    groups, args = _in_digits(find, reading, value, groups, args)
    places = _Places.of(find, alg, node, args)
    mode = reading.params.get("mode", "forward")
    k, n = groups if mode == "forward" else groups[::-1]
    along, order, (k, n) = places.within(k, n)
    ev = find.evaluator(reading.value, names={value: value})
    first, second = (_half(find, ev, value, at, behind) for at in places.both)
    if first.numbers != second.numbers or first.args != second.args:
        raise _refused("both halves are not of the same byte")
    if {first.half.half, second.half.half} != {"low", "high"} or (
        first.half.sign, first.half.added
    ) != (second.half.sign, second.half.added):  # fmt: skip
        raise _refused("both halves are not read alike")
    numbers = alg.of_atom(ev.leaf(first.numbers, first.args))
    own = [i for a in first.args for i in flat_indices(a)]
    kept = (k, n) if mode == "forward" else (n, k)
    whole = size_of(alg, own) == _size(find, first.numbers)
    if own != [*kept[0], *kept[1]] or not whole:
        raise _refused("the bytes lie in another order, or are a part of an array")
    if first.numbers not in ev.place.defined:
        raise _refused("the bytes are made where they are not at hand", 0.3)
    half, wide = first.half, UNPACKED.get(kind.name, "uint8")
    packing = Packing(along, order, half.half, half.sign, wide)
    widen = reading.params["widen"]
    if half.added:
        widen = f"{half.added:+}.0 {widen}".strip()
    return dataclasses.replace(
        reading,
        op=NAME,
        operands={**reading.operands, "w": operand(numbers, *kept)},
        params={**reading.params, "widen": widen, "packing": str(packing)},
        proof=reading,
    )


def _in_digits(
    find: Finder,
    reading: Reading,
    value: int,
    groups: Sequence[Group],
    args: tuple[Index, ...],
) -> tuple[tuple[Group, ...], tuple[Index, ...]]:
    """The matrix's indices and those of an array, split where the array reads digits.

    So it is where two numbers of a byte lie beside each other in a flat array.
    """
    alg = reading.algebra
    ev = find.evaluator(reading.value, names={value: value})
    flat = tuple(i for group in groups for i in group)
    _, new = split_digits(alg, alg.of_atom(ev.leaf(value, args)), flat)
    to = {i: a for i, a in zip(flat, new, strict=True) if i != a}
    parts = (tuple(x for i in g for x in flat_indices(to.get(i, i))) for g in groups)
    return tuple(parts), tuple(alg.subst_index(a, to) for a in args)


def _refused(text: str, score: float = 0.5) -> Refused:
    return Refused("packing", text, score=score)


def _size(find: Finder, value: int) -> int:
    total = 1
    for n in find.graph.shape(value):
        total *= n
    return total


@dataclass(frozen=True)
class _Places:
    """The places of two arrays in the one that they make.

    Attributes:
        both: The indices of the first, and of the second, within the whole.
        inner: The first index of both there; None where they have size 1.
        outer: The first index of the whole there.
    """

    both: tuple[tuple[Index, ...], tuple[Index, ...]]
    inner: int | None
    outer: int

    @classmethod
    def of(
        cls, find: Finder, alg: Algebra, node: Node, args: tuple[Index, ...]
    ) -> _Places:
        """The places of two arrays that lie behind each other.

        Raises:
            Refused: If they are not equally large.
        """
        axis = int(node.params[JOINS[node.prim]])
        sizes = {1}
        if node.prim == "concatenate":
            sizes = {find.graph.shape(i)[axis] for i in node.ins}
        outer, *others = flat_indices(args[axis])
        if len(sizes) != 1 or alg.sizes[outer] % 2:
            raise _refused("two arrays of different sizes, or with a group in both")
        (size,) = sizes
        inner, place = None, None
        if size > 1:
            inner = place = alg.new_index(alg.sizes[outer] // 2)
            for i in others:
                place = alg.cat(place, i, alg.sizes[i])
        at = [alg.affine(place, 1, c * size) for c in (0, 1)]
        first, second = ((*args[:axis], a, *args[axis + 1 :]) for a in at)
        return cls((first, second), inner, outer)

    def within(
        self, k: tuple[int, ...], n: tuple[int, ...]
    ) -> tuple[str, str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """(axis, order, the bytes' indices) of the numbers' indices.

        Raises:
            Refused: If numbers lie otherwise.
        """
        axis = "k" if self.outer in k else "n"
        own = k if axis == "k" else n
        at = own.index(self.outer)
        if self.inner is not None:  # [.. 2 i ..]
            if at != 0:
                raise _refused("halves of a part of an axis")
            order, rest = "halves", (self.inner, *own[1:])
        elif at == 0 and len(own) > 1:
            order, rest = "halves", own[1:]
        elif at == len(own) - 1:
            order, rest = "turns", own[:-1]
        else:
            raise _refused("halves of a part of an axis")
        return axis, order, (rest, n) if axis == "k" else (k, rest)


@dataclass(frozen=True)
class _Half:
    """Halves of bytes.

    Attributes:
        numbers: The array of bytes.
        args: Its indices.
        half: Which half, and what is added to it.
    """

    numbers: int
    args: tuple[Index, ...]
    half: Half


def _half(
    find: Finder,
    ev: RegionEvaluator,
    whole: int,
    at: tuple[Index, ...],
    behind: Elementwise,
) -> _Half:
    """The halves of bytes that some places of an array hold.

    Args:
        find: The search.
        ev: An evaluator.
        whole: The array.
        at: The places.
        behind: What is made of the array.

    Raises:
        Refused: If they are something else.
    """
    steps, (value, args) = [behind], _followed(find, ev, whole, at)
    while (found := elementwise(find, value)) is not None and found.nodes:
        steps.append(found)
        value, args = _moved(find, ev, found.first, args)
    half = made_of_bytes(find, [*steps, Elementwise(value, ())])
    if half is None:
        raise _refused("the numbers are not halves of bytes", 0.1)
    return _Half(value, args, half)


def _followed(
    find: Finder, ev: RegionEvaluator, value: int, args: tuple[Index, ...]
) -> tuple[int, tuple[Index, ...]]:
    """The value and indices above layout and concatenation."""
    while True:
        value, args = _moved(find, ev, value, args)
        node = find.graph.node_of(value)
        if node is None or node.prim not in JOINS:
            return value, args
        value, args = _piece(find, node, args)


def _moved(
    find: Finder, ev: RegionEvaluator, value: int, args: tuple[Index, ...]
) -> tuple[int, tuple[Index, ...]]:
    """The value and indices above layout."""
    while True:
        node = find.graph.node_of(value)
        moved = (
            None if node is None or node.prim in JOINS else ev.moved(node, value, args)
        )
        if moved is None or moved[0] is None:
            return value, args
        value, args = moved


def _piece(
    find: Finder, node: Node, args: tuple[Index, ...]
) -> tuple[int, tuple[Index, ...]]:
    """The array of a concatenation that some places are in.

    Raises:
        Refused: If it is not known which.
    """
    axis = int(node.params[JOINS[node.prim]])
    new = node.prim == "stack"
    (first, inner), before = _start(args[axis]), 0
    for value in node.ins:
        size = 1 if new else find.graph.shape(value)[axis]
        if first == before:
            own = () if new else (inner if size > 1 else None,)
            return value, (*args[:axis], *own, *args[axis + 1 :])
        before += size
    raise _refused("an array of which the place is not known")


def _start(a: Index) -> tuple[int, Index]:
    """(first place, index from there) of an index."""
    if isinstance(a, tuple) and a[0] == "k":
        return int(a[1]), None
    if isinstance(a, tuple) and a[0] == "aff" and a[2] == 1:
        return int(a[3]), a[1]
    return 0, a


PATTERN = ReaderPattern(
    NAME, ANCHORS, propose, either=frozenset(JOINS) | words.SHIFTS,
    dtypes=STORED | {jnp.dtype("int32"), jnp.dtype("uint32")},
)  # fmt: skip
