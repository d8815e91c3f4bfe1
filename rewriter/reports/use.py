"""Says in words what the operands and parameters of a site mean.

The op declares the words: `Operand.summary`, `Operand.instead` and `Op.words`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from rewriter.measure.measurement import time_text
from rewriter.ops.op import Op, Operand
from rewriter.ops.registry import registry
from rewriter.rewrite.plan import Site
from rewriter.support.sizes import size_text

OPERAND = re.compile(r"(\w+) (\w+)\[([^\]]*)\]")
COMMA = re.compile(r",(?![^()]*\))")

Shape = tuple[int | str, ...]


EVERYWHERE = ("out_dtype", "precision")
"""Parameters that many ops have, and that shapes show."""


def op_of(site: Site) -> Op | None:
    """Returns the op of a site, or its special form; None for a user's pattern."""
    name = site.form or site.op
    return registry().op(name) if name in registry().ops() else None


def parameters(site: Site) -> Iterator[str]:
    """Yields the parameters of a site that are worth showing."""
    op = op_of(site)
    for name, value in dict(site.params).items():
        if name in EVERYWHERE or value in (None, "", (None, None), False):
            continue
        if op is not None and name in op.words:
            text = op.words[name](value)
        else:
            text = (
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            )
        if text:
            yield text


def summaries(site: Site) -> Iterator[str]:
    """Yields what the operands of a site mean, such as ``"keys up to a length"``."""
    for operand, shape in _operands(site):
        if operand.summary and not (operand.instead and _is_matrix(shape)):
            yield operand.summary


def large_operands(site: Site, rate: float = 0.0) -> Iterator[str]:
    """Yields what operands cost that are as large as a matrix, and what would not.

    Args:
        site: The site.
        rate: The device's bytes/s from memory; 0 if unknown.
    """
    for operand, shape in _operands(site):
        if not operand.instead or not _is_matrix(shape):
            continue
        cost = "×".join(map(str, shape))
        if all(isinstance(d, int) for d in shape):
            count = math.prod(shape)
            cost += f", {size_text(count)}"
            cost += f", {time_text(1e6 * count / rate)} or more," if rate else ""
        yield f"a {operand.name} of {cost} is read in each pass; {operand.instead}"


def _operands(site: Site) -> Iterator[tuple[Operand, Shape]]:
    """The operands that a site has and its op declares, with their shapes."""
    op, shapes = op_of(site), _shapes(site)
    for operand in op.operands if op is not None else ():
        if operand.name in shapes:
            yield operand, shapes[operand.name]


def _shapes(site: Site) -> Mapping[str, Shape]:
    """Shapes by operand; a symbolic size is its text."""
    found = OPERAND.findall(site.shapes)
    return {
        name: tuple(int(d) if d.isdigit() else d for d in filter(None, COMMA.split(of)))
        for name, _, of in found
    }


def _is_matrix(shape: Shape) -> bool:
    """Whether an array differs along both of its last axes."""
    return len(shape) > 1 and 1 not in shape[-2:]
