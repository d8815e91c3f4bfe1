"""Padding that has a segment of its own and lies behind a length sees no key.

In equal segments every query sees itself, and under a length of at least one every
query sees the first key. Under both, a padded query sees none.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.support.arrays import normal
from tests.support.programs import FORCED

pytestmark = pytest.mark.once

T, LENGTH = 12, 8
SEGMENTS = np.asarray([0, 0, 0, 1, 1, 1, 1, 1, -1, -1, -1, -1], np.int32)
AT = np.arange(T)
Q, K, V = (normal(1, T, 2, 4, seed=i) for i in range(3))
LOWEST = float(np.finfo(np.float32).min)


def same(s: Any) -> Any:
    return s[:, None] == s


def fills(fill: float) -> Any:
    return lambda scores, keep: jnp.where(keep, scores, fill)


def adds(fill: float) -> Any:
    return lambda scores, keep: scores + jnp.where(keep, 0.0, fill)


FIXED = {
    "numbers of segments": lambda s, n: same(s) & (s >= 0),
    "a length": lambda s, n: same(s) & (AT < LENGTH),
    "not at or behind it": lambda s, n: same(s) & ~(AT >= LENGTH),
    "causal": lambda s, n: same(s) & (AT < LENGTH) & (AT[:, None] >= AT),
    "to the last key": lambda s, n: same(s) & (AT <= LENGTH - 1),
    "of queries": lambda s, n: same(s) & (s >= 0) & (s >= 0)[:, None],
    "no segment sees the padding": lambda s, n: same(s) & (s != -1),
}
GIVEN = {
    "at least one": lambda s, n: same(s) & (jnp.maximum(n, 1) > AT),
    "clipped": lambda s, n: same(s) & (jnp.clip(n, 2, T) > AT),
}
SPELLED = {name: (keep, fills(-1e9)) for name, keep in (FIXED | GIVEN).items()}
for spelled, hide in {
    "lowest": fills(LOWEST), "added": adds(-1e9), "infinite, added": adds(-np.inf),
}.items():  # fmt: skip
    SPELLED[f"{spelled}, a length"] = FIXED["a length"], hide
    SPELLED[f"{spelled}, at least one"] = GIVEN["at least one"], hide


@pytest.mark.parametrize("name", SPELLED)
def test_padded_rows_give_what_is_written(name: str) -> None:
    keep, hide = SPELLED[name]

    def both(q: Any, k: Any, v: Any, n: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> Any:
            scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
            weights = jax.nn.softmax(hide(scores, keep(jnp.asarray(SEGMENTS), n)))
            out = jnp.einsum("bnts,bsnh->btnh", weights, v)
            return (out * Q[:, ::-1]).sum(), out

        return jax.grad(attention, (0, 1, 2), has_aux=True)(q, k, v)

    args = Q, K, V, jnp.int32(LENGTH)
    fast = rewriter.optimize(both, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert site.replaced
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6),
        fast(*args),
        jax.jit(both)(*args),
    )
