"""Gathers of one entry of each row: the sum of the row where the index is that one.

With i the index of a row, ``y[i]`` is ``Σ_v [v = i] y[v]``. What is the same in the
whole row is that of the entry, whichever it is. Its transpose adds a number c to that
entry of a row of zeros: ``[v = i] c``. What an index outside of the row does is part of
the form: it gives NaN, beside which other terms do not matter; or 0; or the nearest
entry. An index that is promised to be inside takes the nearest too, but adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.lax import GatherScatterMode

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.algebra.canonicalize.evaluator import Evaluator, rule
from rewriter.algebra.normal_form import TRUE, Index, Monomial, OverBudget, Poly
from rewriter.program.graph import Node

PICKS = frozenset({"gather", "scatter-add", "scatter"})
"""Primitives that may take or set one entry of each row."""


NEAREST, PROMISED = "within", "promised within"
"""How forms name the nearest index inside. Gradients of both differ."""


def is_pick(node: Node) -> bool:
    """Whether an equation takes one entry of each row, or adds to one of each.

    Taking the only entry of an axis of size one counts too.
    """
    if node.prim not in PICKS:
        return False
    numbers, shape = node.params["dimension_numbers"], node.eqn.invars[0].aval.shape
    batch = numbers.operand_batching_dims
    if node.prim == "gather":
        mapped, sizes = numbers.start_index_map, node.params["slice_sizes"]
    else:
        mapped = numbers.scatter_dims_to_operand_dims
        outside = {*numbers.inserted_window_dims, *batch}
        window = iter(numbers.update_window_dims)
        updates = node.eqn.invars[2].aval.shape
        sizes = [
            1 if d in outside else updates[next(window)] for d in range(len(shape))
        ]
    each = range(len(shape))
    if any(sizes[d] != (1 if d in (*batch, *mapped) else shape[d]) for d in each):
        return False
    if all(shape[d] == 1 for d in mapped):
        return True
    return len(shape) > 1 and all(d in (*batch, *mapped) or shape[d] == 1 for d in each)


def picked(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    """The form of a gather that takes one entry of each row.

    Raises:
        OverBudget: If it takes several entries, or an axis is taken otherwise.
    """
    if not is_pick(node) or kind_of(ev.g.dtype(node.outs[0])) != "f":
        raise OverBudget("a gather that is not of one number of each row")
    numbers, alg = node.params["dimension_numbers"], ev.alg
    array, indices = node.ins
    shape = ev.g.shape(array)
    rows = tuple(a for k, a in enumerate(args) if k not in numbers.offset_dims)
    batch, inserted = numbers.operand_batching_dims, numbers.collapsed_slice_dims
    window = iter(args[k] for k in numbers.offset_dims)
    at: list[Index] = [
        None if d in (*batch, *inserted) else next(window) for d in range(len(shape))
    ]
    for d, k in zip(batch, numbers.start_indices_batching_dims, strict=True):
        at[d] = rows[k]
    label: tuple[int, Poly] | None = None
    for column, d in enumerate(numbers.start_index_map):
        start = ev.poly(indices, (*rows, alg.affine(None, 1, column)))
        position = _position(ev, start, rows, shape[d])
        if shape[d] == 1 and not start:
            continue
        if position is not None:
            at[d] = position
            continue
        if label is not None:
            raise OverBudget("two indices of a lookup are computed")
        if shape[d] == 1:
            raise OverBudget("a lookup among one entry, which may be outside")
        place = alg.new_index(shape[d])
        at[d], label = place, (place, start)
    if label is None:
        return ev.poly(array, tuple(at), mode)
    place, start = label
    hit = alg.of_bool(_hit(ev, place, start, node))
    fills = node.params["mode"] == GatherScatterMode.FILL_OR_DROP
    fill = node.params["fill_value"]
    is_number = fills and fill is not None and not math.isnan(fill)
    if is_number and fill != 0:
        raise OverBudget("a fill that is neither NaN nor 0")
    promised = _is_promised(ev, start, node)
    form: Poly = {}
    for key, c in ev.poly(array, tuple(at), mode).items():
        term, own = {key: c}, place in alg.term_ids(*key)
        if own or is_number or (promised and not _is_stopped(ev, key)):
            term = alg.sum_over(alg.mul(hit, term), [place])
        form = alg.add(form, term)
    if fills and not is_number:
        name = f"NaN outside {alg.sizes[place]}"
        form = alg.add(form, alg.of_atom(alg.atom("fn", name, alg.freeze(start))))
    return form


def _position(
    ev: Evaluator, start: Poly, rows: Sequence[Index], size: int
) -> Index | None:
    """The row's index that a start is, if it is one."""
    alg = ev.alg
    for a in rows:
        whole = isinstance(a, int) and alg.sizes[a] == size
        if whole and not alg.add(start, alg.iota(a), -1.0):
            return a
    return None


def _hit(ev: Evaluator, at: Index, start: Poly, node: Node) -> int:
    """Whether a position is the one that is picked."""
    alg = ev.alg
    promised = _is_promised(ev, start, node)
    clips = node.params["mode"] == GatherScatterMode.CLIP and _may_miss(ev, start, node)
    if clips or (promised and node.prim == "gather"):  # a promised scatter drops
        name = f"{PROMISED if promised else NEAREST} {_size(ev, node)}"
        start = alg.of_atom(alg.atom("fn", name, alg.freeze(start)))
    return alg.compare("eq", alg.add(alg.iota(at), start, -1.0), True)


def _is_promised(ev: Evaluator, start: Poly, node: Node) -> bool:
    """Whether an index that may be outside is promised not to be.

    XLA then reads the nearest entry. The transpose adds to none, so that in gradients
    the entry is no function of the row, nor of what is the same in the whole row.
    """
    promised = node.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS
    return promised and _may_miss(ev, start, node)


def _is_stopped(ev: Evaluator, key: tuple[int, Monomial]) -> bool:
    """Whether a term has no gradient: it consists of what `stop_gradient` gives."""
    nodes = [
        ev.g.node_of(ev.alg.defs[a][1]) if ev.alg.kind(a) == "leaf" else None
        for a, _ in key[1]
    ]
    return all(n is not None and n.prim == "stop_gradient" for n in nodes)


def _may_miss(ev: Evaluator, start: Poly, node: Node) -> bool:
    """Whether an index may be outside of the row."""
    lo, hi = ev.alg.bounds(start)
    return lo < 0 or hi >= _size(ev, node)


def _size(ev: Evaluator, node: Node) -> int:
    """The number of entries of a row."""
    return ev.g.shape(node.ins[0])[_axis(node)]


def _axis(node: Node) -> int:
    """The axis of the entries: the last one that is indexed."""
    numbers = node.params["dimension_numbers"]
    if node.prim == "gather":
        return numbers.start_index_map[-1]
    return numbers.scatter_dims_to_operand_dims[-1]


@rule("scatter")
def set_entries(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    """The form of numbers added to, or set in, rows of zeros, one of each row.

    Raises:
        OverBudget: If several numbers are added to a row, or it is not of zeros.
    """
    numbers, alg = node.params["dimension_numbers"], ev.alg
    array, indices, updates = node.ins
    if not is_pick(node) or ev.number(array) != 0:
        raise OverBudget("a scatter that is not one entry of each row of zeros")
    shape, sizes = ev.g.shape(indices)[:-1], ev.g.shape(array)
    rows: list[Index] = [alg.new_index(n) for n in shape]
    known = dict(
        zip(
            numbers.scatter_indices_batching_dims,
            (args[d] for d in numbers.operand_batching_dims),
            strict=True,
        )
    )
    for k, a in known.items():
        rows[k] = a
    hits: list[tuple[int, int]] = []
    for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
        which = alg.affine(None, 1, column)
        start = ev.poly(indices, (*rows, which))
        position = _position(ev, start, rows, sizes[d])
        if position is not None and rows.index(position) not in known:
            known[rows.index(position)] = args[d]
        elif sizes[d] != 1 or start:
            hits.append((column, d))
    if any(n != 1 and k not in known for k, n in enumerate(shape)) or len(hits) > 1:
        raise OverBudget("a scatter of several numbers to one row")
    rows = [known.get(k) for k in range(len(rows))]
    flag = TRUE
    for column, d in hits:
        start = ev.poly(indices, (*rows, alg.affine(None, 1, column)))
        flag = _hit(ev, args[d], start, node)
    outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(args[d] for d in range(len(sizes)) if d not in outside)
    batch = iter(rows)
    places = range(len(ev.g.shape(updates)))
    at = [next(window if k in numbers.update_window_dims else batch) for k in places]
    return alg.mul(alg.of_bool(flag), ev.poly(updates, tuple(at), mode))
