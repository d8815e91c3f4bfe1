"""Attention by cuDNN, through `jax.nn.dot_product_attention`.

cuDNN is fast on recent NVIDIA GPUs, for 16-bit operands and the masks it knows by
name. JAX does not promise that its call stays what it is, so that it cannot be part
of an exported program; and it can only be traced where cuDNN is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernel import Spec
from rewriter.verdict import YES, Verdict, all_of, no

PLAIN = frozenset({"q", "k", "v"})
TYPES = ("bfloat16", "float16")


def supports(spec: Spec) -> Verdict:
    """Takes 16-bit q, k, v, causal or not, with a window behind; asks cuDNN last."""
    verdict = all_of(_operands(spec), _types(spec), _masks(spec))
    return _asked(spec) if verdict.ok else verdict


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes for 128 queries and keys and more if their scores take 48 MiB.

    Measured on an H200 (``tests/bench/results/cudnn_h200.json``): 1.3 to 14 times as
    fast as XLA from there on, as fast or slower for 24 MiB and less.
    """
    del platform  # a GPU is all it supports
    (b, t, n, _), s = spec.shape("q"), spec.shape("k")[1]
    scores = 4 * b * n * t * s
    if min(t, s) >= FEW and scores >= SMALL:
        return YES
    text = f"{t} queries, {s} keys and scores of {scores >> 20} MiB"
    return no("small", f"{text} are so little that XLA is as fast")


FEW = 128
SMALL = 48 << 20


def _operands(spec: Spec) -> Verdict:
    more = sorted(set(spec.operands) - PLAIN)
    if more:
        return no("operands", f"cuDNN is not given {', '.join(more)}")
    if spec.symbolic:
        return no("symbolic", "cuDNN wants sizes that are numbers")
    return YES


def _types(spec: Spec) -> Verdict:
    kinds = {str(jnp.dtype(spec.dtype(name))) for name in PLAIN}
    out = spec.param("out_dtype")
    kinds |= {str(jnp.dtype(out))} if out else set()
    if spec.shape("q")[3] != spec.shape("v")[3]:
        return no("width", "cuDNN with values of another width was not tried")
    if len(kinds) == 1 and kinds <= set(TYPES):
        return YES
    return no("dtype", f"cuDNN takes one 16-bit float, not {', '.join(sorted(kinds))}")


def _masks(spec: Spec) -> Verdict:
    left, right = spec.param("window", (None, None))
    if spec.param("softcap") is not None:
        return no("softcap", "cuDNN has no soft cap")
    if (left, right) == (None, None):
        return YES
    if right != 0 or spec.param("shift", 0) != 0 or (left or 0) < 0:
        return no("window", "cuDNN's window ends at the query itself")
    if left is not None and spec.shape("q")[1] - left > spec.shape("k")[1]:
        return no("window", "the window leaves queries without keys")
    return YES


@functools.lru_cache(maxsize=1024)
def _asked(spec: Spec) -> Verdict:
    """What JAX says when it traces the call with its gradients."""
    arrays = {
        n: jax.ShapeDtypeStruct(spec.shape(n), spec.dtype(n)) for n in sorted(PLAIN)
    }
    params = {n: spec.param(n) for n in ("scale", "window")}
    b, t, n, _ = spec.shape("q")
    out = jax.ShapeDtypeStruct((b, t, n, spec.shape("v")[3]), spec.dtype("q"))

    def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        return jax.vjp(_call(**params), q, k, v)[1](cotangent)

    try:
        jax.eval_shape(both, arrays["q"], arrays["k"], arrays["v"], out)
    except Exception as problem:  # of many kinds, each with a reason in its text
        return no("cudnn", str(problem).splitlines()[0])
    return YES


def _call(
    scale: float, window: tuple[int | None, int | None]
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    left, right = window

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        (b, t), s = q.shape[:2], k.shape[1]
        more = {}
        if (t % 2 or s % 2) and (right is None or s < t):  # hides what is added
            more["query_seq_lengths"] = jnp.full((b,), t, jnp.int32)
            more["key_value_seq_lengths"] = jnp.full((b,), s, jnp.int32)
        out = jax.nn.dot_product_attention(
            _even(q), _even(k), _even(v),
            scale=scale,
            is_causal=right is not None,
            local_window_size=None if left is None else (left, 0),
            implementation="cudnn",
            **more,
        )  # fmt: skip
        return out[:, :t]

    return attention


def _even(x: jax.Array) -> jax.Array:
    """Adds a row to an odd number of them, of which cuDNN has no gradients."""
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))


def forward(
    *,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    softcap: float | None = None,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
    residuals: bool = False,
) -> Any:
    """Returns the result [b, t, n, e]; with residuals, what cuDNN's backward reads."""
    del shift, softcap, empty_rows, out_dtype
    attention = _call(scale, window)
    if not residuals:
        return attention(q, k, v)
    out, back = jax.vjp(attention, q, k, v)
    return out, tuple(jax.tree.leaves(back))


def backward(
    *,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: None,
    residuals: tuple[jax.Array, ...],
    cotangent: jax.Array,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    **others: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangents of q, k and v."""
    del out, others
    made = jax.eval_shape(lambda *x: jax.vjp(_call(scale, window), *x)[1], q, k, v)
    back = jax.tree.unflatten(jax.tree.structure(made), residuals)
    return dict(zip("qkv", back(cotangent), strict=True))
