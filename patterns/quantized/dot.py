"""Quantized dot: rows times a matrix that is stored in few bits.

Formula    out[..., n] = Σ_k x[..., k] (q[k, n] - zero[k/z, n]) scale[k/z, n]
Looks like a product with an array of 4 or 8 bits above one operand: casts, products
           with scales, sums with zero points, in any order. Scales may also multiply
           the product. Rows may be numbers of few bits too, as they are.
Must hold  all stored numbers are the matrix, in memory order: summed axes before the
           others, or behind them. Scales are equal within groups along summed axes.
           Roundings are kept: the steps are a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewriter.algebra.canonicalize.contraction import dot_arguments
from rewriter.algebra.normal_form import Index, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Operand,
    Reading,
    Refused,
    flat_indices,
    operand,
)
from rewriter.ops.widening import BIAS, ROWS, SCALE, ZERO
from rewriter.patterns.quantized.indices import Indices, order, split
from rewriter.patterns.quantized.proposals import of_each_side, those_that_read
from rewriter.patterns.quantized.steps import (
    STORED,
    Joined,
    Steps,
    arguments,
    behind,
    few_bits,
    moved_below,
    repeats_above,
    rounded_here,
    same_body,
    stored_above,
    widening,
)
from rewriter.program.graph import Node

NAME = "quantized_dot"
ANCHORS = frozenset({"dot_general"})

LEAST = 8
"""The fewest numbers of a group: scales of fewer take as much memory as numbers."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of a product with stored numbers above one operand."""
    if not few_bits(find) or not anchor.params["dimension_numbers"][0][0]:
        return
    yield from of_each_side(find, anchor, NAME, _readings)


def _readings(find: Finder, dot: Node, side: int, stored: int) -> Iterator[Reading]:
    """Readings of a product, the one that reaches furthest first.

    Raises:
        Refused: If the product has batch axes, or the matrix is something else.
    """
    if dot.params["dimension_numbers"][1][0]:
        raise Refused("batch", "a product with batch axes", score=0.5)
    rows = dot.ins[1 - side]
    if stored_above(find, rows) is not None and rows not in few_bits(find):
        text = "rows are widened from few bits too: XLA may multiply these itself"
        raise Refused("rows", text, score=0.4)
    narrow = rows in few_bits(find)
    as_it_is = narrow and dot.ins[side] in few_bits(find)
    if rounded_here(find, stored, dot) and not as_it_is:
        text = "the program rounds the numbers itself: they are not stored in few bits"
        raise Refused("stored", text, score=0.2)
    above = widening(find, dot.ins[side], stored)
    if any(not same_body(find, node, dot) for node, _ in above.nodes):
        text = "the matrix is widened outside of the loop that multiplies it"
        raise Refused("outside", text, score=0.3)
    scaled = any(j.name == SCALE for j in above.joined)
    yield from those_that_read(
        _Product(find, dot, side, above, below, value).reading
        for value, below in behind(find, dot.outs[0], scaled, narrow)
    )


@dataclass(frozen=True)
class _Product:
    """A product of rows and stored numbers, and what is behind it.

    Attributes:
        find: The search.
        dot: The product.
        side: Which operand is the matrix.
        above: The steps from the stored numbers to the matrix.
        below: The steps from the product to the result.
        value: The result.
    """

    find: Finder
    dot: Node
    side: int
    above: Steps
    below: Steps
    value: int

    def reading(self) -> Reading:
        """The reading.

        Raises:
            Refused: If numbers or scales lie in another way.
            OverBudget: If the form grows too large.
        """
        alg, g, x = self.find.algebra, self.find.graph, self.dot.ins[1 - self.side]
        ev = self._evaluator()
        args, at = split(
            ev,
            ev.indices(self.value),
            self.above.first,
            lambda args, known: self._indices(ev, args, known),
        )
        own = [i for a in at.numbers for i in flat_indices(a)]
        rows = [flat_indices(a) for a in at.rows]
        of_rows = {i for group in rows for i in group}
        summed = [i for i in own if i in at.summed]
        columns = [i for i in own if i not in at.summed]
        below = self._named(ev, at.joined, of_rows, set(columns))
        mode = order(self.find, self.above.first, own, summed, columns)
        numbers = alg.of_atom(ev.leaf(self.above.first, at.numbers))
        axes = [tuple(summed), tuple(columns)]
        operands = {
            "x": operand(at.of_rows, *rows, summed, dtype=g.dtype(x)),
            "w": operand(numbers, *(axes if mode == "forward" else axes[::-1])),
            **self._joined(ev, at.joined, below, summed, columns, of_rows),
            **self._row_scales_and_bias(ev, at.joined, below, rows, columns),
        }
        params: dict[str, Any] = {"widen": self.above.text}
        sums = g.dtype(self.dot.outs[0])
        if not sums == g.dtype(x) == g.dtype(self.dot.ins[self.side]):
            params["sums"] = str(sums)
        if below.text:
            params["behind"] = below.text
        if mode != "forward":
            params["mode"] = mode
        return Reading(
            NAME, alg, ev.place, self.value, args, ev.poly(self.value, args),
            (*map(tuple, rows), tuple(columns)), operands, params,
            notes=tuple(sorted(ev.notes)),
        )  # fmt: skip

    def _evaluator(self) -> RegionEvaluator:
        """An evaluator that expands the matrix, down to the program's arrays."""
        (out,) = self.dot.outs
        steps = (*self.above.joined, *self.below.joined)
        leaves = [self.above.first, *(j.leaf for j in steps)]
        return self.find.evaluator(
            self.value,
            inside=frozenset({out}) | repeats_above(self.find, steps),
            names={leaf: leaf for leaf in leaves},
            full_sides=frozenset({(out, self.side)}),
        )

    def _indices(
        self, ev: RegionEvaluator, args: tuple[Index, ...], known: Mapping[int, Index]
    ) -> Indices:
        """The indices of each array, from those of the result.

        Args:
            ev: The evaluator.
            args: The result's indices.
            known: The summed indices by their position; new ones if empty.
        """
        alg = self.find.algebra
        out, of_scales = arguments(ev, self.value, args, self.below)
        left, right, bound = dot_arguments(ev, self.dot, out)
        if not known:
            known = {i: alg.new_index(alg.sizes[i]) for i in bound}
        sides = [
            tuple(known.get(a, a) if isinstance(a, int) else a for a in side)
            for side in (left, right)
        ]
        rows, matrix = sides[1 - self.side], sides[self.side]
        above = self.dot.ins[self.side]
        numbers, joined = arguments(ev, above, matrix, self.above)
        numbers = moved_below(self.find, ev, above, self.above, numbers)
        contracted = self.dot.params["dimension_numbers"][0][1 - self.side]
        kept = [a for k, a in enumerate(rows) if k not in set(map(int, contracted))]
        summed = frozenset(i for a in known.values() for i in flat_indices(a))
        form = ev.poly(self.dot.ins[1 - self.side], rows, "layout")
        return Indices(
            tuple(kept), form, numbers, summed, {**joined, **of_scales}, known
        )

    def _joined(
        self,
        ev: RegionEvaluator,
        at: Mapping[int, tuple[Index, ...]],
        below: Steps,
        summed: list[int],
        columns: list[int],
        rows: set[int],
    ) -> dict[str, Operand]:
        """Scales and zero points.

        Raises:
            Refused: If they vary otherwise than by groups and columns.
        """
        alg = self.find.algebra
        every = (*self.above.joined, *below.joined)
        forms = {
            j.name: (j, ev.poly(j.value, at[j.value]))
            for j in every
            if j.name in (SCALE, ZERO)
        }
        groups: list[int] = []
        for name, (_, form) in forms.items():
            ids = alg.ids(form)
            own = [i for i in summed if i in ids]
            if ids & rows:
                raise Refused(name, f"the {name} varies along the rows", score=0.4)
            if own != summed[: len(own)]:
                text = f"the {name} varies within groups of the axis that is summed"
                raise Refused(name, text, score=0.6)
            groups = max(groups, own, key=len)
        if groups and self._numbers_of_a_scale(forms.values(), groups, columns) < LEAST:
            text = f"fewer than {LEAST} numbers have a scale"
            raise Refused("groups", text, score=0.2)
        made = {}
        for name, (j, form) in forms.items():
            ids = alg.ids(form)
            along = groups if ids & set(groups) else ()
            across = columns if ids & set(columns) else ()
            dtype = self.find.graph.dtype(j.value)
            made[f"w_{name}"] = operand(form, along, across, dtype=dtype)
        return made

    def _named(
        self,
        ev: RegionEvaluator,
        at: Mapping[int, tuple[Index, ...]],
        rows: set[int],
        columns: set[int],
    ) -> Steps:
        """The steps behind the product, with the names of factors by their axes."""
        alg, below = self.find.algebra, self.below
        if self.dot.ins[1 - self.side] not in few_bits(self.find):
            return below
        ids = {j.name: alg.ids(ev.poly(j.value, at[j.value])) for j in below.joined}
        turned = ids.get(SCALE, set()) & rows or ids.get(ROWS, set()) & columns
        if not turned or any(j.name == SCALE for j in self.above.joined):
            return below
        to = {SCALE: ROWS, ROWS: SCALE}
        text = [f"{s[0]}{to[s[1:]]}" if s[1:] in to else s for s in below.text.split()]
        joined = (replace(j, name=to.get(j.name, j.name)) for j in below.joined)
        return replace(below, text=" ".join(text), joined=tuple(joined))

    def _row_scales_and_bias(
        self,
        ev: RegionEvaluator,
        at: Mapping[int, tuple[Index, ...]],
        below: Steps,
        rows: list[list[int]],
        columns: list[int],
    ) -> dict[str, Operand]:
        """Scales of rows, and a bias.

        Raises:
            Refused: If they vary along other axes.
        """
        alg, made = self.find.algebra, {}
        axes = {ROWS: ("x_scale", rows), BIAS: ("bias", [columns])}
        for j in below.joined:
            if j.name not in axes:
                continue
            name, own = axes[j.name]
            form = ev.poly(j.value, at[j.value])
            if alg.ids(form) - {i for group in own for i in group}:
                text = f"what is joined as {j.name} varies along other axes"
                raise Refused(name, text, score=0.3)
            dtype = self.find.graph.dtype(j.value)
            made[name] = operand(form, *own, dtype=dtype)
        return made

    def _numbers_of_a_scale(
        self,
        forms: Iterable[tuple[Joined, Poly]],
        groups: list[int],
        columns: list[int],
    ) -> float:
        """The numbers for each of the largest array of scales or zero points."""
        alg, sizes = self.find.algebra, self.find.algebra.sizes
        across, along = (math.prod(sizes[i] for i in a) for a in (columns, groups))
        arrays = [alg.ids(form) for _, form in forms]
        most = max(
            (along if ids & set(groups) else 1) * (across if ids & set(columns) else 1)
            for ids in arrays
        )
        return math.prod(self.find.graph.shape(self.above.first)) / most


PATTERN = ReaderPattern(NAME, ANCHORS, propose, dtypes=STORED)
