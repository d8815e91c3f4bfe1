"""Finds what a program's softmax gives for a row whose keys are all masked.

The region is run on one such row with abstract values: a constant, the same at
every key; scores, finite and different; or unknown. Spellings differ here (NaN,
the mean of the values, zero), and a kernel must do as the program does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, Evaluator
from rewriter.algebra.normal_form import FALSE, TRUE, Poly
from rewriter.patterns.attention.condition_names import literal_name
from rewriter.patterns.attention.row_numbers import NUMERIC, slopes_are_finite
from rewriter.patterns.attention.row_values import (
    LOST,
    NEARLY,
    ROW,
    SCORES,
    SWALLOWS,
    UNKNOWN,
    WEIGHTS,
    Abstract,
    EmptyRow,
    absorbing,
    is_large,
    is_large_number,
    mixed,
)
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Node

COMBINATIONS = 128  # the most conditions of a mask; every case without a key is tried
STEPS = 256  # the most steps of an evaluated loop
GOLDEN = 0.618033988749895  # makes values of blocks differ in every partial sum
UNITS = (29, 1009)  # what a symbolic size counts as: the verdicts must agree

_TESTS = frozenset({"eq", "ne", "gt", "ge", "lt", "le", "is_finite"})

_SAME_SIZE = LAYOUT_PRIMITIVES | TRANSPARENT | {"convert_element_type"}


def empty_row(
    ev: Evaluator,
    keep: int,
    scores: frozenset[int],
    products: Sequence[tuple[Node, int]],
    value: int,
    factor: tuple[frozenset[int], float] = (frozenset(), 1.0),
    live: frozenset[int] | None = None,
    dropped_rows: int = TRUE,
) -> EmptyRow:
    """What a row without keys gives.

    Args:
        ev: The evaluator that made the region's form.
        keep: Which keys are kept, as a boolean function.
        scores: Results of the contractions of queries with keys.
        products: The contractions of the weights with the values, and the operand that
            holds the weights.
        value: The region's result.
        factor: The factor of the weights, as in dropout: arrays, which count as one,
            and a number.
        live: What is asked about in place of the scores, where it comes to gradients.
        dropped_rows: Which rows are kept after the softmax. Where it is false they must
            be zero; the answer is about the others.
    """
    ones, number = factor
    support, table = ev.alg.bools[keep]
    names = [literal_name(ev.alg, a, ev.outer) for a in support]
    if len({name for name, _ in names}) < len(names):
        return EmptyRow(UNKNOWN)  # conditions that count as equal
    full = table | ev.alg.impossible(support)
    empty = [row for row in range(1 << len(support)) if not full >> row & 1]
    whole = None
    if len(empty) > COMBINATIONS and dropped_rows != TRUE:
        return EmptyRow(UNKNOWN)
    if len(empty) > COMBINATIONS:  # the mask is one condition
        names, empty, whole = [], [0], _conditions(ev, keep)
    seen: set[Any] = set()
    runs: list[_Row] = []
    numbers = all(isinstance(n, int) for n in ev.alg.sizes.values())
    for row, unit in itertools.product(empty, UNITS[:1] if numbers else UNITS):
        truth = {n: bool(row >> k & 1) == up for k, (n, up) in enumerate(names)}
        run = _Row(ev, truth, scores, products, ones, unit, live)
        run.whole = whole
        verdict = run.outcome(value, number)
        runs.append(run)
        if _holds(ev, dropped_rows, support, row):
            seen.add((verdict, tuple(run.peaks)))
        elif verdict != "zero":
            return EmptyRow(UNKNOWN)
    breaks = any(run.breaks for run in runs)
    halves = any(run.halves for run in runs)
    passes = any(run.passes for run in runs)
    if {name for name, _ in seen} == {"nan", "nan_passing"}:
        # A row is hidden by both, or by either.
        return EmptyRow("nan", passes=passes)
    if len(seen) != 1:
        return EmptyRow(UNKNOWN, breaks, halves, passes)
    ((gives, peaks),) = seen
    score = peaks[0] if len({*peaks}) == 1 else None
    known = UNKNOWN if gives == NEARLY else gives
    return EmptyRow(known, breaks, halves, passes, score, gives == NEARLY)


def _holds(ev: Evaluator, b: int, support: Sequence[int], row: int) -> bool:
    """Whether a boolean function holds, by the values of atoms that include its own."""
    own, table = ev.alg.bools[b]
    bits = (row >> support.index(a) & 1 for a in own)
    return bool(table >> sum(bit << k for k, bit in enumerate(bits)) & 1)


def _conditions(ev: Evaluator, b: int) -> Any:
    """A boolean function of conditions whose names differ, in any order."""
    support, table = ev.alg.bools[b]
    names = [literal_name(ev.alg, a, ev.outer) for a in support]
    rows = [r for r in range(1 << len(support)) if table >> r & 1]
    return frozenset(
        frozenset((n, bool(r >> k & 1) == up) for k, (n, up) in enumerate(names))
        for r in rows
    )


class _Row:
    """Abstract evaluation of one row.

    Attributes:
        live: Values that pass a gradient on to the scores.
        whole: The mask, if it is one condition; it does not hold.
        breaks: Whether a derivative between the scores and the result is not finite.
        halves: Whether a maximum of equal numbers is between them.
        passes: Whether the result passes a gradient on to the scores.
        skips: Whether steps of a loop may be skipped.
    """

    def __init__(self, ev, truth, scores, products, ones, unit, live=None):
        self.ev, self.g, self.truth, self.ones = ev, ev.g, truth, ones
        self.unit = unit
        self.scores = scores
        self.products = {node.outs[0]: side for node, side in products}
        self.memo: dict[int, Abstract] = {}
        self.peaks: list[float] = []
        self.added: list[float] = []
        self.live = set(scores if live is None else live)
        self.breaks = self.halves = self.passes = self.skips = False
        self.whole: Any = None
        self.branches: list[int] = []
        self.blocks: list[tuple[int, float]] = []
        self.flags: dict[int, list[int]] = {}
        self.numbers: dict[int, list[Poly]] = {}
        for (v, _, _), form in ev.memo.items():
            if self.g.dtype(v) == bool:
                self.flags.setdefault(v, []).append(form)
            elif all(not mono for _, mono in form):
                self.numbers.setdefault(v, []).append(form)

    def outcome(self, value: int, factor: float) -> str:
        """The verdict on the result, and what passes a gradient on."""
        out = self(value)
        self.passes = value in self.live
        self.follow_branches()
        verdict = self.verdict(out, factor)
        if self.skips and (self.breaks or verdict == "nan"):
            return UNKNOWN  # only the steps that run pass a NaN to their keys
        if verdict == "nan" and self.breaks:
            return "nan_passing"
        if verdict == "mean" and self.added:
            everything = min(self.added) >= SWALLOWS
            return "mean_passing" if everything else NEARLY
        return verdict

    def verdict(self, out: Abstract, factor: float) -> str:
        """The verdict on a result times a factor; a block's values are one number."""
        if not isinstance(out, tuple):
            return UNKNOWN
        total = sum(n for n, _ in self.blocks) or 1
        mean = sum(n * x for n, x in self.blocks) / total or 1.0
        c = float(out[1]) / factor / mean
        if math.isnan(c):
            return "nan"
        if c == 0:
            return "zero"
        near = 1e-2 if len(self.blocks) < 2 else 1e-6
        return "mean" if abs(c - 1) < near else UNKNOWN

    def __call__(self, value: int) -> Abstract:
        if value not in self.memo:
            self.memo[value] = UNKNOWN
            self.memo[value] = self._value(value)
            if self._is_live(value):
                self.live.add(value)
        return self.memo[value]

    def _is_live(self, value: int) -> bool:
        """Whether a value, whose operands are known, passes a gradient on."""
        node = self.g.node_of(value)
        if value in self.live:
            return True
        if node is None:
            whole, _ = self.ev.loops.steps.get(value, (None, None))
            return whole in self.live
        if not jnp.issubdtype(self.g.dtype(value), jnp.floating):
            return False
        if node.prim == "stop_gradient" or node.prim in LOOPS:
            return False  # a loop has said so of its results
        ins = node.ins
        if node.prim in TRANSPARENT:
            ins = (ins[node.outs.index(value)],)
        elif node.prim == "select_n":
            p = self.memo.get(ins[0])
            ins = (ins[1 + bool(p[1])],) if isinstance(p, tuple) else ins[1:]
        return not self.live.isdisjoint(ins)

    def _value(self, value: int) -> Abstract:
        number = self.g.scalar(value)
        if number is not None:
            return ("c", number)
        if value in self.scores:
            return SCORES
        if value in self.ones:
            return ("c", 1.0)
        node = self.g.node_of(value)
        if self.g.dtype(value) == bool:
            found = self._float_test(node, value)
            if found is not None:
                return found
            known = self._truth(value)
            if known is not None:
                return ("c", known)
        elif node is not None and node.prim == "dynamic_slice":
            known = self._number(value)
            if known is not None:
                return ("c", known)
        if node is None:
            whole, _ = self.ev.loops.steps.get(value, (None, None))
            return UNKNOWN if whole is None else self(whole)
        if node.prim in LOOPS:
            return self._scan(node, value)
        if value in self.products:
            return self._product(node, self.products[value])
        with np.errstate(all="ignore"):
            return self._step(node, value)

    def _float_test(self, node: Node | None, value: int) -> Abstract | None:
        """The result of a float test; forms assume finite floats and non-empty sums."""
        if node is None or node.prim not in _TESTS:
            return None
        if not np.issubdtype(self.g.dtype(node.ins[0]), np.floating):
            return None
        out = self._step(node, value)
        if isinstance(out, tuple):
            return out
        folded = not {TRUE, FALSE}.isdisjoint(self.flags.get(value, ()))
        return UNKNOWN if folded and node.prim != "is_finite" else None

    def _truth(self, value: int) -> bool | None:
        """The value of a mask in this row, by any of its forms in the region."""
        known = map(self._holds, self.flags.get(value, ()))
        return next((x for x in known if x is not None), None)

    def _number(self, value: int) -> float | None:
        """The value of a choice among numbers by masks, such as a bias, in this row."""
        for form in self.numbers.get(value, ()):
            terms = [(self._holds(flag), c) for (flag, _), c in form.items()]
            if all(holds is not None for holds, _ in terms):
                return sum((c for holds, c in terms if holds), 0.0)
        return None

    def _holds(self, b: int) -> bool | None:
        """Whether a boolean function holds in this row; None if unknown."""
        alg = self.ev.alg
        if self.whole is not None:
            both = (_conditions(self.ev, x) for x in (alg.negate(b), b))
            return next((k == 0 for k, x in enumerate(both) if x == self.whole), None)
        support, table = alg.bools[b]
        row = 0
        for k, a in enumerate(support):
            name, up = literal_name(alg, a, self.ev.outer)
            if name not in self.truth:
                return None
            row |= (self.truth[name] == up) << k
        return bool(table >> row & 1)

    def _product(self, node: Node, side: int) -> Abstract:
        weight = self(node.ins[side])
        if not isinstance(weight, tuple):
            return UNKNOWN
        (lc, _), _ = node.params["dimension_numbers"]
        n = self._count(node.ins[0], lc)
        x = 1 + len(self.blocks) * GOLDEN % 1
        self.blocks.append((n, x))
        return ("c", float(weight[1]) * self._scale(node.ins[1 - side]) * n * x)

    def _scale(self, value: int) -> float:
        """The number that the region multiplies a value by, perhaps through layouts."""
        scale, node = 1.0, self.g.node_of(value)
        while node is not None and value not in self.ev.leaf_values:
            numbers = [self.ev.number(i) for i in node.ins]
            if node.prim in ("mul", "div") and numbers[1] is not None:
                scale *= numbers[1] if node.prim == "mul" else 1 / numbers[1]
                value = node.ins[0]
            elif node.prim == "mul" and numbers[0] is not None:
                scale, value = scale * numbers[0], node.ins[1]
            elif node.prim in ("add", "sub") and numbers[1] == 0:
                value = node.ins[0]
            elif node.prim == "add" and numbers[0] == 0:
                value = node.ins[1]
            elif node.prim == "neg":
                scale, value = -scale, node.ins[0]
            elif len(node.ins) == 1 and node.prim in _SAME_SIZE:
                value = node.ins[0]
            else:
                break
            node = self.g.node_of(value)
        return scale

    def _scan(self, node: Node, value: int) -> Abstract:
        """A loop over blocks of keys, step by step; the row is masked in each.

        Where steps may be skipped, those that run must leave the carries as they are.
        """
        loop = self.ev.loops.entered.get(node)
        if loop is None:
            return UNKNOWN
        self.skips |= loop.runs != TRUE
        length = 1 if loop.index is None else self.ev.alg.sizes[loop.index]
        if length > STEPS:
            return UNKNOWN
        last, carried = loop.first, [self(v) for v in loop.first]
        for _ in range(length):
            self.memo = {v: x for v, x in self.memo.items() if not self.ev.varies(v)}
            self.memo.update(zip(loop.before, carried, strict=True))
            live = {b for b, v in zip(loop.before, last, strict=True) if v in self.live}
            self.live = {v for v in self.live if not self.ev.varies(v)} | live
            last = loop.after[: len(carried)]
            before, carried = carried, [self(v) for v in last]
            if loop.runs != TRUE and not self._are_left(loop.before, before, carried):
                return UNKNOWN
            self.follow_branches(inside=True)
        for out, v, x in zip(node.outs, last, carried, strict=False):
            self.memo[out] = x
            self.live |= {out} if v in self.live else set()
        return self.memo.get(value, UNKNOWN)

    def _are_left(self, carries: Sequence[int], before: Any, after: Any) -> bool:
        """Whether a step leaves the floats that a loop carries."""
        return all(
            x == y and isinstance(x, tuple)
            for value, x, y in zip(carries, before, after, strict=True)
            if jnp.issubdtype(self.g.dtype(value), jnp.floating)
        )

    def _step(self, node: Node, value: int) -> Abstract:
        prim = node.prim
        if prim in LAYOUT_PRIMITIVES or prim in TRANSPARENT or prim == "stop_gradient":
            return self(
                node.ins[node.outs.index(value)] if prim in TRANSPARENT else node.ins[0]
            )
        if prim == "convert_element_type":
            x = self(node.ins[0])
            if isinstance(x, tuple):
                with np.errstate(all="ignore"):
                    new = np.asarray(x[1]).astype(node.params["new_dtype"])
                return ("c", float(new))
            return x
        if prim == "select_n" and len(node.ins) == 3:
            p = self(node.ins[0])
            if isinstance(p, tuple):
                self.branches.append(node.ins[1 if p[1] else 2])
                return self(node.ins[2 if p[1] else 1])
            a, b = self(node.ins[1]), self(node.ins[2])
            if a == b:
                return a
            if self.peaks and ("c", 0) in (a, b):  # dropout multiplies the weights
                return b if a == ("c", 0) else a
            return LOST if LOST in (a, b) or is_large(a) or is_large(b) else UNKNOWN
        args = [self(i) for i in node.ins]
        peak = prim == "reduce_max" or (prim in ("exp", "exp2") and not self.peaks)
        if peak and isinstance(args[0], tuple):
            self.peaks.append(args[0][1])
        if prim in ("reduce_max", "reduce_sum", "reduce_or", "reduce_and"):
            return self._reduced(node, args[0])
        if prim == "dot_general":
            return self._contracted(node, args)
        same = prim in ("eq", "ne") and node.ins[0] == node.ins[1]
        if same and isinstance(args[0], tuple):  # x != x is a test for NaN
            return ("c", math.isnan(float(args[0][1])) == (prim == "ne"))
        if all(isinstance(x, tuple) for x in args):
            f = NUMERIC.get(prim)
            if f is None:
                return LOST
            numbers = [x[1] for x in args]
            out = self._rounded(f(*numbers, node.params), value)
            self._follow(node, numbers, out)
            return ("c", out)
        if prim == "mul" and UNKNOWN in args and LOST not in args:
            (other,) = [x for x in args if x != UNKNOWN] or (UNKNOWN,)
            if isinstance(other, tuple) and (self.peaks or not other[1]):
                return other  # dropout multiplies the weights
            return LOST if is_large(other) else UNKNOWN
        if prim == "mul" and SCORES in args and ("c", 0) in args:
            return ("c", 0.0)  # hidden by a product: nothing passes to the scores
        absorbs = absorbing(self.g.dtype(value))
        alive = not self.live.isdisjoint(node.ins)
        if prim in ("add", "sub") and alive and (SCORES in args or UNKNOWN in args):
            known = [abs(float(x[1])) for x in args if isinstance(x, tuple)]
            self.added += [c for c in known if c >= absorbs and math.isfinite(c)]
        return mixed(prim, args, absorbs)

    def follow_branches(self, inside: bool = False) -> None:
        """Follows what choices left out, whose derivatives are multiplied by zero.

        Args:
            inside: Only what varies from step to step of a loop.
        """
        found = list(self.peaks), list(self.added), list(self.blocks)
        later: list[int] = []
        while self.branches:
            value = self.branches.pop()
            if inside and not self.ev.varies(value):
                later.append(value)
            else:
                self(value)
        self.branches = later
        self.peaks, self.added, self.blocks = found

    def _follow(self, node: Node, numbers: Sequence[Any], out: Any) -> None:
        """Notes a derivative that makes gradients of the scores NaN."""
        live = [i in self.live for i in node.ins]
        if any(live) and node.prim in ("max", "min"):
            self.halves |= numbers[0] == numbers[1]
        if any(live) and not slopes_are_finite(
            node.prim, numbers, out, node.params, live
        ):
            self.breaks = True

    def _rounded(self, number: Any, value: int) -> Any:
        """A large number rounded to a value's dtype: sums of fills lose digits."""
        dtype = self.g.dtype(value)
        if isinstance(number, bool) or not jnp.issubdtype(dtype, jnp.floating):
            return number
        if not is_large_number(number):
            return number
        with np.errstate(all="ignore"):
            return float(np.asarray(number).astype(dtype))

    def _contracted(self, node: Node, args: list[Abstract]) -> Abstract:
        """A sum written as a contraction with a number."""
        numbers = [self.ev.number(i) for i in node.ins]
        (lc, _), _ = node.params["dimension_numbers"]
        n = self._count(node.ins[0], lc)
        for number, x in zip(numbers, reversed(args), strict=True):
            if number is not None and isinstance(x, tuple):
                return ("c", float(x[1]) * number * n)
            if number and x in (WEIGHTS, SCORES):
                return ROW
        return UNKNOWN

    def _count(self, value: int, axes: Iterable[Any]) -> int:
        """The number of elements along axes; a symbolic size counts as `self.unit`."""
        shape = self.g.shape(value)
        sizes = (shape[int(a)] for a in axes)
        return math.prod(n if isinstance(n, int) else self.unit for n in sizes)

    def _reduced(self, node: Node, x: Abstract) -> Abstract:
        if node.prim == "reduce_sum":
            n = self._count(node.ins[0], node.params["axes"])
            if isinstance(x, tuple):
                return ("c", float(x[1]) * n)
            return ROW if x in (WEIGHTS, SCORES) else x
        if isinstance(x, tuple):
            return x
        return ROW if x in (SCORES, ROW) and node.prim == "reduce_max" else UNKNOWN
