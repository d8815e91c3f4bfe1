"""Run by test_sharding.py on eight devices: masks of data, and of sums that wrap."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
HEADS = NamedSharding(MESH, P("data", None, "model"))
ROWS = NamedSharding(MESH, P("data"))
FORCED = {"attention": ["memory_bounded", "xla"]}
B, T, N, H = 8, 32, 4, 8
Q, K, V = (jax.random.normal(jax.random.key(i), (B, T, N, H)) for i in range(3))
keys = jnp.arange(T, dtype=jnp.int32)
MOST = np.iinfo("int32").max
ENDS = np.array([0, 3, T - 1, T, MOST, MOST - 1, -1, -MOST - 1], "int32")
TIMES = np.sort(np.random.default_rng(0).random((B, T)).astype("float32").round(1), 1)
BITS = np.random.default_rng(1).random((B, N, T, T)) < 0.7

Keep = Callable[[Any], Any]
MASKS: dict[str, tuple[Keep, np.ndarray]] = {
    "times": (lambda t: (t[:, :, None] >= t[:, None])[:, None], TIMES),
    "times apart": (
        lambda t: (abs(t[:, :, None] - t[:, None]) <= jnp.float32(0.3))[:, None], TIMES
    ),
    "booleans": (lambda x: x, BITS),
    "booleans of one head": (lambda x: x, BITS[:, :1]),
    "one more": (lambda n: (keys < n[:, None] + 1)[:, None, None], ENDS),
    "one less": (lambda n: (keys <= n[:, None] - 1)[:, None, None], ENDS),
    "moved": (
        lambda n: (keys <= keys[:, None] + n[:, None, None])[:, None], ENDS
    ),
    "moved back": (
        lambda n: ((keys[:, None] - n[:, None, None]) >= keys)[:, None], ENDS
    ),
    "unsigned": (
        lambda n: (keys.astype("uint32") < n[:, None] - 1)[:, None, None],
        ENDS.astype("uint32"),
    ),
}  # fmt: skip
"""Masks of what is given for each sequence, and that."""
LEAST = 2 * 8
"""How many sites are replaced at least: forward, and with gradients."""


def attention(keep: Keep, q: Any, k: Any, v: Any, given: Any) -> jax.Array:
    """Attention under a mask."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    weights = jax.nn.softmax(jnp.where(keep(given), scores, -1e30))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def every(wrapped: Callable[[Any], Any]) -> Callable[..., Any]:
    """The results and gradients under all masks, as one function."""

    def run(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
        found = {}
        for name, (keep, _) in MASKS.items():

            def loss(q: Any, k: Any, v: Any, keep: Keep = keep, x: Any = given[name]):
                one = wrapped(lambda *a: attention(keep, *a, x))
                return (one(q, k, v) ** 2).sum()

            one = lambda *a, keep=keep, x=given[name]: attention(keep, *a, x)
            grads = jax.grad(loss, (0, 1, 2))(q, k, v)
            found[name] = (wrapped(one)(q, k, v), *grads)
        return found

    return run


def same(got: Any, want: Any) -> None:
    """Asserts that results agree, and are zero where they are."""
    for name, one in want.items():
        for a, b in zip(got[name], one, strict=True):
            a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
            np.testing.assert_allclose(a, b, atol=3e-5 * abs(b).max(), err_msg=name)


def main() -> None:
    """On a mesh, in `jax.checkpoint`, and both."""
    given = {n: x for n, (_, x) in MASKS.items()}
    want = jax.jit(every(lambda f: f))(Q, K, V, given)
    placed = jax.device_put((Q, K, V), HEADS), jax.device_put(given, ROWS)
    for wrapped in (lambda f: f, jax.checkpoint):
        fast = rewriter.optimize(every(wrapped), implementation=FORCED, strict=True)
        for args in ((Q, K, V, given), (*placed[0], placed[1])):
            same(fast(*args), want)
            sites = [s for s in fast.report(*args).sites if s.replaced]
            assert len(sites) >= LEAST, fast.report(*args)
            split = "b over data" if args[0] is not Q else ""
            assert all(split in s.sharding for s in sites), fast.report(*args)
        inner = lambda f, w=wrapped: w(rewriter.optimize(f, implementation=FORCED))
        same(jax.jit(every(inner))(Q, K, V, given), want)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
