"""Functions of polynomials: exponentials, logarithms, maxima, odd functions."""

from __future__ import annotations

import math
from collections.abc import Callable

from rewriter.algebra.normal_form.forms import (
    FALSE,
    TRUE,
    Monomial,
    OverBudget,
    Poly,
    exact,
    real,
)


class Functions:
    """Elementary functions, split into cases where boolean functions allow it."""

    def exp(self, p: Poly, fill: Callable[[float], None] = lambda c: None) -> Poly:
        """The exponential: a product over terms, boolean terms taken apart."""
        out = self.const(1.0)
        for (flag, mono), c in p.items():
            factor = self._exp_term(mono, c, fill)
            if flag != TRUE:
                factor = self.add(
                    {(self.both(flag, b), m): v for (b, m), v in factor.items()},
                    self.of_bool(self.negate(flag)),
                )
            out = self.mul(out, factor)
        return out

    def _exp_term(
        self, mono: Monomial, c: float, fill: Callable[[float], None]
    ) -> Poly:
        if not mono:
            if c <= -80:
                fill(c)
                return {}
            if c > 700:
                raise OverBudget("exp of a large constant")
            return self.const(math.exp(c))
        if math.isinf(c):
            raise OverBudget("infinity times a value")
        if len(mono) == 1 and mono[0][1] == 1 and self.kind(mono[0][0]) == "log":
            return self.power(self.thaw(self.defs[mono[0][0]][1]), exact(c))
        return {(TRUE, ((self.atom("exp", mono), exact(c)),)): 1.0}

    def log(self, p: Poly) -> Poly:
        """The logarithm; logs of factors proved positive split."""
        if len(p) == 1:
            ((flag, mono), c) = next(iter(p.items()))
            if flag == TRUE and c > 0:
                exps = [(a, e) for a, e in mono if self.kind(a) == "exp"]
                rest = tuple((a, e) for a, e in mono if self.kind(a) != "exp")
                out = self.const(math.log(c))
                for a, e in exps:
                    out = self.add(out, {(TRUE, self.defs[a][1]): float(e)})
                if not rest:
                    return out
                if len(rest) == 1 and rest[0][1] == 1:
                    inner = {(TRUE, rest): 1.0}
                    atom = self.atom("log", self.freeze(inner))
                    return self.add(out, self.of_atom(atom))
                if not exps and c == 1.0:
                    return self.of_atom(self.atom("log", self.freeze(p)))
                inner = {(TRUE, rest): 1.0}
                atom = self.atom("log", self.freeze(inner))
                return self.add(out, self.of_atom(atom))
        common = self._common_factor(p)
        if common and all(self.kind(a) == "exp" for a, _ in common):
            inverse = tuple((a, -x) for a, x in common)
            rest_p: Poly = {}
            for (flag, mono), c in p.items():
                self._accumulate(rest_p, flag, self.monomial(mono + inverse), c)
            outer = self.log({(TRUE, self.monomial(common)): 1.0})
            return self.add(outer, self.log(rest_p))
        return self.of_atom(self.atom("log", self.freeze(p)))

    def exponents(self, p: Poly) -> list[Poly] | None:
        """The x if a form is a sum of exp(x), else None."""
        out = []
        for (flag, mono), c in p.items():
            if flag != TRUE or c <= 0 or any(self.kind(a) != "exp" for a, _ in mono):
                return None
            x = self.const(math.log(c))
            for a, e in mono:
                x = self.add(x, {(TRUE, self.defs[a][1]): float(e)})
            out.append(x)
        return out

    # --------------------------------------------------------------- max, odd functions
    def by_cases(self, p: Poly, f: Callable[[Poly], Poly]) -> Poly | None:
        """f(p) split into cases by the masks of p's terms; None without masks."""
        flags = {flag for flag, _ in p if flag != TRUE}
        if not flags:
            return None
        cells = [TRUE]
        for flag in flags:
            halves = ((c, side) for c in cells for side in (flag, self.negate(flag)))
            cells = [x for c, side in halves if (x := self.both(c, side)) != FALSE]
            if len(cells) > 16:
                raise OverBudget("a mask makes more than 16 cases")
        out: Poly = {}
        for cell in cells:
            here: Poly = {}
            for (flag, mono), c in p.items():
                if self.implies(cell, flag):
                    self._accumulate(here, TRUE, mono, c)
            for (flag, mono), c in f(here).items():
                out = self.add(out, {(self.both(flag, cell), mono): c})
        return out

    def relu(self, p: Poly) -> Poly:
        """max(p, 0); max(-p, 0) is max(p, 0) - p."""
        cases = self.by_cases(p, self.relu)
        if cases is not None:
            return cases
        c = self.as_constant(p)
        if c is not None:
            return self.const(max(c, 0.0))
        if self.positive(p) or self.is_variance(p):
            return p
        minus = self.scale(p, -1.0)
        if self.positive(minus) or self.is_variance(minus) or self.is_minimum(p):
            return {}
        if self.is_minimum(minus):
            return p
        frozen = self.freeze(p)
        lead = next((c for (_, m), c in frozen if m), frozen[0][1])
        k = max(abs(c) for (_, m), c in frozen if m)
        if lead < 0:
            atom = self.atom("relu", self.freeze(self.scale(minus, 1.0 / k)))
            return self.add(self.scale(self.of_atom(atom), k), p)
        atom = self.atom("relu", self.freeze(self.scale(p, 1.0 / k)))
        return self.scale(self.of_atom(atom), k)

    def is_minimum(self, p: Poly) -> bool:
        """Whether it is c min(q, 0), which is c q - c max(q, 0), c > 0."""
        for (flag, monomial), c in p.items():
            if flag != TRUE or c >= 0 or len(monomial) != 1 or monomial[0][1] != 1:
                continue
            atom = monomial[0][0]
            if self.defs[atom][0] == "relu":
                rest = self.add(p, self.of_atom(atom), -c)
                if not self.add(rest, self.thaw(self.defs[atom][1]), c):
                    return True
        return False

    def is_variance(self, p: Poly) -> bool:
        """C sum(x^2) - d sum(x)^2, d <= c / N: not negative (Cauchy and Schwarz)."""
        if len(p) != 2:
            return False
        (((f1, m1), c1), ((f2, m2), c2)) = sorted(p.items(), key=lambda t: -t[1])
        if c1 <= 0 or c2 >= 0 or f1 != TRUE or f2 != TRUE:
            return False
        if len(m1) != 1 or len(m2) != 1:
            return False
        (a1, e1), (a2, e2) = m1[0], m2[0]
        if e1 != 1 or e2 != 2 or self.kind(a1) != "sum" or self.kind(a2) != "sum":
            return False
        _, n1, b1, body1 = self.defs[a1]
        _, n2, b2, body2 = self.defs[a2]
        squared = self.monomial((a, 2 * e) for a, e in body2)
        if n1 != n2 or b1 != b2 or squared != body1:
            return False
        count = real(math.prod(self.sizes[n] for n in n1))
        return -c2 <= c1 / count * (1 + 1e-4)

    def odd(self, name: str, p: Poly) -> Poly:
        """f(p) for an odd function f: the sign is taken out."""
        if not p:
            return {}
        cases = self.by_cases(p, lambda q: self.odd(name, q))
        if cases is not None:
            return cases
        frozen = self.freeze(p)
        sign = -1.0 if frozen[0][1] < 0 else 1.0
        atom = self.atom("fn", name, self.freeze(self.scale(p, sign)))
        return self.scale(self.of_atom(atom), sign)
