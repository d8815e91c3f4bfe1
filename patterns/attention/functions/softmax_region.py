"""Reads one candidate region as attention by a function of its scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from rewriter.algebra.normal_form import TRUE, Algebra, Index, Poly
from rewriter.find.finder import RegionEvaluator
from rewriter.find.reading import ComputedValues, Operand, Reading, Refused, operand
from rewriter.patterns.attention.assembly import assembled
from rewriter.patterns.attention.functions.candidate import (
    NAME,
    Candidate,
    zero_products,
)
from rewriter.patterns.attention.functions.equations import Function
from rewriter.patterns.attention.operands import LOUD
from rewriter.patterns.attention.result import require_readable, result_form
from rewriter.patterns.attention.softmax import Softmax, softmax_parts
from rewriter.program.graph import Node
from rewriter.program.walk import equations_above

GUARDS = frozenset({"is_finite", "select_n", "clamp"})
"""What may give a row of nothing but -inf a number after all."""

STEEP = frozenset({
    "log", "log1p", "pow", "rsqrt", "exp", "exp2", "expm1", "atanh", "tan", "lgamma",
    "digamma", "erf_inv", "sinh", "cosh", "acosh",
})  # fmt: skip
"""Functions that may be infinite where what they are of is not."""


@dataclasses.dataclass(frozen=True, eq=False)
class SoftmaxRegion(Candidate):
    """One candidate for a softmax of a function of scores.

    Attributes:
        hidden: The function's value where masks around it have hidden some.
        how: ``"full"``; ``"soft"`` keeps finite fills that are added as a bias.
    """

    hidden: int
    how: str

    def reading(self, known: bool, larger: int = 0) -> Reading:
        """Returns the reading.

        Args:
            known: Whether the result is attention with a bias. Then only a function
                that needs no array of all queries and keys is worth more.
            larger: The size of that bias if it is a sum of smaller arrays, else 0. Any
                function that reads these is worth more.

        Raises:
            Refused: If the region is no softmax of a function of products.
            OverBudget: If a form grows too large.
        """
        find, alg = self.find, self.find.algebra
        depends = lambda v: find.regions.depends(v, self.scored, 120)
        ev = self.evaluator(soft_fills=self.how == "soft", in_pieces=depends)
        form, args = result_form(ev, self.value)
        softmax, leaf = self._softmax(ev, form, args)
        function, softmax, _ = self.function(softmax, leaf)
        if known and function.asked:
            text = "the gradient of a table is asked for, which its bias has at once"
            raise Refused("bias", text, score=0.1)
        if known and not larger and (function.dense or not function.places):
            text = "its bias is an array of the program, which attention takes as it is"
            raise Refused("bias", text, score=0.1)
        if larger and any(_size(alg, x) >= larger for x in function.operands.values()):
            text = "the arrays that its bias is a sum of are not at hand"
            raise Refused("bias", text, score=0.1)
        self._require_one_meaning(softmax, function)
        general = assembled(softmax)
        if "fill" in general.params and function.score.primitives & STEEP:
            raise Refused("rows", "the function may be infinite beside a fill")
        reading = self._with_function(general, function, leaf)
        require_readable(find, ev, reading)
        return reading

    def _softmax(
        self, ev: RegionEvaluator, form: Poly, args: tuple[Index, ...]
    ) -> tuple[Softmax, int]:
        """The softmax, and the function's value in it; the contraction is not read."""
        alg = self.find.algebra
        parts = softmax_parts(alg, form, self.values(ev), self.how == "soft")
        leaf, bias = None, {}
        for atom, c in parts.exps:
            mono = alg.defs[atom][1] if alg.kind(atom) == "exp" else ()
            names = {alg.defs[a][1] for a in alg.leaves(atom)}
            if self.scored not in names:
                if alg.kind(atom) != "exp":
                    text = "the weights are multiplied by another factor"
                    raise Refused("weights", text)
                bias = alg.add(bias, {(TRUE, mono): float(c)})
            elif len(mono) == 1 and mono[0][1] == 1 and alg.kind(mono[0][0]) == "leaf":
                if c != 1 or leaf is not None:
                    raise Refused("scores", "exponents are a multiple of the scores")
                leaf = mono[0][0]
            else:
                raise Refused("scores", "there is no softmax of the scores alone")
        if leaf is None:
            raise Refused("scores", "there is no softmax of the scores", score=0.3)
        softmax = self.weighed_sum(ev, form, args, parts, bias)
        return dataclasses.replace(softmax, function=leaf), leaf

    def _require_one_meaning(self, softmax: Softmax, function: Function) -> None:
        """Refuses a row of nothing but -inf, or of large fills, where results differ.

        A kernel gives NaN for nothing but -inf. So does a softmax, unless something
        behind the function guards it. A kernel's weights add up to 1. Those of
        `exp(s - logsumexp(s))` do not where fills take the digits of the logarithm.

        Raises:
            Refused: If the function may be infinite, and there is a guard. If it may be
                large, and there is a logarithm.
        """
        logs = any(node.prim in ("log", "log1p") for node in self._behind())
        if logs and self.find.largest_number(self.scored) >= LOUD:
            text = "a row of large fills rounds the logarithm of its weights' sum away"
            raise Refused("rows", text, score=0.7)
        parts = softmax.parts
        guarded = parts.sink or parts.drop_flag != TRUE or parts.zero_rows
        guarded = guarded or any(map(self._guards, self._behind()))
        if not guarded:
            return
        steep = function.score.primitives & STEEP
        if steep or math.isinf(self._largest_number(function)):
            text = "after a function of scores, rows that are all -inf may have a guard"
            raise Refused("rows", text, score=0.7)

    def _behind(self) -> Iterator[Node]:
        """The equations behind the function's value and its masks."""
        graph = self.find.graph
        later = self.find.below(frozenset((self.hidden,)), self.value)
        inside = later - {self.hidden}
        return equations_above(graph, [self.value], lambda _: True, inside)

    def _guards(self, node: Node) -> bool:
        """Whether an equation behind the function may replace NaN or zero."""
        if node.prim == "max":
            return -math.inf not in map(self.find.number, node.ins)
        return node.prim in GUARDS

    def _largest_number(self, function: Function) -> float:
        """The largest number among those of a function; infinite if it divides."""
        found = 0.0
        for step in function.score.steps:
            for k, ref in enumerate(step.ins):
                if ref.kind == "number":
                    found = max(found, abs(float(ref.value)))
                elif step.name == "div" and k == 1:
                    return math.inf
        return found

    def _with_function(
        self, general: Reading, function: Function, leaf: int
    ) -> Reading:
        """The reading by the function, proved with the function's value given."""
        alg, groups = general.algebra, general.operands["q"].parts[0][1]
        if "alibi" in general.operands:
            raise Refused("bias", "a slope is added behind the function of scores")
        (_, (_, s, _, _)) = general.operands["k"].parts[0]
        b, t, n, _ = groups
        value = operand(alg.of_atom(leaf), b, n, t, s, full=False)
        if "bias" in general.operands:
            raise Refused("bias", "a bias is added behind the function of scores")
        shared = {n: x for n, x in general.operands.items() if n != "scale_factor"}
        given = {**shared, **zero_products(general), "bias": value}
        return dataclasses.replace(
            general,
            op=NAME,
            operands={**general.operands, **function.operands},
            params={**general.params, "score": function.score},
            proof=dataclasses.replace(general, operands=given),
            taken=ComputedValues("score", function.results),
        )


def _size(alg: Algebra, x: Operand) -> int:
    """The numbers that an operand holds."""
    return math.prod(alg.sizes[i] for i in alg.ids(x.parts[0][0]))
