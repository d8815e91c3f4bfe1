"""Sums of fractions with one denominator, whose numerators add up to it."""

from __future__ import annotations

import math

from rewriter.algebra.normal_form.forms import TRUE, Monomial, Poly


class Fractions:
    """Terms that a common denominator cancels."""

    def cancelled(self, p: Poly) -> Poly:
        """With P = Σ k_i t_i, terms ``k_i t_i m P**-n`` of all i become ``m P**(1-n)``.

        So the gradient of a softmax by the number that all its scores are less of
        is zero.
        """
        for (flag, mono), c in p.items():
            for atom, e in mono:
                if self.kind(atom) != "pow" or not isinstance(e, int) or e >= 0:
                    continue
                base = dict(self.defs[atom][1])
                if len(base) < 2 or any(where != TRUE for where, _ in base):
                    continue
                found = self._numerators(p, flag, mono, c, base)
                if found is None:
                    continue
                rest = {t: x for t, x in p.items() if t not in found[0]}
                shared, ratio = found[1:]
                whole = {(flag, self.monomial((*shared, (atom, 1)))): ratio}
                return self.cancelled(self.add(rest, whole))
        return p

    def _numerators(
        self, p: Poly, flag: int, mono: Monomial, c: float, base: Poly
    ) -> tuple[set[tuple[int, Monomial]], Monomial, float] | None:
        """The terms whose numerators add up to a base, and what they share."""
        for (_, lead), k in base.items():
            if not lead or not self._divides(lead, mono):
                continue
            shared = self.monomial((*mono, *((a, -x) for a, x in lead)))
            terms = {
                (flag, self.monomial((*shared, *t))): x for (_, t), x in base.items()
            }
            if all(
                t in p and math.isclose(p[t], c / k * x, rel_tol=1e-9)
                for t, x in terms.items()
            ):
                return set(terms), shared, self.number(c / k)
        return None
