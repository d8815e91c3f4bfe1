"""Index polynomials: the algebra in which two spellings of a value become equal.

A value at given index arguments is a polynomial. A *term* is a boolean function
of literals times a monomial of atoms with rational exponents, with a number in
front. Equal polynomials over the same indices are equal at every real input at
which both are defined; the form may miss an equality, it never invents one.

Index arguments are integers (names of indices), ``("k", c)`` (the constant c),
or affine and digit forms of them::

    ("cat", a, b, n)  a * n + b      ("div", a, n)  a // n
    ("aff", a, m, c)  m * a + c      ("mod", a, n)  a % n

None stands for the only position of an axis of size one.
"""

from rewriter.algebra.normal_form.algebra import Algebra
from rewriter.algebra.normal_form.forms import (
    FALSE,
    TRUE,
    WORK_BUDGET,
    Index,
    Monomial,
    OverBudget,
    Poly,
    TooMuchWork,
)
from rewriter.algebra.normal_form.polynomial import EXACT

__all__ = [
    "EXACT", "FALSE", "TRUE", "WORK_BUDGET", "Algebra", "Index", "Monomial",
    "OverBudget", "Poly", "TooMuchWork",
]  # fmt: skip
