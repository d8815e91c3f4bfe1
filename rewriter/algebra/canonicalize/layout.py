"""Layout equations: the same value at other index arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jax.extend.core import InconclusiveDimensionOperation

from rewriter.algebra.canonicalize.primitives import TRANSPARENT, NeedSplit
from rewriter.algebra.canonicalize.repeated_rows import Repeats, repeated_rows
from rewriter.algebra.normal_form import Algebra, Index, OverBudget, Poly
from rewriter.program.graph import Node

Moved = tuple[int | None, tuple[Index, ...]] | None
"""A source and its arguments; None where the equation does more than move elements."""


class Layout:
    """Moves index arguments through layout equations.

    Attributes:
        strided: Whether to split interleaved pieces, as in gradients of strided slices;
            otherwise values made of them stay opaque.
    """

    strided = False

    def moved(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        """(source value, its arguments) of a layout equation; source None is zero."""
        if node.prim in TRANSPARENT:
            return node.ins[node.outs.index(value)], args
        move = self.MOVES.get(node.prim)
        return None if move is None else move(self, node, value, args)

    def _broadcast(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        source, dims = node.ins[0], node.params["broadcast_dimensions"]
        shape = self.g.shape(source)
        return source, tuple(
            None if n == 1 else args[d] for d, n in zip(dims, shape, strict=True)
        )

    def _transposed(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        at: list[Index] = [None] * len(args)
        for k, d in enumerate(node.params["permutation"]):
            at[d] = args[k]
        return node.ins[0], tuple(at)

    def _squeezed(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        drop = {int(d) for d in node.params["dimensions"]}
        kept = iter(args)
        rank = len(self.g.shape(node.ins[0]))
        return node.ins[0], tuple(
            None if d in drop else next(kept) for d in range(rank)
        )

    def _expanded(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        drop = {int(d) for d in node.params["dimensions"]}
        return node.ins[0], tuple(a for d, a in enumerate(args) if d not in drop)

    def _reshaped(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        if node.params.get("dimensions") is not None:
            return None
        source, shape = node.ins[0], self.g.shape(node.outs[0])
        return source, reshape_args(self.alg, args, shape, self.g.shape(source))

    def _sliced(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        strides = node.params["strides"] or (1,) * len(args)
        starts, sizes = node.params["start_indices"], self.g.shape(node.ins[0])
        return node.ins[0], tuple(
            None if n == 1 else self.alg.affine(a, int(m), int(s))
            for a, m, s, n in zip(args, strides, starts, sizes, strict=True)
        )

    def _gathered(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        """A gather that is a dynamic slice at a loop's step, or repeats rows."""
        repeats = repeated_rows(self.g, node) if value in self.inside else None
        if repeats is not None:
            return self._repeated(node, args, repeats)
        if not (is_slice(node) and self.varies(node.ins[1])):
            return None
        numbers, at = node.params["dimension_numbers"], list(args)
        sizes, taken = self.g.shape(node.ins[0]), node.params["slice_sizes"]
        for k, d in enumerate(numbers.start_index_map):
            start = self.poly(node.ins[1], (self.alg.affine(None, 1, k),))
            at[d] = self.alg.stepped(start, at[d], int(taken[d]), sizes[d])
        return node.ins[0], tuple(at)

    def _repeated(self, node: Node, args: tuple[Index, ...], how: Repeats) -> Moved:
        offset = set(node.params["dimension_numbers"].offset_dims)
        (row,) = (a for k, a in enumerate(args) if k not in offset)
        at = [a for k, a in enumerate(args) if k in offset]
        at.insert(how.axis, self.alg.div(row, how.each))
        if self.g.shape(node.ins[0])[how.axis] == 1:
            at[how.axis] = None
        return node.ins[0], tuple(at)

    def _reversed(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        dims = {int(d) for d in node.params["dimensions"]}
        sizes = self.g.shape(node.ins[0])
        return node.ins[0], tuple(
            self.alg.affine(a, -1, n - 1) if d in dims and n != 1 else a
            for d, (a, n) in enumerate(zip(args, sizes, strict=True))
        )

    def _part(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        axis, sizes = int(node.params["axis"]), node.params["sizes"]
        start = int(sum(sizes[: node.outs.index(value)]))
        at = list(args)
        if self.g.shape(node.ins[0])[axis] != 1:
            at[axis] = self.alg.affine(at[axis], 1, start)
        return node.ins[0], tuple(at)

    def _tiled(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        sizes = self.g.shape(node.ins[0])
        return node.ins[0], tuple(
            None if n == 1 else self.alg.mod(a, n)
            for a, n in zip(args, sizes, strict=True)
        )

    def _unstacked(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        axis = int(node.params["axis"])
        which = self.alg.affine(None, 1, node.outs.index(value))
        return node.ins[0], (*args[:axis], which, *args[axis:])

    def _stacked(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        axis = int(node.params["axis"])
        lo, hi = self.alg.index_range(args[axis])
        if lo != hi:
            raise self._split(args[axis], list(range(1, len(node.ins))))
        return node.ins[lo], (*args[:axis], *args[axis + 1 :])

    def _static_slice(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
        """A dynamic slice whose starts are numbers, or multiples of a loop's step."""
        sizes = self.g.shape(node.ins[0])
        at = []
        for a, n, m, value in zip(
            args, sizes, node.params["slice_sizes"], node.ins[1:], strict=True
        ):
            x = 0 if n == m else self.number(value)  # moved inside the array
            if x is not None:
                start = min(max(int(x), 0), n - m)
                at.append(None if n == 1 else self.alg.affine(a, 1, start))
            elif self.varies(value):
                start = self.poly(value, ())
                at.append(self.alg.stepped(start, a, m, n))
            else:
                return None
        return node.ins[0], tuple(at)

    def _piece(self, node: Node, value: int, args: tuple[Index, ...]) -> Moved:
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
        whole = self._rejoined(node, axis, args)
        if whole is None:
            raise self._split(args[axis], cuts[:-1])
        return whole

    def _rejoined(self, node: Node, axis: int, args: tuple[Index, ...]) -> Moved:
        """The array of which all joined pieces are parts that follow each other."""
        start, found = 0, set()
        for value in node.ins:
            at = list(args)
            at[axis] = self.alg.affine(at[axis], 1, -start)
            start += self.g.shape(value)[axis]
            place = value, tuple(at)
            while (source := self.g.node_of(place[0])) and source.prim in _PARTS:
                before = self.MOVES[source.prim](self, source, *place)
                if before is None or place[0] in self.names:
                    break
                place = before
            found.add(place)
            if len(found) > 1:
                return None
        return found.pop()

    MOVES: ClassVar[Mapping[str, Callable[..., Moved]]] = {
        "broadcast_in_dim": _broadcast,
        "transpose": _transposed,
        "squeeze": _squeezed,
        "expand_dims": _expanded,
        "reshape": _reshaped,
        "slice": _sliced,
        "dynamic_slice": _static_slice,
        "gather": _gathered,
        "rev": _reversed,
        "split": _part,
        "tile": _tiled,
        "unstack": _unstacked,
        "stack": _stacked,
        "concatenate": _piece,
    }
    """How each layout primitive moves the arguments of a result to its source."""

    def _interleaved(self, a: Index, n: int) -> Exception:
        """Raises that an index must be split into every n-th position."""
        if isinstance(a, tuple) and a[0] == "aff" and a[2] == 1:
            a = a[1]
        if self.strided and isinstance(a, int) and self.alg.sizes[a] % n == 0:
            return NeedSplit(a, (), n)
        return OverBudget("pieces are interleaved")

    def _split(self, a: Index, cuts: list[int]) -> Exception:
        if isinstance(a, int):
            return NeedSplit(a, tuple(cuts))
        moved = isinstance(a, tuple) and a[0] == "aff" and a[2] == 1
        digit = a[1] if moved else a
        if isinstance(digit, tuple) and digit[0] == "mod":
            return self._interleaved(digit[1], digit[2])
        if moved and isinstance(a[1], int):
            inner = [c - a[3] for c in cuts if 0 < c - a[3] < self.alg.sizes[a[1]]]
            return NeedSplit(a[1], tuple(inner))
        if isinstance(digit, tuple) and digit[0] == "div" and isinstance(digit[1], int):
            by, first = digit[2], a[3] if moved else 0
            whole = [by * (c - first) for c in cuts]
            inner = [c for c in whole if 0 < c < self.alg.sizes[digit[1]]]
            return NeedSplit(digit[1], tuple(inner))
        return OverBudget("pieces of a concatenation are mixed")

    def before_reduction(
        self, node: Node, args: tuple[Index, ...]
    ) -> tuple[tuple[Index, ...], list[int]]:
        """Arguments of a reduction's operand, and the indices that it reduces."""
        shape, axes = self.g.shape(node.ins[0]), sorted(map(int, node.params["axes"]))
        spare = self.alg.spare_indices([shape[d] for d in axes], args)
        reduced, kept = dict(zip(axes, spare, strict=True)), iter(args)
        at = tuple(
            reduced[d] if d in reduced else next(kept) for d in range(len(shape))
        )
        return at, [i for i in spare if i is not None]

    def summed(
        self, make: Callable[[Mapping[int, Index]], Poly], bound: list[int]
    ) -> Poly:
        """Sum of make(replacements) over bound indices, piece by piece."""
        try:
            return self.alg.sum_over(make({}), bound)
        except NeedSplit as need:
            if need.index not in bound:
                raise
            return self._summed_pieces(make, bound, need)

    def _summed_pieces(self, make, bound: list[int], need: NeedSplit) -> Poly:
        alg, j = self.alg, need.index
        out: Poly = {}
        for piece, at in pieces(alg, need):
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


_PARTS = frozenset({
    "slice", "split", "reshape", "transpose", "squeeze", "expand_dims",
    "broadcast_in_dim",
})  # fmt: skip
"""Equations between a part of an array and that array."""


def is_slice(node: Node) -> bool:
    """Whether a gather takes one slice with all axes of its operand."""
    numbers = node.params["dimension_numbers"]
    rank = len(node.params["slice_sizes"])
    return tuple(numbers.offset_dims) == tuple(range(rank)) and not (
        numbers.collapsed_slice_dims or numbers.operand_batching_dims
    )


def pieces(alg: Algebra, need: NeedSplit) -> list[tuple[Index, Index]]:
    """New indices over the pieces of an index, and the index in terms of them."""
    if need.stride > 1:
        size = alg.sizes[need.index] // need.stride
        new = [alg.new_index(size) for _ in range(need.stride)]
        return [(i, alg.affine(i, need.stride, k)) for k, i in enumerate(new)]
    edges = [0, *need.cuts, alg.sizes[need.index]]
    parts = [(alg.new_index(hi - lo), lo) for lo, hi in itertools.pairwise(edges)]
    return [(i, alg.affine(i, 1, lo)) for i, lo in parts]


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
            if new_is_next(have, size, j < len(new), i + 1 < len(old)):
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


def new_is_next(have: Any, size: Any, more_new: bool, more_old: bool) -> bool:
    """Whether a reshaped value's next axis is taken, and not the source's.

    Where symbolic sizes leave it open, either may be taken that is there.
    """
    fewer = smaller(have, size)
    return more_new or not more_old if fewer is None else fewer


def smaller(a: Any, b: Any) -> bool | None:
    """Whether a < b; a symbolic size is smaller than its multiples. None if open."""
    try:
        return bool(a < b)
    except InconclusiveDimensionOperation:
        up, down = divides(a, b), divides(b, a)
        return None if up == down else up


def divides(a: Any, b: Any) -> bool:
    """Whether b is a multiple of a, whatever symbolic sizes are."""
    return bool(b % a == 0)


def _first(run: list[int], old: tuple[int, ...]) -> int:
    return next(r for r in run if old[r] != 1)
