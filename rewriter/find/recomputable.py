"""Lists what a replacement may compute itself, each with the reason why it may.

An operand is the program's own array, in another layout. `ALLOWED` lists everything
else, with the condition for it. `PREPARED` has what is written anew before sites are
searched. The rest is refused: code written anew from a real expression may overflow or
lose digits where the program does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rewriter.algebra.canonicalize import of_dtype
from rewriter.algebra.emit import sides
from rewriter.algebra.normal_form import Algebra, Monomial, Poly
from rewriter.find.reading import Operand, Reading, Refused

ALLOWED = {
    "leaf": "the program's value, at other positions; or 1 over it; or sums and "
    "products of some, which the program makes one after the other: rounding",
    "iota": "a position; there are fewer than 2^31 of them",
    "relu": "the larger of two integers that are positions or the program's: exact",
    "ind": "1 where one of the program's booleans holds, else 0: exact",
    "ge": "a comparison of integers: both sides hold in 32 bits, see `emit`",
    "eq": "the same",
    "any": "whether one of the program's booleans holds anywhere: exact",
    "val": "a factor that is a sum of the above",
    "log": "the logarithm of exponentials of the program's values, by `logaddexp`, or "
    "of one that the program computes: as exact as that",
}
"""By kind of atom, why emitted code computes the same as the program."""

AROUND = {
    "layout": "transposes, reshapes, slices, broadcasts, reversals: the same numbers",
    "gather": "a leaf at positions that are no slice; all are inside the array",
    "join": "pieces that the program holds apart, one after the other",
    "choose": "zero, or where it is named a fill, where the program's boolean says so",
    "widen": "floats in float32 or wider; booleans and positions as integers: exact",
    "clamp": "positions are compared with positions alone, all below 2^28: one beyond "
    "that is replaced by 2^28, which compares alike",
}
"""What emitted code does around its atoms, each with the reason why it may."""

PREPARED = {
    "differences_of_softmaxes": "``(a - l b) v`` as ``a v - l (b v)``: rounding",
    "joined_losses": "sums of rows that are added, as the sum of added rows: rounding",
    "masks_in_branches": "the booleans of each branch, of which one is selected: exact",
    "masks_in_loops": "the program's equations, in the loop that reads them",
    "masks_in_shards": "the program's equations, on the device that reads them",
    "pairs_of_loops": "the program's equations, in the later of two loops",
    "parts_of_masks": "the same equations of a part; a position is one with an offset",
    "parts_of_softmaxes": "products of parts as parts of one product: rounding",
    "platform_branches": "the program's own branch for the platforms that are targets",
    "shares_of_cotangents": "shares q and 1 - q of a number, times one array: rounding",
    "slices_before_loops": "the program's slices, in front of the loop: exact",
    "sums_of_cotangents": "a sum over axes of a sum, as a sum of such sums: rounding",
    "sums_of_rows": "a sum over all axes, as the sum of each row's: rounding",
    "whole_products": "columns of one product as those of several: the same sums",
}
"""By module of `rewriter.program.prepare`, which equations it writes anew, and why it
may."""


def require_own(reading: Reading) -> None:
    """Refuses a reading whose operands would be computed from other real numbers.

    Raises:
        Refused: With the operand and the expression.
    """
    alg = reading.algebra
    pieces = (p for joined in reading.joined.values() for p in joined.pieces)
    named = [*reading.operands.items(), *(("an array", p) for p in pieces)]
    atoms = [(name, _atoms(alg, operand)) for name, operand in named]
    outside = [p for p in (reading.times, reading.plus) if p]
    atoms += [("a factor", _inside(alg, _of_form(alg, p))) for p in outside]
    for name, found in atoms:
        for atom in found:
            if not is_allowed(alg, atom):
                raise Refused(
                    "anew",
                    f"{name} would not be computed as in the program",
                    difference=alg.show_atom(atom),
                    score=0.7,
                )


def is_allowed(alg: Algebra, atom: int) -> bool:
    """Whether code for an atom gives what the program computes."""
    kind = alg.kind(atom)
    if kind in ("ge", "eq"):
        return bool(alg.defs[atom][2]) and _fits(alg, alg.thaw(alg.defs[atom][1]))
    if kind == "relu":
        leaves = alg.leaves(atom)
        return all(alg.defs[leaf][1] in alg.integers for leaf in leaves)
    if kind == "log":
        inner = alg.thaw(alg.defs[atom][1])
        names = [alg.defs[a][1] for a in _of_form(alg, inner) if alg.kind(a) == "leaf"]
        one = len(inner) == 1 == len(names) and names[0] in alg.exponentials
        return one or alg.exponents(inner) is not None
    return kind in ALLOWED


def _fits(alg: Algebra, p: Poly) -> bool:
    """Whether both sides of a comparison hold in 32 bits."""
    least, most = of_dtype("int32")
    return all(
        least <= lo and hi <= most + 1 for lo, hi in map(alg.bounds, sides(alg, p))
    )


def _atoms(alg: Algebra, operand: Operand) -> Iterator[int]:
    """The atoms of an operand's forms, at any depth."""
    own = [a for p, _ in operand.parts for a in _of_form(alg, p)]
    if operand.flag is not None:
        own += alg.bools[operand.flag][0]
    return _inside(alg, own)


def _inside(alg: Algebra, atoms: Iterable[int]) -> Iterator[int]:
    """Some atoms, and what they are made of, at any depth."""
    seen: set[int] = set()
    stack = list(atoms)
    while stack:
        atom = stack.pop()
        if atom in seen:
            continue
        seen.add(atom)
        yield atom
        if alg.kind(atom) == "log":  # for exponentials: their arguments
            exponents = alg.exponents(alg.thaw(alg.defs[atom][1])) or ()
            stack += [a for p in exponents for a in _of_form(alg, p)]
        else:
            stack += alg.children(atom)


def _of_form(alg: Algebra, p: Poly) -> Iterator[int]:
    for flag, mono in p:
        yield from _of_monomial(mono)
        yield from alg.bools[flag][0]


def _of_monomial(mono: Monomial) -> Iterator[int]:
    return (atom for atom, _ in mono)
