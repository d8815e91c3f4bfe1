"""Run by test_sharding.py on eight devices: residual streams, part by part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.site import residual_stream, site
from tests.support import streams
from tests.support.streams import FORCED, SCALES, check, loss, sites

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = jax.random.normal(jax.random.key(0), (8, 6, 8))
ROWS = {"rows": P("data"), "both": P("data", "model"), "alike": P()}


def placed(x: Any, spec: P) -> Any:
    """An array, or the types of one, that is split over the mesh."""
    return jax.device_put(x, NamedSharding(MESH, spec))


def both_ways(name: str, split: P) -> None:
    """A program, its gradients, and those of it rewritten."""
    f, norms, in_front, back = streams.PROGRAMS[name]
    args = placed(X, split), placed(SCALES, P())
    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    if name != "recomputed":
        assert sites(fast.jaxpr(*args), residual_stream.site_p, True) == in_front
    check(fast, f, *args)
    step = jax.grad(loss(f), (0, 1))
    fast_step = rewriter.optimize(step, implementation=FORCED, strict=True)
    program = fast_step.jaxpr(*args)
    assert sites(program, residual_stream.backward_p) == back
    assert sites(program, site.backward_p) == norms - back
    check(fast_step, step, *args)
    check(jax.grad(loss(fast), (0, 1)), step, *args)


def compiled_without_gathering() -> None:
    """Rows stay on their devices: nothing but the scales' cotangents is moved."""
    args = placed(X, P("data")), placed(SCALES, P())
    step = rewriter.optimize(
        jax.grad(loss(streams.stacked), (0, 1)), implementation=FORCED
    )
    text = step.lower(*args).compile().as_text()
    for moving in ("all-gather", "all-to-all", "collective-permute"):
        assert moving not in text, moving


def split_otherwise() -> None:
    """What is added is split in another way than the norm's rows."""

    def f(x: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
        h = x + r
        return jnp.sin(h), streams.rms(h, scale)

    args = placed(X, P("data")), placed(X[::-1], P(None, "model")), SCALES[0]
    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    check(fast, f, *args)
    total = lambda f: lambda *a: sum((y**2).sum() for y in f(*a))
    check(jax.grad(total(fast), (0, 1)), jax.grad(total(f), (0, 1)), *args)


def explicitly_split() -> None:
    """Where types say how arrays are split, additions stay where they are."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    step = jax.grad(loss(streams.stacked), (0, 1))
    with jax.sharding.set_mesh(mesh):
        args = jax.device_put(X, P("data")), jax.device_put(SCALES, P())
        fast = rewriter.optimize(step, implementation=FORCED)
        check(fast, step, *args)


if __name__ == "__main__":
    streams.Calls().add()
    for one in streams.PROGRAMS:
        for how in ROWS.values():
            both_ways(one, how)
    compiled_without_gathering()
    split_otherwise()
    explicitly_split()
