"""Says in words what the operands of a site mean, and what a large one costs.

The op declares both: `Operand.summary` and `Operand.instead`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from rewriter.measure.measurement import time_text
from rewriter.ops.op import Operand
from rewriter.ops.registry import registry
from rewriter.rewrite.plan import Site
from rewriter.support.sizes import size_text

OPERAND = re.compile(r"(\w+) (\w+)\[([^\]]*)\]")
COMMA = re.compile(r",(?![^()]*\))")

Shape = tuple[int | str, ...]


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
    name = site.form or site.op
    if name not in registry().ops():
        return
    shapes = _shapes(site)
    for operand in registry().op(name).operands:
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
