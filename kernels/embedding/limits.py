"""Limits of the kernels: real numbers, known sizes, one kind of ids."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

DTYPES = ("bfloat16", "float16", "float32")

MOST = 1 << 31
"""Rows are counted in 32 bits."""


def rows_to_add(spec: Spec) -> Verdict:
    """Returns whether a use of the op of sums has rows that can be added."""
    if spec.symbolic:
        return SYMBOLIC
    *lead, m, _ = spec.shape("rows")
    return _numbers(spec, "rows", math.prod(lead) * max(spec.param("size"), m))


def table_to_read(spec: Spec) -> Verdict:
    """Returns whether a use of the op of lookups has a table that can be added to."""
    if spec.symbolic:
        return SYMBOLIC
    return _numbers(spec, "table", math.prod(spec.shape("table")[:-1]))


def _numbers(spec: Spec, name: str, count: int) -> Verdict:
    """Whether an operand has real numbers, and a table so few rows.

    Args:
        spec: The use, of known sizes.
        name: The operand.
        count: The rows of the table, or those that are given if they are more.
    """
    found = [YES]
    if spec.dtype(name) not in DTYPES:
        text = f"{name} of dtype {spec.dtype(name)}, not {', '.join(DTYPES)}"
        found.append(no("dtype", text))
    for operand in (name, "ids"):
        if spec.has(operand) and 0 in spec.shape(operand):
            text = f"{operand} of shape {spec.shape(operand)}: there are none"
            found.append(no("empty", text))
    if count >= MOST:
        found.append(no("size", f"{count} rows, of at most 2^31 - 1"))
    return all_of(*found)


def ids_given(spec: Spec) -> Verdict:
    """Returns whether a use has ids of its own, and none that count up."""
    if spec.has("ids"):
        return YES
    return no("counted", "ids count up, and need no sums by id")


def counted_only(spec: Spec) -> Verdict:
    """Returns whether the ids of a use are proved to count up."""
    if spec.has("ids"):
        return no("ids", "the ids are not proved to count up")
    return YES
