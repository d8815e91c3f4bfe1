"""The last rounding of a result to 16 bits is the program's, and so are those of x.

A kernel leaves out roundings between its steps. A result that is rounded and widened
again has few digits, and what reads it sees those. So has an array that a program
rounds for one of its uses alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

DRAW = np.random.default_rng(0)
KERNELS = {
    "rms_norm": "reference",
    "layer_norm": "reference",
    "group_norm": "reference",
    "linear_cross_entropy": "reference",
    "cross_entropy": "reference",
    "gated_linear_unit": "reference",
    "attention": "reference",
}


def normal(*shape: int) -> np.ndarray:
    return DRAW.normal(size=shape).astype("f4")


X, G, C = normal(8, 32), normal(32), normal(32)
W, LABELS = normal(32, 24), DRAW.integers(0, 24, 8)
Q, K, V = (normal(1, 16, 2, 8) for _ in range(3))


def rms(x: Any, g: Any, c: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def layer(x: Any, g: Any, c: Any) -> Any:
    d = x - x.mean(-1, keepdims=True)
    return d * lax.rsqrt((d * d).mean(-1, keepdims=True) + 1e-6) * g + c


def groups(x: Any, g: Any, c: Any) -> Any:
    y = x.reshape(2, 4, 4, 8)
    d = y - y.mean((1, 3), keepdims=True)
    d = d * lax.rsqrt((d * d).mean((1, 3), keepdims=True) + 1e-5)
    return d.reshape(2, 4, 32) * g + c


def loss(x: Any, w: Any, labels: Any) -> Any:
    logits = x @ w
    at = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jax.nn.logsumexp(logits, -1) - at


def unit(x: Any, w: Any, w2: Any) -> Any:
    return jax.nn.silu(x @ w) * (x @ w2)


def attention(q: Any, k: Any, v: Any) -> Any:
    w = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 3)
    return jnp.einsum("bnts,bsnh->btnh", w, v)


OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rms": (rms, (X, G, C)),
    "layer": (layer, (X, G, C)),
    "groups": (groups, (X, G, C)),
    "loss": (loss, (X, W, LABELS)),
    "unit": (unit, (X, W, W[::-1])),
    "attention": (attention, (Q, K, V)),
}
ENDS: dict[str, Callable[[Any, Any], Any]] = {
    "as it is": lambda x, d: x.astype(d).astype("f4"),
    "turned before": lambda x, d: x.astype(d).T.astype("f4"),
    "turned behind": lambda x, d: x.astype(d).astype("f4").T,
    "of one more axis": lambda x, d: x.astype(d).astype("f4")[None],
    "in part": lambda x, d: x.astype(d).astype("f4")[1:],
    "of the other sign": lambda x, d: -x.astype(d).astype("f4"),
    "doubled": lambda x, d: x.astype(d).astype("f4") * 2,
    "halved": lambda x, d: x.astype(d).astype("f4") / 2,
    "twice": lambda x, d: x.astype(d).astype("f4").astype(d).astype("f4"),
    "behind a barrier": lambda x, d: lax.optimization_barrier(x.astype(d)).astype("f4"),
}


def few_digits(x: Any, dtype: Any) -> bool:
    tiny = abs(x) < float(jnp.finfo(dtype).tiny)
    return bool((tiny | (x == x.astype(dtype).astype("f4"))).all())


def ended(op: str, end: str, dtype: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    f, args = OPS[op]
    return (lambda *given: ENDS[end](f(*given), dtype)), args


@pytest.mark.once
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("op", OPS)
def test_each_end(op: str, end: str, dtype: Any) -> None:
    f, args = ended(op, end, dtype)
    fast = rewriter.optimize(f, implementation=KERNELS)
    got, want = fast(*args), jax.jit(f)(*args)
    assert any(s.replaced for s in fast.report().sites)
    assert few_digits(got, dtype)
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, want, step, 1e-6)


@pytest.mark.parametrize("op", ["rms", "loss"])
def test_an_end(op: str) -> None:
    test_each_end(op, "as it is", jnp.bfloat16)


@pytest.mark.once
@pytest.mark.parametrize("op", OPS)
def test_gradients(op: str) -> None:
    """A cotangent is rounded where the result is."""
    f, args = ended(op, "as it is", jnp.bfloat16)
    total = lambda *given: (f(*given) * 1.2345).sum()
    want = jax.grad(total)(*args)
    with rewriter.config(implementation=KERNELS):
        one = jax.grad(rewriter.optimize(total))(*args)
        other = rewriter.optimize(jax.grad(total))(*args)
    for got in (one, other):
        np.testing.assert_allclose(got, want, 1e-4, 1e-4 * abs(want).max())


def of_both(x: Any, mean: Any, g: Any) -> Any:
    return x * lax.rsqrt((mean * mean).mean(-1, keepdims=True) + 1e-6) * g


narrow = lambda x: x.astype(jnp.bfloat16).astype("f4")
USES: dict[str, Callable[..., Any]] = {
    "x of an input": lambda x, g, _: of_both(narrow(x), x, g),
    "squares of an input": lambda x, g, _: of_both(x, narrow(x), g),
    "x": lambda x, g, _: of_both(narrow(jnp.sin(x)), jnp.sin(x), g),
    "squares": lambda x, g, _: of_both(jnp.sin(x), narrow(jnp.sin(x)), g),
    "turned x": lambda x, g, _: of_both(narrow(jnp.sin(x).T).T, jnp.sin(x), g),
    "a view of an input": lambda x, g, _: of_both(
        narrow(x.reshape(4, 64)).reshape(8, 32), x, g
    ),
    "mean": lambda x, g, c: layer(x, g, c) + narrow(x).mean(-1, keepdims=True),
    "a centred input": lambda x, g, c: of_both(
        x - narrow(x).mean(-1, keepdims=True), x - x.mean(-1, keepdims=True), g
    ),
    "gate": lambda x, w, w2: jax.nn.silu(narrow(x) @ w) * (x @ w2),
    "gate of a product": lambda x, w, w2: (
        unit(jnp.sin(x), w, w2)
        + jax.nn.silu(narrow(jnp.sin(x)) @ w) * (jnp.sin(x) @ w2)
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("use", USES)
def test_what_is_rounded_for_one_use(use: str) -> None:
    """It is another array there, and no kernel reads the one without the rounding."""
    f = USES[use]
    args = (X, W, W[::-1]) if "gate" in use else (X, G, C)
    got = rewriter.optimize(f, implementation=KERNELS)(*args)
    np.testing.assert_allclose(got, jax.jit(f)(*args), 2e-6, 2e-6)


BITS = DRAW.integers(-127, 128, (32, 24)).astype("i1")
FINE = np.asarray(DRAW.normal(size=(32, 24)), "f4").astype(jnp.float8_e4m3fn)
KEYS = DRAW.integers(-127, 128, (1, 16, 2, 8)).astype("i1")
HALF, BRAIN = jnp.float16, jnp.bfloat16


def matrix(bits: Any, dtype: Any) -> Any:
    return bits.astype(dtype) * 0.0173


STORED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gate": (lambda x, w, w2: unit(x, matrix(w, HALF), w2), (X, BITS, W)),
    "up": (lambda x, w, w2: unit(x, w, matrix(w2, BRAIN)), (X, W, BITS)),
    "both": (
        lambda x, w, w2: unit(x, matrix(w, HALF), matrix(w2, HALF)),
        (X, BITS, BITS[::-1]),
    ),
    "gate of floats": (lambda x, w, w2: unit(x, matrix(w, BRAIN), w2), (X, FINE, W)),
    "turned": (lambda x, w, w2: unit(x, matrix(w.T, BRAIN).T, w2), (X, BITS, W)),
    "divided": (lambda x, w, w2: unit(x, w.astype(BRAIN) / 57.0, w2), (X, BITS, W)),
    "on the left": (
        lambda x, w, w2: unit(x, 0.0173 * w.astype(HALF), w2),
        (X, BITS, W),
    ),
    "logits": (lambda x, w, at: loss(x, matrix(w, BRAIN), at), (X, BITS, LABELS)),
    "keys": (lambda q, k, v: attention(q, matrix(k, BRAIN), v), (Q, KEYS, V)),
    "values": (lambda q, k, v: attention(q, k, matrix(v, BRAIN)), (Q, K, KEYS)),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("which", STORED)
def test_numbers_of_stored_matrices(which: str) -> None:
    """Integers times a number in 16 bits: its rounding says which numbers they are."""
    f, args = STORED[which]
    fast = rewriter.optimize(f, implementation=KERNELS)
    assert any(s.replaced for s in rewriter.explain(fast)(*args).sites)
    with jax.disable_jit():  # XLA leaves out roundings to bfloat16
        got, want = (g(*map(jnp.asarray, args)) for g in (fast, f))
    np.testing.assert_allclose(got, want, 2e-5, 2e-5 * abs(want).max())
