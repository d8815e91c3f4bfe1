"""Cross-entropy over classes: log Σ_v exp y[v] - y[label], of rows of logits y.

Formula    loss[...] = (1 - s) (l - y[..., label]) + s (l - mean_v y) + z l²
           with l = log Σ_v exp y[..., v], and perhaps y = cap tanh(. / cap) of
           scale Σ_k x[..., k] w[k, v] + bias[v]
Looks like a logarithm of a sum of exponentials, and one entry of each row, taken by an
           index or a sum with a one-hot row, beside it.
Must hold  the entry is one of the same logits, or of their log-probabilities.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize import LOCAL, is_coarse, is_pick, values_named
from rewriter.algebra.normal_form import OverBudget
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Operand, Reading, Refused, split_digits, unproved
from rewriter.find.sieve import Step
from rewriter.patterns.cross_entropy.form import Loss, loss_of
from rewriter.patterns.cross_entropy.logits import (
    arrays_of_logits,
    linear_operands,
    logits_operand,
)
from rewriter.patterns.cross_entropy.logits_readers import reader_of
from rewriter.patterns.cross_entropy.shift import EXPONENTIALS, nan_at, require_shifted
from rewriter.program.constant_tables import affine_constant
from rewriter.program.graph import Node
from rewriter.program.lines import is_of_gradient

LINEAR, GIVEN = "linear_cross_entropy", "cross_entropy"
ANCHORS = frozenset({"log"})
MOVES = frozenset({
    "reshape", "broadcast_in_dim", "concatenate", "squeeze", "transpose", "expand_dims",
})  # fmt: skip
JOINS = frozenset({"concatenate"})
"""What joins positions and labels to one index, and also rolls labels."""

OF_BOTH = frozenset({"labels", "terms", "total", "masked", "budget", "rows"})
"""Reasons that have nothing to do with the product: they are told once."""

OF_ARRAYS = frozenset({"rows", "one_class"})
"""Reasons that also hold where it is not read what the logits are computed from."""

CUTS = frozenset({"slice", "dynamic_slice"})
"""What takes some rows."""

COLLECTIVES = frozenset({"psum", "psum2", "psum_invariant"})
"""Sums over devices, by the names that versions of JAX give them."""

WHOLE = "write the loss of whole arrays, and split the weights by their sharding"

MOST = 24
"""Values below the logarithm that are read."""


def propose_linear(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings with the product that makes the logits, if nothing else needs these."""
    products = _products(find, anchor)
    if not products:
        return
    reader = reader_of(find, products)
    if reader:
        text = f"the logits stay in memory: {reader}"
        find.missed(LINEAR, anchor, Refused("alive", text, score=0.6))
        return
    yield from _readings(find, anchor, LINEAR, products)


def propose_given(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings with logits that are an array of the program."""
    products = _products(find, anchor)
    reader = reader_of(find, products) if products else ""
    notes = (f"the logits stay in memory: {reader}",) if reader else ()
    yield from _readings(find, anchor, GIVEN, frozenset(), notes)


def _products(find: Finder, anchor: Node) -> frozenset[int]:
    """The contractions that the exponentials below a logarithm are made of."""
    above = find.regions.above(anchor.ins[0], frozenset({"dot_general"}))
    return frozenset(n.outs[0] for n in above)


def _readings(
    find: Finder,
    anchor: Node,
    op: str,
    products: frozenset[int],
    notes: tuple[str, ...] = (),
) -> Iterator[Reading]:
    """The reading of the last value below a logarithm that is a loss."""
    g = find.graph
    if not jnp.issubdtype(g.dtype(anchor.outs[0]), jnp.floating):
        return
    if not _is_total(find, anchor):
        if op == GIVEN and _is_split(find, anchor):
            text = (
                "the program adds up its parts of the classes by collectives of its own"
            )
            find.missed(
                LINEAR, anchor, Refused("split", text, score=0.6, suggestion=WHOLE)
            )
        return
    losses, arrays = _losses(find, anchor), [frozenset[int]()]
    if op == GIVEN and not any(find.done(LINEAR, v) for v in losses):
        own = arrays_of_logits(find, anchor)
        arrays += [own] * (len(own) == 1)
    miss: Refused | None = None
    for value, logits in itertools.product(losses, arrays):
        if find.done(LINEAR, value):
            return
        try:
            reading = _read(find, anchor, value, op, products, logits)
            yield dataclasses.replace(reading, notes=(*reading.notes, *notes))
            if find.done(op, value):
                return
        except Refused as refusal:
            node = g.node_of(value)
            if node is not None and is_of_gradient(node):
                continue
            better = miss is None or miss.code == "total"
            if logits and not (better and refusal.code in OF_ARRAYS):
                continue
            if miss is None or logits or refusal.score > miss.score:
                miss = refusal.with_traceback(None)
        except OverBudget as error:
            miss = miss or unproved(error, 0.2)
    if miss is not None and (op == GIVEN or miss.code not in OF_BOTH):
        find.missed(op, anchor, miss)


def _is_total(find: Finder, anchor: Node) -> bool:
    """Whether a logarithm is one of a sum of exponentials."""
    sums = find.regions.above(anchor.ins[0], frozenset({"reduce_sum"}))
    return any(find.regions.above(n.ins[0], EXPONENTIALS) for n in sums)


def _is_split(find: Finder, anchor: Node) -> bool:
    """Whether a logarithm is one of such a sum over devices."""
    return any(
        find.regions.above(n.ins[0], frozenset({"reduce_sum"}))
        for n in find.regions.above(anchor.ins[0], COLLECTIVES)
    )


def _losses(find: Finder, anchor: Node) -> list[int]:
    """Values below a logarithm with one number for each of its rows, last first.

    Behind these are those of some rows alone, as in `logs[:, :-1]`.
    """
    g = find.graph
    rows = _long_axes(find, anchor.outs[0])
    seen, queue, found = {anchor.outs[0]}, [anchor.outs[0]], []
    cuts: set[int] = set()
    while queue and len(found) < MOST and len(seen) < 4 * MOST:
        value = queue.pop(0)
        for node in g.users(value):
            if not (find.local(node) or is_pick(node) or node.prim == "dot_general"):
                continue
            for out in node.outs:
                shape = _long_axes(find, out)
                if out in seen or not _may_have_rows(shape, rows):
                    continue
                seen.add(out)
                queue.append(out)
                if node.prim in CUTS:
                    cuts.add(out)
                if _is_flat(shape, rows) or (
                    len(shape) == len(rows) and all(map(_is_part, shape, rows))
                ):
                    found.append(out)
    alike = lambda shape: shape == rows or _is_flat(shape, rows)
    whole = {v for v in found if alike(_long_axes(find, v))}
    if len(cuts) > 1:  # all rows stay computed for the others
        found = list(whole)
    return sorted(found, key=lambda v: (v in whole, v), reverse=True)


def _long_axes(find: Finder, value: int) -> list[Any]:
    """The axes of a value that are not of size 1."""
    return [n for n in find.graph.shape(value) if n != 1]


def _may_have_rows(shape: list[Any], rows: list[Any]) -> bool:
    """Whether an array may have a number for each row, or for some of them."""
    if len(shape) >= len(rows):
        return True
    known = all(isinstance(n, int) for n in (*shape, *rows))
    return known and bool(shape) and math.prod(shape) >= math.prod(rows)


def _is_flat(shape: list[Any], rows: list[Any]) -> bool:
    """Whether an array has the rows along fewer axes."""
    known = all(isinstance(n, int) for n in (*shape, *rows))
    return known and len(shape) < len(rows) and math.prod(shape) == math.prod(rows)


def _is_part(size: Any, whole: Any) -> bool:
    """Whether an axis may be a part of another one, as where rows are shifted."""
    return size == whole or (isinstance(whole, int) and 1 < size < whole)


def _read(
    find: Finder,
    anchor: Node,
    value: int,
    op: str,
    products: frozenset[int],
    logits: frozenset[int],
) -> Reading:
    """The reading of one value.

    Args:
        find: The search.
        anchor: The logarithm.
        value: The value.
        op: The op.
        products: The contractions that make the logits, if they are read.
        logits: The array of the logits, if what it is computed from is not read.

    Raises:
        Refused: If the form is not that of a loss.
        OverBudget: If the form grows too large.
    """
    above = _above(find, value)
    ev = find.evaluator(
        value,
        names={v: v for v in (*above.labels, *above.numbers, *logits)},
        inside=products | above.picks | above.sums,
        full_sides=frozenset((v, k) for v in above.sums for k in (0, 1)),
        picked_fills=True,
    )
    args = ev.indices(value)
    form, args = split_digits(find.algebra, ev.poly(value, args), args)
    loss = loss_of(find.algebra, form, args)
    find.require_proved(ev)
    require_shifted(find, ev, anchor, loss)
    operands, params = _operands_and_params(find, value, op, products, loss)
    params["nan_at"] = nan_at(find, anchor, [value, *above.made_of(find)])
    if any(_of_logs(find, v) for v in above.picks):
        params["of_log_probabilities"] = True
    groups = tuple((i,) for i in loss.rows)
    rules: tuple[dict[str, Any], ...] = ()
    if params.get("of_log_probabilities") and params["outside"] == "zero":
        rules = ({"whole_slopes": True},)
    if "other" in operands and not params.get("mixed"):
        rules += ({"mixed": True},)
    return Reading(
        op,
        find.algebra,
        ev.place,
        value,
        args,
        form,
        groups,
        operands,
        params,
        check_options={"picked_fills": True},
        other_gradients=rules,
        notes=tuple(sorted(ev.notes)),
        times=None if loss.times == find.algebra.const(1) else loss.times,
    )


def _operands_and_params(
    find: Finder, value: int, op: str, products: frozenset[int], loss: Loss
) -> tuple[dict[str, Operand], dict[str, Any]]:
    """The operands of a loss, and its parameters as far as its form tells them.

    Raises:
        Refused: If the logits are something else, or in 8 bits.
    """
    params = {"out_dtype": str(find.graph.dtype(value)), **loss.params}
    if op == GIVEN:
        operands = logits_operand(find.algebra, loss)
        _require_floats(find, operands)
        return operands, params
    operands, more = linear_operands(find.algebra, loss)
    params |= more
    _require_floats(find, operands)
    operands["x"] = _of_own_dtype(find, operands["x"])
    dtype = _dtype_of(find, products)
    if dtype != _dtype_of(find, _arrays(find, operands["x"], operands["w"])):
        params["logits_dtype"] = str(dtype)
    return operands, params


def _require_floats(find: Finder, operands: Mapping[str, Operand]) -> None:
    """Refuses operands that are 8-bit floats: JAX computes nothing of them and others.

    Raises:
        Refused: With the operand.
    """
    for name, given in operands.items():
        coarse = [
            d for v in _arrays(find, given) if is_coarse(d := find.graph.dtype(v))
        ]
        if coarse:
            text = f"{name} is {coarse[0]}, and a loss takes floats of 16 bits or more"
            raise Refused("dtype", text, score=0.6)


def _dtype_of(find: Finder, values: Iterable[int]) -> Any:
    return jnp.result_type(*{find.graph.dtype(v) for v in values})


def _of_own_dtype(find: Finder, rows: Operand) -> Operand:
    """Rows, in their own dtype also after they are multiplied by a number.

    Raises:
        Refused: If they would overflow for usual numbers.
    """
    arrays = _arrays(find, rows)
    if arrays == _values(find, rows):
        return rows
    dtype = _dtype_of(find, arrays)
    if dtype == jnp.float16:
        text = "a number that the program computes may be too large for float16 rows"
        raise Refused("dtype", text, score=0.8)
    return dataclasses.replace(rows, dtype=dtype)


def _arrays(find: Finder, *operands: Operand) -> set[int]:
    """The program's arrays that operands are made of, without single numbers."""
    found = _values(find, *operands)
    return {v for v in found if find.graph.shape(v) != ()} or found


def _values(find: Finder, *operands: Operand) -> set[int]:
    """The program's values that operands are made of."""
    leaves = set().union(*(o.leaves(find.algebra) for o in operands))
    return {v for leaf in leaves for v in values_named(find.algebra.defs[leaf][1])}


@dataclass(frozen=True)
class _Above:
    """Equations above a loss, besides those that forms look through.

    Attributes:
        picks: Entries that are taken of rows.
        sums: Contractions that sum a product of two arrays over each row.
        labels: Integers that say which entries are taken, or are hot.
        numbers: Single floats that the program computes, such as a temperature.
    """

    picks: frozenset[int]
    sums: frozenset[int]
    labels: frozenset[int]
    numbers: frozenset[int]

    def made_of(self, find: Finder) -> list[int]:
        """What the entries and sums are taken of."""
        nodes = (find.graph.node_of(v) for v in (*self.picks, *self.sums))
        return [i for node in nodes for i in node.ins]


def _above(find: Finder, value: int) -> _Above:
    g = find.graph
    seen, queue = {value}, [value]
    picks: set[int] = set()
    sums: set[int] = set()
    labels: set[int] = set()
    numbers: set[int] = set()
    while queue and len(seen) < 200:
        at = queue.pop(0)
        node = g.node_of(at)
        if node is None:
            continue
        if g.shape(at) == () and _is_computed(find, at):
            numbers.add(at)
            continue
        ins = node.ins
        if is_pick(node):
            picks.update(node.outs)
            labels |= _index_values(find, node.ins[1])
            ins = node.ins[:1]
        elif node.prim == "eq" and jnp.issubdtype(g.dtype(node.ins[0]), jnp.integer):
            for i in node.ins:
                labels |= _index_values(find, i, MOVES - JOINS)
            continue
        elif _weighs(find, node):
            sums.update(node.outs)
        elif not find.local(node):
            continue
        new = [i for i in ins if i not in seen and i not in g.constants]
        seen.update(new)
        queue += new
    numbers -= {n for n in numbers if _rest_of_one(find, n) in seen}
    return _Above(*map(frozenset, (picks, sums, labels, numbers)))


def _rest_of_one(find: Finder, number: int) -> int | None:
    """The number q of one that is ``1 - q``, as the shares of two labels are."""
    node = find.graph.node_of(number)
    if node is None or node.prim != "sub" or find.number(node.ins[0]) != 1:
        return None
    return node.ins[1]


def _is_computed(find: Finder, value: int) -> bool:
    """Whether a single float is not known before the program runs."""
    floating = jnp.issubdtype(find.graph.dtype(value), jnp.floating)
    return floating and find.number(value) is None


def _of_logs(find: Finder, pick: int) -> bool:
    """Whether an entry is taken of log-probabilities, and not of logits."""
    node = find.graph.node_of(pick)
    return bool(find.regions.above(node.ins[0], ANCHORS))


def _weighs(find: Finder, node: Node) -> bool:
    """Whether a contraction is a sum over each row of a product of two arrays."""
    if node.prim != "dot_general":
        return False
    (left, right), (batch, other) = node.params["dimension_numbers"]
    shapes = [len(find.graph.shape(i)) for i in node.ins]
    return [len(left) + len(batch), len(right) + len(other)] == shapes


def _index_values(find: Finder, value: int, moves: Set[str] = MOVES) -> set[int]:
    """Integers that indices are made of, below layout: not positions."""
    g, found = find.graph, set()
    queue = [value]
    while queue:
        value = queue.pop()
        node = g.node_of(value)
        if node is not None and node.prim in moves:
            queue += node.ins
        elif not _is_position(find, value):
            found.add(value)
    return found


def _is_position(find: Finder, value: int, depth: int = 8) -> bool:
    """Whether a value is made of positions and numbers alone."""
    if find.number(value) is not None:
        return True
    constant = find.graph.constants.get(value)
    if constant is not None:
        return affine_constant(np.asarray(constant)) is not None
    node = find.graph.node_of(value)
    if node is None or depth == 0:
        return False
    return node.prim == "iota" or (
        find.local(node) and all(_is_position(find, i, depth - 1) for i in node.ins)
    )


STEPS = (Step(EXPONENTIALS, LOCAL | COLLECTIVES), Step(frozenset({"log"})))
LABELLED = frozenset({"gather", "eq"})
PATTERN = ReaderPattern(
    LINEAR, ANCHORS, propose_linear, STEPS, either=LABELLED, of_rows=True
)
CHOOSING = LABELLED | {"iota", "mul"}
"""What picks one logit of a row, or weighs all by targets, where logits are given."""
GIVEN_LOGITS = ReaderPattern(
    GIVEN, ANCHORS, propose_given, STEPS, either=CHOOSING, of_rows=True
)
