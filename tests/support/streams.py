"""Residual streams of norms, and a kernel for any platform that adds beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from rewriter.kernels.norms import xla
from rewriter.ops.kernel import PLATFORMS, Kernel
from rewriter.ops.registry import registry
from tests.support.arrays import normal

B, T, D, LAYERS = 2, 3, 8, 3
X, R = (normal(B, T, D, seed=k) for k in (0, 1))
SCALE = jnp.asarray(1 + np.asarray(normal(D, seed=2)) / 8)
FORCED = {"rms_norm": "adding"}


@dataclass
class Calls:
    """How often the kernel was given an addend, where it was traced."""

    forward: int = 0
    backward: int = 0
    kernel: Kernel = field(init=False)

    def __post_init__(self) -> None:
        self.kernel = Kernel(
            "adding", "rms_norm", PLATFORMS, 1, forward=self.normalize,
            backward=self.differentiate, saves_out=False, adds_to="x",
        )  # fmt: skip

    def add(self) -> None:
        """Adds the kernel to those of its op."""
        registry().add_kernel(self.kernel)

    def normalize(
        self, *, x: Any, addend: Any = None, residuals: bool = False, **given: Any
    ) -> Any:
        if addend is None:
            return xla.forward(x=x, centred=False, residuals=residuals, **given)
        self.forward += 1
        out, saved = xla.forward(x=x + addend, centred=False, residuals=True, **given)
        both = x + addend, out
        return (both, saved) if residuals else both

    def differentiate(self, *, addend: Any = None, **given: Any) -> Any:
        grads = xla.backward(centred=False, **given)
        if addend is not None:
            self.backward += 1
            grads["x"] = grads["x"] + addend
        return grads


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root * scale).astype(x.dtype)


def layer(h: jax.Array, scale: jax.Array) -> jax.Array:
    """Half a layer, with what a product is made of behind another function."""
    return h + jnp.sin(rms(h, scale))


def stacked(h: jax.Array, scales: jax.Array) -> jax.Array:
    for scale in scales:
        h = layer(h, scale)
    return h


def scanned(h: jax.Array, scales: jax.Array) -> jax.Array:
    two = lambda h, scale: (layer(layer(h, scale), 1 + scale), None)
    return jax.lax.scan(two, h, scales)[0]


def recomputed(h: jax.Array, scales: jax.Array) -> jax.Array:
    two = jax.checkpoint(lambda h, scale: layer(layer(h, scale), 1 + scale))
    for scale in scales:
        h = two(h, scale)
    return h


PROGRAMS: dict[str, tuple[Callable[..., jax.Array], int, int, int]] = {
    "unrolled": (stacked, LAYERS, LAYERS - 1, LAYERS),
    "scanned": (scanned, 2, 1, 2),
    "recomputed": (recomputed, 2 * LAYERS, 2 * LAYERS - 1, 2 * LAYERS),
}
"""With how many norms, sums in front of one and cotangents that come back along it."""
SCALES = jnp.asarray(1 + np.asarray(normal(LAYERS, D, seed=3)) / 8)


def sites(jaxpr: Any, primitive: Any, addend: bool | None = None) -> int:
    """How many equations there are; only those with an addend, or without."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitive:
            use = eqn.params["use"]
            found += addend in (None, len(eqn.invars) > len(use.names))
        found += sum(sites(b, primitive, addend) for b in jaxprs_in_params(eqn.params))
    return found


def loss(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *args: (f(*args).astype(jnp.float32) ** 2).mean()


def check(fast: Any, slow: Any, *args: Any) -> None:
    """Compares with float64: twice the program's own error is allowed, and a bit."""
    got, same = fast(*args), slow(*args)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in args]
        true = jax.tree.map(np.asarray, slow(*wide))
    for g, s, t in zip(*map(jax.tree.leaves, (got, same, true)), strict=True):
        assert g.shape == t.shape
        error, own = (np.abs(np.asarray(x, np.float64) - t).max() for x in (g, s))
        assert error <= 1e-4 * np.abs(t).max() + 2 * own
