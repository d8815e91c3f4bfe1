"""Reads one candidate region as attention whose weights are no softmax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence, Set
from typing import Any

from rewriter.algebra.normal_form import TRUE, Index, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import ComputedValues, Operand, Reading, Refused, operand
from rewriter.ops.score import NONE, PRODUCT, SUM, Ref, Score, inverse_step
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.functions.candidate import (
    NAME,
    Candidate,
    zero_products,
)
from rewriter.patterns.attention.functions.equations import Function, ScoreReader
from rewriter.patterns.attention.functions.place import product_place
from rewriter.patterns.attention.operands import read_operands
from rewriter.patterns.attention.precision import read_weights
from rewriter.patterns.attention.result import require_readable, result_form
from rewriter.patterns.attention.softmax import Parts, Softmax
from rewriter.program.graph import Node

LINEAR = frozenset({
    "add", "add_any", "convert_element_type", "copy", "div", "mul", "neg",
    "reduce_precision", "select_n", "sub",
})  # fmt: skip
"""Equations that may be linear in a product."""


OTHER_SUM = "a sum of something else than the weights divides or multiplies them"


@dataclasses.dataclass(frozen=True)
class Divisor:
    """The divisor of weights.

    Attributes:
        total: The sum of weights.
        value: The function of it.
        inverse: Whether that multiplies, and does not divide.
    """

    total: Node
    value: int
    inverse: bool


@dataclasses.dataclass(frozen=True, eq=False)
class WeighedRegion(Candidate):
    """One candidate for a sum of values by weights that are a function of scores.

    Attributes:
        divisor: What weights are divided by, if anything.
    """

    divisor: Divisor | None

    def reading(self) -> Reading:
        """Returns the reading.

        Raises:
            Refused: If the region is no sum of values with such weights.
            OverBudget: If a form grows too large.
        """
        given = () if self.divisor is None else (self.divisor.value,)
        ev = self.evaluator(*given)
        form, args = result_form(ev, self.value)
        softmax, leaf, by = self._sum(ev, form, args)
        function, softmax, axes = self.function(softmax, leaf)
        self._require_a_function(function)
        reading = self._assembled(softmax, axes, function, leaf, by)
        require_readable(self.find, ev, reading)
        return reading

    def _sum(
        self, ev: RegionEvaluator, form: Poly, args: tuple[Index, ...]
    ) -> tuple[Softmax, int, int | None]:
        """The sum over keys, the weights in it, and what it is divided by."""
        alg = self.find.algebra
        if len(form) != 1:
            if self.divisor is not None:
                raise Refused("denominator", OTHER_SUM, score=0.5)
            raise Refused("terms", f"the result is a sum of {len(form)} terms")
        ((flag, mono), c) = next(iter(form.items()))
        sums = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
        if flag != TRUE or len(sums) != 1:
            raise Refused("factor", "the result is masked, or multiplied by a sum")
        by = self._divided_by([f for f in mono if f[0] != sums[0]])
        s, keep, body = alg.open_sum(sums[0])
        leaves = [a for a, _ in body if alg.kind(a) == "leaf"]
        weights = [a for a in leaves if alg.defs[a][1] == self.scored]
        if keep != TRUE or len(weights) != 1 or (weights[0], 1) not in body:
            text = "the weights are hidden, or multiplied, behind their sum"
            raise Refused("weights", text, score=0.6)
        named = self.values(ev)
        v = tuple(a for a in leaves if alg.defs[a][1] in named)
        rest = tuple(f for f in body if f[0] not in (*v, *weights))
        if not v or any(e != 1 for _, e in rest):
            raise Refused("values", "no values are weighed", score=0.2)
        parts = Parts(tuple(s), TRUE, (), v, rest, factor=float(c))
        return self.weighed_sum(ev, form, args, parts, {}), weights[0], by

    def _divided_by(self, factors: list[tuple[int, Any]]) -> int | None:
        """The leaf of the divisor, which must be the only factor beside the sum."""
        alg, divisor = self.find.algebra, self.divisor
        if divisor is None and not factors:
            return None
        if divisor is not None and len(factors) == 1:
            ((atom, power),) = factors
            own = alg.kind(atom) == "leaf" and alg.defs[atom][1] == divisor.value
            if own and power == (1 if divisor.inverse else -1):
                return atom
        text = "the result is multiplied by something else"
        if divisor is not None and not factors:
            text = "the weights are divided by a sum along another axis than the keys"
        raise Refused("factor", text, score=0.4)

    def _require_a_function(self, function: Function) -> None:
        """Refuses a product of three matrices, and layers that are no attention.

        Raises:
            Refused: If nothing but the names of arrays says that it is attention.
        """
        pv, side = self.weighed
        lead = len(pv.params["dimension_numbers"][1][0])
        sides = (*self.product.ins[:2], pv.ins[1 - side])
        known = lead > 1 or function.places or _are_projected_alike(self.find, *sides)
        if not known:
            text = "two layers of a network with matrices of their own are the same"
            raise Refused("layers", text, score=0.2)
        if not function.places and not function.dense and _is_linear(function.score):
            raise Refused(
                "linear",
                "linear attention: queries, keys and values are multiplied without a "
                "function between, which needs no scores",
                score=0.4,
                suggestion="multiply keys by values first",
            )

    # ------------------------------------------------------------------ the reading
    def _assembled(
        self,
        softmax: Softmax,
        axes: Axes,
        function: Function,
        leaf: int,
        by: int | None,
    ) -> Reading:
        """The reading, proved with the weights and their divisor given."""
        alg, find = softmax.alg, self.find
        inputs = read_operands(softmax, axes)
        operands = {**inputs.arrays, **function.operands}
        weights = read_weights(softmax)
        params: dict[str, Any] = {
            **inputs.params,
            **({} if weights is None else {"weights": weights}),
            "out_dtype": str(find.graph.dtype(softmax.value)),
            "score": function.score,
            "normalisation": NONE if by is None else SUM,
        }
        given = {"score_0": operand(alg.of_atom(leaf), *axes.of_scores, full=False)}
        proved = {"score": _array("score_0")}
        if by is not None:
            divisor, more = self._divisor(softmax, axes, leaf, by, operands)
            params["divisor"] = divisor
            operands.update(more)
            rows = (axes.b, axes.n, axes.t, ())
            form = alg.of_atom(by)
            if self.divisor is not None and self.divisor.inverse:
                form = alg.power(form, -1)
            given["score_1"] = operand(form, *rows, full=False)
            proved["divisor"] = _array("score_1")
        reading = Reading(
            NAME,
            alg,
            softmax.ev.place,
            softmax.value,
            softmax.args,
            softmax.form,
            (axes.b, axes.t, axes.n, axes.e),
            operands,
            params,
            notes=tuple(sorted(inputs.notes)),
            evaluator=softmax.ev,
        )
        kept = {n: x for n, x in inputs.arrays.items() if n in ("v", "dropout")}
        proof = dataclasses.replace(
            reading,
            operands={**kept, **zero_products(reading), **given},
            params={**params, **proved, "scale": 1.0},
        )
        taken = ComputedValues("score", function.results)
        return dataclasses.replace(reading, proof=proof, taken=taken)

    def _divisor(
        self, softmax: Softmax, axes: Axes, leaf: int, by: int, operands: Any
    ) -> tuple[Score, dict[str, Operand]]:
        """The function of a sum of weights that divides, and what it reads.

        Raises:
            Refused: If it is a function of something else.
        """
        assert self.divisor is not None
        ev, alg, total = softmax.ev, softmax.alg, self.divisor.total.outs[0]
        args = alg.defs[by][2]
        core = self.find.below(frozenset((total,)), self.divisor.value)
        at = product_place(ev, self.divisor.value, args, total, core)
        unnamed = self.evaluator() if self.divisor.value == total else ev
        if not _adds_up(softmax, unnamed.poly(total, at), leaf):
            raise Refused("denominator", OTHER_SUM, score=0.6)
        reader = ScoreReader(ev, axes, total, at, core, operands=dict(operands))
        score = reader.function(self.divisor.value, args).score
        if self.divisor.inverse:
            last = inverse_step(score.out, ev.g.dtype(self.divisor.value))
            out = Ref("step", len(score.steps))
            score = dataclasses.replace(score, steps=(*score.steps, last), out=out)
        return score, reader.operands


def _is_linear(score: Score) -> bool:
    """Whether a function is a multiple of the product, and something added."""
    of_product: set[int] = set()
    for i, step in enumerate(score.steps):
        inside = [
            ref.kind == PRODUCT or (ref.kind == "step" and ref.name in of_product)
            for ref in step.ins
        ]
        if not any(inside):
            continue
        twice = step.name == "mul" and all(inside)
        below = step.name == "div" and inside[1]
        chosen = step.name == "select_n" and inside[0]
        if step.name not in LINEAR or twice or below or chosen:
            return False
        of_product.add(i)
    return True


def _array(name: str) -> Score:
    """The function that is an array."""
    return Score((), Ref("array", name), "float32")


def _adds_up(softmax: Softmax, form: Poly, leaf: int) -> bool:
    """Whether a form is the sum of the weights of all keys, and nothing else."""
    alg, s = softmax.alg, softmax.parts.s
    if len(form) != 1:
        return False
    ((flag, mono), c) = next(iter(form.items()))
    if (flag, c, len(mono)) != (TRUE, 1, 1) or alg.kind(mono[0][0]) != "sum":
        return False
    keys, keep, body = alg.open_sum(mono[0][0])
    if keep != TRUE or mono[0][1] != 1 or len(keys) != len(s):
        return False
    return any(
        [alg.sizes[i] for i in order] == [alg.sizes[i] for i in keys]
        and dict(alg.subst_mono(body, dict(zip(keys, order, strict=True)))) == {leaf: 1}
        for order in itertools.islice(itertools.permutations(s), 6)
    )


def _are_projected_alike(find: Finder, *sides: int) -> bool:
    """Whether keys (or queries) and values are products with one array.

    The matrices of two layers are not made so.
    """
    *scored, values = (_projected(find, value) for value in sides)
    return any(not of.isdisjoint(values) for of in scored)


def _numbers(node: Node | None) -> Sequence[int]:
    """What the numbers of a result are made of: not the condition of a choice."""
    if node is None:
        return ()
    return node.ins[1:] if node.prim == "select_n" else node.ins


def _projected(find: Finder, value: int, limit: int = 60) -> Set[int]:
    """Arrays that an array is a product with, near above it, and what these are of."""
    graph = find.graph
    seen, queue, found = {value}, [(value, False)], set[int]()
    while queue and len(seen) < limit:
        current, below = queue.pop(0)
        node = graph.node_of(current)
        if below:
            found.add(current)
        for i in _numbers(node):
            if i not in seen and i not in graph.constants and graph.shape(i):
                seen.add(i)
                queue.append((i, below or node.prim == "dot_general"))
    return found
