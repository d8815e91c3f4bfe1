"""Graph values to normal forms: one rule per primitive.

Values are evaluated from the result towards the inputs, at given index
arguments, so that layout primitives only rewrite arguments. What has no rule is
a leaf named after its value number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import InconclusiveDimensionOperation

from rewriter.graph import Graph, Node
from rewriter.normal_form import (
    FALSE,
    TRUE,
    Algebra,
    Index,
    OverBudget,
    Poly,
    TooMuchWork,
)

FULL, LAYOUT = "full", "layout"

LAYOUT_PRIMITIVES = frozenset({
    "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice",
    "rev", "split", "dynamic_slice", "tile", "unstack",
})  # fmt: skip
TRANSPARENT = frozenset({
    "copy", "copy_p", "name", "sharding_constraint", "pvary", "pbroadcast",
    "reshard", "mesh_cast", "optimization_barrier", "with_layout_constraint",
    "layout_constraint",
})  # fmt: skip
ARITHMETIC = frozenset({
    "add", "add_any", "sub", "mul", "div", "neg", "square", "integer_pow", "pow",
    "sqrt", "rsqrt", "cbrt", "exp", "exp2", "log", "log1p", "expm1", "logistic", "tanh",
    "max", "min", "abs", "sign", "erf", "erfc", "sin", "cos", "select_n", "clamp",
    "convert_element_type", "stop_gradient", "is_finite", "ge", "gt", "le", "lt",
    "eq", "ne", "and", "or", "not", "xor", "one_minus_square", "iota",
    "floor_divide", "remainder",
})  # fmt: skip
REDUCTIONS = frozenset({"reduce_sum", "reduce_or", "reduce_and"})
LOCAL = (
    LAYOUT_PRIMITIVES
    | TRANSPARENT
    | ARITHMETIC
    | REDUCTIONS
    | frozenset({"reduce_max", "concatenate", "stack", "pad"})
)


def is_local(node: Node) -> bool:
    """Whether an equation can be inside a region: no contraction over an axis."""
    if node.prim == "dot_general":
        return not node.params["dimension_numbers"][0][0]
    return node.prim in LOCAL


STRUCTURAL = frozenset({"ragged_dot_general", "ragged_dot"})
OPAQUE_LEVEL = 1 << 20
KNOWN_CONSTANTS = (
    math.sqrt(2 / math.pi), 0.044715, 1.702, math.sqrt(0.5), math.log2(math.e),
    math.log(2), 2 * math.sqrt(2 / math.pi), math.sqrt(2), 1 / 3, 1 / 6,
)  # fmt: skip


class NeedSplit(OverBudget):
    """An index runs over several pieces of a concatenation."""

    def __init__(self, index: int, cuts: tuple[int, ...]):
        super().__init__("a value is made of pieces")
        self.index, self.cuts = index, cuts


class Evaluator:
    """Normal forms of graph values relative to leaves.

    Args:
        graph: The matching view.
        algebra: Where atoms are interned.
        names: Values that are leaves, with the name each one gets.
        inside: Results of contractions that are expanded; others are leaves.
        usable: Whether a value can be had where the replacement will stand; an
            equation with an operand that cannot is a leaf. None: all can.
        soft_fills: Keep additive constants above -1e5 as a bias, not as a mask.
        full_sides: (result of a contraction, operand position) pairs whose operand
            is expanded beyond layout.
        expand_all: Expand every contraction (used for references).
        in_pieces: Whether a concatenation is taken apart; None: every one.
        whole_sides: Whether a float value is expanded; None: every one.
        filled_rows: Take sums of exponentials to be positive, masked ones too; what
            rows without keys give is then for the caller to find out.
    """

    def __init__(
        self,
        graph: Graph,
        algebra: Algebra,
        *,
        names: Mapping[int, Any] | None = None,
        inside: frozenset[int] = frozenset(),
        usable: Callable[[int], bool] | None = None,
        expand_all: bool = False,
        soft_fills: bool = False,
        full_sides: frozenset[tuple[int, int]] = frozenset(),
        in_pieces: Callable[[int], bool] | None = None,
        whole_sides: Callable[[int], bool] | None = None,
        filled_rows: bool = False,
    ):
        self.g, self.alg = graph, algebra
        self.names = dict(names or {})
        self.inside, self.usable, self.expand_all = inside, usable, expand_all
        self.soft_fills, self.full_sides = soft_fills, full_sides
        self.in_pieces, self.whole_sides = in_pieces, whole_sides
        self.filled_rows = filled_rows
        self.memo: dict[Any, Any] = {}
        self.fills: set[float] = set()
        self.notes: set[str] = set()
        self.leaf_values: set[int] = set()
        self.visits = 0
        self.private = False
        self.outer: frozenset[int] = frozenset()

    # ------------------------------------------------------------- entry
    def indices(self, value: int) -> tuple[Index, ...]:
        """New indices, one per axis of a value."""
        return tuple(self.alg.new_index(n) for n in self.g.shape(value))

    def poly(self, value: int, args: tuple[Index, ...], mode: str = FULL) -> Poly:
        """The form of a value at index arguments; booleans count as 0 and 1."""
        if self.g.dtype(value) == bool:
            return self.alg.of_bool(self.flag(value, args, mode))
        key = (value, args, mode)
        if key not in self.memo:
            self._count()
            try:
                self.memo[key] = self._poly(value, args, mode)
            except NeedSplit:
                if self._whole(value):
                    raise
                self.memo[key] = self.alg.of_atom(self.leaf(value, args))
            except TooMuchWork:
                raise
            except OverBudget:  # no rule for this: a value taken as it is
                self.memo[key] = self.alg.of_atom(self.leaf(value, args))
        return self.memo[key]

    def flag(self, value: int, args: tuple[Index, ...], mode: str = FULL) -> int:
        """The boolean function that a boolean value is at index arguments."""
        key = (value, args, mode)
        if key not in self.memo:
            self._count()
            try:
                self.memo[key] = self._flag(value, args, mode)
            except NeedSplit:
                if self._whole(value):
                    raise
                self.memo[key] = self.alg.literal(self.leaf(value, args))
            except TooMuchWork:
                raise
            except OverBudget:
                self.memo[key] = self.alg.literal(self.leaf(value, args))
        return self.memo[key]

    def _whole(self, value: int) -> bool:
        """Whether an index over several pieces of a value concerns its readers."""
        node = self.g.node_of(value)
        joins = node is not None and node.prim in ("concatenate", "pad", "stack")
        return not joins or self.in_pieces is None or self.in_pieces(value)

    def _count(self) -> None:
        self.visits += 1
        if self.visits > 3000:
            raise TooMuchWork("the region is too large")

    def operand_mode(self, node: Node, k: int, mode: str) -> str:
        """How far an operand of a contraction is expanded."""
        if self.expand_all or is_local(node):
            return mode
        return FULL if (node.outs[0], k) in self.full_sides else LAYOUT

    # ------------------------------------------------------------- leaves
    def leaf(self, value: int, args: tuple[Index, ...]) -> int:
        """The atom of a value taken as it is."""
        if value not in self.names:
            self.names[value] = ("own", value) if self.private else value
        self.leaf_values.add(value)
        return self.alg.atom("leaf", self.names[value], args)

    def _expandable(self, value: int, mode: str) -> Node | None:
        if value in self.names and value not in self.g.constants:
            return None
        node = self.g.node_of(value)
        if node is None:
            return None
        prim = node.prim
        if mode == LAYOUT:
            ok = (
                prim in LAYOUT_PRIMITIVES
                or prim in TRANSPARENT
                or (
                    prim in ("convert_element_type", "mul", "div", "neg")
                    and self._plain(node)
                )
            )
        elif prim in STRUCTURAL:
            ok = self.expand_all or value in self.inside
        elif prim in ("dot_general",):
            ok = self.expand_all or value in self.inside or is_local(node)
        else:
            ok = prim in LOCAL and prim not in ("reduce_max",)
        if ok and mode == FULL and self.whole_sides is not None:
            ok = (
                _kind(self.g.dtype(value)) != "f"
                or self.whole_sides(value)
                or self.number(value) is not None
            )
        if not ok:
            return None
        if self.usable and not all(self.usable(i) for i in node.ins):
            return None
        return node

    def _plain(self, node: Node) -> bool:
        """A lossless cast, or a multiplication by a constant number."""
        if node.prim == "convert_element_type":
            return is_lossless(self.g.dtype(node.ins[0]), self.g.dtype(node.outs[0]))
        if node.prim == "neg":
            return True
        if _kind(self.g.dtype(node.outs[0])) != "f":
            return False
        known = [self.number(i) is not None for i in node.ins]
        return known[1] or (node.prim == "mul" and known[0])

    def number(self, value: int, depth: int = 8) -> float | None:
        """The number a value is at every position, folded through scalar chains."""
        const = self.g.scalar(value)
        if const is not None:
            return float(const)
        node = self.g.node_of(value)
        if node is None or depth == 0:
            return None
        if node.prim in ("broadcast_in_dim", "reshape", "convert_element_type",
                         "squeeze", "copy", "expand_dims",
                         "stop_gradient"):  # fmt: skip
            inner = self.number(node.ins[0], depth - 1)
            if node.prim == "convert_element_type" and inner is not None:
                new = node.params["new_dtype"]
                if np.dtype(new).kind in "iub" and not inner.is_integer():
                    return None
            return inner
        fold = _FOLD.get(node.prim)
        if fold is None:
            return None
        values = [self.number(i, depth - 1) for i in node.ins]
        if any(v is None for v in values):
            return None
        try:
            return float(fold(*values, node.params))
        except (ValueError, ZeroDivisionError, OverflowError, TypeError):
            return None

    def _constant(self, value: int) -> Poly | None:
        const = self.g.constants.get(value)
        if const is None:
            return None
        if np.shape(const) == ():
            return self._number_poly(float(np.asarray(const)), self.g.dtype(value))
        if np.size(const) <= 1 << 16:
            flat = np.asarray(const)
            if flat.size and (flat == flat.flat[0]).all():
                return self._number_poly(float(flat.flat[0]), self.g.dtype(value))
        return None

    def _number_poly(self, c: float, dtype: Any) -> Poly:
        if not math.isnan(c) and str(dtype) in ("bfloat16", "float16"):
            for known in KNOWN_CONSTANTS:
                for sign in (1.0, -1.0):
                    if float(np.asarray(sign * known, dtype)) == c:
                        self.notes.add(f"literal {c:.6g} stands for {sign * known:.6g}")
                        return self.alg.const(sign * known)
        if math.isnan(c):
            raise OverBudget("a NaN constant")
        return self.alg.const(c)

    # ------------------------------------------------------------- numbers
    def _poly(self, value: int, args: tuple[Index, ...], mode: str) -> Poly:
        const = self._constant(value)
        if const is not None:
            return const
        if value not in self.names and (mode == LAYOUT or not self.g.shape(value)):
            number = self.number(value)
            if number is not None:
                return self._number_poly(number, self.g.dtype(value))
        node = self._expandable(value, mode)
        if node is None:
            array = self.g.constants.get(value)
            if array is not None and mode == FULL:
                known = affine_constant(np.asarray(array))
                if known is not None:
                    return self._affine(known, args)
                chosen = self._two_values(np.asarray(array), args)
                if chosen is not None:
                    return chosen
            return self.alg.of_atom(self.leaf(value, args))
        prim = node.prim
        moved = self.moved(node, value, args)
        if moved is not None:
            source, at = moved
            return {} if source is None else self.poly(source, at, mode)
        if prim in ("convert_element_type", "stop_gradient"):
            return self._cast(node, value, args, mode)
        rule = _RULES.get(prim)
        if rule is None:
            return self.alg.of_atom(self.leaf(value, args))
        return rule(self, node, args, mode)

    def _two_values(self, array: np.ndarray, args: tuple[Index, ...]) -> Poly | None:
        """A constant array of two numbers, such as a mask with its fill."""
        if array.dtype.kind != "f" or array.size > 1 << 22:
            return None
        values = np.unique(array)
        if len(values) != 2 or np.isnan(values).any():
            return None
        flag = self._constant_flag(array == values[1], args)
        if flag is None:
            return None
        lo, hi = (self.alg.const(float(v)) for v in values)
        return choose(self.alg, flag, hi, lo)

    def _affine(self, known: tuple[float, tuple[float, ...]], args) -> Poly:
        c0, slopes = known
        out = self.alg.const(c0)
        for slope, a in zip(slopes, args, strict=True):
            if slope:
                out = self.alg.add(out, self.alg.scale(self.alg.iota(a), slope))
        return out

    def operands(self, node: Node, args: tuple[Index, ...], mode: str) -> list[Poly]:
        """Forms of the operands of an elementwise equation."""
        return [self.poly(i, self.aligned(i, args), mode) for i in node.ins]

    def aligned(self, value: int, args: tuple[Index, ...]) -> tuple[Index, ...]:
        """Arguments of an operand that may be a scalar or have axes of size one."""
        shape = self.g.shape(value)
        if len(shape) != len(args):
            return ()
        return tuple(None if n == 1 else a for a, n in zip(args, shape, strict=True))

    def _cast(self, node: Node, value: int, args, mode: str) -> Poly:
        source = node.ins[0]
        if node.prim == "stop_gradient":
            if self._constant_like(source):
                return self.poly(source, args, mode)
            return self.alg.of_atom(self.leaf(value, args))
        old, new = self.g.dtype(source), self.g.dtype(value)
        if old == bool:
            return self.alg.of_bool(self.flag(source, args, mode))
        kinds = (_kind(old), _kind(new))
        if kinds == ("f", "i"):
            p = self.poly(source, args, mode)
            c = self.alg.as_constant(p)
            if c is not None and math.isfinite(c):
                return self.alg.const(float(int(c)))
            if _whole(self.alg, p):
                return p
            return self.alg.of_atom(self.alg.atom("fn", "trunc", self.alg.freeze(p)))
        if kinds == ("i", "i") and np.dtype(new).itemsize < np.dtype(old).itemsize:
            p = self.poly(source, args, mode)
            lo, hi = self.alg.bounds(p)
            info = np.iinfo(new)
            if lo < info.min or hi > info.max:
                return self.alg.of_atom(self.leaf(value, args))
            return p
        if kinds == ("f", "f") and not is_lossless(old, new):
            if self.g.node_of(source) is None and not self.expand_all:
                return self.alg.of_atom(self.leaf(value, args))  # rounds an input
            self.notes.add(f"rounding to {np.dtype(new).name} moved")
        return self.poly(source, args, mode)

    def _constant_like(self, value: int, depth: int = 12) -> bool:
        """Whether a value depends on no input."""
        if value in self.g.constants:
            return True
        node = self.g.node_of(value)
        if node is None or depth == 0:
            return False
        return all(self._constant_like(i, depth - 1) for i in node.ins)

    # ------------------------------------------------------------- layout
    def moved(
        self, node: Node, value: int, args: tuple[Index, ...]
    ) -> tuple[int | None, tuple[Index, ...]] | None:
        """(source value, its arguments) of a layout equation; source None is zero."""
        prim, params, alg = node.prim, node.params, self.alg
        if prim in TRANSPARENT:
            return node.ins[node.outs.index(value)], args
        if prim == "broadcast_in_dim":
            source = node.ins[0]
            at = tuple(
                None if n == 1 else args[d]
                for d, n in zip(
                    params["broadcast_dimensions"], self.g.shape(source), strict=True
                )
            )
            return source, at
        if prim == "transpose":
            at: list[Index] = [None] * len(args)
            for k, d in enumerate(params["permutation"]):
                at[d] = args[k]
            return node.ins[0], tuple(at)
        if prim == "squeeze":
            drop = {int(d) for d in params["dimensions"]}
            kept = iter(args)
            shape = self.g.shape(node.ins[0])
            return node.ins[0], tuple(
                None if d in drop else next(kept) for d in range(len(shape))
            )
        if prim == "expand_dims":
            drop = {int(d) for d in params["dimensions"]}
            return node.ins[0], tuple(a for d, a in enumerate(args) if d not in drop)
        if prim == "reshape":
            if params.get("dimensions") is not None:
                return None
            return node.ins[0], reshape_args(
                alg, args, self.g.shape(node.outs[0]), self.g.shape(node.ins[0])
            )
        if prim == "slice":
            strides = params["strides"] or (1,) * len(args)
            sizes = self.g.shape(node.ins[0])
            return node.ins[0], tuple(
                None if n == 1 else alg.affine(a, int(m), int(s))
                for a, m, s, n in zip(
                    args, strides, params["start_indices"], sizes, strict=True
                )
            )
        if prim == "dynamic_slice":
            return self._static_slice(node, args)
        if prim == "rev":
            dims = {int(d) for d in params["dimensions"]}
            sizes = self.g.shape(node.ins[0])
            return node.ins[0], tuple(
                alg.affine(a, -1, n - 1) if d in dims and n > 1 else a
                for d, (a, n) in enumerate(zip(args, sizes, strict=True))
            )
        if prim == "split":
            axis, sizes = int(params["axis"]), params["sizes"]
            k = node.outs.index(value)
            start = int(sum(sizes[:k]))
            at = list(args)
            if self.g.shape(node.ins[0])[axis] > 1:
                at[axis] = alg.affine(at[axis], 1, start)
            return node.ins[0], tuple(at)
        if prim == "tile":
            sizes = self.g.shape(node.ins[0])
            return node.ins[0], tuple(
                None if n == 1 else alg.mod(a, n)
                for a, n in zip(args, sizes, strict=True)
            )
        if prim == "unstack":
            k = node.outs.index(value)
            axis = int(params["axis"])
            which = alg.affine(None, 1, k)
            return node.ins[0], (*args[:axis], which, *args[axis:])
        if prim == "stack":
            return self._stacked(node, args)
        if prim == "concatenate":
            return self._piece(node, args)
        return None

    def _stacked(self, node: Node, args: tuple[Index, ...]):
        axis = int(node.params["axis"])
        lo, hi = self.alg.index_range(args[axis])
        if lo != hi:
            raise self._split(args[axis], list(range(1, len(node.ins))))
        return node.ins[lo], (*args[:axis], *args[axis + 1 :])

    def _static_slice(self, node: Node, args: tuple[Index, ...]):
        """A dynamic slice whose starts are numbers."""
        sizes = self.g.shape(node.ins[0])
        starts = [self.number(i) for i in node.ins[1:]]
        if any(x is None for x in starts):
            return None
        at = []
        for a, n, m, x in zip(
            args, sizes, node.params["slice_sizes"], starts, strict=True
        ):
            start = min(max(int(x) + (n if x < 0 else 0), 0), n - m)
            at.append(None if n == 1 else self.alg.affine(a, 1, start))
        return node.ins[0], tuple(at)

    def _piece(self, node: Node, args: tuple[Index, ...]):
        axis = int(node.params["dimension"])
        lo, hi = self.alg.index_range(args[axis])
        start, cuts = 0, []
        for source in node.ins:
            size = self.g.shape(source)[axis]
            if start <= lo and hi < start + size:
                at = list(args)
                at[axis] = self.alg.affine(at[axis], 1, -start)
                if size == 1:
                    at[axis] = None
                return source, tuple(at)
            start += size
            cuts.append(start)
        raise self._split(args[axis], cuts[:-1])

    def _split(self, a: Index, cuts: list[int]) -> Exception:
        if isinstance(a, int):
            return NeedSplit(a, tuple(cuts))
        if (
            isinstance(a, tuple)
            and a[0] == "aff"
            and isinstance(a[1], int)
            and a[2] == 1
        ):
            inner = [c - a[3] for c in cuts if 0 < c - a[3] < self.alg.sizes[a[1]]]
            return NeedSplit(a[1], tuple(inner))
        return OverBudget("pieces of a concatenation are mixed")

    def summed(
        self, make: Callable[[Mapping[int, Index]], Poly], bound: list[int]
    ) -> Poly:
        """Sum of make(replacements) over bound indices, taking pieces apart."""
        try:
            return self.alg.sum_over(make({}), bound)
        except NeedSplit as need:
            if need.index not in bound:
                raise
            return self._summed_pieces(make, bound, need)

    def _summed_pieces(self, make, bound: list[int], need: NeedSplit) -> Poly:
        alg, j = self.alg, need.index
        edges = [0, *need.cuts, alg.sizes[j]]
        out: Poly = {}
        for lo, hi in itertools.pairwise(edges):
            piece = alg.new_index(hi - lo)
            at = alg.affine(piece, 1, lo)
            rest = [i for i in bound if i != j] + ([piece] if piece else [])
            part = self.summed(lambda to, at=at: make({j: at, **to}), rest)
            out = alg.add(out, part)
        return out

    def cut(self, args: tuple[Index, ...], to: Mapping[int, Index]):
        """Arguments with bound indices replaced by pieces."""
        if not to:
            return args
        out = args
        for _ in range(3):
            out = tuple(self.alg.subst_index(a, to) for a in out)
        return out

    # ------------------------------------------------------------- booleans
    def _flag(self, value: int, args: tuple[Index, ...], mode: str) -> int:
        const = self.g.constants.get(value)
        if const is not None:
            found = self._constant_flag(np.asarray(const), args)
            if found is not None:
                return found
            return self.alg.literal(self.leaf(value, args))
        node = self._expandable(value, mode)
        if node is None:
            return self.alg.literal(self.leaf(value, args))
        moved = self.moved(node, value, args)
        if moved is not None:
            return self.flag(moved[0], moved[1], mode)
        folded = self._folded(node)
        if folded is not None:
            found = self._constant_flag(folded, args)
            if found is not None:
                return found
        rule = _FLAGS.get(node.prim)
        if rule is None:
            return self.alg.literal(self.leaf(value, args))
        return rule(self, node, args, mode)

    def _folded(self, node: Node) -> np.ndarray | None:
        """A predicate of constant arrays, computed; None if it is not that."""
        fold = _FOLD_FLAGS.get(node.prim)
        arrays = [self.g.constants.get(i) for i in node.ins]
        if fold is None or any(a is None for a in arrays):
            return None
        shape = self.g.shape(node.outs[0])
        if math.prod(shape) > 1 << 27 or not shape:
            return None
        return np.broadcast_to(fold(*map(np.asarray, arrays)), shape)

    def _constant_flag(self, mask: np.ndarray, args: tuple[Index, ...]) -> int | None:
        if mask.ndim == 0 or (mask == mask.flat[0]).all():
            return TRUE if bool(mask.flat[0]) else FALSE
        found = banded_constant(mask)
        if found is None:
            return None
        rows, cols, lower, upper = found
        diff = self.alg.add(
            self.alg.iota(args[cols]) if cols is not None else {},
            self.alg.iota(args[rows]) if rows is not None else {},
            -1.0,
        )
        out = TRUE
        if upper is not None:  # col - row <= upper
            p = self.alg.add(self.alg.const(upper), diff, -1.0)
            out = self.alg.both(out, self.alg.compare("ge", p, True))
        if lower is not None:
            p = self.alg.add(diff, self.alg.const(-lower))
            out = self.alg.both(out, self.alg.compare("ge", p, True))
        return out


# ------------------------------------------------------------------ rules
_RULES: dict[str, Callable[[Evaluator, Node, tuple[Index, ...], str], Poly]] = {}
_FLAGS: dict[str, Callable[[Evaluator, Node, tuple[Index, ...], str], int]] = {}


def _rule(*names: str, table: dict = _RULES):
    def register(f):
        for name in names:
            table[name] = f
        return f

    return register


def _elementwise(name: str, f: Callable[..., Poly]) -> None:
    _RULES[name] = lambda ev, node, args, mode: f(ev, *ev.operands(node, args, mode))


_elementwise("add", lambda ev, a, b: _gentle(ev, ev.alg.add(a, b)))  # a + b
_elementwise("add_any", lambda ev, a, b: ev.alg.add(a, b))  # a + b
_elementwise("sub", lambda ev, a, b: _gentle(ev, ev.alg.add(a, b, -1.0)))  # a - b
_elementwise("neg", lambda ev, a: ev.alg.scale(a, -1.0))  # -a
_elementwise("mul", lambda ev, a, b: _gentle(ev, ev.alg.mul(a, b)))  # a b
_elementwise("sqrt", lambda ev, a: ev.alg.power(a, Fraction(1, 2)))  # a^1/2
_elementwise("rsqrt", lambda ev, a: ev.alg.power(a, Fraction(-1, 2)))  # a^-1/2
_elementwise("log", lambda ev, a: ev.alg.log(a))
_elementwise("log1p", lambda ev, a: ev.alg.log(ev.alg.add(a, ev.alg.const(1))))
_elementwise("exp", lambda ev, a: ev.alg.exp(_fills(ev, a), ev.fills.add))
_elementwise(  # 2^a = exp(a ln 2)
    "exp2",
    lambda ev, a: ev.alg.exp(_fills(ev, ev.alg.scale(a, math.log(2))), ev.fills.add),
)
_elementwise(  # exp(a) - 1
    "expm1", lambda ev, a: ev.alg.add(ev.alg.exp(a), ev.alg.const(-1))
)
_elementwise("logistic", lambda ev, a: sigmoid(ev.alg, a))
_elementwise("tanh", lambda ev, a: tanh(ev.alg, a))
_elementwise(  # 1 - a^2
    "one_minus_square",
    lambda ev, a: ev.alg.add(ev.alg.const(1), ev.alg.power(a, 2), -1.0),
)


def _gentle(ev: Evaluator, p: Poly) -> Poly:
    """Refuses to take a mask of numbers like (m - 1) * 1e9 apart.

    Over the reals its constant cancels in a softmax; in floats, what is left
    would swallow the scores. Such a value is a leaf.
    """
    if not ev.expand_all and len(p) > 1 and any(abs(c) >= 1e4 for c in p.values()):
        for (flag, mono), c in p.items():
            leaf = any(ev.alg.kind(a) == "leaf" for a, _ in mono)
            if flag == TRUE and abs(c) >= 1e4 and leaf:
                raise OverBudget("a mask of numbers")
    return p


def _fills(ev: Evaluator, p: Poly) -> Poly:
    """With soft fills, keeps additive constants of a mask as factors of a bias."""
    if not ev.soft_fills:
        return p
    out: Poly = {}
    for (flag, mono), c in p.items():
        if flag != TRUE and c > -1e5 and not mono:
            atom = ev.alg.atom("ind", flag)
            out = ev.alg.add(out, {(TRUE, ((atom, 1),)): c})
        else:
            out = ev.alg.add(out, {(flag, mono): c})
    return out


def sigmoid(alg: Algebra, a: Poly) -> Poly:
    """1 / (1 + exp(-a))."""
    return alg.power(alg.add(alg.const(1), alg.exp(alg.scale(a, -1.0))), -1)


def tanh(alg: Algebra, a: Poly) -> Poly:
    """1 - 2 / (exp(2a) + 1)."""
    c = alg.as_constant(a)
    if c is not None:
        return alg.const(math.tanh(c))
    inner = alg.power(alg.add(alg.const(1), alg.exp(alg.scale(a, 2.0))), -1)
    return alg.add(alg.const(1), inner, -2.0)


@_rule("div")
def _div(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    a, b = ev.operands(node, args, mode)
    if _kind(ev.g.dtype(node.outs[0])) == "i":
        frozen = ev.alg.freeze(a), ev.alg.freeze(b)
        return ev.alg.of_atom(ev.alg.atom("fn", "idiv", *frozen))
    return ev.alg.mul(a, ev.alg.power(b, -1))


@_rule("floor_divide", "remainder")
def _floor_divide(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    a, b = ev.operands(node, args, mode)
    n, index = ev.alg.as_constant(b), _index_of(ev.alg, a)
    name = "floor_divide" if node.prim == "floor_divide" else "remainder"
    if n is None or not 0 < n < math.inf or n != int(n) or index is None:
        frozen = ev.alg.freeze(a), ev.alg.freeze(b)
        return ev.alg.of_atom(ev.alg.atom("fn", name, *frozen))
    digit = ev.alg.div if name == "floor_divide" else ev.alg.mod
    return ev.alg.iota(digit(index, int(n)))


def _index_of(alg: Algebra, p: Poly) -> Index:
    """The index argument whose value a form is, or None."""
    if len(p) != 1:
        return None
    ((flag, mono), c) = next(iter(p.items()))
    if flag != TRUE or c != 1 or len(mono) != 1 or mono[0][1] != 1:
        return None
    d = alg.defs[mono[0][0]]
    return d[1] if d[0] == "iota" else None


@_rule("integer_pow")
def _integer_pow(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    return _whole_power(ev, node.ins[0], args, mode, int(node.params["y"]))


@_rule("square")
def _square(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    return _whole_power(ev, node.ins[0], args, mode, 2)


def _whole_power(ev: Evaluator, value: int, args, mode: str, e: int) -> Poly:
    """A power with a whole exponent; an even one does not see absolute values."""
    node = ev._expandable(value, mode)
    if node is not None and e % 2 == 0 and node.prim == "abs":
        return _whole_power(ev, node.ins[0], args, mode, e)
    return ev.alg.power(ev.poly(value, ev.aligned(value, args), mode), e)


@_rule("pow")
def _pow(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    a, b = ev.operands(node, args, mode)
    e = ev.alg.as_constant(b)
    if e is None:
        raise OverBudget("a power whose exponent is not a number")
    if math.isfinite(e) and e == int(e):
        return _whole_power(ev, node.ins[0], args, mode, int(e))
    exact = Fraction(e).limit_denominator(64)
    if abs(float(exact) - e) > 1e-6:
        return ev.alg.power(a, e)
    return ev.alg.power(a, int(exact) if exact.denominator == 1 else exact)


@_rule("iota")
def _iota(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    return ev.alg.iota(args[int(node.params["dimension"])])


@_rule("reduce_sum")
def _reduce_sum(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    source, axes = node.ins[0], {int(a) for a in node.params["axes"]}
    kept = iter(args)
    at = tuple(
        ev.alg.new_index(n) if d in axes else next(kept)
        for d, n in enumerate(ev.g.shape(source))
    )
    bound = [at[d] for d in axes if at[d] is not None]
    return ev.summed(lambda to: ev.poly(source, ev.cut(at, to), mode), bound)


@_rule("dot_general")
def _dot_general(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    left, right, bound = dot_arguments(ev, node, args)
    inner = (
        FULL if ev.expand_all or (mode == FULL and node.outs[0] in ev.inside) else mode
    )

    def side(k: int, at: tuple[Index, ...]) -> Poly:
        return ev.poly(node.ins[k], at, ev.operand_mode(node, k, inner))

    return ev.summed(
        lambda to: ev.alg.mul(side(0, ev.cut(left, to)), side(1, ev.cut(right, to))),
        bound,
    )


def dot_arguments(ev: Evaluator, node: Node, args):
    """Arguments of both operands of a contraction, and its bound indices."""
    (lc, rc), (lb, rb) = [
        [[int(x) for x in side] for side in pair]
        for pair in node.params["dimension_numbers"]
    ]
    ls, rs = ev.g.shape(node.ins[0]), ev.g.shape(node.ins[1])
    left: list[Index] = [None] * len(ls)
    right: list[Index] = [None] * len(rs)
    rest = list(args)
    for x, y in zip(lb, rb, strict=True):
        left[x] = right[y] = rest.pop(0)
    bound = []
    for x, y in zip(lc, rc, strict=True):
        left[x] = right[y] = ev.alg.new_index(ls[x])
        if left[x] is not None:
            bound.append(left[x])
    for x in range(len(ls)):
        if x not in lb and x not in lc:
            left[x] = rest.pop(0)
    for y in range(len(rs)):
        if y not in rb and y not in rc:
            right[y] = rest.pop(0)
    return tuple(left), tuple(right), bound


@_rule(*sorted(STRUCTURAL))
def _structural(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    """An opaque function of whole operands: equal for equal operands and params.

    The axes of the operands are known by their roles, so that the order in which
    an operand has them is layout and not part of the function.
    """
    numbers, *axes = ragged_axes(node, [len(ev.g.shape(i)) for i in node.ins])
    slots: dict[str, int] = {}
    operands = []
    for source, roles in zip(node.ins, axes, strict=True):
        at = tuple(
            None
            if n == 1
            else ev.alg.bound_index(OPAQUE_LEVEL, slots.setdefault(role, len(slots)), n)
            for role, n in zip(roles, ev.g.shape(source), strict=True)
        )
        side = mode if ev.expand_all else LAYOUT
        operands.append(ev.alg.freeze(ev.poly(source, at, side)))
    params = tuple(
        (name, _plain_param(value)) for name, value in sorted(node.params.items())
        if name not in (
            "preferred_element_type", "out_sharding", "ragged_dot_dimension_numbers"
        )
    )  # fmt: skip
    name = ("call", node.prim, numbers, params, tuple(operands))
    return ev.alg.of_atom(ev.alg.atom("leaf", name, args))


def ragged_axes(node: Node, ranks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The roles of a ragged dot's axes: (ragged and group axes, lhs, rhs, sizes...).

    Batch axes are ``b0 b1 ...``, contracted ones ``k0 ...``, the other axes of lhs
    ``m0 ...``, of rhs ``n0 ...``, and groups ``g0 ...``. The result's axes are the
    groups (if the ragged axis is contracted), b, m and n in this order.
    """
    d = node.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = d.dot_dimension_numbers
    groups = tuple(d.rhs_group_dimensions)

    def roles(rank: int, batch, contracted, rest: str) -> tuple[str, ...]:
        names = {int(a): f"b{i}" for i, a in enumerate(batch)}
        names |= {int(a): f"k{i}" for i, a in enumerate(contracted)}
        if rest == "n":
            names |= {int(a): f"g{i}" for i, a in enumerate(groups)}
        others = (a for a in range(rank) if a not in names)
        names |= {a: f"{rest}{i}" for i, a in enumerate(others)}
        return tuple(names[a] for a in range(rank))

    left = roles(ranks[0], lb, lc, "m")
    right = roles(ranks[1], rb, rc, "n")
    ragged = tuple(left[int(a)] for a in d.lhs_ragged_dimensions)
    sizes = tuple(tuple(f"s{i}" for i in range(rank)) for rank in ranks[2:])
    return ragged, left, right, *sizes


def _plain_param(value: Any) -> Any:
    """A parameter as text, with equal spellings made the same."""
    if isinstance(value, tuple) and len(set(map(str, value))) == 1:
        value = value[0]
    return None if str(value) in ("None", "DEFAULT") else str(value)


@_rule("select_n")
def _select(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    if len(node.ins) != 3 or ev.g.dtype(node.ins[0]) != bool:
        return ev.alg.of_atom(ev.leaf(node.outs[0], args))
    flag = ev.flag(node.ins[0], ev.aligned(node.ins[0], args), mode)
    no_at, yes_at = (ev.aligned(i, args) for i in node.ins[1:])
    if flag == FALSE:
        return ev.poly(node.ins[1], no_at, mode)
    if flag == TRUE:
        return ev.poly(node.ins[2], yes_at, mode)
    if_false = ev.poly(node.ins[1], no_at, mode)
    if_true = ev.poly(node.ins[2], yes_at, mode)
    ramp = _ramp(ev.alg, flag, if_true, if_false)
    if ramp is not None:
        return ramp
    return choose(ev.alg, flag, if_true, if_false)


def choose(alg: Algebra, flag: int, if_true: Poly, if_false: Poly) -> Poly:
    """if_true where flag holds, else if_false."""
    return alg.add(
        _masked(alg, if_true, flag), _masked(alg, if_false, alg.negate(flag))
    )


def _masked(alg: Algebra, p: Poly, flag: int) -> Poly:
    out: Poly = {}
    for (b, mono), c in p.items():
        both = alg.both(b, flag)
        if both != FALSE:
            out = alg.add(out, {(both, mono): c})
    return out


def _ramp(alg: Algebra, flag: int, if_true: Poly, if_false: Poly) -> Poly | None:
    """select(p >= 0, b + k p, b) = b + k max(p, 0), also with > and exchanged arms."""
    support, table = alg.bools[flag]
    if len(support) != 1 or alg.defs[support[0]][0] != "ge":
        return None
    p = alg.thaw(alg.defs[support[0]][1])
    hold, other = (if_true, if_false) if table == 0b10 else (if_false, if_true)
    diff = alg.add(hold, other, -1.0)
    if not diff or len(diff) != len(p):
        return None
    term = next(iter(p))
    if term not in diff:
        return None
    k = diff[term] / p[term]
    if alg.add(diff, p, -k):
        return None
    return alg.add(other, alg.relu(p), k)


@_rule("max", "min")
def _max_min(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    alg = ev.alg
    values = node.ins
    for this, other in ((0, 1), (1, 0)):
        n = ev.number(values[this])
        at = ev.aligned(values[other], args)
        if n is not None and math.isinf(n) and (n < 0) == (node.prim == "max"):
            return ev.poly(values[other], at, mode)
    a, b = ev.operands(node, args, mode)
    if node.prim == "max":  # b + max(a - b, 0)
        return alg.add(b, alg.relu(alg.add(a, b, -1.0)))
    return alg.add(a, alg.relu(alg.add(a, b, -1.0)), -1.0)  # a - max(a - b, 0)


@_rule("clamp")
def _clamp(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    lo, x, hi = ev.operands(node, args, mode)
    alg = ev.alg
    low = alg.add(lo, alg.relu(alg.add(x, lo, -1.0)))
    return alg.add(low, alg.relu(alg.add(low, hi, -1.0)), -1.0)


@_rule("abs")
def _abs(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    if ev.alg.positive(a):
        return a
    return ev.alg.add(ev.alg.scale(ev.alg.relu(a), 2.0), a, -1.0)


@_rule("sign")
def _sign(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    c = ev.alg.as_constant(a)
    if c is not None:
        return ev.alg.const(float(np.sign(c)))
    return ev.alg.of_atom(ev.alg.atom("fn", "sign", ev.alg.freeze(a)))


def _odd(name: str):
    def rule(ev: Evaluator, node: Node, args, mode: str) -> Poly:
        (a,) = ev.operands(node, args, mode)
        return ev.alg.odd(name, a)

    return rule


_RULES["erf"] = _odd("erf")
_RULES["sin"] = _odd("sin")


@_rule("erfc")
def _erfc(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    return ev.alg.add(ev.alg.const(1), ev.alg.odd("erf", a), -1.0)


@_rule("cos")
def _cos(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    frozen = ev.alg.freeze(a)
    if frozen and frozen[0][1] < 0:
        frozen = ev.alg.freeze(ev.alg.scale(a, -1.0))
    return ev.alg.of_atom(ev.alg.atom("fn", "cos", frozen))


@_rule("concatenate", "stack")
def _concatenate(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    source, at = ev.moved(node, node.outs[0], args)
    return ev.poly(source, at, mode)


@_rule("pad")
def _pad(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    config = node.params["padding_config"]
    at = list(args)
    for d, (lo, hi, interior) in enumerate(config):
        size = ev.g.shape(node.ins[0])[d]
        if (lo, hi, interior) == (0, 0, 0):
            continue
        if interior:
            return ev.alg.of_atom(ev.leaf(node.outs[0], args))
        first, last = ev.alg.index_range(at[d])
        if last < lo or first >= lo + size:
            return ev.poly(node.ins[1], (), mode)
        if first < lo or last >= lo + size:
            cuts = [c for c in (lo, lo + size) if first < c <= last]
            raise ev._split(at[d], cuts)
        at[d] = ev.alg.affine(at[d], 1, -int(lo))
        if size == 1:
            at[d] = None
    return ev.poly(node.ins[0], tuple(at), mode)


# ------------------------------------------------------------------ predicates
def _compare(ev: Evaluator, node: Node, args, mode: str) -> int:
    name, alg = node.prim, ev.alg
    if ev.g.dtype(node.ins[0]) == bool:
        a, b = (ev.flag(i, ev.aligned(i, args), mode) for i in node.ins)
        same = alg.either(alg.both(a, b), alg.both(alg.negate(a), alg.negate(b)))
        if name in ("eq", "ne"):
            return same if name == "eq" else alg.negate(same)
        raise OverBudget("an order of booleans")
    a, b = ev.operands(node, args, mode)
    integral = _kind(ev.g.dtype(node.ins[0])) == "i"
    if _all_choices(a) and _all_choices(b):
        return _compare_choices(alg, name, a, b)
    for p, q in ((a, b), (b, a)):
        edge = alg.as_constant(q)
        if name in ("eq", "ne") and edge is not None and math.isinf(edge):
            ev.notes.add("values assumed finite")
            masked = FALSE
            for (flag, mono), c in p.items():
                if c == edge and not mono:
                    masked = alg.either(masked, flag)
            return masked if name == "eq" else alg.negate(masked)
    if any(math.isinf(c) for p in (a, b) for c in p.values()):
        return alg.literal(ev.leaf(node.outs[0], args))
    if ev.filled_rows and (
        (not b and _is_total(alg, a)) or (not a and _is_total(alg, b))
    ):
        return TRUE if _TESTS[name](float(bool(a)), float(bool(b))) else FALSE
    d = alg.add(a, b, -1.0)
    whole = integral or _whole(alg, d)
    if name in ("le", "lt"):
        d = alg.scale(d, -1.0)
    if name in ("ge", "le"):
        return alg.compare("ge", d, whole)
    if name in ("gt", "lt"):
        if whole:
            return alg.compare("ge", alg.add(d, alg.const(-1)), True)
        return alg.negate(alg.compare("ge", alg.scale(d, -1.0), False))
    same = alg.compare("eq", d, whole)
    return same if name == "eq" else alg.negate(same)


def _is_total(alg: Algebra, p: Poly) -> bool:
    """Whether a form is a sum of exponentials, up to positive factors."""
    if len(p) != 1:
        return False
    (((flag, mono), c),) = p.items()
    return flag == TRUE and c > 0 and all(_is_weight(alg, a) for a, _ in mono)


def _is_weight(alg: Algebra, atom: int) -> bool:
    if alg.kind(atom) == "sum":
        return all(_is_weight(alg, a) for a, _ in alg.defs[atom][3])
    return alg.kind(atom) == "exp"


def _whole(alg: Algebra, p: Poly) -> bool:
    """Whether a form takes only integer values: positions, flags, truncated values."""
    return all(
        float(c).is_integer() and all(e == 1 and _whole_atom(alg, a) for a, e in m)
        for (_, m), c in p.items()
    )


def _whole_atom(alg: Algebra, atom: int) -> bool:
    d = alg.defs[atom]
    if d[0] == "relu":
        return _whole(alg, alg.thaw(d[1]))
    return d[0] in ("iota", "ind") or d[:2] == ("fn", "trunc")


def _all_choices(p: Poly) -> bool:
    return all(not m for _, m in p)


def _compare_choices(alg: Algebra, name: str, a: Poly, b: Poly) -> int:
    """Compares two values that each take a few constants, infinities included."""
    test = _TESTS[name]
    out = FALSE
    for fa, ca in _cases(alg, a):
        for fb, cb in _cases(alg, b):
            both = alg.both(fa, fb)
            if both != FALSE and test(ca, cb):
                out = alg.either(out, both)
    return out


def _cases(alg: Algebra, p: Poly) -> list[tuple[int, float]]:
    out, covered = [], FALSE
    for (flag, _), c in p.items():
        out.append((flag, c))
        covered = alg.either(covered, flag)
    rest = alg.negate(covered)
    return [*out, (rest, 0.0)] if rest != FALSE else out


_TESTS: dict[str, Callable[[float, float], bool]] = {
    "ge": lambda a, b: a >= b, "gt": lambda a, b: a > b, "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
for _name in _TESTS:
    _FLAGS[_name] = _compare


def _flag_operands(ev: Evaluator, node: Node, args, mode: str) -> list[int]:
    return [ev.flag(i, ev.aligned(i, args), mode) for i in node.ins]


@_rule("and", table=_FLAGS)
def _and(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.both(*_flag_operands(ev, node, args, mode))


@_rule("mul", table=_FLAGS)
def _mul(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.both(*_flag_operands(ev, node, args, mode))


@_rule("or", "add", "max", table=_FLAGS)
def _or(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.either(*_flag_operands(ev, node, args, mode))


@_rule("min", table=_FLAGS)
def _min(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.both(*_flag_operands(ev, node, args, mode))


@_rule("xor", table=_FLAGS)
def _xor(ev: Evaluator, node: Node, args, mode: str) -> int:
    a, b = _flag_operands(ev, node, args, mode)
    alg = ev.alg
    return alg.either(alg.both(a, alg.negate(b)), alg.both(b, alg.negate(a)))


@_rule("not", table=_FLAGS)
def _not(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.negate(_flag_operands(ev, node, args, mode)[0])


@_rule("is_finite", table=_FLAGS)
def _is_finite(ev: Evaluator, node: Node, args, mode: str) -> int:
    ev.notes.add("values assumed finite")
    return TRUE


@_rule("select_n", table=_FLAGS)
def _select_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    flags = _flag_operands(ev, node, args, mode)
    if len(flags) != 3:
        return ev.alg.literal(ev.leaf(node.outs[0], args))
    p, no_, yes = flags
    alg = ev.alg
    return alg.either(alg.both(p, yes), alg.both(alg.negate(p), no_))


@_rule("convert_element_type", table=_FLAGS)
def _to_bool(ev: Evaluator, node: Node, args, mode: str) -> int:
    if ev.g.dtype(node.ins[0]) == bool:
        return ev.flag(node.ins[0], args, mode)
    p = ev.poly(node.ins[0], args, mode)
    if _all_choices(p):
        return _compare_choices(ev.alg, "ne", p, {})
    whole = _kind(ev.g.dtype(node.ins[0])) == "i"
    return ev.alg.negate(ev.alg.compare("eq", p, whole))


@_rule("stop_gradient", table=_FLAGS)
def _stop_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.flag(node.ins[0], args, mode)


@_rule("reduce_or", "reduce_and", table=_FLAGS)
def _reduce_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    source, axes = node.ins[0], {int(a) for a in node.params["axes"]}
    kept = iter(args)
    at = tuple(
        ev.alg.new_index(n) if d in axes else next(kept)
        for d, n in enumerate(ev.g.shape(source))
    )
    bound = [at[d] for d in axes]
    flag = ev.flag(source, at, mode)
    if node.prim == "reduce_or":
        return ev.alg.any_over(flag, bound)
    return ev.alg.negate(ev.alg.any_over(ev.alg.negate(flag), bound))


@_rule("pad", table=_FLAGS)
def _pad_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.literal(ev.leaf(node.outs[0], args))


# ------------------------------------------------------------------ helpers
_FOLD_FLAGS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "lt": np.less, "le": np.less_equal, "and": np.logical_and, "or": np.logical_or,
    "not": np.logical_not, "convert_element_type": lambda a: a != 0,
}  # fmt: skip
_FOLD: dict[str, Callable[..., float]] = {
    "sqrt": lambda a, p: math.sqrt(a),
    "rsqrt": lambda a, p: 1 / math.sqrt(a),
    "mul": lambda a, b, p: a * b,
    "add": lambda a, b, p: a + b,
    "sub": lambda a, b, p: a - b,
    "div": lambda a, b, p: a / b,
    "neg": lambda a, p: -a,
    "pow": lambda a, b, p: a**b,
    "integer_pow": lambda a, p: a ** p["y"],
    "log": lambda a, p: math.log(a),
    "exp": lambda a, p: math.exp(a),
    "max": lambda a, b, p: max(a, b),
    "min": lambda a, b, p: min(a, b),
    "square": lambda a, p: a * a,
}


def _kind(dtype: Any) -> str:
    """'f' for floats of every width, 'i' for integers, 'b' for booleans."""
    kind = np.dtype(dtype).kind if not hasattr(dtype, "_rules") else "V"
    if kind in "iu":
        return "i"
    if kind == "b":
        return "b"
    return "f" if kind in "fV" else kind


def is_lossless(old: Any, new: Any) -> bool:
    """Whether every value of a dtype exists in another."""
    try:
        return bool(np.can_cast(old, new, "safe")) or (str(old), str(new)) in _WIDER
    except TypeError:
        return old == new


_WIDER = {
    (small, wide)
    for small in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    for wide in ("float32", "float64")
}


def reshape_args(
    alg: Algebra, args: tuple[Index, ...], new: tuple[int, ...], old: tuple[int, ...]
) -> tuple[Index, ...]:
    """Arguments of a reshaped value (shape new) as arguments of its source."""
    out: list[Index] = []
    j = 0
    i = 0
    while i < len(old):
        if old[i] == 1:
            out.append(None)
            i += 1
            continue
        run, size = [i], old[i]
        taken: list[int] = []
        have = 1
        while have != size:
            if _smaller(have, size):
                if new[j] != 1:
                    taken.append(j)
                    have *= new[j]
                j += 1
            else:
                i += 1
                if old[i] != 1:
                    size *= old[i]
                run.append(i)
        linear: Index = None
        for t in taken:
            linear = args[t] if linear is None else alg.cat(linear, args[t], new[t])
            if args[t] is None:
                continue
        digits = []
        for r in reversed(run):
            if old[r] == 1:
                digits.append(None)
                continue
            digits.append(alg.mod(linear, old[r]) if r != _first(run, old) else linear)
            linear = alg.div(linear, old[r])
        out.extend(reversed(digits))
        i += 1
    return tuple(out)


def _smaller(a: Any, b: Any) -> bool:
    """Whether a < b; a symbolic size is smaller than its multiples."""
    try:
        return bool(a < b)
    except InconclusiveDimensionOperation:
        return bool(b % a == 0)


def _first(run: list[int], old: tuple[int, ...]) -> int:
    return next(r for r in run if old[r] != 1)


def affine_constant(array: np.ndarray) -> tuple[float, tuple[float, ...]] | None:
    """(offset, slope per axis) of an array that is affine in its indices."""
    if array.size > 1 << 20 or array.ndim == 0 or array.dtype.kind not in "iuf":
        return None
    origin = float(array.flat[0])
    slopes = []
    for d, n in enumerate(array.shape):
        at = [0] * array.ndim
        at[d] = 1 if n > 1 else 0
        slopes.append(float(array[tuple(at)]) - origin)
    whole = all(float(s).is_integer() for s in (origin, *slopes))
    if array.dtype.kind == "f" and not whole:
        return None
    built = np.full(array.shape, origin)
    for d, slope in enumerate(slopes):
        shape = [1] * array.ndim
        shape[d] = array.shape[d]
        built = built + slope * np.arange(array.shape[d]).reshape(shape)
    return (origin, tuple(slopes)) if (built == array).all() else None


def banded_constant(mask: np.ndarray):
    """(row axis, column axis, lower, upper) of a mask lower <= col - row <= upper."""
    wide = [d for d, n in enumerate(mask.shape) if n > 1]
    varying = [d for d in wide if not (mask == mask.take([0], axis=d)).all()]
    if not 1 <= len(varying) <= 2 or mask.size > 1 << 27:
        return None
    at = tuple(slice(None) if d in varying else 0 for d in range(mask.ndim))
    plane = mask[at]
    if len(varying) == 1:
        plane = plane[None]
        rows, cols = None, varying[0]
    else:
        rows, cols = varying
    diff = np.arange(plane.shape[1])[None] - np.arange(plane.shape[0])[:, None]
    kept = diff[plane]
    if kept.size == 0:
        return None
    lower, upper = int(kept.min()), int(kept.max())
    if not np.array_equal(plane, (diff >= lower) & (diff <= upper)):
        return None
    return (
        rows, cols,
        None if lower <= int(diff.min()) else lower,
        None if upper >= int(diff.max()) else upper,
    )  # fmt: skip
