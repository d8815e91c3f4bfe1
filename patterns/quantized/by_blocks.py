"""Products of blocks with scales: each part of a sum is multiplied, scaled, and added.

Formula    out[..., n] = Σ_z rows[..., z] scale[z, n] Σ_k x[..., z, k] w[z, k, n]
Looks like a product with batch axes, of an array of few bits that is at most cast.
           Scales multiply the product, and a sum over the batch axes is behind them.
Must hold  parts are equal pieces of the summed axis, in memory order. All numbers are
           the matrix. Roundings are kept: the steps are parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.canonicalize.contraction import dot_arguments
from rewriter.algebra.normal_form import Index
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Reading,
    Refused,
    flat_indices,
    operand,
)
from rewriter.ops.widening import BIAS, ROWS, SCALE
from rewriter.patterns.quantized.dot import ANCHORS
from rewriter.patterns.quantized.indices import Indices, order, split
from rewriter.patterns.quantized.proposals import of_each_side, those_that_read
from rewriter.patterns.quantized.steps import (
    LAYOUT,
    REACH,
    STORED,
    Steps,
    arguments,
    behind,
    few_bits,
    join_behind,
    moved_below,
    only_user,
    repeats_above,
    rounded_here,
    widening,
)
from rewriter.program.graph import Node

NAME = "block_scaled_dot"


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of a product of parts."""
    (summed, _), (batch, _) = anchor.params["dimension_numbers"]
    if not few_bits(find) or not batch or not summed:
        return
    yield from of_each_side(find, anchor, NAME, _readings)


def _readings(find: Finder, dot: Node, side: int, stored: int) -> Iterator[Reading]:
    """Readings of a product of parts, the one that reaches furthest first.

    Raises:
        Refused: If it is another function.
    """
    narrow = dot.ins[1 - side] in few_bits(find)
    if rounded_here(find, stored, dot) and not (narrow and dot.ins[side] == stored):
        text = "the program rounds the numbers itself: they are not stored in few bits"
        raise Refused("stored", text, score=0.2)
    above = widening(find, dot.ins[side], stored)
    if above.joined or any(step[0] in "*/+-" for step in above.text.split()):
        raise _refused("the matrix is scaled before its product")
    inside, total = _inside(find, dot)
    yield from those_that_read(
        _Parts(find, dot, side, above, inside, total, below, value).reading
        for value, below in behind(find, total.outs[0], True)
    )


def _refused(text: str, score: float = 0.4) -> Refused:
    return Refused("blocks", text, score=score)


def _inside(find: Finder, dot: Node) -> tuple[Steps, Node]:
    """The steps from products of parts to what is summed, and the sum.

    Raises:
        Refused: If something else is behind the product.
    """
    (product,) = dot.outs
    value, left = product, [SCALE, ROWS, BIAS]
    text: list[str] = []
    joined, nodes = [], []
    while len(nodes) < REACH:
        node = only_user(find, value, product)
        if node is None:
            break
        if node.prim == "reduce_sum":
            steps = Steps(product, " ".join(text), tuple(joined), tuple(nodes[::-1]))
            if not joined:
                break
            return steps, node
        (new,) = node.outs
        one = join_behind(find, node, value, left)
        if node.prim == "convert_element_type":
            text.append(str(find.graph.dtype(new)))
        elif one is not None and BIAS not in {j.name for j in one[1]}:
            text.append(one[0])
            joined += one[1]
            left = [x for x in left if x not in {j.name for j in one[1]}]
        elif node.prim not in LAYOUT:
            break
        nodes.append((node, value))
        value = new
    raise _refused("products of parts are not only scaled and added up")


@dataclass(frozen=True)
class _Parts:
    """A sum of scaled products of parts.

    Attributes:
        find: The search.
        dot: The product of parts.
        side: Which operand is the matrix.
        above: The casts from the stored numbers to the matrix.
        inside: The steps from products to what is summed.
        total: The sum over parts.
        below: The steps from the sum to the result.
        value: The result.
    """

    find: Finder
    dot: Node
    side: int
    above: Steps
    inside: Steps
    total: Node
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
        groups = [i for i in own if i in at.groups]
        summed = [i for i in own if i in at.summed]
        columns = [i for i in own if i not in at.summed]
        mode = order(self.find, self.above.first, own, summed, columns)
        if not groups or summed[: len(groups)] != groups:
            raise _refused("parts are no equal pieces of the summed axis")
        numbers = alg.of_atom(ev.leaf(self.above.first, at.numbers))
        axes = [tuple(summed), tuple(columns)]
        inside, scales = self._scales(ev, at.joined, rows, groups, columns)
        operands = {
            "x": operand(at.of_rows, *rows, summed, dtype=g.dtype(x)),
            "w": operand(numbers, *(axes if mode == "forward" else axes[::-1])),
            **scales,
        }
        count = 1
        for i in groups:
            count *= alg.sizes[i]
        params: dict[str, Any] = {"groups": count, "inside": inside}
        sums = g.dtype(self.dot.outs[0])
        if not sums == g.dtype(x) == g.dtype(self.dot.ins[self.side]):
            params["sums"] = str(sums)
        more = {"widen": self.above.text, "behind": self.below.text}
        params |= {n: text for n, text in more.items() if text}
        if mode != "forward":
            params["mode"] = mode
        return Reading(
            NAME, alg, ev.place, self.value, args, ev.poly(self.value, args),
            (*map(tuple, rows), tuple(columns)), operands, params,
            notes=tuple(sorted(ev.notes)),
        )  # fmt: skip

    def _evaluator(self) -> RegionEvaluator:
        """An evaluator that expands the sum, down to the program's arrays."""
        (out,), (total,) = self.dot.outs, self.total.outs
        leaves = [self.above.first, *(j.leaf for j in self.inside.joined)]
        return self.find.evaluator(
            self.value,
            inside=frozenset({out, total})
            | repeats_above(self.find, self.inside.joined),
            names={leaf: leaf for leaf in leaves},
            full_sides=frozenset({(out, self.side)}),
        )

    def _indices(
        self, ev: RegionEvaluator, args: tuple[Index, ...], known: Mapping[Any, Index]
    ) -> Indices:
        """The indices of each array, from those of the result.

        Args:
            ev: The evaluator.
            args: The result's indices.
            known: The indices that are summed over; new ones if empty.
        """
        alg, g = self.find.algebra, self.find.graph
        out, _ = arguments(ev, self.value, args, self.below)
        (scaled,) = self.total.ins
        known, axes = dict(known), sorted(map(int, self.total.params["axes"]))
        inner = list(out)
        for axis in axes:
            if ("part", axis) not in known:
                known["part", axis] = alg.new_index(g.shape(scaled)[axis])
            inner.insert(axis, known["part", axis])
        product, joined = arguments(ev, scaled, tuple(inner), self.inside)
        left, right, bound = dot_arguments(ev, self.dot, product)
        for i in bound:
            if i not in known:
                known[i] = alg.new_index(alg.sizes[i])
        sides = [
            tuple(known.get(a, a) if isinstance(a, int) else a for a in side)
            for side in (left, right)
        ]
        rows, matrix = sides[1 - self.side], sides[self.side]
        numbers, _ = arguments(ev, self.dot.ins[self.side], matrix, self.above)
        numbers = moved_below(
            self.find, ev, self.dot.ins[self.side], self.above, numbers
        )
        apart = [
            set(map(int, pair[1 - self.side]))
            for pair in self.dot.params["dimension_numbers"]
        ]
        kept = [a for k, a in enumerate(rows) if k not in apart[0] | apart[1]]
        flat = {key: flat_indices(a) for key, a in known.items()}
        parts = (i for key, ids in flat.items() if isinstance(key, tuple) for i in ids)
        return Indices(
            tuple(kept),
            ev.poly(self.dot.ins[1 - self.side], rows, "layout"),
            numbers,
            frozenset(i for ids in flat.values() for i in ids),
            joined,
            known,
            frozenset(parts),
        )

    def _scales(
        self,
        ev: RegionEvaluator,
        at: Mapping[int, tuple[Index, ...]],
        rows: list[list[int]],
        groups: list[int],
        columns: list[int],
    ) -> tuple[str, dict[str, Any]]:
        """The steps with the names of scales by their axes, and the scales.

        Raises:
            Refused: If they vary along other axes.
        """
        alg, made, to = self.find.algebra, {}, {}
        of_rows = {i for group in rows for i in group}
        for j in self.inside.joined:
            form = ev.poly(j.value, at[j.value])
            ids = alg.ids(form)
            along = groups if ids & set(groups) else ()
            dtype = self.find.graph.dtype(j.value)
            if not ids - of_rows - set(groups) and ids & of_rows:
                name, axes = ROWS, (*rows, along)
            elif not ids - set(groups) - set(columns):
                name, axes = SCALE, (along, _leading(columns, ids))
            else:
                raise _refused("a scale varies along other axes")
            operand_name = "x_scale" if name == ROWS else "w_scale"
            if operand_name in made:
                raise _refused("products of parts have two scales of one kind")
            to[j.name] = name
            made[operand_name] = operand(form, *axes, dtype=dtype)
        steps = []
        for step in self.inside.text.split():
            names = [to.get(n, n) for n in step[1:].split("*")]
            steps.append(step[0] + "*".join(names) if step[1:] and any(
                n in to for n in step[1:].split("*")
            ) else step)  # fmt: skip
        return " ".join(steps), made


def _leading(columns: list[int], ids: set[int]) -> list[int]:
    """The leading indices of columns, of those that scales vary along."""
    last = max((k for k, i in enumerate(columns) if i in ids), default=-1)
    return columns[: last + 1]


PATTERN = ReaderPattern(NAME, ANCHORS, propose, dtypes=STORED)
