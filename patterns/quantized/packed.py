"""Quantized dot of packed numbers: two numbers of four bits in each byte.

Formula    as of a quantized dot, with q[2 i + c, n] or q[i + c k/2, n] the half c of
           bytes[i, n]; or the same along n
Looks like a quantized dot whose numbers are two arrays of halves of bytes behind each
           other, or in turns. Halves are made by shifts and masks.
Must hold  both halves are of the same byte, and are put at places as above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rewriter.algebra.normal_form import Algebra, Index
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Reading, Refused, flat_indices, operand
from rewriter.ops.packing import Packing
from rewriter.patterns.quantized import dot
from rewriter.patterns.quantized.dot import ANCHORS
from rewriter.patterns.quantized.operands import readings, size_of
from rewriter.patterns.quantized.steps import STORED, few_bits
from rewriter.program.graph import Node

NAME = "packed_dot"
JOINS = {"concatenate": "dimension", "stack": "axis"}
"""What puts arrays behind each other, and its parameter with the axis."""

SHIFTS = frozenset({"shift_right_arithmetic", "shift_right_logical"})


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of a product whose numbers are packed in bytes."""
    if few_bits(find):
        yield from readings(find, anchor, NAME, dot.propose, packed)


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
    value, casts = _under_casts(find, value)
    node = find.graph.node_of(value)
    if node is None or node.prim not in JOINS or len(node.ins) != 2:
        raise _refused("the numbers are not two arrays behind each other", 0.1)
    places = _Places.of(find, alg, node, args)
    mode = reading.params.get("mode", "forward")
    k, n = groups if mode == "forward" else groups[::-1]
    along, order, (k, n) = places.within(k, n)
    ev = find.evaluator(reading.value, names={value: value})
    first, second = (_half(find, ev, value, at) for at in places.both)
    if first.numbers != second.numbers or first.args != second.args:
        raise _refused("both halves are not of the same byte")
    if {first.half, second.half} != {"low", "high"} or first.sign != second.sign:
        raise _refused("both halves are not read alike")
    numbers = alg.of_atom(ev.leaf(first.numbers, first.args))
    own = [i for a in first.args for i in flat_indices(a)]
    kept = (k, n) if mode == "forward" else (n, k)
    whole = size_of(alg, own) == _size(find, first.numbers)
    if own != [*kept[0], *kept[1]] or not whole:
        raise _refused("the bytes lie in another order, or are a part of an array")
    if first.numbers not in ev.place.defined:
        raise _refused("the bytes are made where they are not at hand", 0.3)
    if kind.name not in BYTES or not casts <= HOLDS[first.sign]:
        raise _refused(f"the numbers are unpacked to {kind}", 0.3)
    packing = Packing(along, order, first.half, first.sign, kind.name)
    return dataclasses.replace(
        reading,
        op=NAME,
        operands={**reading.operands, "w": operand(numbers, *kept)},
        params={**reading.params, "packing": str(packing)},
        proof=reading,
    )


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
        half: ``"low"`` or ``"high"``.
        sign: ``"signed"`` or ``"unsigned"``.
    """

    numbers: int
    args: tuple[Index, ...]
    half: str
    sign: str


def _half(
    find: Finder, ev: RegionEvaluator, whole: int, at: tuple[Index, ...]
) -> _Half:
    """The halves of bytes that some places of an array hold.

    Raises:
        Refused: If they are something else.
    """
    source, args = _followed(find, ev, whole, at)
    found = _half_of(find, source)
    if found is None:
        raise _refused("the numbers are not halves of bytes", 0.1)
    value, half, sign = found
    while True:  # up to the program's array
        node = find.graph.node_of(value)
        moved = None if node is None else ev.moved(node, value, args)
        if moved is None or moved[0] is None:
            return _Half(value, args, half, sign)
        value, args = moved


def _followed(
    find: Finder, ev: RegionEvaluator, value: int, args: tuple[Index, ...]
) -> tuple[int, tuple[Index, ...]]:
    """The value and indices above layout, concatenation and casts of whole numbers."""
    while True:
        node = find.graph.node_of(value)
        if node is None:
            return value, args
        if node.prim in JOINS:
            value, args = _piece(find, node, args)
            continue
        moved = ev.moved(node, value, args)
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


def _half_of(find: Finder, value: int) -> tuple[int, str, str] | None:
    """(bytes, which half, its sign) of an array, or None."""
    value, casts = _under_casts(find, value)
    node = find.graph.node_of(value)
    found = None if node is None else _made(find, node)
    return found if found is not None and casts <= HOLDS[found[2]] else None


def _under_casts(find: Finder, value: int) -> tuple[int, frozenset[str]]:
    """The value under casts, and the dtypes on the way."""
    graph, casts = find.graph, {find.graph.dtype(value).name}
    node = graph.node_of(value)
    while node is not None and node.prim == "convert_element_type":
        (value,) = node.ins
        casts.add(graph.dtype(value).name)
        node = graph.node_of(value)
    return value, frozenset(casts)


WHOLE = frozenset(f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64))
SIGNED = frozenset(name for name in WHOLE if name[0] == "i")
BYTES = frozenset({"int8", "uint8"})
HOLDS = {"unsigned": WHOLE, "signed": SIGNED}
"""Dtypes that hold numbers of four bits."""


def _made(find: Finder, node: Node) -> tuple[int, str, str] | None:
    """(bytes, which half, its sign) of what an equation gives, or None."""
    if node.prim == "and":
        for value, mask in (node.ins, node.ins[::-1]):
            if find.number(mask) == 15:
                return _masked(find, value)
        return None
    if node.prim not in SHIFTS or find.number(node.ins[1]) != 4:
        return None
    kind = find.graph.dtype(node.outs[0]).name
    arithmetic = node.prim == "shift_right_arithmetic"
    above = find.graph.node_of(node.ins[0])
    if above is not None and above.prim == "shift_left":
        if not (arithmetic and kind == "int8" and find.number(above.ins[1]) == 4):
            return None
        return above.ins[0], "low", "signed"
    value = _bytes(find, node.ins[0])
    if value is None:
        return None
    of_bytes = find.graph.dtype(value).name
    if arithmetic:  # of unsigned numbers it is not what it is for signed ones
        sign = "signed" if of_bytes == "int8" else "unsigned"
        return (value, "high", sign) if kind in SIGNED else None
    narrow = kind in BYTES or of_bytes == "uint8"  # else the sign was spread
    return (value, "high", "unsigned") if narrow else None


def _masked(find: Finder, value: int) -> tuple[int, str, str] | None:
    """The same of what is masked by 15: signs are masked too."""
    node = find.graph.node_of(value)
    half = "low"
    if node is not None and node.prim in SHIFTS:
        if find.number(node.ins[1]) != 4:
            return None
        half, value = "high", node.ins[0]
    found = _bytes(find, value)
    return None if found is None else (found, half, "unsigned")


def _bytes(find: Finder, value: int) -> int | None:
    """The array of bytes under casts to wider integers, or None."""
    graph = find.graph
    while (name := graph.dtype(value).name) not in BYTES:
        node = graph.node_of(value)
        if node is None or node.prim != "convert_element_type" or name not in WHOLE:
            return None
        (value,) = node.ins
    return value


PATTERN = ReaderPattern(NAME, ANCHORS, propose, either=frozenset(JOINS), dtypes=STORED)
