"""Ages of a ring cache's slots, and other sums whose steps may wrap around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

B, T, S, N, H, WINDOW = 2, 3, 8, 2, 4, 5
RANDOM = np.random.default_rng(0)
Q = RANDOM.normal(size=(B, T, N, H)).astype(np.float32)
K, V = (RANDOM.normal(size=(B, S, N, H)).astype(np.float32) for _ in "kv")
FORCED = {"attention": "memory_bounded"}
LAST = 2**31 - 1
ENDS = (13, 5, 3, 0, -7, LAST, LAST - 1, -LAST - 1, -LAST + 2, 2**30)
"""Positions behind the last token; sums of some wrap around."""


def positions(end: Any) -> tuple[Any, Any]:
    """Those of queries, and of the tokens that a ring's slots hold last."""
    ages = (end - 1 - jnp.arange(S)) % S
    return end - T + jnp.arange(T), end - 1 - ages


def near(distance: Any) -> Any:
    return (distance >= 0) & (distance < WINDOW)


def of_distances(end: Any) -> Any:
    mine, theirs = positions(end)
    return near(mine[:, None] - theirs)


def of_sums(end: Any) -> Any:
    mine, theirs = positions(end)
    return near(-(theirs[None] - mine[:, None]))


def of_ages(end: Any) -> Any:
    ages = (end - 1 - jnp.arange(S)) % S
    return near(jnp.arange(T)[:, None] - (T - 1) + ages)


def of_each(end: Any) -> Any:
    mine, theirs = positions(jnp.stack([end, end - 3])[:, None])
    return near(mine[..., None] - theirs[:, None])[:, None]


def compared(end: Any) -> Any:
    mine, theirs = positions(end)
    return (theirs <= mine[:, None]) & (mine[:, None] - theirs < WINDOW)


def doubled(end: Any) -> Any:
    return near(2 * end + jnp.arange(T)[:, None] - (2 * end - 4 + jnp.arange(S)))


def linear(end: Any) -> Any:
    return near(end + jnp.arange(T)[:, None] - (end - 2 + jnp.arange(S)))


def narrow(dtype: str) -> Callable[[Any], Any]:
    """Distances in numbers of another size, without a sign or with one."""

    def keep(end: Any) -> Any:
        end = jnp.asarray(end).astype(dtype)
        mine, theirs = end + jnp.arange(T, dtype=dtype), jnp.arange(S, dtype=dtype)
        return near((mine[:, None] + 2) - (end + theirs))

    return keep


BOTH = "kv_positions i32[2,8] first_position i32[2,3] last_position i32[2,3]"
RINGS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "distances": (of_distances, BOTH),
    "sums": (of_sums, BOTH),
    "ages": (of_ages, BOTH),
    "of each sequence": (of_each, BOTH),
    "compared": (compared, None),
    "doubled": (doubled, "window"),
    "linear": (linear, "window"),
    "of 8 bits": (narrow("int8"), "window"),
    "without sign": (narrow("uint32"), None),
}
"""Masks of the end, and what is read: a mask where two positions are compared, whose
sums may wrap around by themselves."""


@pytest.mark.parametrize("name", RINGS)
def test_ages_are_positions(name: str) -> None:
    keep, wanted = RINGS[name]

    def attend(q: Any, k: Any, v: Any, end: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jax.nn.softmax(jnp.where(keep(end), scores, -1e30))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    fast, plain = rewriter.optimize(attend, implementation=FORCED), jax.jit(attend)
    for end in map(np.int32, ENDS):
        got, want = fast(Q, K, V, end), plain(Q, K, V, end)
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=f"{name} {end}")
    (site,) = fast.report().sites
    if wanted == "window":
        assert site.params["window"] != (None, None)
        assert "mask" not in site.shapes
    elif wanted:
        assert wanted in site.shapes
        assert "mask" not in site.shapes
    else:
        assert "mask" in site.shapes
