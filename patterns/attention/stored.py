"""Reads attention whose keys and values are stored in few bits.

Formula    as of attention, with k[b, s, k, h] = (q[b, s, k, h] - zero) scale, and v
           alike; zero points and scales vary along some of these axes
Looks like attention with arrays of 8 bits above keys or values. Scales may also
           multiply the scores or the weights.
Must hold  keys and values are stored numbers after some steps, as
           `rewriter.patterns.quantized.operands` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Operand, Reading, Refused
from rewriter.ops.widening import param_of
from rewriter.patterns.attention import read
from rewriter.patterns.attention.read import ANCHORS, DOT, STEPS
from rewriter.patterns.quantized.operands import (
    LEAST,
    StoredOperand,
    may_be_stored,
    readings,
    size_of,
    stored_operand,
)
from rewriter.patterns.quantized.steps import STORED, few_bits
from rewriter.program.graph import Node

NAME = "quantized_attention"


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of attention around an exponential whose keys or values are stored."""
    if not few_bits(find):
        return
    dots = [*find.regions.above(anchor.ins[0], DOT)]
    dots += [n for n, _ in find.regions.below(anchor.outs[0], DOT)]
    if may_be_stored(find, dots):
        yield from readings(find, anchor, NAME, read.propose, stored)


def stored(find: Finder, reading: Reading) -> Reading:
    """The reading of attention with stored keys or values.

    Raises:
        Refused: If they are something else.
        OverBudget: If a form grows too large.
    """
    if reading.joined:
        raise Refused("keys", "keys are in several arrays", score=0.4)
    operands: dict[str, Operand] = {}
    params: dict[str, Any] = dict(reading.params)
    for name in "kv":
        found = stored_operand(find, reading, name)
        if found is not None:
            _require_few_scales(found, name)
            floats = str(find.graph.dtype(reading.value))  # they hold these numbers
            params[param_of(name)] = found.widen or floats
            operands |= found.operands(name)
    if not operands:
        raise Refused("dtype", "keys and values are floats", score=0.1)
    return dataclasses.replace(
        reading, op=NAME, operands={**reading.operands, **operands}, params=params,
        proof=reading,
    )  # fmt: skip


def _require_few_scales(found: StoredOperand, name: str) -> None:
    """Refuses scales that take as much memory as the numbers.

    Raises:
        Refused: If a scale is for less than `LEAST` numbers.
    """
    alg = found.algebra
    for what, (form, _) in found.joined.items():
        ids = alg.ids(form)
        whole = [group for group in found.groups if ids & set(group)]
        scales = size_of(alg, [i for group in whole for i in group])
        if LEAST * scales > size_of(alg, [i for group in found.groups for i in group]):
            text = f"{name}: a {what} for less than {LEAST} numbers"
            raise Refused(name, text, score=0.5)


PATTERN = ReaderPattern(NAME, ANCHORS, propose, STEPS, dtypes=STORED, looks_above=True)
