"""Chooses between a site and smaller ones inside of it that read fewer bytes.

A gated linear unit may be made of products with matrices of 8 bits. A kernel of the
unit would read both matrices in 16 bits, which XLA then writes first. So where kernels
are chosen for its products, the unit itself is left as written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.site.facts import Facts
from rewriter.site.implementation import XLA


def with_ops_inside(
    facts: Sequence[Facts], choices: Sequence[Choice]
) -> tuple[Choice, ...]:
    """Returns the choices, where each region is computed by one kernel.

    Args:
        facts: The matches. Those whose op says `Op.stays` stay where they are inside of
            others, unless a kernel of the other one is forced.
        choices: What was chosen for each by itself.
    """
    pairs = [(f, c) for f, c in zip(facts, choices, strict=True) if c.kernel != XLA]
    inside = [(f, c) for f, c in pairs if f.match.op.stays]
    return tuple(_settled(facts, choices, pairs, inside)) if inside else tuple(choices)


def _settled(
    facts: Sequence[Facts],
    choices: Sequence[Choice],
    pairs: Sequence[tuple[Facts, Choice]],
    inside: Sequence[tuple[Facts, Choice]],
) -> Iterator[Choice]:
    for f, choice in zip(facts, choices, strict=True):
        why = ""
        if choice.kernel != XLA and choice.origin != "forced":
            why = _of_larger(f, pairs) if f.match.op.stays else _of_smaller(f, inside)
        if why:
            refused = (choice.kernel, why), *choice.not_chosen
            choice = Choice(AS_WRITTEN, choice.origin, refused)
        yield choice


def _of_smaller(facts: Facts, inside: Sequence[tuple[Facts, Choice]]) -> str:
    """Why a site is left for those inside of it."""
    own = (f.match.op.name for f, _ in inside if f.match.value in facts.match.inner)
    name = next(own, "")
    return name and f"{name} inside of it reads matrices in fewer bits"


def _of_larger(facts: Facts, pairs: Sequence[tuple[Facts, Choice]]) -> str:
    """Why a site is left for one around it whose kernel is forced."""
    names = (
        f.match.op.name
        for f, c in pairs
        if c.origin == "forced"
        and not f.match.op.stays
        and facts.match.value in f.match.inner
    )
    name = next(names, "")
    return name and f"a kernel of {name} around it is forced"
