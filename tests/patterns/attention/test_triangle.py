"""Triangle attention of protein models: each row attends, with one bias for all rows.

The functions are written from algorithms 13 and 14 of the supplement of "Highly
accurate protein structure prediction with AlphaFold" (2021). Each lays out heads, masks
and biases as the code base does that it is named after.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow
from tests.patterns.attention.functions.checks import FORCED, exact, far
from tests.patterns.attention.functions.checks import quickly as quickly

pytestmark = pytest.mark.once

L, C, N, H = 20, 16, 4, 8
draw = np.random.default_rng(0)


def matrix(*shape: int) -> Any:
    return (draw.normal(size=shape) / np.sqrt(shape[0])).astype("f4")


WEIGHTS = {
    "scale": np.ones(C, "f4"), "offset": np.zeros(C, "f4"), "bias": matrix(C, N),
    **{name: matrix(C, N, H) for name in ("q", "k", "v", "gate")},
    "gate_bias": np.ones((N, H), "f4"), "out": matrix(N, H, C) / 3,
}  # fmt: skip
PAIRS = draw.normal(size=(L, L, C)).astype("f4")
MASK = (draw.random((L, L)) < 0.8).astype("f4")
MASK[:, 0] = MASK[0] = 1  # no row is empty


def norm(x: Any, p: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["offset"]


def flat(z: Any, w: Any) -> Any:
    """Returns heads [i, j, n, h] of a matrix product."""
    return (z @ w.reshape(C, -1)).reshape(*z.shape[:-1], N, H)


def alphafold_2(z: Any, mask: Any, p: Any) -> Any:
    """Heads last, a mask that is added, and a bias with an axis in front."""
    z = norm(z, p)
    hidden = (1e9 * (mask - 1.0))[:, None, None, :]
    bias = jnp.einsum("qkc,ch->hqk", z, p["bias"])
    q = jnp.einsum("bqa,ahc->bqhc", z, p["q"]) * H**-0.5
    k = jnp.einsum("bka,ahc->bkhc", z, p["k"])
    v = jnp.einsum("bka,ahc->bkhc", z, p["v"])
    logits = jnp.einsum("bqhc,bkhc->bhqk", q, k) + hidden
    logits += jnp.expand_dims(bias, 0)
    out = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(logits), v)
    gate = jax.nn.sigmoid(jnp.einsum("bqc,chv->bqhv", z, p["gate"]) + p["gate_bias"])
    return jnp.einsum("bqhc,hco->bqo", out * gate, p["out"])


def alphafold_3(z: Any, mask: Any, p: Any) -> Any:
    """One row under `jax.vmap`, and a mask that is chosen."""
    z = norm(z, p)
    bias = jnp.einsum("ijc,ch->hij", z, p["bias"])

    def row(q: Any, k: Any, v: Any, seen: Any) -> Any:
        logits = jnp.einsum("qhc,khc->hqk", q * H**-0.5, k) + bias
        logits = jnp.where(seen[None, None, :] > 0, logits, -1e9)
        return jnp.einsum("hqk,khc->qhc", jax.nn.softmax(logits), v)

    out = jax.vmap(row)(*(flat(z, p[name]) for name in "qkv"), mask)
    gate = jax.nn.sigmoid(z @ p["gate"].reshape(C, -1))
    return (out.reshape(L, L, -1) * gate) @ p["out"].reshape(-1, C)


def openfold(z: Any, mask: Any, p: Any) -> Any:
    """Heads before positions, and a list of biases that are added one by one."""
    z = norm(z, p)
    hidden = (1e9 * (mask - 1))[..., :, None, None, :]
    bias = jnp.moveaxis(z @ p["bias"], -1, -3)[None]
    q, k, v = (flat(z, p[name]).swapaxes(-2, -3) for name in "qkv")
    a = jnp.matmul(q / jnp.sqrt(jnp.float32(H)).astype(q.dtype), k.swapaxes(-1, -2))
    for more in (hidden, bias):
        a = a + more
    out = jnp.matmul(jax.nn.softmax(a, -1), v).swapaxes(-2, -3)
    gate = jax.nn.sigmoid(flat(z, p["gate"]) + p["gate_bias"])
    return (out * gate).reshape(L, L, -1) @ p["out"].reshape(-1, C)


def boltz(z: Any, mask: Any, p: Any) -> Any:
    """A batch in front, and both biases added at once."""
    z, mask = norm(z[None], p), mask[None]
    hidden = (1e9 * (mask - 1))[:, :, None, None, :]
    bias = (z @ p["bias"]).transpose(0, 3, 1, 2)[:, None]
    q, k, v = (flat(z, p[name]).transpose(0, 1, 3, 2, 4) for name in "qkv")
    a = jnp.einsum("bihqc,bihkc->bihqk", q * H**-0.5, k) + (hidden + bias)
    out = jnp.einsum("bihqk,bihkc->bihqc", jax.nn.softmax(a, -1), v)
    out = out.transpose(0, 1, 3, 2, 4) * jax.nn.sigmoid(flat(z, p["gate"]))
    return (out.reshape(1, L, L, -1) @ p["out"].reshape(-1, C))[0]


def protenix(z: Any, mask: Any, p: Any) -> Any:
    """A softmax by hand."""
    z = norm(z, p)
    bias = jnp.transpose(z @ p["bias"], (2, 0, 1))
    q, k, v = (jnp.transpose(flat(z, p[name]), (0, 2, 1, 3)) for name in "qkv")
    a = jnp.matmul(q * H**-0.5, jnp.swapaxes(k, -1, -2))
    a = a + ((mask - 1) * 1e9)[:, None, None, :] + bias[None]
    e = jnp.exp(a - jax.lax.stop_gradient(a.max(-1, keepdims=True)))
    out = jnp.swapaxes(jnp.matmul(e / e.sum(-1, keepdims=True), v), 1, 2)
    out = out * jax.nn.sigmoid(jnp.einsum("ijc,chd->ijhd", z, p["gate"]))
    return out.reshape(L, L, -1) @ p["out"].reshape(-1, C)


def in_chunks(z: Any, mask: Any, p: Any) -> Any:
    """Some rows at a time, in a loop: the bias is that of all."""
    z = norm(z, p)
    bias = jnp.einsum("qkc,ch->hqk", z, p["bias"])

    def rows(given: Any) -> Any:
        x, seen = given
        q, k, v = (flat(x, p[name]) for name in "qkv")
        logits = jnp.einsum("bqhc,bkhc->bhqk", q * H**-0.5, k) + bias[None]
        logits += (1e9 * (seen - 1.0))[:, None, None, :]
        out = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(logits), v)
        return out * jax.nn.sigmoid(flat(x, p["gate"]))

    parts = z.reshape(4, L // 4, L, C), mask.reshape(4, L // 4, L)
    out = jax.lax.map(rows, parts).reshape(L, L, N * H)
    return out @ p["out"].reshape(-1, C)


def around_the_ending_node(f: Any) -> Any:
    """Returns the attention of columns."""

    def columns(z: Any, mask: Any, p: Any) -> Any:
        return jnp.swapaxes(f(jnp.swapaxes(z, 0, 1), mask.T, p), 0, 1)

    return columns


def in_layers(f: Any) -> Any:
    """Returns two layers of a loop, each in a checkpoint."""

    def layers(z: Any, mask: Any, p: Any) -> Any:
        def layer(z: Any, c: Any) -> Any:
            return z + jax.checkpoint(f)(z, mask, {**p, "q": p["q"] * c}), None

        return jax.lax.scan(layer, z, jnp.array([0.5, 1.0], z.dtype))[0]

    return layers


SPELLED = (alphafold_2, alphafold_3, openfold, boltz, protenix, in_chunks)
CASES = {
    **{f.__name__: f for f in SPELLED},
    **{f"{f.__name__}, columns": around_the_ending_node(f) for f in SPELLED},
    "alphafold_2, layers": in_layers(alphafold_2),
    "openfold, layers of columns": in_layers(around_the_ending_node(openfold)),
}


@pytest.mark.parametrize("name", slow.first(2, CASES))
def test_one_bias_for_all_rows_with_gradients(name: str) -> None:
    """No array has a number for each row, head, query and key."""
    f = CASES[name]

    def step(z: Any, p: Any) -> Any:
        weighted = lambda z, p: (f(z, MASK, p) * jnp.cos(jnp.arange(C))).sum()
        return jax.value_and_grad(weighted, (0, 1))(z, p)

    fast = rewriter.optimize(step, implementation=FORCED)
    (site,) = (s for s in fast.report(PAIRS, WEIGHTS).sites if s.op == "attention")
    assert (site.kernel, site.backward) == ("memory_bounded", True)
    assert f"f32[1,{N},{L},{L}]" in site.shapes
    got = jax.jit(fast)
    text = got.lower(PAIRS, WEIGHTS).as_text()
    assert not any(f"{rows}x{N}x{L}x{L}x" in text for rows in (L, L // 4))
    assert far(got(PAIRS, WEIGHTS), exact(step, [PAIRS, WEIGHTS])) < 3e-5
