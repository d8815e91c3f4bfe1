"""Run by test_sharding.py on eight devices: rows without keys, and rows that overflow.

Results and gradients stay numbers, zeros or NaN as they were, under `jax.checkpoint`
and with batch and heads split.
"""

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
from tests.soundness.test_kinds import UNSHIFTED, WEIGHING

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
HEADS = NamedSharding(MESH, P("data", None, "model"))
ROWS = NamedSharding(MESH, P("data"))
FORCED = {"attention": ["memory_bounded", "xla"]}
B, T, N, H = 4, 16, 2, 8
draw = np.random.default_rng(0)
Q, K, V = (draw.normal(size=(B, T, N, H)).astype("f4") for _ in range(3))
Q[:, ::5] *= 400
KEEP = draw.random((B, 1, T, T)) < 0.5
KEEP[1, :, 3] = KEEP[2, :, :4] = False

HIDDEN = (
    "chosen -inf, softmax", "added -inf, softmax", "added number, softmax",
    "chosen number, softmax", "zero instead, softmax",
)  # fmt: skip
OVERFLOWING = ("plain", "with one more")
WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    **{n: WEIGHING[n] for n in HIDDEN},
    **{n: lambda s, keep, f=UNSHIFTED[n]: f(s) for n in OVERFLOWING},
}


def every(wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    """Results and gradients of all programs, as one function."""

    def attention(weights: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
        return jnp.einsum("bnts,bsnh->btnh", weights(scores, keep), v)

    def run(q: Any, k: Any, v: Any, keep: Any) -> Any:
        found = {}
        for name, weights in WEIGHTS.items():
            one = wrap(lambda *a, f=weights: attention(f, *a, keep))
            out, pull = jax.vjp(one, q, k, v)
            found[name] = (out, *pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape)))
        return found

    return run


def same(got: Any, want: Any) -> None:
    """Asserts that results agree, and are NaN where they were.

    Gradients of keys and values of a row that overflows may be NaN beyond those.
    """
    for name, one in want.items():
        for i, (a, b) in enumerate(zip(got[name], one, strict=True)):
            a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
            assert np.isnan(a[np.isnan(b)]).all(), (name, i)
            more = np.isnan(a) & ~np.isnan(b)
            assert not more.any() or (name in OVERFLOWING and i > 1), (name, i)
            both = ~np.isnan(a)
            size = max(abs(b[both]).max(initial=0), 1e-6)
            error = abs(a[both] - b[both]).max(initial=0)
            assert error <= 1e-3 * size, (name, i, error / size)


def main() -> None:
    """With and without `jax.checkpoint`, on one device and on the mesh."""
    args = tuple(map(jnp.asarray, (Q, K, V, KEEP)))
    want = jax.jit(every(lambda f: f))(*args)
    assert sum(np.isnan(x).any() for one in want.values() for x in one) > 8
    placed = (*jax.device_put(args[:3], HEADS), jax.device_put(args[3], ROWS))
    for wrap in (lambda f: f, jax.checkpoint):
        fast = rewriter.optimize(every(wrap), implementation=FORCED, strict=True)
        same(fast(*placed), want)
        sites = [s for s in fast.report(*placed).sites if s.replaced]
        assert len(sites) >= len(HIDDEN), fast.report(*placed)
        assert all("b over data" in s.sharding for s in sites), fast.report(*placed)
        inner = lambda f, w=wrap: w(rewriter.optimize(f, implementation=FORCED))
        same(jax.jit(every(inner))(*placed), want)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
