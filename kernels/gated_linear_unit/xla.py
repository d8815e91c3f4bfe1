"""A gated linear unit that holds both branches for one block of rows only.

The usual form writes both branches, [rows, f] each, and automatic
differentiation keeps them for the backward pass. This one walks over blocks
of rows, keeps nothing, and computes the branches again going back: two more
contractions for 2·rows·f fewer numbers in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.device import Device
from rewriter.kernel import Spec
from rewriter.kernels.gated_linear_unit.reference import (
    ACTIVATIONS,
    Bounds,
    branch,
    combine,
)
from rewriter.verdict import YES, Verdict, all_of, no


@dataclass(frozen=True)
class Block:
    """The config of both passes.

    Attributes:
        rows: Rows per block: so many that a contraction's set-up does not show.
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
"""Bytes of both branches from which holding them whole costs more than time."""

PAYS_KEPT_FROM = 1 << 25
"""Bytes of the branches of all layers from which keeping them for gradients does."""


def supports(spec: Spec) -> Verdict:
    """Takes real floating operands, weights [k, f] and a known activation."""
    return all_of(
        *(_floating(spec, name) for name in spec.operands),
        *(_matrix(spec, name) for name in ("w_gate", "w_up")),
        _known(str(spec.param("activation", "silu"))),
    )


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU where both branches together take 64 MiB or more.

    There it takes about XLA's time, in a seventh of its memory at 128 MiB; in smaller
    ones walking over blocks costs more than reading the branches from memory
    (``tests/bench/results/small.json``). On other platforms nothing shows that it beats
    XLA.
    """
    return _pays(spec, platform, 1, PAYS_FROM)


def profitable_backward(spec: Spec, platform: str, count: int) -> Verdict:
    """Returns the same where the branches of so many layers are kept for gradients.

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
    return no("small", f"branches of {size >> 10} KiB are so small that XLA is as fast")


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
    return no("activation", f"{activation} is none of {', '.join(ACTIVATIONS)}")


def forward(
    *,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    activation: str = "silu",
    beta: float = 1.0,
    clip_gate: Bounds = (None, None),
    clip_up: Bounds = (None, None),
    up_shift: float = 0.0,
    precision: str | None = None,
    out_dtype: str | None = None,
    residuals: bool = False,
    config: Block | None = None,
) -> Any:
    """Returns the result; there are no residuals."""
    size = (config or DEFAULT).rows

    def block(rows: jax.Array) -> jax.Array:
        gate = branch(rows, w_gate, b_gate, precision)
        up = branch(rows, w_up, b_up, precision)
        y = combine(gate, up, activation, beta, clip_gate, clip_up, up_shift)
        return y.astype(out_dtype or x.dtype)

    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    whole = flat.shape[0] // size * size
    if whole <= size:
        out = block(flat)
    else:
        parts = flat[:whole].reshape(-1, size, x.shape[-1])
        out = jax.lax.map(block, parts).reshape(whole, -1)
        if whole < flat.shape[0]:
            out = jnp.concatenate([out, block(flat[whole:])])
    out = out.reshape(*x.shape[:-1], w_gate.shape[-1])
    return (out, ()) if residuals else out


def backward(
    *,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    out: None,
    residuals: tuple[()],
    cotangent: jax.Array,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    activation: str = "silu",
    beta: float = 1.0,
    clip_gate: Bounds = (None, None),
    clip_up: Bounds = (None, None),
    up_shift: float = 0.0,
    precision: str | None = None,
    out_dtype: str | None = None,
    config: Block | None = None,
) -> dict[str, jax.Array]:
    """Returns the cotangents of every operand."""
    del out, residuals, out_dtype
    wide = jnp.promote_types(x.dtype, jnp.float32)
    narrow = jnp.result_type(x, w_gate, w_up)

    def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        dims = (((contract[0],), (contract[1],)), ((), ()))
        a, b = a.astype(narrow), b.astype(narrow)
        return jax.lax.dot_general(
            a, b, dims, precision=precision, preferred_element_type=wide
        )

    def block(rows: jax.Array, ct: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        gate = branch(rows, w_gate, b_gate, precision)
        up = branch(rows, w_up, b_up, precision)
        join = lambda g, u: combine(
            g, u, activation, beta, clip_gate, clip_up, up_shift
        )
        _, back = jax.vjp(join, gate, up)
        d_gate, d_up = back(ct.astype(wide))
        sums = []
        if b_gate is not None:
            sums.append(d_gate.sum(0))
        if b_up is not None:
            sums.append(d_up.sum(0))
        dx = dot(d_gate, w_gate, (1, 1)) + dot(d_up, w_up, (1, 1))
        weights = [dot(rows, d_gate, (0, 0)), dot(rows, d_up, (0, 0))]
        return dx.astype(x.dtype), [*weights, *sums]

    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    cotangent = cotangent.reshape(flat.shape[0], w_gate.shape[-1])
    dx, sums = _over_blocks(block, flat, cotangent, (config or DEFAULT).rows)
    names = ["w_gate", "w_up", "b_gate", "b_up"]
    operands = [w_gate, w_up, b_gate, b_up]
    present = [(n, o) for n, o in zip(names, operands, strict=True) if o is not None]
    grads = {n: s.astype(o.dtype) for (n, o), s in zip(present, sums, strict=True)}
    return {"x": dx.reshape(x.shape), **grads}


def _over_blocks(
    block: Callable[..., tuple[jax.Array, list[jax.Array]]],
    rows: jax.Array,
    cotangent: jax.Array,
    size: int,
) -> tuple[jax.Array, list[jax.Array]]:
    """Runs a function over blocks of rows, adding up its second results."""
    whole = rows.shape[0] // size * size
    if whole <= size:
        return block(rows, cotangent)

    def step(sums: list[jax.Array], part: Any) -> tuple[list[jax.Array], jax.Array]:
        dx, more = block(*part)
        return [a + b for a, b in zip(sums, more, strict=True)], dx

    parts = tuple(a[:whole].reshape(-1, size, a.shape[-1]) for a in (rows, cotangent))
    zeros = jax.eval_shape(lambda *p: block(*p)[1], parts[0][0], parts[1][0])
    start = [jnp.zeros(z.shape, z.dtype) for z in zeros]
    sums, dx = jax.lax.scan(step, start, parts)
    dx = dx.reshape(whole, rows.shape[-1])
    if whole < rows.shape[0]:
        sums, rest = step(sums, (rows[whole:], cotangent[whole:]))
        dx = jnp.concatenate([dx, rest])
    return dx, sums
