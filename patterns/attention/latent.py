"""Latent attention: attention whose values are the first columns of its keys.

Formula    k[b, s] = [latent[b, s], k_rope[b, s]], v[b, s] = latent[b, s]; then
           attention over them, with the same keys and values for all heads
Looks like attention with one key head. Its scores are a sum of two contractions, or
           one over joined arrays or over a cache that holds both side by side.
Must hold  values are the array that the keys begin with, at the same positions, without
           a factor between them. Other keys are added to that, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, is_local
from rewriter.algebra.normal_form import TRUE, Algebra, Index, Poly
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Group, Operand, Reading, Refused
from rewriter.patterns.attention import read
from rewriter.patterns.attention.read import ANCHORS, DOT, STEPS
from rewriter.patterns.quantized.operands import readings
from rewriter.program.graph import Node
from rewriter.program.walk import equations_above, values_above

NAME = "latent_attention"
LAYOUT = LAYOUT_PRIMITIVES | TRANSPARENT
THROUGH = LAYOUT | {"concatenate", "convert_element_type"}
"""Equations between a cache and the contractions that read it."""

NEAR = 40
"""The most values above a contraction that are looked at."""

Part = tuple[Poly, tuple[Group, ...]]
"""A part of an operand, as `Operand.parts` has it."""

Atom = tuple[object, tuple[Index, ...]]
"""The name of an array, and its index arguments."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of latent attention around an exponential."""
    products = find.regions.above(anchor.ins[0], DOT)
    scores = [i for n in products for i in n.ins[:2]]
    made = {v for n in products for v in n.outs}
    below = find.regions.below(anchor.outs[0], DOT)
    values = [
        n.ins[1 - side]
        for n, side in below
        if _are_weights(find, anchor, n.ins[side], made)
    ]
    if not _sources(find, scores).isdisjoint(_sources(find, values)):
        yield from readings(find, anchor, NAME, read.propose, latent)


def _are_weights(find: Finder, anchor: Node, value: int, scores: Set[int]) -> bool:
    """Whether a value is made of products by the exponential alone.

    A gradient's is not: it also holds the product of the cotangent and the values.
    """
    goes_on = lambda node: is_local(node) and node.prim not in ANCHORS
    for node in equations_above(find.graph, [value], goes_on):
        if node.prim in DOT and not is_local(node) and scores.isdisjoint(node.outs):
            sums = values_above(find.graph, node.ins, find.local, most=NEAR)
            if anchor.outs[0] not in sums:
                return False
    return True


def _sources(find: Finder, values: Sequence[int]) -> set[int]:
    """The arrays that values are made of by layout, joining and casts."""
    found, queue, seen = set(), list(values), set(values)
    while queue and len(seen) < NEAR:
        value = queue.pop(0)
        node = find.graph.node_of(value)
        if node is None or node.prim not in THROUGH:
            found.add(value)
            continue
        new = [i for i in node.ins if i not in seen and find.graph.shape(i)]
        seen.update(new)
        queue += new
    return found


def latent(find: Finder, reading: Reading) -> Reading:
    """Turns a reading of attention into one of latent attention.

    Raises:
        Refused: If values are not the first columns of keys that all heads share.
        OverBudget: If a form grows too large.
    """
    if reading.params.get("unshifted"):
        text = "exponentials without their maximum, which may overflow"
        raise Refused("rows", text, score=0.3)
    if reading.joined:
        raise Refused("keys", "keys are in several arrays", score=0.2)
    alg = reading.algebra
    keys, values = (reading.operands[name] for name in "kv")
    if any(alg.sizes[i] > 1 for i in keys.parts[0][1][2]):
        raise Refused("heads", "each head has keys of its own", score=0.1)
    if len(values.parts) != 1 or len(values.parts[0][1][3]) != 1:
        raise Refused("values", "values are in several arrays or axes", score=0.2)
    (value,) = values.parts
    parts = _joined(find, reading, atom_of(alg, value, "values"))
    place = _place_of_values(alg, parts, value)
    (narrow,) = value[1][3]
    if len(parts) == 1 and alg.sizes[parts[0][1][3][0]] > alg.sizes[narrow]:
        widths = [alg.sizes[narrow], alg.sizes[parts[0][1][3][0]] - alg.sizes[narrow]]
    else:
        widths = [alg.sizes[p[1][3][0]] for p in parts]
    if widths[place] != alg.sizes[narrow]:
        raise Refused("values", "values are narrower than the latent", score=0.3)
    queries = queries_of(alg, reading.operands["q"], widths)
    # Arrays that the program joins are proved as one, piece by piece as `_joined` does.
    proof = reading if len(parts) > len(keys.parts) else None
    if place:
        parts, queries = parts[::-1], queries[::-1]
    own = _keys(alg, parts)
    own |= dict(zip(("q", "q_rope"), queries, strict=False))
    rest = {n: o for n, o in reading.operands.items() if n not in ("q", "k", "v")}
    return dataclasses.replace(reading, op=NAME, operands={**rest, **own}, proof=proof)


# ------------------------------------------------------------------------- keys
def _joined(find: Finder, reading: Reading, own: Atom) -> tuple[Part, ...]:
    """Keys in one or two parts along their width.

    Raises:
        Refused: If there are more, or values are none of them.
        OverBudget: If a form grows too large.
    """
    alg, parts = reading.algebra, reading.operands["k"].parts
    if len(parts) > 2:
        raise Refused("keys", "keys are made of more than two arrays", score=0.3)
    name, args = atom_of(alg, parts[0], "keys")
    if len(parts) == 2 or name == own[0]:
        return parts
    node = _below_layout(find, name)
    if node is None or node.prim != "concatenate" or len(node.ins) != 2:
        raise Refused("values", "values are no part of the keys", score=0.2)
    ((_, groups),), (width,) = parts, parts[0][1][3]
    found, start = [], 0
    for piece in node.ins:
        size = find.graph.shape(piece)[node.params["dimension"]]
        if start + size > alg.sizes[width]:
            raise Refused("keys", "keys are joined along another axis", score=0.2)
        at = alg.new_index(size)
        to = {width: alg.affine(at, 1, start)}
        moved = tuple(alg.subst_index(a, to) for a in args)
        leaf = own[0] if _is_made_of(find, piece, own[0]) else piece
        ev = find.evaluator(reading.value, names={leaf: leaf})
        if reading.evaluator is not None:
            ev.loops = reading.evaluator.loops
        found.append((ev.poly(name, moved), (*groups[:3], (at,))))
        start += size
    return tuple(found)


def _below_layout(find: Finder, name: object) -> Node | None:
    """The equation that makes an array, before its axes are moved."""
    node = find.graph.node_of(name) if isinstance(name, int) else None
    while node is not None and node.prim in LAYOUT:
        node = find.graph.node_of(node.ins[0])
    return node


def _is_made_of(find: Finder, value: int, other: object) -> bool:
    """Whether a value is another one with moved axes or lossless casts."""
    while value != other:
        node = find.graph.node_of(value)
        if node is None or node.prim not in LAYOUT | {"convert_element_type"}:
            return False
        value = node.ins[0]
    return True


def _place_of_values(alg: Algebra, parts: Sequence[Part], value: Part) -> int:
    """Which part of the keys is the values.

    Raises:
        Refused: If none is.
    """
    for k, (form, groups) in enumerate(parts):
        if len(form) != 1 or len(groups[3]) != 1 or groups[0] != value[1][0]:
            continue
        if _same(alg, (form, groups), value):
            return k
    raise Refused("values", "values are not the first columns of keys", score=0.3)


def _same(alg: Algebra, keys: Part, value: Part) -> bool:
    """Whether values are the first columns of an array that keys are columns of."""
    (name, args), (own, at) = (atom_of(alg, p, "keys") for p in (keys, value))
    (wide,), (narrow,) = keys[1][3], value[1][3]
    if name != own or alg.sizes[wide] < alg.sizes[narrow]:
        return False
    return args == tuple(alg.subst_index(a, {narrow: wide}) for a in at)


def _keys(alg: Algebra, parts: Sequence[Part]) -> dict[str, Operand]:
    """The latent and the rotary keys as operands, that of the values first."""
    (first, groups), *rest = parts
    without = (*groups[:2], groups[3])
    wide = alg.sizes[groups[3][0]]
    if not rest:
        return {"latent": Operand(((first, without),))}
    ((form, other),) = rest
    behind = _behind(alg, parts[0], rest[0], wide)
    if behind is not None:
        return {"latent": Operand(((behind[0], (*groups[:2], behind[1])),))}
    return {
        "latent": Operand(((first, without),)),
        "k_rope": Operand(((form, (*other[:2], other[3])),)),
    }


def _behind(
    alg: Algebra, first: Part, other: Part, wide: int
) -> tuple[Poly, Group] | None:
    """Both parts of keys as one, if they follow each other in an array."""
    try:
        (name, args), (own, at) = (atom_of(alg, p, "keys") for p in (first, other))
    except Refused:
        return None
    (width,), (more,) = first[1][3], other[1][3]
    if name != own or len(args) != len(at):
        return None
    whole = alg.new_index(wide + alg.sizes[more])
    starts = alg.affine(more, 1, wide)
    moved = tuple(alg.subst_index(a, {width: starts}) for a in args)
    if moved != at:
        return None
    both = tuple(alg.subst_index(a, {width: whole}) for a in args)
    return alg.of_atom(alg.atom("leaf", name, both)), (whole,)


def atom_of(alg: Algebra, part: Part, what: str) -> Atom:
    """The array that an operand is, and its index arguments.

    Raises:
        Refused: If it is no array, but computed from some.
    """
    form, groups = part
    ((flag, mono), c), *others = form.items()
    if (
        not others
        and flag == TRUE
        and c == 1
        and len(mono) == 1
        and len(groups[3]) == 1
    ):
        ((atom, exponent),) = mono
        if exponent == 1 and alg.kind(atom) == "leaf":
            return alg.defs[atom][1:]
    raise Refused("values", f"{what} are computed from an array", score=0.2)


# ---------------------------------------------------------------------- queries
def queries_of(alg: Algebra, q: Operand, widths: Sequence[int]) -> tuple[Operand, ...]:
    """Queries in parts of some widths.

    Raises:
        Refused: If they are in other parts.
    """
    sizes = [alg.sizes[i] for _, groups in q.parts for i in groups[3]]
    if sizes == list(widths):
        return tuple(dataclasses.replace(q, parts=(p,)) for p in q.parts)
    if len(q.parts) > 1 or len(sizes) > 1 or sum(widths) != sizes[0]:
        raise Refused("queries", "queries are in other parts than keys", score=0.3)
    ((form, groups),), start, found = q.parts, 0, []
    for wide in widths:
        at = alg.new_index(wide)
        part = alg.subst(form, {groups[3][0]: alg.affine(at, 1, start)})
        one = ((part, (*groups[:3], (at,))),)
        found.append(dataclasses.replace(q, parts=one))
        start += wide
    return tuple(found)


PATTERN = ReaderPattern(NAME, ANCHORS, propose, STEPS, looks_above=True)
