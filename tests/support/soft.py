"""A small attention, its op and a recording kernel, for tests of sites."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.kernel import Kernel
from rewriter.ops.op import Op, Operand


def _scores(q: Any, k: Any, bias: Any, lengths: Any, scale: float) -> jax.Array:
    scores = jnp.einsum("bth,bsh->bts", q, k) * scale
    if bias is not None:
        scores = scores + bias
    if lengths is not None:
        keep = jnp.arange(k.shape[1]) < lengths[:, None, None]
        scores = jnp.where(keep, scores, -1e30)
    return scores


def reference(
    *, q: Any, k: Any, v: Any, bias: Any = None, lengths: Any = None, scale: float = 1.0
) -> jax.Array:
    """Softmax attention of one head: [b, t, h], [b, s, h], [b, s, e]."""
    p = jax.nn.softmax(_scores(q, k, bias, lengths, scale))
    return jnp.einsum("bts,bse->bte", p, v)


OP = Op(
    name="soft",
    operands=(
        Operand("q", "b t h", True), Operand("k", "b s h", True),
        Operand("v", "b s e", True), Operand("bias", "b|1 t s"),
        Operand("lengths", "b|1"),
    ),
    out="b t e",
    reference=reference,
    defaults={"scale": 1.0},
    parallel="b",
)  # fmt: skip


def recording(
    name: str = "recording",
    *,
    times: float = 1.0,
    extra: bool = False,
    empty: bool = False,
    **options: Any,
) -> tuple[Kernel, list[tuple[Any, ...]]]:
    """Returns a kernel with residuals and the list of calls made to it.

    Args:
        name: The kernel's name.
        times: The result is multiplied by this, to tell kernels apart.
        extra: Whether to save a second residual.
        empty: Whether to save one without elements before all others.
        options: Further fields of the kernel.
    """
    calls: list[tuple[Any, ...]] = []

    def forward(
        *, q: Any, k: Any, v: Any, bias: Any = None, lengths: Any = None,
        scale: float = 1.0, residuals: bool = False,
    ) -> Any:  # fmt: skip
        calls.append(("forward", q.shape, k.shape, residuals))
        s = _scores(q, k, bias, lengths, scale)
        lse = jax.nn.logsumexp(s, -1)
        out = jnp.einsum("bts,bse->bte", jnp.exp(s - lse[..., None]), v) * times
        saved = (lse, lse[:, 0].sum(-1)) if extra else (lse,)
        if empty:
            saved = (jnp.zeros((0, 2), jnp.int8), *saved)
        return (out.astype(q.dtype), saved) if residuals else out.astype(q.dtype)

    def backward(
        *, q: Any, k: Any, v: Any, out: Any, residuals: Any, cotangent: Any,
        bias: Any = None, lengths: Any = None, scale: float = 1.0,
    ) -> dict[str, jax.Array]:  # fmt: skip
        calls.append(("backward", q.shape, k.shape, len(residuals)))
        assert not empty or residuals[0].shape == (0, 2), residuals[0]
        lse = residuals[int(empty)]
        p = jnp.exp(_scores(q, k, bias, lengths, scale) - lse[..., None])
        dp = jnp.einsum("bte,bse->bts", cotangent, v)
        ds = p * (dp - (cotangent * out).sum(-1, keepdims=True))
        grads = {
            "q": scale * jnp.einsum("bts,bsh->bth", ds, k),
            "k": scale * jnp.einsum("bts,bth->bsh", ds, q),
            "v": jnp.einsum("bts,bte->bse", p, cotangent),
        }
        if bias is not None:
            grads["bias"] = ds.sum(0, keepdims=True) if bias.shape[0] == 1 else ds
        return {
            n: g.astype({"q": q, "k": k, "v": v, "bias": bias}[n].dtype)
            for n, g in grads.items()
        }

    kernel = Kernel(
        name, "soft", ("cpu", "cuda", "tpu"), 1, forward=forward,
        backward=options.pop("backward", backward), memory_bounded=True, **options,
    )  # fmt: skip
    return kernel, calls
