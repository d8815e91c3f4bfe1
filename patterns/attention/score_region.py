"""Reads one candidate region as attention by a function of its scores."""

from __future__ import annotations

import dataclasses
import math

from rewriter.algebra.normal_form import TRUE, Algebra, Index, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import (
    Operand,
    Reading,
    Refused,
    Taken,
    leaves_of,
    operand,
    split_digits,
)
from rewriter.patterns.attention.assembly import assembled
from rewriter.patterns.attention.axes import Axes, name_axes
from rewriter.patterns.attention.score_of import Function, ScoreReader
from rewriter.patterns.attention.score_place import product_place
from rewriter.patterns.attention.softmax import (
    Scores,
    Softmax,
    contracted,
    softmax_parts,
)
from rewriter.program.graph import Node

NAME = "scored_attention"

GUARDS = frozenset({"is_finite", "select_n", "clamp"})
"""What may give a row of nothing but -inf a number after all."""

STEEP = frozenset({
    "log", "log1p", "pow", "rsqrt", "exp", "exp2", "expm1", "atanh", "tan", "lgamma",
    "digamma", "erf_inv", "sinh", "cosh", "acosh",
})  # fmt: skip
"""Functions that may be infinite where what they are of is not."""


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """One candidate: a result, the function's value, and the contractions.

    Attributes:
        find: The search.
        value: The result.
        scored: The function's value, of which there is a softmax.
        hidden: The same where masks around it have hidden some.
        product: The contraction of queries with keys.
        weighed: The contraction of weights with values, and the side of the weights.
        how: ``"full"``; ``"soft"`` keeps finite fills that are added as a bias.
    """

    find: Finder
    value: int
    scored: int
    hidden: int
    product: Node
    weighed: tuple[Node, int]
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
        ev = self._evaluator()
        args = ev.indices(self.value)
        form = ev.poly(self.value, args)
        whole = args
        form, args = split_digits(alg, form, args)
        ev.outer = frozenset().union(*map(alg.index_ids, (*whole, *args)))
        softmax, leaf = self._softmax(ev, form, args)
        function, softmax, _ = with_function(
            softmax, self.scored, alg.defs[leaf][2], self.product
        )
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
        reading = self._with_function(general, function, leaf)
        if any(ev.varies(value) for value in leaves_of(reading)):
            text = "a value inside one step of a loop is read"
            raise Refused("loop", text, score=0.4)
        find.require_proved(ev)
        return reading

    def _evaluator(self) -> RegionEvaluator:
        """What puts the result into its normal form, the function's value given."""
        find, (pv, side) = self.find, self.weighed
        product = self.product.outs[0]
        made = frozenset((product, self.scored))

        def from_scores(v: int) -> bool:
            return find.regions.depends(v, self.scored, 120)

        return find.evaluator(
            self.value,
            names={self.scored: self.scored},
            inside=made | frozenset(pv.outs),
            roots=made,
            full_sides=frozenset({(pv.outs[0], side)}),
            soft_fills=self.how == "soft",
            in_pieces=from_scores,
            filled_rows=True,
        )

    def _softmax(
        self, ev: RegionEvaluator, form: Poly, args: tuple[Index, ...]
    ) -> tuple[Softmax, int]:
        """The softmax, and the function's value in it; the contraction is not read."""
        find, alg, (pv, side) = self.find, self.find.algebra, self.weighed
        values = find.layout_leaves(ev, pv.ins[1 - side])
        parts = softmax_parts(alg, form, values, self.how == "soft")
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
        softmax = Softmax(
            find=find,
            ev=ev,
            value=self.value,
            args=args,
            form=form,
            parts=parts,
            qk=(),
            bias=bias,
            scores=frozenset((self.scored, self.product.outs[0])),
            products=(self.weighed,),
            joined={},
            some=None,
        )
        return softmax, leaf

    def _require_one_meaning(self, softmax: Softmax, function: Function) -> None:
        """Refuses a row of nothing but -inf, where the program may give a number.

        A kernel gives NaN there. So does a softmax, unless something behind the
        function guards it.

        Raises:
            Refused: If the function may be infinite, and there is a guard.
        """
        parts = softmax.parts
        guarded = parts.sink or parts.drop_flag != TRUE or parts.zero_rows
        guarded = guarded or any(map(self._guards, self._behind()))
        if not guarded:
            return
        steep = function.score.primitives & STEEP
        if steep or math.isinf(self._loudest(function)):
            text = "after a function of scores, rows that are all -inf may have a guard"
            raise Refused("rows", text, score=0.7)

    def _behind(self) -> list[Node]:
        """The equations behind the function's value and its masks."""
        graph = self.find.graph
        later = self.find.below(frozenset((self.hidden,)), self.value)
        found: dict[int, Node] = {}
        queue = [self.value]
        while queue:
            value = queue.pop()
            node = graph.node_of(value)
            if value != self.hidden and value not in found and node is not None:
                found[value] = node
                queue += [i for i in node.ins if i in later]
        return list(found.values())

    def _guards(self, node: Node) -> bool:
        """Whether an equation behind the function may replace NaN or zero."""
        if node.prim == "max":
            return -math.inf not in map(self.find.number, node.ins)
        return node.prim in GUARDS

    def _loudest(self, function: Function) -> float:
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
        nothing = {
            name: Operand((({}, general.operands[name].parts[0][1]),), dtype="float32")
            for name in "qk"
        }
        if "bias" in general.operands:
            raise Refused("bias", "a bias is added behind the function of scores")
        shared = {n: x for n, x in general.operands.items() if n != "scale_factor"}
        proof = dataclasses.replace(
            general, operands={**shared, **nothing, "bias": value}
        )
        return dataclasses.replace(
            general,
            op=NAME,
            operands={**general.operands, **function.operands},
            params={**general.params, "score": function.score},
            proof=proof,
            taken=Taken("score", function.results),
        )


def _size(alg: Algebra, x: Operand) -> int:
    """The numbers that an operand holds."""
    return math.prod(alg.sizes[i] for i in alg.ids(x.parts[0][0]))


def with_function(
    softmax: Softmax, scored: int, args: tuple[Index, ...], product: Node
) -> tuple[Function, Softmax, Axes]:
    """Returns the function that a value is of products, and the op's axes.

    Args:
        softmax: What is read of the sum over keys, without the contraction of queries
            with keys.
        scored: The function's value.
        args: Its index arguments in the sum.
        product: That contraction.

    Returns:
        ``(function, softmax, axes)``: the softmax with its contraction.

    Raises:
        Refused: If the value is no such function.
    """
    find, ev, value = softmax.find, softmax.ev, product.outs[0]
    core = find.below(frozenset((value,)), scored)
    at = product_place(ev, scored, args, value, core)
    sides = find.layout_leaves(ev, *product.ins[:2])
    contraction = _contraction(softmax, value, at, sides)
    softmax = dataclasses.replace(softmax, qk=(contraction,))
    axes = name_axes(softmax)
    reader = ScoreReader(ev, axes, value, at, core)
    return reader.function(scored, args), softmax, axes


def _contraction(
    softmax: Softmax, product: int, at: tuple[Index, ...], sides: set[int]
) -> Scores:
    """The contraction of queries with keys."""
    form = softmax.ev.poly(product, at)
    if len(form) == 1:
        ((flag, mono), c) = next(iter(form.items()))
        if flag == TRUE:
            keys = softmax.parts.s
            found = contracted(softmax.alg, mono, float(c), sides, keys)
            if found is not None and not found.softcap:
                return found
    raise Refused("scores", "no product of queries and keys is read", score=0.4)
