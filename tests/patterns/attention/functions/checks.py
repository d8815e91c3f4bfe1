"""Checks of attention by a function of scores: numbers, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention.xla import config
from tests.spellings.attention.scores import B, H, N, S, T

FORCED = {"attention": "memory_bounded", "scored_attention": "memory_bounded"}
OP = "scored_attention"
UP = np.cos(np.arange(B * T * N * H)).reshape(B, T, N, H).astype("float32")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tiles for small shapes, and code that compiles fast."""
    monkeypatch.setattr(config, "DEFAULT", config.Blocks(8, 16, 1 << 9, 1 << 9))
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that gives the result, and gradients of all arrays."""

    def both(*arrays: Any) -> Any:
        out, back = jax.vjp(f, *arrays)
        return out, back(UP.astype(out.dtype))

    return both


def far(got: Any, want: Any) -> float:
    """Returns the largest error of arrays, by the size of the largest number."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(g - w).max() / (np.abs(w).max() + 1e-2)) for g, w in pairs)


def exact(f: Callable[..., Any], arrays: list[Any]) -> Any:
    """Returns what a function gives in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def found(f: Callable[..., Any], *arrays: Any) -> Any:
    """Returns the only site of a function."""
    (site,) = rewriter.optimize(f, implementation=FORCED).report(*arrays).sites
    return site


def over_layers(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns attention in two layers of a loop."""

    def layers(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        step = lambda x, c: (x + f(x, k, v, *(a * c for a in arrays)), None)
        return jax.lax.scan(step, q, jnp.array([0.5, 1.0], q.dtype))[0]

    return layers


def stacked(arrays: list[Any]) -> list[Any]:
    """Returns two different sets of arrays along a new axis."""
    return [np.stack([x, x * np.float32(0.5)]) for x in arrays]


def loss_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the sum of a result, with a number for each of its places."""
    return lambda *arrays: (f(*arrays) * UP).sum()


CONTEXTS = {
    "vmap": lambda f, a: (jax.vmap(f), stacked(a)),
    "scan": lambda f, a: (over_layers(f), a),
    "checkpoint": lambda f, a: (jax.grad(loss_of(jax.checkpoint(f))), a),
    "gradients in the program": lambda f, a: (jax.grad(loss_of(f), range(len(a))), a),
    "scan of checkpoints": lambda f, a: (
        jax.grad(loss_of(over_layers(jax.checkpoint(f))), range(len(a))), a,
    ),
}  # fmt: skip
"""What is around a site: a function, and its arrays, of attention and its arrays."""


def check_in_context(context: str, f: Callable[..., Any], arrays: list[Any]) -> None:
    """Checks that one site is found in a context, and its numbers."""
    f, arrays = CONTEXTS[context](f, arrays)
    site, fast = found(f, *arrays), rewriter.optimize(f, implementation=FORCED)
    assert (site.form, site.kernel) == (OP, "memory_bounded")
    assert site.backward == (context not in ("vmap", "scan"))
    assert far(fast(*arrays), exact(f, arrays)) < 3e-5


def check_bounded(f: Callable[..., Any], arrays: list[Any]) -> None:
    """Checks that no array of all queries and keys is made, as there is without us."""
    fast = rewriter.optimize(f, implementation=FORCED)
    text = jax.jit(with_gradients(fast)).lower(*arrays).as_text()
    assert f"{T}x{S}x" not in text
    assert f"{T}x{S}x" in jax.jit(with_gradients(f)).lower(*arrays).as_text()


def check_gradients(f: Callable[..., Any], arrays: list[Any]) -> None:
    """Checks numbers and gradients of one site, in the dtype of its arrays."""
    fast = rewriter.optimize(f, implementation=FORCED)
    got = jax.jit(with_gradients(fast))(*arrays)
    got = jax.tree.map(lambda x: np.asarray(x, np.float64), got)
    close = 3e-5 if arrays[0].dtype == jnp.float32 else 5e-2
    assert far(got, exact(with_gradients(f), arrays)) < close
