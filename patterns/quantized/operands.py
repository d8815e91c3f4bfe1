"""Operands of an op that a program widens from numbers of few bits.

Formula    operand[i, j, ...] = (numbers[i, j, ...] - zero[i, j, ...]) scale[i, j, ...]
Looks like an operand that is found already, made by casts, scales and zero points of an
           array of few bits.
Must hold  the operand's form is that of the numbers after these steps: it is compared.
           Roundings are kept: the steps are a parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.normal_form import TRUE, Algebra, Index, OverBudget, Poly
from rewriter.find.check import form_of_code
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import (
    Group,
    Operand,
    Reading,
    Refused,
    flat_indices,
    operand,
    split_digits,
)
from rewriter.ops.widening import SCALE, applied
from rewriter.patterns.quantized.steps import (
    Steps,
    arguments,
    few_bits,
    moved_below,
    repeats_above,
    rounded_here,
    same_body,
    stored_above,
    widening,
)
from rewriter.program.graph import Node
from rewriter.program.walk import values_above

BEHIND = "float32 *scale"
"""The steps of a scale that the program joins to a product with the numbers."""

LEAST = 8
"""The fewest numbers for a scale: scales of fewer take as much memory as numbers."""

NEAR = 60
"""The most values above products that are looked at."""


@dataclass(frozen=True)
class StoredOperand:
    """An operand as it is stored.

    Attributes:
        algebra: The algebra of its forms.
        groups: The indices of its axes.
        numbers: The numbers.
        joined: The scale and the zero point, and the dtype in which each is joined.
        widen: The steps, see `rewriter.ops.widening`.
    """

    algebra: Algebra
    groups: tuple[Group, ...]
    numbers: Poly
    joined: Mapping[str, tuple[Poly, Any]]
    widen: str

    @property
    def atom(self) -> int:
        """The numbers as an atom."""
        ((_, ((atom, _),)),) = self.numbers
        return atom

    def operands(self, name: str, summed: int | None = None) -> dict[str, Operand]:
        """The operands of a stored form, by their names.

        Args:
            name: The operand's name.
            summed: The axis along which groups of numbers share a scale, if there may
                be some. Other axes of scales have their whole size, or size 1.

        Raises:
            Refused: If scales vary otherwise.
        """
        groups = list(self.groups)
        if summed is not None:
            groups[summed] = self._leading(groups[summed], name)
        made = {name: operand(self.numbers, *self.groups)}
        for what, (form, dtype) in self.joined.items():
            one = operand(form, *groups, full=False, dtype=dtype)
            made[f"{name}_{what}"] = one
        return made

    def _leading(self, own: Group, name: str) -> Group:
        """The leading indices of an axis, of those that scales vary along."""
        ids = set().union(*(self.algebra.ids(form) for form, _ in self.joined.values()))
        last = max((k for k, i in enumerate(own) if i in ids), default=-1)
        if size_of(self.algebra, own[last + 1 :]) < LEAST and last >= 0:
            text = f"{name}: a scale varies within groups of the axis that is summed"
            raise Refused(name, text, score=0.5)
        return own[: last + 1]


def size_of(alg: Algebra, indices: Sequence[int]) -> int:
    """Returns the number of positions of some indices."""
    return math.prod(alg.sizes[i] for i in indices)


def other_search(find: Finder, name: str) -> Finder:
    """The same search with a log of its own, in which a general op is read again."""
    key = ("read again", name)
    if key not in find.cache:
        find.cache[key] = dataclasses.replace(
            find, misses={}, found={}, cache={}, _known_empty={}, _asked={},
            _names={},
        )  # fmt: skip
    return find.cache[key]


def readings(
    find: Finder,
    anchor: Node,
    name: str,
    general: Callable[[Finder, Node], Iterator[Reading]],
    stored: Callable[[Finder, Reading], Reading],
    looking: Finder | None = None,
) -> Iterator[Reading]:
    """Readings of a stored form, from those of its general op.

    Args:
        find: The search.
        anchor: Where it begins.
        name: The form.
        general: Proposes readings of the general op.
        stored: Turns one into a reading of the form, or refuses to.
        looking: The search in which the general op is read, if it is another one.
    """
    looking = looking or other_search(find, name)
    for reading in general(looking, anchor):
        try:
            yield stored(find, reading)
        except Refused as refusal:
            find.missed(name, anchor, refusal.with_traceback(None))
        except OverBudget as error:
            find.missed(name, anchor, Refused("budget", str(error), score=0.5))
        else:
            if not find.done(name, reading.value):
                continue  # another reading may be proved
        looking.found[reading.op, reading.value] = reading


def may_be_stored(find: Finder, dots: Iterable[Node]) -> bool:
    """Whether an array of few bits is near above an operand of some products."""
    operands = {i for dot in dots for i in dot.ins}
    above = values_above(find.graph, operands, find.local, most=NEAR)
    return not few_bits(find).isdisjoint(above)


def is_stored(find: Finder, value: int) -> bool:
    """Whether a value is an array of few bits, or made of one by local steps."""
    return value in few_bits(find) or stored_above(find, value) is not None


def stored_operand(
    find: Finder, reading: Reading, name: str, times: Poly | None = None
) -> StoredOperand | None:
    """An operand of a reading as it is stored, or None if it is not of few bits.

    Args:
        find: The search.
        reading: The reading of an op.
        name: The operand.
        times: What the operand is multiplied by beside; 1 if None.

    Raises:
        Refused: If it is of few bits, and something else is done to it.
        OverBudget: If a form grows too large.
    """
    given, alg = reading.operands[name], reading.algebra
    names = {alg.defs[a][1] for a in given.leaves(alg)}
    found = [v for v in names if isinstance(v, int) and is_stored(find, v)]
    if not found:
        return None
    if len(found) > 1 or len(given.parts) > 1:
        raise Refused(name, f"{name} is made of several arrays of few bits", score=0.5)
    ((form, groups),) = given.parts
    form = form if times is None else alg.mul(form, times)
    return _Reader(find, reading, name, found[0]).read(form, groups)


@dataclass(frozen=True)
class _Reader:
    """Reads an operand of few bits.

    Attributes:
        find: The search.
        reading: The reading that it is an operand of.
        name: Its name.
        value: The leaf of it that is made of few bits.
    """

    find: Finder
    reading: Reading
    name: str
    value: int

    def refused(self, text: str, score: float = 0.6, difference: str = "") -> Refused:
        text = f"{self.name}: {text}"
        return Refused(self.name, text, score=score, difference=difference)

    @functools.cached_property
    def steps(self) -> Steps:
        """The steps from the stored numbers to the leaf."""
        find, value = self.find, self.value
        stored = value if value in few_bits(find) else stored_above(find, value)
        node = find.graph.node_of(self.reading.value)
        assert stored is not None
        assert node is not None
        if rounded_here(find, stored, node):
            raise self.refused("the numbers are rounded here, not stored", 0.2)
        found = widening(find, value, stored)
        if any(not same_body(find, n, node) for n, _ in found.nodes):
            raise self.refused("it is widened outside of the loop that reads it", 0.3)
        return found

    def read(self, form: Poly, groups: Sequence[Group]) -> StoredOperand:
        """An operand as it is stored, given its form and the indices of its axes.

        Raises:
            Refused: If it is another function of the numbers.
            OverBudget: If a form grows too large.
        """
        alg, steps = self.reading.algebra, self.steps
        atom, rest = self._factors(form)
        ev = self._evaluator()
        args, at = arguments(ev, self.value, alg.defs[atom][2], steps)
        args = moved_below(self.find, ev, self.value, steps, args)
        numbers = alg.of_atom(ev.leaf(steps.first, args))
        joined = {
            j.name: (ev.poly(j.value, at[j.value]), self.find.graph.dtype(j.value))
            for j in steps.joined
        }
        widen = steps.text
        if rest != alg.const(1):
            if SCALE in joined:
                raise self.refused("it has two scales", 0.5)
            joined[SCALE], widen = (rest, None), f"{widen} {BEHIND}".strip()
        to, groups = self._digits(groups, [numbers, *(p for p, _ in joined.values())])
        found = StoredOperand(
            alg,
            groups,
            alg.subst(numbers, to),
            {n: (alg.subst(p, to), dtype) for n, (p, dtype) in joined.items()},
            widen,
        )
        self._require_equal(ev, alg.subst(form, to), found)
        return found

    def _digits(
        self, groups: Sequence[Group], forms: Sequence[Poly]
    ) -> tuple[dict[int, Index], tuple[Group, ...]]:
        """What stands for indices that some forms read by digits, and new groups."""
        alg, whole = self.reading.algebra, {}
        for form in forms:
            whole = alg.add(whole, form)
        flat = tuple(i for group in groups for i in group)
        _, new = split_digits(alg, whole, flat)
        to = {i: a for i, a in zip(flat, new, strict=True) if i != a}
        parts = (
            tuple(x for i in g for x in flat_indices(to.get(i, i))) for g in groups
        )
        return to, tuple(parts)

    def _factors(self, form: Poly) -> tuple[int, Poly]:
        """(the leaf of few bits, what it is multiplied by) of the operand's form.

        Raises:
            Refused: If it is no such product. A number may have been rounded with, and
                where is not known here.
        """
        alg = self.reading.algebra
        for (flag, mono), c in form.items() if len(form) == 1 else ():
            own = [a for a, e in mono if e == 1 and self._is_own(a)]
            if flag == TRUE and len(own) == 1 and c == 1:
                others = tuple(x for x in mono if x[0] != own[0])
                if all(alg.kind(a) == "leaf" for a, _ in others):
                    return own[0], {(TRUE, others): c}
        raise self.refused("it is not only numbers of few bits times a scale")

    def _is_own(self, atom: int) -> bool:
        alg = self.reading.algebra
        return alg.kind(atom) == "leaf" and alg.defs[atom][1] == self.value

    def _evaluator(self) -> RegionEvaluator:
        """An evaluator that expands the operand, down to the program's arrays."""
        leaves = [self.steps.first, *(j.leaf for j in self.steps.joined)]
        ev = self.find.evaluator(
            self.reading.value,
            names={leaf: leaf for leaf in leaves},
            inside=repeats_above(self.find, self.steps.joined),
        )
        if any(leaf not in ev.place.defined for leaf in leaves):
            raise self.refused("it is made where its numbers are not at hand", 0.3)
        if self.reading.evaluator is not None:
            ev.loops = self.reading.evaluator.loops
        return ev

    def _require_equal(
        self, ev: RegionEvaluator, form: Poly, made: StoredOperand
    ) -> None:
        """Proves that the numbers after their steps are the operand.

        Args:
            ev: Expands the operand.
            form: The operand's form.
            made: The numbers and their steps.

        Raises:
            Refused: If they are another function.
        """
        alg = self.reading.algebra
        arrays = {"x": operand(made.numbers, *made.groups)}
        for name, (p, dtype) in made.joined.items():
            arrays[name] = operand(p, *made.groups, full=False, dtype=dtype)
        code = functools.partial(applied, steps=made.widen)
        form_of = form_of_code(self.find.graph, self.reading, arrays, code, ev)
        want = form_of(tuple(_joined(alg, group) for group in made.groups))
        atom, rest = self._factors(form)
        have = alg.mul(ev.poly(self.value, alg.defs[atom][2]), rest)
        if alg.difference(have, want):
            shown = f"{alg.show(have)}  is not  {alg.show(want)}"
            raise self.refused("it is another function of the numbers", 0.6, shown)


def _joined(alg: Algebra, group: Group) -> Index:
    """The index of an axis that a group of indices makes."""
    at: Index = None
    for i in group:
        at = i if at is None else alg.cat(at, i, alg.sizes[i])
    return at
