"""Reads positions of queries and keys, with which a function of scores computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rewriter.algebra.normal_form import TRUE, Index
from rewriter.ops.score import COLUMN, ROW, Ref, cast_step, number
from rewriter.patterns.attention.functions.builder import Builder, Unread


def position(reader: Builder, arg: Index, dtype: Any) -> Ref:
    """The number of a query or key, or a digit of it."""
    alg = reader.ev.alg
    ids = alg.index_ids(arg)
    if ids - {*reader.axes.t, *reader.axes.s}:
        form = alg.iota(arg)
        return reader.operand(("iota", arg), form, ids, dtype)
    total: Ref | None = None
    for (flag, mono), c in alg.iota(arg).items():
        if flag != TRUE or len(mono) > 1 or c != int(c):
            raise Unread("a position that is no sum of digits")
        term = number(1, "int32") if not mono else _digit(reader, mono[0][0])
        if c != 1:
            term = reader.count("multiply", term, int(c))
        total = term if total is None else reader.count("add", total, term)
    total = number(0, "int32") if total is None else total
    if np.dtype(dtype) == np.int32:
        return total
    return reader.add(cast_step(total, dtype))


def _digit(reader: Builder, atom: int) -> Ref:
    """A digit of a query's or key's number."""
    arg = reader.ev.alg.defs[atom][1]
    ways: list[tuple[str, int]] = []
    while isinstance(arg, tuple) and arg[0] in ("div", "mod"):
        ways.append((arg[0], arg[2]))
        arg = arg[1]
    if not isinstance(arg, int):
        raise Unread("a position that is no digit")
    ref = _number_of(reader, arg)
    for way, n in reversed(ways):
        ref = reader.count("quotient" if way == "div" else "remainder", ref, n)
    return ref


def _number_of(reader: Builder, index: int) -> Ref:
    """The value of one index of the queries or keys."""
    sizes = reader.ev.alg.sizes
    for kind, group in ((ROW, reader.axes.t), (COLUMN, reader.axes.s)):
        if index in group:
            k, ref = group.index(index), Ref(kind)
            below = math.prod(sizes[i] for i in group[k + 1 :])
            if below != 1:
                ref = reader.count("quotient", ref, below)
            return ref if k == 0 else reader.count("remainder", ref, sizes[index])
    raise Unread("a position of another axis")
