"""Questions about a form: its contractions, its factors, its linear parts."""

from __future__ import annotations

from collections.abc import Iterator

from rewriter.algebra.normal_form import TRUE, Algebra, Monomial, Poly


def contractions(alg: Algebra, p: Poly) -> list[int]:
    """Contractions in a form, at any depth, each once, without nested ones."""
    return [a for a in every(alg, p) if alg.kind(a) == "sum"]


def every(alg: Algebra, p: Poly) -> list[int]:
    """All atoms of a form, except those inside contractions."""
    out: dict[int, None] = {}
    stack = [
        a
        for flag, mono in reversed(p)
        for a in reversed((*(a for a, _ in mono), *alg.bools[flag][0]))
    ]
    while stack:
        atom = stack.pop()
        if atom not in out:
            out[atom] = None
            if alg.kind(atom) != "sum":
                stack += reversed([*alg.children(atom)])
    return list(out)


def common_factor(
    alg: Algebra, p: Poly, keep: frozenset[int] = frozenset()
) -> tuple[Poly | None, Poly]:
    """(factor, rest) of a form that is multiplied by an array, such as a mask.

    Args:
        alg: Where the form is.
        p: The form.
        keep: Leaves that stay in it.
    """
    terms = list(p)
    flag = terms[0][0] if len({f for f, _ in terms}) == 1 else TRUE
    common = {a: e for a, e in terms[0][1] if alg.kind(a) == "leaf" and a not in keep}
    for _, mono in terms[1:]:
        powers = dict(mono)
        common = {a: e for a, e in common.items() if powers.get(a) == e}
    if flag == TRUE and not common:
        return None, p
    rest = {}
    for (f, mono), c in p.items():
        inner = tuple(x for x in mono if x[0] not in common)
        rest[f if flag == TRUE else TRUE, inner] = c
    if not contractions(alg, rest):
        return None, p  # only a bias would be left
    return {(flag, alg.monomial(common.items())): 1.0}, rest


def linear_parts(alg: Algebra, p: Poly) -> Iterator[Poly]:
    """Arguments of functions in a form, at any depth; the form itself is last."""
    atoms = every(alg, p)
    for atom in atoms:
        if alg.kind(atom) == "pow":
            for _, mono in alg.thaw(alg.defs[atom][1]):
                yield _exponent(alg, mono)
    for atom in atoms:
        if alg.kind(atom) in ("fn", "relu", "ge"):
            for part in alg.defs[atom][1:]:
                if isinstance(part, tuple):
                    yield alg.thaw(part)
    for atom in atoms:
        if alg.kind(atom) == "log":
            for _, mono in alg.thaw(alg.defs[atom][1]):
                yield _exponent(alg, mono)
    for _, mono in p:
        yield _exponent(alg, mono)
    yield p


def _exponent(alg: Algebra, mono: Monomial) -> Poly:
    """The exponent of the exponentials in a monomial."""
    return {(TRUE, alg.defs[a][1]): float(e) for a, e in mono if alg.kind(a) == "exp"}
