"""A candidate for attention by a function of scores: a result and two contractions.

This is what a softmax of such a function (`softmax_region`) and weights that are the
function itself (`weights_region`) have in common.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rewriter.algebra.normal_form import TRUE, Index, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import Operand, Reading, Refused
from rewriter.patterns.attention.axes import Axes, name_axes
from rewriter.patterns.attention.functions.equations import Function, ScoreReader
from rewriter.patterns.attention.functions.place import product_place
from rewriter.patterns.attention.softmax import Parts, Scores, Softmax, contracted
from rewriter.program.graph import Node

NAME = "scored_attention"


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """One candidate.

    Attributes:
        find: The search.
        value: The result.
        scored: The function's value.
        product: The contraction of queries with keys.
        weighed: The contraction of weights with values, and the side of the weights.
    """

    find: Finder
    value: int
    scored: int
    product: Node
    weighed: tuple[Node, int]

    @property
    def made(self) -> frozenset[int]:
        """The products of queries and keys, and the function's value."""
        return frozenset((self.product.outs[0], self.scored))

    def evaluator(self, *named: int, **options: Any) -> RegionEvaluator:
        """What puts the result into its normal form, the function's value given.

        Args:
            named: Other values that are given.
            options: Further arguments of the evaluator.
        """
        pv, side = self.weighed
        return self.find.evaluator(
            self.value,
            names={v: v for v in (self.scored, *named)},
            inside=self.made | frozenset(pv.outs),
            roots=self.made,
            full_sides=frozenset({(pv.outs[0], side)}),
            filled_rows=True,
            **options,
        )

    def values(self, ev: RegionEvaluator) -> set[int]:
        """The arrays that the weighed values are, in any layout."""
        pv, side = self.weighed
        return self.find.layout_leaves(ev, pv.ins[1 - side])

    def weighed_sum(
        self,
        ev: RegionEvaluator,
        form: Poly,
        args: tuple[Index, ...],
        parts: Parts,
        bias: Poly,
    ) -> Softmax:
        """The sum over keys, still without the contraction of queries with keys."""
        return Softmax(
            find=self.find,
            ev=ev,
            value=self.value,
            args=args,
            form=form,
            parts=parts,
            qk=(),
            bias=bias,
            scores=self.made,
            products=(self.weighed,),
            joined={},
            some=None,
        )

    def function(self, softmax: Softmax, leaf: int) -> tuple[Function, Softmax, Axes]:
        """The function of which a leaf of the sum is the value, and the op's axes.

        Args:
            softmax: What is read of the sum over keys.
            leaf: The function's value in it.

        Returns:
            ``(function, softmax, axes)``: the softmax with the contraction of queries
            with keys.

        Raises:
            Refused: If the value is no function of these products.
        """
        find, ev, product = self.find, softmax.ev, self.product.outs[0]
        args = softmax.alg.defs[leaf][2]
        core = find.below(frozenset((product,)), self.scored)
        at = product_place(ev, self.scored, args, product, core)
        sides = find.layout_leaves(ev, *self.product.ins[:2])
        contraction = _contraction(softmax, product, at, sides)
        softmax = dataclasses.replace(softmax, qk=(contraction,))
        axes = name_axes(softmax)
        reader = ScoreReader(ev, axes, product, at, core)
        return reader.function(self.scored, args), softmax, axes


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


def zero_products(reading: Reading) -> dict[str, Operand]:
    """Queries and keys of zeros, for a proof in which the function's value is given."""
    return {
        name: Operand((({}, reading.operands[name].parts[0][1]),), dtype="float32")
        for name in "qk"
    }
