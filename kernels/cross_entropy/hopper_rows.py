"""Sums of exponentials and gradients of rows of logits on a Hopper GPU, in one pass.

A block of threads takes one row, whose columns its warpgroups share. Each number of a
lane has its own running maximum, and its own sum of exponentials: they are joined once,
at the end of the row. So a row is read once for its sum. For gradients it is read
again, from the L2 cache where the other blocks' rows leave it room.

XLA reads a row from memory for the maximum, for the sum, and for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.shared import pallas_gpu, pallas_gpu_rows

if TYPE_CHECKING:
    from jax import Array

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Where a running maximum begins: finite, so that -inf minus it is -inf."""

AT_ONCE = 2
"""Chunks whose exponentials share a rescaling of the sum."""


@dataclass(frozen=True)
class Form:
    """Facts about all rows that are known when the kernel is compiled.

    Attributes:
        end: The column behind the last logit; columns from there on are padding.
        scale: Multiplies the numbers of a row, to make logits.
        nan_at: Infinite log-sum-exps that are NaN in gradients.
        warpgroups: Warpgroups that share a row.
    """

    end: int
    scale: float = 1.0
    nan_at: tuple[float, ...] = ()
    warpgroups: int = 8


def width_of(dtype: Any) -> int:
    """Columns of a warpgroup's chunk: 16 bytes in each lane."""
    return pallas_gpu_rows.LANES * (16 // jnp.dtype(dtype).itemsize)


def totals(y: Array, form: Form) -> tuple[Array, Array]:
    """Returns the sums of exponentials of rows: tops m and weights, float32 [n].

    Of a row y of logits the weight is the sum of ``exp(y - m)``, with m their maximum.
    If a logit is inf, m is 0 and the weight is inf. If all are -inf the weight is 0.

    Args:
        y: [n, v], 16 or 32 bits, v a multiple of 8 and at least `width_of` its dtype.
        form: What is known of the rows.
    """
    (sums,) = _call("sum_of_exponentials", y, (), form, [])
    return sums[:, 0], sums[:, 1]


def totals_and_gradients(
    y: Array,
    first: Array,
    by_total: Array,
    each: Array,
    form: Form,
    in_place: bool = False,
) -> tuple[Array, Array, Array]:
    """Returns what `totals` does, and cotangents [n, v] in y's dtype.

    With the log-sum-exp l of a row, these are ``exp(y - l) (first + by_total l) +
    each``, and 0 in padding.

    Args:
        y: As for `totals`.
        first: float32 [n].
        by_total: float32 [n].
        each: float32 [n].
        form: What is known of the rows.
        in_place: Whether the cotangents take y's memory, which XLA copies if it has a
            later reader. It needs `work_stealing.AVAILABLE`.
    """
    given, name = (first, by_total, each), "sum_of_exponentials_and_gradient"
    if in_place:
        reference = jax.new_ref(y)
        (sums,) = _call(name, reference, given, form, [])
        return sums[:, 0], sums[:, 1], reference[...]
    out = [jax.ShapeDtypeStruct(y.shape, y.dtype)]
    sums, d = _call(name, y, given, form, out)
    return sums[:, 0], sums[:, 1], d


def _call(
    name: str, y: Array, given: Sequence[Array], form: Form, out: list[Any]
) -> Any:
    lanes = pallas_gpu_rows.LANES
    columns = jnp.arange(width_of(y.dtype), dtype=jnp.float32)
    sums = jax.ShapeDtypeStruct((y.shape[0], lanes), jnp.float32)
    shape = (2, 1, 4 * form.warpgroups)
    scratch = {"joined": plgpu.SMEM(shape, jnp.float32)}

    def body(y: Any, columns: Any, *references: Any, joined: Any) -> None:
        given_, outs = references[: len(given)], references[len(given) :]
        place = lax.axis_index(pallas_gpu.WARPGROUP), lax.axis_index(pallas_gpu.PROGRAM)
        row = _Row(form, y, columns, joined, *place)
        top, weight, rest = row.total()

        @pallas_gpu.when(place[0] == 0)
        def _() -> None:
            first = pallas_gpu_rows.loaded(columns.at[pl.ds(0, lanes)]) < 1
            every = pallas_gpu_rows.zeros(lanes)
            both = jnp.where(first, every + top, every + weight)
            pallas_gpu_rows.store(outs[0].at[place[1]], both)

        if given_:
            slopes = row.slopes(top, weight, *(x[place[1]] for x in given_))
            row.differentiate(*slopes, rest, outs[1] if out else y)

    call = pallas_gpu.kernel(
        body, name, [sums, *out], scratch, y.shape[0], form.warpgroups
    )
    return call(y, columns, *given)


@dataclass(frozen=True)
class _Row:
    """The part of a row that one warpgroup has.

    Attributes:
        form: What is known of the rows.
        y: All rows.
        columns: 0, 1, 2 and so on, float32, as many as a chunk has.
        joined: Shared memory for what the warpgroups join.
        warpgroup: The index of this warpgroup.
        index: The row.
    """

    form: Form
    y: Any
    columns: Any
    joined: Any
    warpgroup: Any
    index: Any

    @property
    def width(self) -> int:
        return self.columns.shape[0]

    @property
    def whole(self) -> int:
        """The steps of `AT_ONCE` chunks of each warpgroup that have no padding."""
        return self.form.end // (AT_ONCE * self.form.warpgroups * self.width)

    def total(self) -> tuple[Any, Any, list[Any]]:
        """The top and the weight of the row, and the numbers of its last chunks.

        Those overlap, and so they are read before the first of them may be written.
        """
        weight = pallas_gpu_rows.zeros(self.width)
        top, none = weight + LOWEST, weight + float("-inf")

        def added(carry: Any, parts: Sequence[Any]) -> Any:
            top, weight = carry
            new = top
            for y in parts:
                new = jnp.maximum(new, y)
            weight = weight * jnp.exp(top - new)
            for y in parts:
                weight = weight + jnp.exp(y - new)
            return new, weight

        def step(i: Any, carry: Any) -> Any:
            starts = [self.start(i * AT_ONCE + j) for j in range(AT_ONCE)]
            return added(carry, [self.logits(start) for start in starts])

        carry = lax.fori_loop(0, self.whole, step, (top, weight))
        last = []
        for start, inside in self.rest():
            last.append(self.narrow(start))
            carry = added(carry, [jnp.where(inside, self.scaled(last[-1]), none)])
        top, weight = carry
        joined = self.joined.at[0], self.joined.at[1]
        (most,) = pallas_gpu_rows.row_maxima([top], joined[0], self.form.warpgroups)
        own = weight * jnp.exp(top - most)
        (sums,) = pallas_gpu_rows.row_sums([own], joined[1], self.form.warpgroups)
        endless = most == jnp.inf
        infinite, none = jnp.float32(jnp.inf), jnp.float32(0.0)
        weight = jnp.where(endless, infinite, sums)
        return jnp.where(endless, none, most), weight, last

    def slopes(
        self, top: Any, weight: Any, first: Any, by_total: Any, each: Any
    ) -> tuple[Any, Any, Any]:
        """Numbers t, a and b of a row, whose cotangents are ``exp(y - t) a + b``."""
        for infinite in self.form.nan_at:
            lost = weight == jnp.float32(max(infinite, 0.0))
            weight = jnp.where(lost, jnp.float32(jnp.nan), weight)
        more = by_total * (jnp.log(weight) + top)
        none = jnp.float32(0.0)
        return top, (first + jnp.where(by_total == none, none, more)) / weight, each

    def differentiate(
        self, top: Any, share: Any, each: Any, last: Sequence[Any], out: Any
    ) -> None:
        """Writes the cotangents of the row, maybe in place of its logits."""

        def write(start: Any, y: Any, inside: Any = None) -> None:
            d = jnp.exp(y - top) * share + each
            if inside is not None:
                d = jnp.where(inside, d, pallas_gpu_rows.zeros(self.width))
            place = out.at[self.index, pl.ds(start, self.width)]
            pallas_gpu_rows.store(place, d.astype(out.dtype))

        def step(i: Any, carry: Any) -> Any:
            write(self.start(i), self.logits(self.start(i)))
            return carry

        lax.fori_loop(0, self.whole * AT_ONCE, step, jnp.int32(0))
        if out is self.y and last:  # they overlap what others read above
            pallas_gpu_rows.wait_for_block()
        for (start, _), y in zip(self.rest(), last, strict=True):
            end = jnp.float32(self.form.end - start)
            write(start, self.scaled(y), self.numbers < end)

    # -------------------------------------------------------------------- columns
    def start(self, chunk: Any) -> Any:
        """The first column of this warpgroup in a chunk of all of them."""
        first = (chunk * self.form.warpgroups + self.warpgroup) * self.width
        return pl.multiple_of(first, self.width)

    def rest(self) -> list[tuple[Any, Any]]:
        """Chunks behind the whole steps: first columns, and which are not yet taken.

        The last chunks of a row overlap, so that none reaches over its end.
        """
        before = self.whole * AT_ONCE
        each = self.form.warpgroups * self.width
        found = []
        for i in range(before, -(-self.y.shape[1] // each)):
            wanted = (i * self.form.warpgroups + self.warpgroup) * self.width
            start = jnp.minimum(wanted, self.y.shape[1] - self.width)
            start = pl.multiple_of(start, 8)
            least = jnp.float32(wanted - start)
            end = jnp.float32(self.form.end - start)
            found.append((start, (self.numbers >= least) & (self.numbers < end)))
        return found

    @property
    def numbers(self) -> Any:
        """The columns' numbers, in registers."""
        return pallas_gpu_rows.loaded(self.columns)

    def logits(self, start: Any) -> Any:
        """The logits of some columns, float32 in registers."""
        return self.scaled(self.narrow(start))

    def narrow(self, start: Any) -> Any:
        """The numbers of some columns in registers, in their dtype."""
        place = self.y.at[self.index, pl.ds(start, self.width)]
        return pallas_gpu_rows.loaded_as_is(place)

    def scaled(self, y: Any) -> Any:
        """The logits that numbers are, float32."""
        y = y.astype(jnp.float32)
        return y if self.form.scale == 1 else y * self.form.scale
