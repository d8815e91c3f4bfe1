"""Rows of arrays at positions known only when the program runs.

A step of decoding takes its row of a causal mask: by `lax.dynamic_slice`, by indexing,
per sequence under `jax.vmap`. Where the position is only compared with others, the row
is what those comparisons are at the start that JAX reads from, which is moved inside
the array or answered by a fill.
"""

from __future__ import annotations

from jax.lax import GatherScatterMode

from rewriter.canonicalize.evaluator import FLAGS, Evaluator, rule
from rewriter.canonicalize.primitives import FULL, NeedSplit
from rewriter.graph import Node
from rewriter.normal_form import TRUE, Index, OverBudget, Poly

Starts = list[tuple[int, Poly, int]]
"""A stand-in for each position, its start before it is moved, and the axis' size."""


@rule("dynamic_slice", table=FLAGS)
def _sliced_flag(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> int:
    at, starts = _slice_starts(ev, node, args, mode)
    out = _read(ev.flag, ev, node, at, mode)
    for place, start, size in starts:
        out = ev.alg.moved_inside(out, place, start, size)
    return out


@rule("dynamic_slice")
def _sliced(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    alg = ev.alg
    at, starts = _slice_starts(ev, node, args, mode)
    p = _read(ev.poly, ev, node, at, mode)
    for place, start, size in starts:
        out: Poly = {}
        for (flag, mono), c in p.items():
            if place in alg.term_ids(TRUE, mono):
                raise OverBudget("a value that differs by row")
            row = alg.moved_inside(flag, place, start, size)
            out = alg.add(out, {(row, mono): c})
        p = out
    return p


@rule("gather", table=FLAGS)
def _gathered_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    at, starts = _gather_starts(ev, node, args, mode)
    alg, inside = ev.alg, TRUE
    out = _read(ev.flag, ev, node, at, mode)
    for place, start, size in starts:
        out = alg.moved_inside(out, place, start, size)
        inside = alg.both(inside, alg.within(start, size))
    if node.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return out
    if node.params["fill_value"] in (None, True):
        return alg.either(out, alg.negate(inside))
    return alg.both(out, inside)


def _read(form, ev: Evaluator, node: Node, at: tuple[Index, ...], mode: str):
    """The array's form, which is made of positions alone."""
    if not ev.constant_like(node.ins[0]):
        raise OverBudget("rows of an array that depends on inputs")
    try:
        return form(node.ins[0], at, mode)
    except NeedSplit:
        raise OverBudget("rows of pieces") from None


def _slice_starts(ev: Evaluator, node: Node, args, mode: str):
    """Arguments of a dynamic slice's array, and the starts of single positions."""
    at: list[Index] = []
    starts: Starts = []
    sizes, taken = ev.g.shape(node.ins[0]), node.params["slice_sizes"]
    for a, n, m, value in zip(args, sizes, taken, node.ins[1:], strict=True):
        x = ev.number(value)
        if m == n:
            at.append(a)
        elif x is not None:
            at.append(ev.alg.affine(a, 1, min(max(int(x), 0), n - m)))
        else:
            at.append(_place(ev, starts, m, n, lambda v=value: ev.poly(v, ())))
    return _checked(mode, at, starts)


def _gather_starts(ev: Evaluator, node: Node, args, mode: str):
    """The same of a gather of rows by their numbers."""
    numbers, taken = node.params["dimension_numbers"], node.params["slice_sizes"]
    if numbers.operand_batching_dims:
        raise OverBudget("a gather per entry of a batch")
    sizes, mapped = ev.g.shape(node.ins[0]), tuple(numbers.start_index_map)
    rows = tuple(a for k, a in enumerate(args) if k not in numbers.offset_dims)
    offsets = iter(args[k] for k in numbers.offset_dims)
    at: list[Index] = []
    starts: Starts = []
    for d, (n, m) in enumerate(zip(sizes, taken, strict=True)):
        a = None if d in numbers.collapsed_slice_dims else next(offsets)
        if d in mapped and (m != n or n == 1):
            which = ev.alg.affine(None, 1, mapped.index(d))
            at.append(
                _place(
                    ev, starts, m, n, lambda w=which: ev.poly(node.ins[1], (*rows, w))
                )
            )
        elif d in mapped and node.params["mode"] == GatherScatterMode.FILL_OR_DROP:
            raise OverBudget("a fill of whole arrays")
        else:
            at.append(a)
    return _checked(mode, at, starts)


def _place(ev: Evaluator, starts: Starts, m: int, n: int, start) -> Index:
    """A stand-in for the one position that is taken along an axis."""
    if m != 1:
        raise OverBudget("several rows at a start that is not known")
    place = ev.alg.new_index(n)
    starts.append((place, start(), n))
    return place


def _checked(mode: str, at: list[Index], starts: Starts):
    if mode != FULL:
        raise OverBudget("not a matter of layout")
    return tuple(at), starts
