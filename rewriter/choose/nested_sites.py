"""Chooses between a site and smaller ones inside of it that read fewer bytes.

A gated linear unit may be made of products with matrices of 8 bits. A kernel of the
unit may read both matrices in 16 bits, which XLA then writes first. So where kernels
are chosen for its products, the unit itself is left as written. A kernel of the unit
that reads 8 bits itself goes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.ops.stored import FEW_BITS
from rewriter.site.facts import Facts
from rewriter.site.implementation import XLA

Pair = tuple[Facts, Choice]


def choose_among_nested(
    facts: Sequence[Facts], choices: Sequence[Choice]
) -> tuple[Choice, ...]:
    """Returns the choices, where each region is computed by one kernel.

    Args:
        facts: The matches. Those whose op says `Op.stays` stay where they are inside of
            others, unless a kernel of the other one is forced, or reads as few bits.
        choices: What was chosen for each by itself.
    """
    pairs = [(f, c) for f, c in zip(facts, choices, strict=True) if c.kernel != XLA]
    inside = [(f, c) for f, c in pairs if f.match.op.stays]
    return tuple(_settled(facts, choices, pairs, inside)) if inside else tuple(choices)


def _settled(
    facts: Sequence[Facts],
    choices: Sequence[Choice],
    pairs: Sequence[Pair],
    inside: Sequence[Pair],
) -> Iterator[Choice]:
    for pair in zip(facts, choices, strict=True):
        f, choice = pair
        why = ""
        if choice.kernel != XLA and choice.origin != FORCED:
            why = (
                _why_larger(pair, pairs)
                if f.match.op.stays
                else _why_smaller(f, inside)
            )
        if why:
            refused = (choice.kernel, why), *choice.not_chosen
            choice = Choice(AS_WRITTEN, choice.origin, refused)
        yield choice


FORCED = "forced"


def _why_smaller(facts: Facts, inside: Sequence[Pair]) -> str:
    """Why a site is left for those inside of it."""
    own = [(f, c) for f, c in inside if f.match.value in facts.match.inner]
    if _reads_few_bits(facts):
        own = [(f, c) for f, c in own if c.origin == FORCED]
        text = "a kernel of {} inside of it is forced"
    else:
        text = "{} inside of it reads matrices in fewer bits"
    name = next((f.match.op.name for f, _ in own), "")
    return name and text.format(name)


def _why_larger(pair: Pair, pairs: Sequence[Pair]) -> str:
    """Why a site is left for one around it: that is forced, or reads as few bits."""
    facts, _ = pair
    for f, choice in pairs:
        if f.match.op.stays or facts.match.value not in f.match.inner:
            continue
        if choice.origin == FORCED:
            return f"a kernel of {f.match.op.name} around it is forced"
        if _reads_few_bits(f) and not _why_smaller(f, _forced(pairs)):
            return f"{f.match.op.name} around it reads the matrices as few bits"
    return ""


def _forced(pairs: Sequence[Pair]) -> list[Pair]:
    return [(f, c) for f, c in pairs if f.match.op.stays and c.origin == FORCED]


def _reads_few_bits(facts: Facts) -> bool:
    """Whether some operand of a site is stored in few bits."""
    return any(dtype in FEW_BITS for _, dtype in facts.match.spec.dtypes)
