"""Turns normal forms back into JAX code: the operands of a replacement."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter import _jax
from rewriter.algebra.normal_form import TRUE, Algebra, Index, OverBudget, Poly

Groups = Sequence[Sequence[int]]


def shaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Reshapes an array, unless it has the shape, which JAX takes long to see."""
    return x if x.shape == tuple(shape) else _jax.reshaped(x, tuple(shape))


def typed(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts an array, unless it has the dtype already, and not as a weak one."""
    return x if x.dtype == dtype and not x.weak_type else x.astype(dtype)


def ordered(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Transposes an array, unless its axes are in order already."""
    return x if list(axes) == list(range(x.ndim)) else x.transpose(axes)


class Emitter:
    """Builds arrays from polynomials.

    Args:
        algebra: Where the atoms are defined.
        arrays: Leaf name to array.
        dtype: Floating dtype in which sums and products are computed.
    """

    def __init__(
        self, algebra: Algebra, arrays: Mapping[Any, jax.Array], dtype: Any = np.float32
    ):
        self.alg, self.arrays, self.dtype = algebra, arrays, dtype

    # ------------------------------------------------------------- arrays
    def array(
        self,
        p: Poly,
        groups: Groups,
        *,
        full: bool = True,
        dtype: Any = None,
        near: int = 0,
    ) -> jax.Array:
        """The polynomial as an array with one axis per group of indices.

        With ``full`` every axis has its whole size; otherwise an axis on which the
        value does not depend has size one. Integers beyond ``near``, such as `FAR`, are
        clamped to it, so that no sum with a position overflows.
        """
        order = [i for group in groups for i in group]
        if near and len(cases := self.alg.cases(p)) > 1:
            x = self._by_cases(cases, order, near)
            return self._grouped(x, groups, full, dtype)
        x = self._single(p, order)
        if x is not None and near:
            x = _near(x, near)
        if x is None and dtype is not None and jnp.issubdtype(dtype, jnp.integer):
            x = self._integer(p, order, near)
        if x is None:
            x = self._sum(p, order)
        return self._grouped(x, groups, full, dtype)

    def flag(self, b: int, groups: Groups, *, full: bool = False) -> jax.Array:
        """A boolean function as an array with one axis per group of indices."""
        order = [i for group in groups for i in group]
        return self._grouped(self._bool(b, order), groups, full, None)

    def _grouped(self, x: jax.Array, groups: Groups, full: bool, dtype: Any):
        shape, target, k = [], [], 0
        for group in groups:
            sizes = [self.alg.sizes[i] for i in group]
            have = x.shape[k : k + len(group)]
            k += len(group)
            whole = full or any(n != 1 for n in have)
            target += sizes if whole else [1] * len(group)
            shape.append(math.prod(sizes) if whole else 1)
        if x.shape != tuple(target):
            x = jnp.broadcast_to(x, tuple(target))
        x = shaped(x, shape)
        return x if dtype is None else typed(x, dtype)

    def _single(self, p: Poly, order: list[int]) -> jax.Array | None:
        """A polynomial that is one leaf, in the leaf's own dtype."""
        if len(p) != 1:
            return None
        ((flag, mono), c) = next(iter(p.items()))
        if flag != TRUE or c != 1 or len(mono) != 1 or mono[0][1] != 1:
            return None
        if self.alg.kind(mono[0][0]) != "leaf":
            return None
        return self._leaf(mono[0][0], order)

    def _sum(self, p: Poly, order: list[int]) -> jax.Array:
        total = None
        for (flag, mono), c in p.items():
            term = jnp.full((1,) * len(order), c, self.dtype)
            for a, e in mono:
                factor = self._atom(a, order)
                if e != 1:
                    factor = _power(factor, e)
                term = term * factor
            if flag != TRUE:
                term = jnp.where(self._bool(flag, order), term, 0)
            total = term if total is None else total + term
        return jnp.zeros((1,) * len(order), self.dtype) if total is None else total

    # ------------------------------------------------------------- atoms
    def _atom(self, atom: int, order: list[int]) -> jax.Array:
        d = self.alg.defs[atom]
        kind = d[0]
        if kind == "leaf":
            return typed(self._leaf(atom, order), self.dtype)
        if kind == "iota":
            return self._index(d[1], order).astype(self.dtype)
        if kind == "ind":
            return self._bool(d[1], order).astype(self.dtype)
        if kind == "log":
            return self._log(self.alg.thaw(d[1]), order)
        if kind == "val":
            return self._sum(self.alg.thaw(d[1]), order)
        if kind == "relu":
            return jnp.maximum(self._sum(self.alg.thaw(d[1]), order), 0)
        raise OverBudget(f"no code for {kind}")

    def _log(self, p: Poly, order: list[int]) -> jax.Array:
        exponents = self.alg.exponents(p)
        if exponents is None:
            return jnp.log(self._sum(p, order))
        # Avoid the exponential of a large number.
        return functools.reduce(jnp.logaddexp, [self._sum(x, order) for x in exponents])

    def _leaf(self, atom: int, order: list[int]) -> jax.Array:
        _, name, args = self.alg.defs[atom]
        x = self.arrays[name]
        labels: list[Any] = list(args)
        for _ in range(16):
            complex_at = next(
                (k for k, a in enumerate(labels) if not isinstance(a, int)), None
            )
            if complex_at is None:
                break
            step = self._simplify(x, labels, complex_at)
            if step is None:
                return self._gather(self.arrays[name], args, order)
            x, labels = step
        for k, a in enumerate(labels):
            if self.alg.sizes[a] != x.shape[k]:
                x = jax.lax.slice_in_dim(x, 0, self.alg.sizes[a], axis=k)
        if len(set(labels)) != len(labels):
            return self._gather(self.arrays[name], args, order)
        where = {i: k for k, i in enumerate(labels)}
        x = ordered(x, [where[i] for i in order if i in where])
        present = iter(x.shape)
        return shaped(x, [next(present) if i in where else 1 for i in order])

    def _simplify(self, x: jax.Array, labels: list[Any], k: int):
        """One layout step that turns the argument of axis k into plainer ones."""
        a = labels[k]
        if a is None or a[0] == "k":
            at = 0 if a is None else a[1]
            x = (
                x.reshape(x.shape[:k] + x.shape[k + 1 :])
                if x.shape[k] == 1
                else (jax.lax.index_in_dim(x, at, k, keepdims=False))
            )
            return x, labels[:k] + labels[k + 1 :]
        if a[0] == "aff" and isinstance(a[1], int):
            size, m, c = self.alg.sizes[a[1]], a[2], a[3]
            if m > 0:
                x = jax.lax.slice_in_dim(x, c, c + (size - 1) * m + 1, m, k)
            else:
                x = jax.lax.slice_in_dim(x, c + (size - 1) * m, c + 1, -m, k)
                x = jnp.flip(x, k)
            return x, [*labels[:k], a[1], *labels[k + 1 :]]
        if a[0] == "aff" and a[2] > 0:
            lo, hi = self.alg.index_range(a)
            if self.alg.index_range(a[1])[0] == 0 and self._numbers(a):
                x = jax.lax.slice_in_dim(x, lo, hi + 1, a[2], k)
                return x, [*labels[:k], a[1], *labels[k + 1 :]]
        if a[0] == "cat" and x.shape[k] % a[3] == 0:
            shape = (*x.shape[:k], x.shape[k] // a[3], a[3], *x.shape[k + 1 :])
            return x.reshape(shape), [*labels[:k], a[1], a[2], *labels[k + 1 :]]
        if a[0] == "cat":
            lo, hi = self.alg.index_range(a)
            if lo == 0 and self._numbers(a) and hi + 1 < x.shape[k]:
                return jax.lax.slice_in_dim(x, 0, hi + 1, axis=k), labels
        return None

    def _numbers(self, a: Index) -> bool:
        """Whether the sizes of an argument are known, so that its range is exact."""
        return all(isinstance(self.alg.sizes[i], int) for i in self.alg.index_ids(a))

    def _gather(self, x: jax.Array, args: tuple[Index, ...], order: list[int]):
        if not args:
            return x.reshape((1,) * len(order))
        at = tuple(self._index(a, order) for a in args)
        return (
            x[jnp.broadcast_arrays(*at) if len(at) > 1 else at]
            if len(at) == 1
            else (x[tuple(jnp.broadcast_arrays(*at))])
        )

    def _index(self, a: Index, order: list[int]) -> jax.Array:
        """The value of an index argument, over the order's axes."""
        if a is None:
            return jnp.zeros((1,) * len(order), jnp.int32)
        if isinstance(a, int):
            shape = [1] * len(order)
            shape[order.index(a)] = self.alg.sizes[a]
            return jnp.arange(self.alg.sizes[a], dtype=jnp.int32).reshape(shape)
        if a[0] == "k":
            return jnp.full((1,) * len(order), a[1], jnp.int32)
        if a[0] == "cat":
            return self._index(a[1], order) * a[3] + self._index(a[2], order)
        inner = self._index(a[1], order)
        if a[0] == "aff":
            return inner * a[2] + a[3]
        return inner // a[2] if a[0] == "div" else inner % a[2]

    # ------------------------------------------------------------- booleans
    def _bool(self, b: int, order: list[int]) -> jax.Array:
        support, table = self.alg.bools[b]
        if not support:
            return jnp.full((1,) * len(order), bool(table))
        literals = [self._literal(a, order) for a in support]
        rows = [r for r in range(1 << len(support)) if table >> r & 1]
        negate = len(rows) > (1 << len(support)) // 2
        if negate:
            rows = [r for r in range(1 << len(support)) if not table >> r & 1]
        out = None
        for r in rows:
            term = None
            for k, lit in enumerate(literals):
                x = lit if r >> k & 1 else ~lit
                term = x if term is None else term & x
            out = term if out is None else out | term
        return ~out if negate else out

    def _literal(self, atom: int, order: list[int]) -> jax.Array:
        d = self.alg.defs[atom]
        if d[0] == "leaf":
            return self._leaf(atom, order)
        if d[0] in ("ge", "eq"):
            left, right = sides(self.alg, self.alg.thaw(d[1]))
            last = right.get((TRUE, ()), 0.0) - 1
            if d[0] == "ge" and last == jnp.iinfo(jnp.int32).max:
                right[TRUE, ()] = last  # 2^31 is no int32
                return self._integer(left, order) > self._integer(right, order)
            x, y = self._integer(left, order), self._integer(right, order)
            return x >= y if d[0] == "ge" else x == y
        if d[0] == "any":
            bound, flag, _ = self.alg.open_sum(atom)
            x = self._bool(flag, order + bound)
            return x.any(tuple(range(len(order), x.ndim)))
        if d[0] == "ind":
            return self._bool(d[1], order)
        raise OverBudget(f"no code for a predicate of kind {d[0]}")

    def _integer(self, p: Poly, order: list[int], near: int = 0) -> jax.Array:
        """A form over integers, computed exactly; `near` as for `array`."""
        if near:
            moved = self._moved(p, order, near)
            if moved is not None:
                return moved
        total = jnp.zeros((1,) * len(order), jnp.int32)
        for (flag, mono), c in p.items():
            term = jnp.full((1,) * len(order), int(c), jnp.int32)
            for a, e in mono:
                x = self._integer_array(a, order, near)
                if x is None or e != 1:
                    raise OverBudget("a position that is no integer")
                if near and self.alg.kind(a) != "relu":  # which has such inside
                    x = _near(x, near // max(1, abs(int(c))))
                term = term * x
            if flag != TRUE:
                term = jnp.where(self._bool(flag, order), term, 0)
            total = total + term
        return total

    def _by_cases(
        self, cases: list[tuple[int, Poly]], order: list[int], near: int
    ) -> jax.Array:
        """A form over integers by cases, of which one holds; each computed alone."""
        arrays = [self._integer(p, order, near) if p else 0 for _, p in cases]
        x = arrays[0]
        for (flag, _), other in zip(cases[1:], arrays[1:], strict=True):
            x = jnp.where(self._bool(flag, order), other, x)
        return jnp.asarray(x)

    def _moved(self, p: Poly, order: list[int], far: int) -> jax.Array | None:
        """A leaf plus or minus a number, clamped to `far`; None for other forms.

        The leaf is first clamped near the number, so that their sum is exact.
        """
        c, rest = self.alg.split_constant(p)
        x = self._single(rest, order)
        sign = 1
        if x is None:
            x, sign = self._single(self.alg.scale(rest, -1.0), order), -1
        if x is None or not jnp.issubdtype(x.dtype, jnp.integer):
            return None
        ends = jnp.iinfo(jnp.int32)
        most, least = min(far, ends.max) - int(c), max(-far, ends.min) - int(c)
        if sign < 0:
            most, least = -least, -most
        info = jnp.iinfo(x.dtype)
        if most < info.min or least > info.max:
            raise OverBudget("a position is beyond the range of its integers")
        x = jnp.maximum(x, x.dtype.type(least)) if least > info.min else x
        x = jnp.minimum(x, x.dtype.type(most)) if most < info.max else x
        if abs(int(c)) > jnp.iinfo(jnp.int32).max:
            raise OverBudget("a number that no position is compared with")
        return sign * x.astype(jnp.int32) + jnp.asarray(int(c), jnp.int32)

    def _integer_array(
        self, atom: int, order: list[int], near: int
    ) -> jax.Array | None:
        """An atom as an integer array; None if it is not one."""
        d = self.alg.defs[atom]
        if d[0] == "iota":
            return self._index(d[1], order)
        x: jax.Array | None = None
        if d[0] == "ind":
            return self._bool(d[1], order).astype(jnp.int32)
        if d[0] == "leaf":
            x = self._leaf(atom, order)
            x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        elif d[0] == "relu" and all(c == int(c) for _, c in d[1]):
            x = jnp.maximum(self._integer(self.alg.thaw(d[1]), order, near), 0)
        return x if x is None or jnp.issubdtype(x.dtype, jnp.integer) else None


def sides(alg: Algebra, p: Poly) -> tuple[Poly, Poly]:
    """P as a difference of two sides, where no value is added to a number if possible.

    So a comparison is right for values near the largest of their type.
    """
    found: tuple[Poly, Poly] = {}, {}
    known: Poly = {}
    for (flag, mono), c in p.items():
        if flag == TRUE and all(alg.kind(a) == "iota" for a, _ in mono):
            known[flag, mono] = c
        else:
            found[c < 0][flag, mono] = abs(c)
    right = bool(found[0]) and not found[1]
    for term, c in known.items():
        found[right][term] = -c if right else c
    return found


KINDS = frozenset({"leaf", "iota", "ind", "relu", "val", "log", "ge", "eq", "any"})
"""The kinds of atoms that there is code for; `rewriter.find.recomputable` says why."""

FAR = 1 << 28
"""Beyond all positions: twice that and more is still an int32."""


def _near(x: jax.Array, far: int) -> jax.Array:
    """Clamps integers to a number, and to int32; returns other arrays unchanged."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    own, ends = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    least, most = max(-far, own.min, ends.min), min(far, own.max, ends.max)
    x = jnp.maximum(x, x.dtype.type(least)) if least > own.min else x
    return jnp.minimum(x, x.dtype.type(most)) if most < own.max else x


def _power(x: jax.Array, e: Any) -> jax.Array:
    if isinstance(e, int):
        return jax.lax.integer_pow(x, e)
    if float(e) == 0.5:
        return jnp.sqrt(x)
    if float(e) == -0.5:
        return jax.lax.rsqrt(x)
    return x ** float(e)
