"""Recognises the activation that a form applies to one of several arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from rewriter.algebra.formula import applied
from rewriter.algebra.normal_form import Algebra, OverBudget, Poly
from rewriter.find.reading import Refused
from rewriter.ops.activations import ACTIVATIONS, PARAMETRIC
from rewriter.patterns.gated_linear_unit.branches import Branch
from rewriter.patterns.gated_linear_unit.forms import every

TRIED = 8
"""The most numbers to try in a parametric activation."""


@dataclass(frozen=True)
class Activated:
    """An activation of a branch.

    Attributes:
        gate: The branch.
        name: The activation's name.
        beta: Its number; 1 if it has none.
        factor: The factor in front of it.
    """

    gate: Branch
    name: str
    beta: float
    factor: float


def activated(alg: Algebra, act: Poly, gates: list[Branch]) -> Activated:
    """The activation and the argument that give a form.

    Raises:
        Refused: If no known activation fits.
    """
    for gate in gates:
        form = gate.form(alg)
        for name, beta in _candidates(alg, act):
            try:
                known = applied(alg, _function(name, beta), form)
                factor = _ratio(alg, act, known)
            except OverBudget:
                continue
            if factor is not None:
                return Activated(gate, name, beta, factor)
    exponential = all(alg.kind(a) == "exp" for _, mono in act for a, _ in mono)
    raise Refused(
        "activation",
        "the activation is not a known one",
        score=0.2 if exponential else 0.5,  # weights of a softmax are exponentials, too
        difference=alg.show(act),
    )


def _candidates(alg: Algebra, act: Poly) -> Iterator[tuple[str, float]]:
    for name in ACTIVATIONS:
        if name not in PARAMETRIC and name != "identity":
            yield name, 1.0
    betas = _betas(alg, act)
    for name in PARAMETRIC:
        for beta in betas:
            yield name, beta


def _betas(alg: Algebra, act: Poly) -> list[float]:
    """Numbers in a form: exponents of exponentials, and coefficients."""
    found: dict[float, None] = {}
    forms = [act]
    forms += [alg.thaw(alg.defs[a][1]) for a in every(alg, act) if alg.kind(a) == "pow"]
    for p in forms:
        for _, mono in p:
            for a, e in mono:
                if alg.kind(a) == "exp":
                    found |= {abs(float(e)): None, 1 / abs(float(e)): None}
    found |= {abs(c): None for c in act.values()}
    return list(found)[:TRIED]


def _ratio(alg: Algebra, p: Poly, known: Poly) -> float | None:
    """The number c by which p is a multiple of a known form, if it is one."""
    if len(p) != len(known) or not known:
        return None
    term = next(iter(known))
    if term not in p:
        return None
    c = alg.number(p[term] / known[term])
    return None if alg.add(p, known, -c) else c


@functools.lru_cache(maxsize=128)
def _function(name: str, beta: float) -> Callable[[jax.Array], jax.Array]:
    return lambda y: ACTIVATIONS[name](y, beta)
