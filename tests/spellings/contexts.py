"""Programs around a function: each takes it and its arguments, and gives another.

The function's sites must be found in every one of them, as often as without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYERS = 2


@dataclass(frozen=True)
class Context:
    """A way to run a function.

    Attributes:
        name: Plain word.
        wrap: `wrap(fn, args)` gives the new function and its arguments.
        gradients: Whether reverse mode works through it.
        exact: Whether the count of sites is the same as without.
        ops: The operations that can be expressed inside it; all if empty.
    """

    name: str
    wrap: Callable[[Callable, tuple], tuple[Callable, tuple]]
    gradients: bool = True
    exact: bool = True
    ops: tuple[str, ...] = ()


CONTEXTS: list[Context] = []


def context(
    gradients: bool = True, exact: bool = True, ops: tuple[str, ...] = ()
) -> Callable:
    """Add a wrapper under its own name."""

    def add(wrap: Callable) -> Callable:
        CONTEXTS.append(Context(wrap.__name__, wrap, gradients, exact, ops))
        return wrap

    return add


def stacked(args: tuple) -> tuple:
    """The arguments with a leading layer axis; floats differ from layer to layer."""

    def stack(a):
        if jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.stack([a * (1 + 0.1 * i) for i in range(LAYERS)]).astype(a.dtype)
        return jnp.stack([a] * LAYERS)

    return jax.tree.map(stack, args)


@context()
def plain(fn, args):
    return fn, args


@context()
def jit(fn, args):
    return jax.jit(fn), args


@context()
def nested_jit(fn, args):
    inner = jax.jit(fn)
    return jax.jit(lambda *a: jax.jit(inner)(*a)), args


@context()
def inlined_jit(fn, args):
    return jax.jit(fn, inline=True), args


# With weights of their own per layer, units and grouped products are not one op.
STACKABLE = ("attention", "rms_norm", "layer_norm", "group_norm")
SHAREABLE = (*STACKABLE, "gated_linear_unit")


@context(ops=STACKABLE)
def vmap(fn, args):
    return jax.vmap(fn), stacked(args)


@context(ops=SHAREABLE)
def vmap_of_first(fn, args):
    axes = (0, *[None] * (len(args) - 1))
    return jax.vmap(fn, in_axes=axes), (*stacked(args[:1]), *args[1:])


@context(ops=STACKABLE)
def vmap_of_jit(fn, args):
    return jax.vmap(jax.jit(fn)), stacked(args)


@context()
def remat(fn, args):
    return jax.checkpoint(fn), args


@context()
def remat_dots_saveable(fn, args):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(fn, policy=policy), args


@context()
def remat_dots_without_batch_saveable(fn, args):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(fn, policy=policy), args


@context()
def remat_nothing_saveable(fn, args):
    policy = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(fn, policy=policy, prevent_cse=False), args


@context()
def remat_everything_saveable(fn, args):
    policy = jax.checkpoint_policies.everything_saveable
    return jax.checkpoint(fn, policy=policy), args


@context()
def remat_saved_names(fn, args):
    policy = jax.checkpoint_policies.save_only_these_names("query", "out")
    return jax.checkpoint(fn, policy=policy), args


@context()
def scan(fn, args):
    def layers(*stacks):
        return lax.scan(lambda c, xs: (c + 1, fn(*xs)), 0, stacks)[1]

    return layers, stacked(args)


@context()
def scan_of_remat(fn, args):
    def layers(*stacks):
        body = jax.checkpoint(lambda c, xs: (c + 1, fn(*xs)), prevent_cse=False)
        return lax.scan(body, 0, stacks)[1]

    return layers, stacked(args)


@context()
def scan_with_constants(fn, args):
    def layers(*args):
        def body(c, x):
            scaled = (args[0] * x, *args[1:])
            return c, fn(*scaled)

        return lax.scan(body, 0, jnp.asarray([1.0, 0.5], args[0].dtype))[1]

    return layers, args


@context()
def lax_map(fn, args):
    return lambda *stacks: lax.map(lambda xs: fn(*xs), stacks), stacked(args)


@context()
def cond(fn, args):
    def choose(on, *args):
        out = jax.eval_shape(fn, *args)

        def zeros(*_):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), out)

        return lax.cond(on > 0, fn, zeros, *args)

    return choose, (jnp.int32(1), *args)


@context()
def switch(fn, args):
    def choose(which, *args):
        out = jax.eval_shape(fn, *args)

        def zeros(*_):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), out)

        return lax.switch(which, [zeros, zeros, fn], *args)

    return choose, (jnp.int32(2), *args)


def _add(total, new):
    def one(a, b):
        return (a + b).astype(a.dtype) if a.dtype != bool else a | b

    return jax.tree.map(one, total, new)


def _zeros(fn, args):
    return jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *args)
    )


@context()
def fori_loop(fn, args):
    def loop(*args):
        return lax.fori_loop(
            0, 2, lambda i, total: _add(total, fn(*args)), _zeros(fn, args)
        )

    return loop, args


@context(gradients=False)
def while_loop(fn, args):
    def loop(stop, *args):
        def body(state):
            i, total = state
            return i + 1, _add(total, fn(*args))

        start = (jnp.int32(0), _zeros(fn, args))
        return lax.while_loop(lambda state: state[0] < stop, body, start)[1]

    return loop, (jnp.int32(2), *args)


@context()
def shard_map(fn, args):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec()
    sharded = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return sharded(fn), args


@context()
def custom_vjp(fn, args):
    @jax.custom_vjp
    def ruled(*args):
        return fn(*args)

    def forward(*args):
        return jax.vjp(fn, *args)

    ruled.defvjp(forward, lambda pull, g: pull(g))
    return ruled, args


@context()
def custom_jvp(fn, args):
    @jax.custom_jvp
    def ruled(*args):
        return fn(*args)

    ruled.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return ruled, args


@context(gradients=False, exact=False)
def value_and_grad(fn, args):
    def loss(*args):
        total = jnp.float32(0)
        for leaf in jax.tree.leaves(fn(*args)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                weights = jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)
                total += jnp.sum(leaf * weights)
        return total

    floats = tuple(
        i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)
    )
    return jax.value_and_grad(loss, argnums=floats), args


BY_NAME = {c.name: c for c in CONTEXTS}
