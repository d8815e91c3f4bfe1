"""Opaque values of loops that a checkpoint computes again, perhaps in other steps.

A step's largest score so far has no form: it is a name. A checkpoint around the step
computes it again in the loop that goes back, where equations that make a mask may
differ. It has the same name if it is the same function of operands with equal forms.
"""

from __future__ import annotations

from collections.abc import Hashable

from rewriter.algebra.canonicalize.loop_bodies import Loops

OPAQUE = frozenset({"max", "min", "reduce_max", "reduce_min", "stop_gradient"})


class Recomputed:
    """Names of opaque values in the bodies of loops."""

    loops: Loops

    def name_recomputed(self, value: int) -> None:
        """Gives a value the name of the one that it is computed again from, if any."""
        if self.loops.entered and value not in self.names:
            first = self.known_as(value)
            if first != value and first in self.names:
                self.names[value] = self.names[first]

    def known_as(self, value: int) -> int:
        """The first value of loops that is the same function of equal operands."""
        loops = self.loops
        if not loops.entered or self._function(value) is None:
            return value
        for loop in [*loops.entered.values()]:
            for after in loop.after[: len(loop.before)]:
                self._note_function(after)
        return self._note_function(value)

    def _note_function(self, value: int) -> int:
        loops = self.loops
        if value not in loops.first_alike:
            loops.first_alike[value] = value  # a name while its operands are read
            content = self._function(value)
            if content is not None:
                loops.first_alike[value] = loops.functions.setdefault(content, value)
        return loops.first_alike[value]

    def _function(self, value: int) -> Hashable:
        """What an opaque value of a loop is a function of; None for another value."""
        node = self.g.node_of(value)
        if node is None or node.prim not in OPAQUE or not self.varies(value):
            return None
        alg, forms = self.alg, []
        # The number of a single step is no index.
        steps = tuple(i for i in self.varies(value) if i is not None)
        for i in node.ins:
            at = alg.spare_indices(self.g.shape(i), steps)
            own = alg.spare_indices((alg.sizes[s] for s in steps), (*at, *steps))
            form = alg.subst(self.poly(i, at), dict(zip(steps, own, strict=True)))
            forms.append((len(at), alg.freeze(form)))
        return node.signature, *forms
