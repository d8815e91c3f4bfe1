"""Pads matrix products with sizes for which a GPU has no fast kernel.

    y = x·w  of w [768, 50257]     →     p = pad w    z = x·p    y = z[:, :50257]

Kernels for 16-bit matrices load 16 bytes at once. A matrix whose rows are no multiple
of 8 numbers has no such loads, and XLA falls back to kernels that take twice the time.
Zeros that are summed add nothing, and columns of zeros are cut off again, so the result
has the same terms. Differentiated, a padded product is two padded ones. What padding
and cutting read and write is counted, unless XLA fuses them with what is around. No
product is padded that then needs another large array: one that the program gets or
returns has no room for padding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from rewriter import _jax
from rewriter.measure.measurement import time_text
from rewriter.ops import unaligned
from rewriter.ops.device import Device
from rewriter.ops.estimate import LAUNCH_S, PRODUCTS, seconds
from rewriter.ops.unaligned import EVEN
from rewriter.program.contents import contents_of
from rewriter.program.equations import Equations
from rewriter.program.loops import inserted
from rewriter.rewrite.beside_sites import BodyPass, Change, Changed
from rewriter.rewrite.passes.flops import flops_of, is_sized, size
from rewriter.rewrite.passes.recompute import CHEAP

STEPS = ((4096, 128), (1024, 64), (0, EVEN))
"""From these sizes on, sizes are padded to a multiple of these: tiles are then full."""

GAIN = 0.9
"""The share of its time that a padded product may take, with the padding."""

MEMORY = 0.1
"""The share of the product's own temporary arrays that padding may take in memory."""

LEAST_S = 5 * LAUNCH_S
"""The fewest seconds that padding must gain."""

LAYOUT = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})
"""Primitives whose result lies in memory as their operand does."""

FUSED = CHEAP | {"reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"}
"""Primitives that read a part of an array as fast as a whole one."""


@dataclass(frozen=True)
class Aligned(Change):
    """A product that was padded.

    Attributes:
        sizes: The sizes that were padded, as ``(from, to)``.
        before: The seconds that it is estimated to take as written.
        after: The same padded, with padding and cutting.
    """

    by: ClassVar[str] = "aligned_products"
    sizes: tuple[tuple[int, int], ...]
    before: float
    after: float

    @classmethod
    def row(cls, same: Sequence[Self]) -> tuple[str, ...]:
        """Returns how many products, their sizes, and both estimates."""
        sizes = dict.fromkeys(size for a in same for size in a.sizes)
        text = "padded from " + ", ".join(f"{old} to {new}" for old, new in sizes)
        before, after = (
            time_text(1e6 * sum(seconds))
            for seconds in ([a.before for a in same], [a.after for a in same])
        )
        more = f"estimated to take {after}, and {before} as written"
        return f"×{len(same)}", text, more


def _changed(body: Any, device: Device) -> Changed:
    """Pads matrix products for whose sizes a GPU has no fast kernel."""
    known = device.flops and device.bandwidth
    products = contents_of(body).named({"dot_general"})
    if not known or not any(map(_is_of_matrices, products)):
        return body, ()
    return _Body(body, device).changed()


class _Body:
    """One body whose products are padded; each value is padded once.

    Args:
        jaxpr: The body.
        device: Where it will run.
    """

    def __init__(self, jaxpr: Any, device: Device):
        self.jaxpr, self.device = jaxpr, device
        self.around = Equations(jaxpr)
        self.padded: set[tuple[Any, tuple[int, ...]]] = set()

    def changed(self) -> Changed:
        """The body, itself if no padding pays, and the products that were padded."""
        found, eqns = list[Aligned](), []
        for eqn in self.jaxpr.eqns:
            odd = _is_of_matrices(eqn) and _odd_axes(eqn, self.around)
            product = _Product.of(eqn, odd) if odd else None
            estimate = product and self._estimate_of(product)
            if product and estimate:
                found.append(estimate)
                eqns += self._written(product)
            else:
                eqns.append(eqn)
        if not found:
            return self.jaxpr, ()
        outs = getattr(self.jaxpr, "jaxpr", self.jaxpr).outvars
        return _jax.with_equations(self.jaxpr, eqns, outs), found

    def _estimate_of(self, product: _Product) -> Aligned | None:
        """The estimate of a padded product; None if it does not pay."""
        work = flops_of(product.eqn)
        assert work is not None
        more = math.prod(to / size for size, to in product.sizes)
        moved = self._padding(product) + self._cutting(product)
        before = seconds(
            self.device,
            work.flops,
            0.0,
            compute=PRODUCTS / _slower(product.eqn, self.around),
        )
        after = seconds(
            self.device, more * work.flops, moved, compute=PRODUCTS,
            launches=1 + 3 * (moved > 0),
        )  # fmt: skip
        if after > GAIN * before or before - after < LEAST_S:
            return None
        if self._more_memory(product) > MEMORY * self._memory(product):
            return None
        where = _jax.source_of(product.eqn)
        return Aligned("product", where, tuple(product.sizes), before, after)

    def _padding(self, product: _Product) -> float:
        """Bytes that pass to pad the operands that are not padded yet."""
        return sum(
            0.0 if self._is_made_here(atom) else 2.0 * size(atom)
            for atom, _ in self._not_padded(product)
        )

    def _cutting(self, product: _Product) -> float:
        """Bytes that pass to cut the result, unless all that read it can do so."""
        cut = product.out.aval.shape != product.result
        return 2.0 * size(product.out) if cut and self._is_read_whole(product) else 0.0

    def _more_memory(self, product: _Product) -> float:
        """Bytes of arrays that are there beside those as written.

        A padded array takes the place of the one as written if that has no other use.
        """
        more = 0.0
        for atom, to in self._not_padded(product):
            grown = size(atom) * math.prod(to) / math.prod(atom.aval.shape)
            replaced = self._is_made_here(atom) and all(
                k != self.around.end and _is_of_matrices(self.around.eqns[k])
                for k in self.around.readers(atom)
            )
            more += grown - size(atom) if replaced else grown
        cut = product.out.aval.shape != product.result
        if cut and (self._is_returned(product.out) or self._is_read_whole(product)):
            more += size(product.out)
        return more

    def _memory(self, product: _Product) -> float:
        """Bytes of the product's arrays that are neither inputs nor results."""
        made = [a for a in product.eqn.invars if self._maker(a) is not None]
        if not self._is_returned(product.out):
            made.append(product.out)
        return float(sum(map(size, made)))

    def _not_padded(self, product: _Product) -> list[tuple[Any, tuple[int, ...]]]:
        """The operands that are to be padded, and no earlier product did so."""
        pairs = zip(product.eqn.invars, product.operands, strict=True)
        return [p for p in pairs if p[1] != p[0].aval.shape and p not in self.padded]

    def _is_made_here(self, atom: Any) -> bool:
        """Whether XLA makes an array, and may make it padded at no cost."""
        maker = self._maker(atom)
        return maker is not None and maker.primitive.name in CHEAP

    def _maker(self, atom: Any) -> Any:
        """The equation that makes an array, in any layout; None for an input."""
        maker = self.around.maker(atom)
        while maker is not None and maker.primitive.name in LAYOUT:
            maker = self.around.maker(maker.invars[0])
        return maker

    def _is_read_whole(self, product: _Product) -> bool:
        """Whether anything that reads a result is not fused with cutting it."""
        around = self.around
        return any(
            k == around.end or around.eqns[k].primitive.name not in FUSED
            for k in around.readers(product.out)
        )

    def _is_returned(self, out: Any) -> bool:
        """Whether a result is written into one of the body's, perhaps with more to it.

        As written, XLA then needs no array for the product itself.
        """
        around, seen, queue = self.around, {out}, [out]
        while queue:
            for k in around.readers(queue.pop()):
                if k == around.end:
                    return True
                eqn = around.eqns[k]
                large = [v for v in eqn.outvars if size(v) * 4 >= size(out)]
                if eqn.primitive.name in CHEAP:
                    new = [v for v in large if v not in seen]
                    seen.update(new)
                    queue += new
        return False

    def _written(self, product: _Product) -> list[Any]:
        """The equations of a padded product. Equal paddings are one for XLA."""
        eqn, atoms = product.eqn, product.eqn.invars
        (out,) = eqn.outvars

        def code(*given: jax.Array) -> jax.Array:
            wide = map(_wide, given, product.operands)
            made = eqn.primitive.bind(*wide, **eqn.params)
            if made.shape == out.aval.shape:
                return made
            return lax.slice(made, [0] * made.ndim, out.aval.shape)

        fragment = _jax.trace_placed(code, [a.aval for a in atoms])
        made, _ = inserted(fragment, atoms, eqn.source_info)
        self.padded |= set(zip(atoms, product.operands, strict=True))
        return [*made[:-1], made[-1].replace(outvars=[out])]


@dataclass(frozen=True, eq=False)
class _Product:
    """A product, and the shapes that it has if it is padded.

    Attributes:
        eqn: Its equation.
        sizes: The sizes that are padded, as ``(from, to)``.
        operands: The shapes of both operands.
        result: The shape of the result.
    """

    eqn: Any
    sizes: Sequence[tuple[int, int]]
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]

    @property
    def out(self) -> Any:
        """The variable of the result."""
        return self.eqn.outvars[0]

    @classmethod
    def of(cls, eqn: Any, odd: Sequence[tuple[int, int]]) -> _Product:
        """The product with some axes padded.

        Args:
            eqn: The equation.
            odd: Axes as ``(operand, axis)``; an axis that is summed as that of the
                first operand.
        """
        shapes = [list(a.aval.shape) for a in eqn.invars]
        (left, right), _ = eqn.params["dimension_numbers"]
        sizes = []
        for operand, axis in odd:
            old = shapes[operand][axis]
            new = _padded_size(old)
            sizes.append((old, new))
            shapes[operand][axis] = new
            if operand == 0 and axis in left:
                shapes[1][right[left.index(axis)]] = new
        free = [
            size
            for shape, summed in zip(shapes, (left, right), strict=True)
            for axis, size in enumerate(shape)
            if axis not in summed
        ]
        return cls(eqn, sizes, tuple(map(tuple, shapes)), tuple(free))


def _odd_axes(eqn: Any, around: Equations) -> list[tuple[int, int]]:
    """Axes of a product that make the rows of a matrix unaligned.

    An axis that is summed is named as that of the first operand.
    """
    (left, right), _ = eqn.params["dimension_numbers"]
    odd = [r for r in _rows(eqn, around) if r is not None and _is_odd(eqn, r)]
    first = [
        (0, left[right.index(axis)]) if operand and axis in right else (operand, axis)
        for operand, axis in odd
    ]
    return list(dict.fromkeys(first))


def _is_of_matrices(eqn: Any) -> bool:
    """Whether an equation is a product of 16-bit matrices, without batches."""
    if eqn.primitive.name != "dot_general":
        return False
    if not all(_is_narrow(a.aval.dtype) for a in eqn.invars):
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    atoms = (*eqn.invars, *eqn.outvars)
    return not batch and is_sized(atoms) and not any(map(_jax.is_literal, eqn.invars))


def _rows(eqn: Any, around: Equations) -> list[tuple[int, int] | None]:
    """What makes up a row of both operands and of the result, as ``(operand, axis)``.

    A transposed operand lies in memory as it was before. None where several axes make
    up a row.
    """
    (left, right), _ = eqn.params["dimension_numbers"]
    rows: list[tuple[int, int] | None] = []
    frees = []
    for operand, (atom, summed) in enumerate(
        zip(eqn.invars, (left, right), strict=True)
    ):
        order = _order(atom, around)
        frees.append([axis for axis in sorted(order) if axis not in summed])
        kinds = [axis in summed for axis in order]
        alone = bool(order) and kinds[-1] not in kinds[-2:-1]
        rows.append((operand, order[-1]) if alone else None)
    last = 1 if frees[1] else 0
    alone = len(frees[last]) == 1 or (last == 0 and bool(frees[0]))
    return [*rows, (last, frees[last][-1]) if alone else None]


def _order(atom: Any, around: Equations) -> list[int]:
    """The axes of an operand in the order in which they lie in memory."""
    maker = around.maker(atom)
    if maker is None or maker.primitive.name != "transpose":
        return list(range(len(atom.aval.shape)))
    order = list(maker.params["permutation"])
    return [order.index(axis) for axis in range(len(order))]


def _is_odd(eqn: Any, row: tuple[int, int]) -> bool:
    operand, axis = row
    size = eqn.invars[operand].aval.shape[axis]
    return bool(size > EVEN and size % EVEN)


def _slower(eqn: Any, around: Equations) -> float:
    """How many times longer a product takes than an aligned one."""
    sizes = [
        EVEN if row is None else eqn.invars[row[0]].aval.shape[row[1]]
        for row in _rows(eqn, around)
    ]
    return unaligned.slower(*sizes)


@functools.cache
def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def _padded_size(size: int) -> int:
    step = next(step for least, step in STEPS if size >= least)
    return -(-size // step) * step


def _wide(a: jax.Array, shape: Sequence[int]) -> jax.Array:
    """An array with zeros behind it."""
    sizes = zip(a.shape, shape, strict=True)
    more = [(0, new - old, 0) for old, new in sizes]
    return lax.pad(a, jnp.zeros((), a.dtype), more)


PASS = BodyPass(Aligned, _changed, unaligned.PLATFORMS)
