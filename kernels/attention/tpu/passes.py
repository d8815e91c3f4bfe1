"""Forward and backward passes around the TPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.empty_rows import (
    NAN,
    PASSES,
    ZERO,
    complete_if_any_empty,
)
from rewriter.kernels.attention.tpu import (
    backward_kernel,
    bias_kernel,
    decode_layout,
    forward_kernel,
)
from rewriter.kernels.attention.tpu.config import (
    ANY,
    BackwardBlocks,
    Blocks,
    backward_clipped,
    backward_default,
    clipped,
    default,
)
from rewriter.kernels.attention.tpu.operands import heads_first
from rewriter.kernels.attention.tpu.schedule import Cut
from rewriter.kernels.attention.tpu.scores import Problem
from rewriter.kernels.attention.tpu.sizes import together
from rewriter.ops.kernel import Spec

if TYPE_CHECKING:
    from jax import Array

PARAMS = ("scale", "window", "shift", "softcap", "empty_rows", "out_dtype")


def problem(operands: dict[str, Any], params: dict[str, Any]) -> Problem:
    """Returns one use of attention."""
    (b, t, n, h), (_, s, heads, _) = operands["q"].shape, operands["k"].shape
    left, right = params.get("window", (None, None))
    cut = Cut(t, s, 0, 0, left, right, params.get("shift", 0))
    return Problem(
        cut, b, n, heads, h, operands["v"].shape[3], params.get("scale", 1.0),
        params.get("softcap"), params.get("empty_rows", "nan"), frozenset(operands),
    )  # fmt: skip


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    params = {n: given.pop(n) for n in PARAMS if n in given}
    return {n: jnp.asarray(x) for n, x in given.items() if x is not None}, params


def _spec(operands: dict[str, Any]) -> Spec:
    shapes = tuple((n, tuple(x.shape)) for n, x in operands.items())
    dtypes = tuple((n, str(x.dtype)) for n, x in operands.items())
    return Spec("attention", shapes, dtypes, ())


def _turned(operands: dict[str, Any]) -> dict[str, Any]:
    return {n: heads_first(x) if n in "qkv" else x for n, x in operands.items()}


def forward(
    *, config: Blocks | None = None, residuals: bool = False, **given: Any
) -> Any:
    """Returns attention [b, t, n, e].

    Args:
        config: Sizes of blocks; by default such as have room on every TPU.
        residuals: Whether to return ``(result, (kept,))``, kept float32 [b, n, 1, t]
            the log-sum-exp of rows; see `forward_kernel.forward`.
        **given: Operands and parameters of the op.
    """
    operands, params = _split(given)
    p, spec = problem(operands, params), _spec(operands)
    out_dtype = jnp.dtype(params.get("out_dtype") or operands["q"].dtype)
    shape, t = (p.b, p.n, p.cut.t, p.e), p.cut.t
    kind = together(spec)
    if kind == "all":
        p, arrays = decode_layout.every_head(p, operands)
    else:
        arrays = _turned(operands)
        p, arrays = decode_layout.by_group(p, arrays) if kind else (p, arrays)
    blocks = clipped(config or default(spec, ANY), p.cut.t, p.cut.s)
    out, *kept = forward_kernel.forward(p, blocks, arrays, out_dtype, residuals)
    out = heads_first(out.reshape(shape))
    if not residuals:
        return out
    return out, tuple(_by_head(x, shape[1], t) for x in kept)


def _by_head(x: Array, n: int, t: int) -> Array:
    """[b, heads, kinds, group t] as [b, n, kinds, t]."""
    b, heads, kinds, _ = x.shape
    x = x.reshape(b, heads, kinds, n // heads, t)
    return x.swapaxes(2, 3).reshape(b, n, kinds, t)


def backward(
    *,
    out: Array,
    residuals: tuple[Array, ...],
    cotangent: Array,
    config: BackwardBlocks | None = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns cotangents of q, k, v, bias, sinks and scale_factor.

    Args:
        out: [b, t, n, e], from `forward`.
        residuals: ``(kept,)``, from `forward`.
        cotangent: [b, t, n, e].
        config: Sizes of blocks; by default such as have room on every TPU.
        **given: Operands and parameters of the op.
    """
    operands, params = _split(given)
    p, arrays = problem(operands, params), _turned(operands)
    kept, wide_up = residuals[0], cotangent.astype(jnp.float32)
    empty = kept[:, :, -1] == -jnp.inf
    delta = heads_first((out.astype(jnp.float32) * wide_up).sum(-1, keepdims=True))
    delta = jnp.where(empty, 0.0, delta[..., 0])
    less = jnp.where(empty[:, :, None], jnp.inf, kept * p.unit)
    up = cotangent
    if p.may_be_empty and p.empty_rows in ZERO:  # nothing comes back to zeros
        up = jnp.where(empty.swapaxes(1, 2)[..., None], 0, up)
    arrays["up"] = heads_first(up.astype(operands["q"].dtype))
    blocks = config or backward_default(_spec(operands), ANY)
    blocks = backward_clipped(blocks, p.cut.t, p.cut.s)
    more = -p.cut.t % blocks.rows
    kept_rows = jnp.concatenate([less, delta[:, :, None]], 2)
    arrays["kept"] = jnp.pad(kept_rows, ((0, 0), (0, 0), (0, 0), (0, more)))
    scaled = "scale_factor" in operands
    dtype = jnp.dtype(jnp.float32) if scaled else operands["q"].dtype
    dq, dk, dv = (
        heads_first(x) for x in backward_kernel.backward(p, blocks, arrays, dtype)
    )
    grads = {"q": dq, "k": dk, "v": _empty_rows(p, dv, empty, wide_up)}
    if scaled:
        factor = operands["scale_factor"].astype(jnp.float32)
        grads["scale_factor"] = (dq * operands["q"].astype(jnp.float32)).sum()
        grads |= {"q": dq * factor, "k": dk * factor}
    if "bias" in operands:
        grads["bias"] = bias_kernel.gradient(p, blocks, arrays)
    if "sinks" in operands:
        share = operands["sinks"].astype(jnp.float32)[:, None]
        for i in range(kept.shape[2]):  # one by one, since large terms absorb digits
            share = share - kept[:, :, i]
        grads["sinks"] = -(jnp.exp(share) * delta).sum((0, 2))
    if p.may_be_empty and p.empty_rows in PASSES:
        lse = jnp.where(empty, -jnp.inf, 0.0)
        completed = lambda given: xla.with_passed(
            given, operands, params, out=out, lse=lse, cotangent=cotangent
        )
        grads = complete_if_any_empty(empty, grads, completed)
    return {n: x.astype(operands[n].dtype) for n, x in grads.items()}


def _empty_rows(p: Problem, dv: Array, empty: Array, up: Array) -> Array:
    """Adds the share of rows without keys, bool [b, n, t], to dv [b, s, heads, e]."""
    if not p.may_be_empty or p.empty_rows in ZERO:
        return dv
    if p.empty_rows in NAN:
        bad = empty.reshape(p.b, p.heads, -1).any(-1)[:, None, :, None]
        return jnp.where(bad, jnp.nan, dv)
    up = jnp.where(empty.swapaxes(1, 2)[..., None], up, 0).sum(1) / p.cut.s
    up = up.reshape(p.b, 1, p.heads, p.group, -1).sum(3)
    return dv.astype(jnp.float32) + up
