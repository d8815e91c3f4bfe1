"""Programs of other kinds inside of what JAX offers: calls, loops, rules, effects.

A transformation says how a function is called, differentiated or kept, and not what it
computes. So the results are those of the function alone, unless it changes them.
"""

from __future__ import annotations

import dataclasses
import random

from tests.soundness import (
    attention,
    caches,
    functions,
    labels,
    latents,
    layers,
    lookups,
    losses,
    norms,
    packed,
    quantized,
    triangles,
    units,
)  # fmt: skip
from tests.soundness.program import Program

OF = (
    attention.of_masks, attention.of_operands, norms.program, units.program,
    losses.program, lookups.program, functions.program, quantized.program,
    packed.program, caches.program, latents.program, triangles.program, layers.program,
    labels.program,
)  # fmt: skip
CALLS = (
    "jax.jit({f})", "jax.jit({f}, inline=True)",
    "(lambda g: lambda x, *a: jax.jit(g, donate_argnums=0)(jnp.copy(x), *a))({f})",
    "jax.checkpoint({f})", "jax.checkpoint({f}, prevent_cse=False)",
    "jax.checkpoint({f}, policy=jax.checkpoint_policies.everything_saveable)",
    "jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)",
    "jax.checkpoint({f}, policy=jax.checkpoint_policies"
    ".dots_with_no_batch_dims_saveable)",
    "jax.named_call({f}, name='block')",
    "(lambda g: lambda *a: g(*lax.optimization_barrier(a)))({f})",
    "(lambda g: lambda *a: lax.optimization_barrier(g(*a)))({f})",
)  # fmt: skip
LOOPS = (
    "(lambda g: lambda *a: jax.vmap(g)(*(x[None] for x in a))[0])({f})",
    "(lambda g: lambda x, *a: jax.vmap(lambda y: g(y, *a))"
    "(jnp.stack([x, x[::-1]]))[1])({f})",
    "(lambda g: lambda x, *a: jax.vmap(lambda y: g(y, *a), -1, -1)"
    "(jnp.stack([x, x], -1))[..., 0])({f})",
    "(lambda g: lambda *a: jax.vmap(g, spmd_axis_name='rows')"
    "(*(x[None] for x in a))[0])({f})",
    "(lambda g: lambda *a: lax.map(lambda x: g(*x), tuple(x[None] for x in a))[0])"
    "({f})",
    "(lambda g: lambda *a: lax.scan(lambda c, x: (c + 1, g(*x)), 0,"
    " tuple(jnp.stack([x, x]) for x in a))[1][1])({f})",
    "(lambda g: lambda *a: lax.fori_loop(0, 2, lambda i, c: (c + g(*a)) / 2,"
    " g(*a)))({f})",
    "(lambda g: lambda *a: lax.cond(jnp.isfinite(a[0]).sum() % 2 == 0, g,"
    " lambda *b: -g(*b), *a))({f})",
    "(lambda g: lambda *a: lax.switch(jnp.int32(1), [g, lambda *b: 2 * g(*b)], *a))"
    "({f})",
)  # fmt: skip
RULES = (
    "(lambda g: (lambda h: (h.defvjp(lambda *a: jax.vjp(g, *a), lambda r, t: r(t)), h)"
    "[1])(jax.custom_vjp(g)))({f})",
    "(lambda g: (lambda h: (h.defjvp(lambda a, t: jax.jvp(g, a, t)), h)[1])"
    "(jax.custom_jvp(g)))({f})",
    "(lambda g: (lambda h: (h.defvjp(lambda *a: (g(*a), a),"
    " lambda a, t: jax.vjp(g, *a)[1](2 * t)), h)[1])(jax.custom_vjp(g)))({f})",
    "(lambda g: lambda *a: lax.stop_gradient(g(*a)) * 0.5 + 0.5 * g(*a))({f})",
    "(lambda g: lambda x, *a: g(lax.stop_gradient(x), *a))({f})",
)  # fmt: skip
EFFECTS = (
    "(lambda g: lambda *a: (lambda o: (jax.debug.callback(lambda x: None, o), o)[1])"
    "(g(*a)))({f})",
    "(lambda g: lambda *a: (jax.debug.callback(lambda x: None, a[0]), g(*a))[1])({f})",
    "(lambda g: lambda *a: jax.pure_callback(lambda x: x,"
    " jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1)).astype(a[0].dtype)"
    " * g(*a))({f})",
)  # fmt: skip
TWICE = (
    "(lambda g: lambda *a: g(*a) + g(*a))({f})",
    "(lambda g: lambda x, *a: g(x, *a) - 0.5 * g(x[::-1], *a))({f})",
    "(lambda g: lambda *a: g(*a).astype(jnp.bfloat16).astype(jnp.float32))({f})",
    "(lambda g: lambda *a: jnp.where(jnp.isfinite(o := g(*a)), o, 0))({f})",
    "(lambda g: lambda *a: g(*a).sum(-1))({f})",
)  # fmt: skip
GROUPS = (CALLS, CALLS, LOOPS, LOOPS, RULES, EFFECTS, TWICE)


def program(seed: int) -> Program:
    """A program of another kind, called in one to three such ways."""
    draw = random.Random(f"inside {seed}")
    of = draw.choice(OF)(seed)
    ways = [draw.choice(draw.choice(GROUPS)) for _ in range(draw.choice((1, 1, 2, 3)))]
    if of.entries:
        ways = [way for way in ways if ".sum(-1)" not in way]
    around = tuple(f"f = {way.format(f='f')}" for way in ways)
    return dataclasses.replace(of, around=around)
