"""A gated linear unit that holds both branches for one block of rows only.

The usual form writes both branches, [rows, f] each, and automatic
differentiation keeps them for the backward pass. This one loops over blocks
of rows, keeps nothing, and computes the branches again in the backward pass: two more
contractions for 2·rows·f fewer numbers in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import min_dim

from rewriter.kernels.gated_linear_unit.branches import Rows, Use, combine
from rewriter.kernels.gated_linear_unit.estimate import estimate
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.loops import scan, zero_after
from rewriter.kernels.shared.products import unturned
from rewriter.kernels.shared.row_blocks import over_blocks
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.device import Device
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.support.sizes import size_text
from rewriter.support.verdict import YES, Verdict, all_of, no


@dataclass(frozen=True)
class Block:
    """The config of both passes.

    Attributes:
        rows: Rows per block: enough to hide the set-up of a contraction.
    """

    rows: int = 512


DEFAULT = Block()


LARGE = Block(4096)
"""For GPUs."""


def default(spec: Spec, device: Device) -> Block:
    """Returns the block for a CPU, or a larger one for a GPU."""
    del spec
    return DEFAULT if device.platform == "cpu" else LARGE


def configs(spec: Spec, device: Device) -> list[Block]:
    """Returns blocks worth measuring, of fewer rows than there are."""
    rows = math.prod(spec.shape("x")[:-1])
    sizes = (256, 1024, 2048) if device.platform == "cpu" else (1024, 2048, 8192)
    return [Block(n) for n in sizes if n < rows]


PAYS_FROM = 1 << 26
"""The fewest bytes of both branches for which blocks save memory at about XLA's
time."""

PAYS_KEPT_FROM = 1 << 25
"""The same for branches that all layers keep for gradients."""


def supports(spec: Spec) -> Verdict:
    """Takes real floating operands, weights [k, f] and a known activation."""
    return all_of(
        *(_floating(spec, name) for name in spec.operands),
        *(_matrix(spec, name) for name in ("w_gate", "w_up")),
        _known(str(spec.param("activation", "silu"))),
    )


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU if both branches together take 64 MiB or more.

    There it takes about XLA's time, in a seventh of its memory at 128 MiB; for smaller
    ones, looping over blocks costs more than reading the branches from memory
    (``tests/bench/results/small.json``). On other platforms nothing shows that it beats
    XLA.
    """
    return _pays(spec, platform, 1, PAYS_FROM)


def profitable_backward(spec: Spec, platform: str, count: int) -> Verdict:
    """Returns the same for branches of `count` layers that are kept for gradients.

    From 32 MiB on it takes a third of XLA's memory and less, at 0.87 of its speed and
    more, measured as above.
    """
    return _pays(spec, platform, count, PAYS_KEPT_FROM)


def _pays(spec: Spec, platform: str, count: int, least: int) -> Verdict:
    if platform != "cpu":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if spec.symbolic:
        return YES
    rows, f = math.prod(spec.shape("x")[:-1]), spec.shape("w_gate")[-1]
    size = 2 * rows * f * jnp.dtype(spec.dtype("x")).itemsize * count
    if size >= least:
        return YES
    return no(
        "small", f"branches of {size_text(size)} are so small that XLA is as fast"
    )


def _floating(spec: Spec, name: str) -> Verdict:
    dtype = jnp.dtype(spec.dtype(name))
    if jnp.issubdtype(dtype, jnp.floating):
        return YES
    return no("dtype", f"{name} is {dtype}, expected a real floating dtype")


def _matrix(spec: Spec, name: str) -> Verdict:
    shape = spec.shape(name)
    if len(shape) == 2 and shape[0] == spec.shape("x")[-1]:
        return YES
    return no("shape", f"{name} is {shape}, expected ({spec.shape('x')[-1]}, f)")


def _known(activation: str) -> Verdict:
    if activation in ACTIVATIONS:
        return YES
    return no("activation", f"{activation} is not one of {', '.join(ACTIVATIONS)}")


def forward(
    *, residuals: bool = False, config: Block | None = None, **given: Any
) -> Any:
    """Returns the result; there are no residuals.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The block.
        **given: As for `reference`.
    """
    use = Use.of(given).without_slopes()

    def block(rows: Rows) -> tuple[jax.Array, tuple[()]]:
        rows = {**rows, "x": unturned(rows["x"])}
        return combine(*use.branches(rows), **use.joining).astype(use.dtype), ()

    out, _ = _over_blocks(block, _flat(use.by_row), (config or DEFAULT).rows, ())
    out = out.reshape(*use.x.shape[:-1], use.w_gate.shape[-1])
    return (out, ()) if residuals else out


def backward(
    *,
    out: None,
    residuals: tuple[()],
    cotangent: jax.Array,
    config: Block | None = None,
    **given: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangents of every operand.

    Args:
        out: Not needed.
        residuals: Empty.
        cotangent: [..., f].
        config: The block.
        **given: As for `reference`.
    """
    del out, residuals
    use = Use.of(given)
    shared, apart = use.shared, use.by_row
    wide = jnp.promote_types(use.x.dtype, jnp.float32)
    narrow = jnp.result_type(use.x, use.w_gate, use.w_up)
    dot = functools.partial(product, precision=use.precision, narrow=narrow, wide=wide)

    def block(rows: Rows) -> tuple[Rows, Rows]:
        part = unturned(rows["x"])
        rows = {**rows, "x": part}
        _, back = jax.vjp(
            functools.partial(combine, **use.joining), *use.branches(rows)
        )
        d_gate, d_up = back(rows["cotangent"].astype(wide))
        dx = dot(d_gate, use.w_gate, (1, 1)) + dot(d_up, use.w_up, (1, 1))
        by_row = {"x": dx, "rows_gate": d_gate, "rows_up": d_up}
        sums = {
            "w_gate": dot(part, d_gate, (0, 0)), "w_up": dot(part, d_up, (0, 0)),
            "b_gate": d_gate.sum(0), "b_up": d_up.sum(0),
        }  # fmt: skip
        return (
            {n: by_row[n].astype(a.dtype) for n, a in apart.items()},
            {n: sums[n] for n in shared},
        )

    rows = _flat({**apart, "cotangent": cotangent})
    zero = zero_after(cotangent, dtype=wide)
    none = {n: jnp.full(a.shape, zero) for n, a in shared.items()}
    by_row, sums = _over_blocks(block, rows, (config or DEFAULT).rows, none)
    return {
        **{n: y.reshape(apart[n].shape) for n, y in by_row.items()},
        **{n: y.astype(shared[n].dtype) for n, y in sums.items()},
    }


def product(
    a: jax.Array,
    b: jax.Array,
    summed: tuple[int, int],
    *,
    precision: str | None,
    narrow: Any,
    wide: Any,
) -> jax.Array:
    """Returns the product of two matrices over an axis of each.

    Args:
        a: One matrix.
        b: The other.
        summed: An axis of each.
        precision: As `jax.lax.Precision`, by name.
        narrow: The dtype in which they are multiplied.
        wide: The dtype in which products are added up.
    """
    dims = (((summed[0],), (summed[1],)), ((), ()))
    return jax.lax.dot_general(
        unturned(a.astype(narrow)), b.astype(narrow), dims, precision=precision,
        preferred_element_type=wide,
    )  # fmt: skip


def _flat(arrays: Rows) -> Rows:
    """The arrays with one axis of rows."""
    return {
        n: a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for n, a in arrays.items()
    }


def _over_blocks(
    block: Callable[[Rows], tuple[Any, Any]], rows: Rows, size: int, start: Any
) -> tuple[Any, Any]:
    """Runs a function over blocks of rows, adding up its second results.

    Args:
        block: The function.
        rows: The rows.
        size: Rows of a block.
        start: Zeros like the second result.
    """
    count = rows["x"].shape[0]

    def step(sums: Any, part: Rows) -> tuple[Any, Any]:
        out, more = block(part)
        return jax.tree.map(jnp.add, sums, more), out

    if not isinstance(count, int):
        own = lambda part, sums: step(sums, part)
        return over_blocks(own, rows, start, min_dim(size, count))[::-1]
    whole = count // size * size
    if whole <= size:
        return block(rows)

    parts = {
        n: a[:whole].reshape(count // size, size, a.shape[-1]) for n, a in rows.items()
    }
    sums, out = scan(step, start, parts)
    out = jax.tree.map(lambda y: y.reshape(whole, y.shape[-1]), out)
    if whole < count:
        sums, rest = step(sums, {n: a[whole:] for n, a in rows.items()})
        out = jax.tree.map(lambda *ys: jnp.concatenate(ys), out, rest)
    return out, sums


KERNEL = XLA.kernel(
    "gated_linear_unit", forward, backward, supports,
    Speed(profitable, profitable_backward, estimate=estimate),
    Space(Block, default, configs), flat=True,
)  # fmt: skip
