"""Run by test_site.py on two devices: sites in sharded programs, by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from rewriter.site import site
from tests.support import soft

P = PartitionSpec
ROWS, ALL = P("x"), P()
KERNEL, _ = soft.recording(empty=True)  # which XLA cannot pass into a shard_map


def bound(q: Any, k: Any, v: Any, **more: Any) -> jax.Array:
    """The site under test."""
    return site.bind(
        soft.OP, {"q": q, "k": k, "v": v, **more}, {}, (("default", KERNEL),)
    )


def plain(q: Any, k: Any, v: Any, **more: Any) -> jax.Array:
    """What it must equal."""
    return soft.reference(q=q, k=k, v=v, **more)


def same(make: Callable[[Callable[..., jax.Array]], Any]) -> None:
    """Asserts that a program of the site gives what one of the reference gives."""
    for got, true in zip(
        *(jax.tree.leaves(make(f)) for f in (bound, plain)), strict=True
    ):
        assert got.shape == true.shape
        np.testing.assert_allclose(got, true, rtol=2e-5, atol=2e-5)


def square(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A scalar of a function."""
    return lambda *a: (f(*a) ** 2).sum()


def grad(f: Callable[..., jax.Array], n: int = 3) -> Callable[..., Any]:
    """Its gradients by the first arguments."""
    return jax.jit(jax.grad(square(f), tuple(range(n))))


q, k, v = (jax.random.normal(jax.random.key(i), (2, 4, 8)) for i in range(3))
bias, lengths = jax.random.normal(jax.random.key(3), (1, 4, 4)), jnp.array([2, 4])
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


def step(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A scan of a rematerialised function."""
    one = lambda k, v: lambda c, _: (jax.checkpoint(f)(c, k, v), None)
    return lambda q, k, v: jax.lax.scan(one(k, v), q, None, length=2)[0]


def full(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of the optional operands too."""
    return lambda q, k, v, b, n: f(q, k, v, bias=b, lengths=n)


def manual(check: bool) -> None:
    """Sites inside shard_map."""

    def mapped(f: Any, specs: Any = (ROWS,) * 3, out: Any = ROWS) -> Any:
        return jax.shard_map(
            f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check
        )

    shared = (P(None, "x"), ALL, ALL)
    specs = (*(ROWS,) * 3, ALL, ROWS)
    stacked = lambda f: lambda *a: jax.vmap(f)(*(x[:, None] for x in a))
    same(lambda f: mapped(f)(q, k, v))
    same(lambda f: grad(mapped(f))(q, k, v))
    same(lambda f: grad(mapped(f, shared, shared[0]))(q, k, v))
    same(lambda f: jax.jit(mapped(jax.grad(square(f), (0, 1, 2))))(q, k, v))
    same(lambda f: jax.jvp(mapped(f), (q, k, v), (v, q, k)))
    same(lambda f: grad(mapped(full(f), specs), 4)(q, k, v, bias, lengths))
    same(lambda f: grad(mapped(step(f)))(q, k, v))
    same(lambda f: jax.jit(mapped(stacked(f)))(q, k, v))


manual(check=True)
manual(check=False)

rows = jax.device_put(q, jax.NamedSharding(mesh, ROWS))
same(lambda f: grad(f)(rows, k, v))

explicit = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(explicit):
    typed = [jax.device_put(a, ROWS) for a in (q, k, v)]
    same(lambda f: jax.jit(f)(*typed))
    same(lambda f: grad(f)(*typed))
    same(lambda f: jax.jit(f)(q, k, v))
    assert jax.typeof(jax.jit(bound)(*typed)) == jax.typeof(jax.jit(plain)(*typed))
