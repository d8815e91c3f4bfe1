"""Run by test_sharding.py on eight devices: attention with functions of its scores."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
FORCED = {"scored_attention": "memory_bounded", "attention": "memory_bounded"}
B, T, N, H = 4, 24, 4, 8
R = np.random.default_rng(0)
Q, K, V = (R.normal(size=(B, T, N, H)).astype("float32") for _ in range(3))
TABLE = R.normal(size=(N, 9)).astype("float32")
ODD = V.copy()
ODD[0, 3, 1], ODD[1, 5, 2] = np.inf, np.nan


def program(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Attention with an activation of scores, and a table by distance."""
    away = jnp.arange(T)[:, None] - jnp.arange(T)
    s = jax.nn.softplus(jnp.einsum("btnh,bsnh->bnts", q, k))
    s = s + table[:, jnp.clip(away, -4, 4) + 4]
    s = jnp.where(away >= 0, s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def main() -> None:
    """The result and gradients, on a mesh, in a checkpoint, and beside infinities."""
    loss = lambda f: lambda *a: (f(*a) * jnp.cos(jnp.arange(H))).sum()
    fast = rewriter.optimize(program, implementation=FORCED, strict=True)
    kept = jax.checkpoint(fast)
    heads = P("data", None, "model")
    for spec, table in ((heads, P("model")), (P("data"), P()), (P(), P())):
        for v in (V, ODD):
            args = [
                jax.device_put(a, NamedSharding(MESH, s))
                for a, s in zip((Q, K, v, TABLE), (spec,) * 3 + (table,), strict=True)
            ]
            (site,) = fast.report(*args).sites
            assert site.form == "scored_attention"
            assert site.replaced
            near(jax.jit(fast)(*args), program(Q, K, v, TABLE))
            assert "all-gather(" not in fast.lower(*args).compile().as_text()
            if v is V:
                wanted = jax.grad(loss(program), (0, 1, 2, 3))(Q, K, v, TABLE)
                for f in (fast, kept):
                    near(jax.jit(jax.grad(loss(f), (0, 1, 2, 3)))(*args), wanted)


def near(got: Any, want: Any) -> None:
    """Fails where arrays differ by more than rounding, or in what is finite."""
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
