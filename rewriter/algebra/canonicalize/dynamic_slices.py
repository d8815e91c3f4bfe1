"""Rows of arrays at positions known only when the program runs.

A decode step takes one row of a causal mask: by `lax.dynamic_slice`, by indexing, or
per sequence under `jax.vmap`. Where the position is only compared with other numbers,
the row's form is those comparisons, at the start that JAX reads from. JAX moves a start
out of range inside the array, or answers it by a fill.
"""

from __future__ import annotations

from jax.lax import GatherScatterMode

from rewriter.algebra.canonicalize.evaluator import FLAGS, Evaluator, rule
from rewriter.algebra.canonicalize.primitives import FULL, NeedSplit
from rewriter.algebra.normal_form import TRUE, Index, OverBudget, Poly
from rewriter.program.graph import Node

Starts = list[tuple[int, Poly, int]]
"""A stand-in for each position, its start before it is moved, and the axis' size."""


@rule("dynamic_slice", table=FLAGS)
def _sliced_flag(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> int:
    _require_positions(ev, node, mode)
    at, starts = _slice_starts(ev, node, args)
    out = _read(ev.flag, ev, node, at, mode)
    for place, start, size in starts:
        out = ev.alg.moved_inside(out, place, start, size)
    return out


@rule("dynamic_slice")
def _sliced(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    alg = ev.alg
    _require_positions(ev, node, mode)
    at, starts = _slice_starts(ev, node, args)
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
    _require_positions(ev, node, mode)
    at, starts = _gather_starts(ev, node, args)
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


def _require_positions(ev: Evaluator, node: Node, mode: str) -> None:
    """Raises for arrays that are not made only of positions and numbers."""
    if mode != FULL or not ev.constant_like(node.ins[0]):
        raise OverBudget("rows of an array that depends on inputs")


def _read(form, ev: Evaluator, node: Node, at: tuple[Index, ...], mode: str):
    """The array's form."""
    try:
        return form(node.ins[0], at, mode)
    except NeedSplit:
        raise OverBudget(
            "rows are taken of an array that is joined from several"
        ) from None


def _slice_starts(ev: Evaluator, node: Node, args: tuple[Index, ...]):
    """Arguments of a dynamic slice's array, and the starts of single positions."""
    at: list[Index] = []
    starts: Starts = []
    sizes, taken = ev.g.shape(node.ins[0]), node.params["slice_sizes"]
    for a, n, m, value in zip(args, sizes, taken, node.ins[1:], strict=True):
        x = 0 if m == n else ev.number(value)
        if x is None:
            at.append(_place(ev, starts, m, n, (value, ())))
        else:
            at.append(ev.alg.affine(a, 1, min(max(int(x), 0), n - m)))
    return tuple(at), starts


def _gather_starts(ev: Evaluator, node: Node, args: tuple[Index, ...]):
    """The same for a gather of rows by their numbers."""
    numbers, taken = node.params["dimension_numbers"], node.params["slice_sizes"]
    if numbers.operand_batching_dims:
        raise OverBudget("each entry of a batch gathers from its own array")
    fills = node.params["mode"] == GatherScatterMode.FILL_OR_DROP
    mapped = tuple(numbers.start_index_map)
    rows = tuple(a for k, a in enumerate(args) if k not in numbers.offset_dims)
    offsets = iter(args[k] for k in numbers.offset_dims)
    at: list[Index] = []
    starts: Starts = []
    for d, (n, m) in enumerate(zip(ev.g.shape(node.ins[0]), taken, strict=True)):
        a = None if d in numbers.collapsed_slice_dims else next(offsets)
        if d in mapped and (m != n or fills):
            which = ev.alg.affine(None, 1, mapped.index(d))
            a = _place(ev, starts, m, n, (node.ins[1], (*rows, which)))
        at.append(a)
    return tuple(at), starts


def _place(ev: Evaluator, starts: Starts, m: int, n: int, start) -> Index:
    """A stand-in index for the single position taken along an axis."""
    if m != 1:
        raise OverBudget("several rows at a start that is not known")
    place = ev.alg.new_index(n)
    starts.append((place, ev.poly(*start), n))
    return place
