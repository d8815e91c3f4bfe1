"""Random loops with gradients, and whether they compute the same with less stacked.

  python3 -m tests.support.loops_at_random [--count N] [--seed N]

A turn is a chain of random equations of a carry, weights, what each turn is given and
what all read. It may be checkpointed, give values besides, or lie in another loop. It
may be written out turn by turn, or be differentiated twice.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from rewriter.ops import device
from rewriter.rewrite.passes import recompute
from rewriter.rewrite.passes.checkpoint_savings import save

CPU = device.named("cpu")

TURNS, SIZE = 3, 16
SQUARE = (SIZE, SIZE)

ONE: tuple[Callable[..., Any], ...] = (
    jnp.sin,
    jnp.tanh,
    jax.nn.silu,
    jax.nn.relu,
    jax.nn.gelu,
    lambda x: x * x,
    lambda x: x.T.reshape(x.shape),
    lambda x: x[::-1],
    lambda x: jnp.exp(-x * x),
    lambda x: jax.nn.softmax(x, -1),
    lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3),
    lambda x: jnp.where(x > 0, x, 0.1 * x),
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    lambda x: jnp.cumsum(x, 0) * 0.1,
    lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + r, c), x[0], x)[1],
    lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(x),
    lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    lambda x: jax.jit(lambda y: jnp.sin(y) * jnp.exp(-y * y))(x),
)
TWO: tuple[Callable[..., Any], ...] = (
    jnp.add,
    jnp.multiply,
    jnp.subtract,
    jnp.minimum,
    lambda a, b: jnp.where(a > b, a, b),
    lambda a, b: (a @ b.T) @ b * 0.05,
)


def operands() -> tuple[jax.Array, ...]:
    """Weights, a carry, what each turn is given, and what all read."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((TURNS, *SQUARE), SQUARE, (TURNS, *SQUARE), SQUARE)
    made = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    return (made[0] * 0.3, *made[1:])


def step(draw: random.Random) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A turn: carry, weights, given and common to the next carry and one more value."""
    plan = [
        (draw.choice("112wg"), *(draw.randrange(100) for _ in range(3)))
        for _ in range(draw.randint(3, 9))
    ]

    def turn(x: Any, w: Any, given: Any, common: Any) -> tuple[jax.Array, jax.Array]:
        values = [x, given, common]
        for kind, a, b, which in plan:
            first, second = values[a % len(values)], values[b % len(values)]
            if kind == "1":
                values.append(ONE[which % len(ONE)](first))
            elif kind == "2":
                values.append(TWO[which % len(TWO)](first, second))
            else:
                values.append(first @ w if kind == "w" else first * w[:1])
        return jnp.tanh(values[-1]) + 0.1 * x, values[len(values) // 2]

    return turn


def program(seed: int) -> Callable[..., Any]:
    """A loss of `operands` and its gradients."""
    draw = random.Random(seed)
    turn = step(draw)
    chance = lambda share: draw.random() < share
    turn = jax.checkpoint(turn) if chance(0.5) else turn
    reverse, gives, written_out, nested = map(chance, (0.3, 0.4, 0.25, 0.15))
    mean = lambda y: jnp.mean(jnp.sin(y)) if gives else 0.0

    def loss(w: Any, x: Any, given: Any, common: Any) -> jax.Array:
        def one(x: Any, own: Any) -> Any:
            x, y = turn(x, *own, common)
            return x, y if gives else None

        def every(x: Any, _: Any) -> Any:
            x, ys = jax.lax.scan(one, x, (w, given), reverse=reverse)
            return x, mean(ys)

        if written_out:
            total = jnp.zeros(())
            for k in range(TURNS):
                x, y = one(x, (w[k], given[k]))
                total = total + mean(y)
        elif nested:
            x, totals = jax.lax.scan(every, x, None, length=2)
            total = jnp.sum(totals)
        else:
            x, total = every(x, None)
        return jnp.mean(x * x) + total

    if not chance(0.15):
        return jax.value_and_grad(loss, (0, 1, 2, 3))
    first = jax.grad(loss, (0, 1))
    slope = lambda *args: sum(jnp.sum(g**2) for g in first(*args))
    return jax.value_and_grad(slope, (0, 1, 2, 3))


def compared(seed: int) -> Iterator[tuple[str, float, bool]]:
    """What was done, how far results are from those before, and if anything changed."""
    args = operands()
    before = jax.make_jaxpr(program(seed))(*args)
    expected = jax.jit(jaxpr_as_fun(before))(*args)
    memory = random.Random(seed).choice([3000, 10000, 1 << 30])
    keeping, _ = save(before, memory)
    for name, after in (
        ("less stacked", recompute.PASS(before, CPU)[0]),
        ("kept", keeping),
        ("both", recompute.PASS(keeping, CPU)[0]),
    ):
        if after is before:
            yield name, 0.0, False
            continue
        found = jax.jit(jaxpr_as_fun(after))(*args)
        far = [
            float(jnp.max(jnp.abs(x - y)) / (1e-6 + jnp.max(jnp.abs(x))))
            for x, y in zip(expected, found, strict=True)
            if bool(jnp.all(jnp.isfinite(x)))
        ]
        yield name, float(np.max(far, initial=0.0)), True


def main() -> None:
    """Prints what differs, and how many programs changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    changed = 0
    for seed in range(given.seed, given.seed + given.count):
        for name, far, is_changed in compared(seed):
            changed += is_changed
            if far > 1e-3:
                print(f"{seed}: {name}: {far:.1e} of the largest number")
    print(f"{given.count} programs, {changed} changes")


if __name__ == "__main__":
    from rewriter.rewrite.passes import checkpoint_savings as keeping
    from rewriter.rewrite.passes import recompute

    recompute.LEAST, keeping.WORTH = 1, 0.001
    main()
