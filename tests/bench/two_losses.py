"""Two losses of the same logits on a CPU: two labels of each row, and pairs.

  python3 -m tests.bench.two_losses [--pairs N] [--write]

Each runs as written, optimized after it was differentiated, and the other way round.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rewriter
from tests.bench import record
from tests.bench.vocabulary_loss import measured

ROWS, K, V = 1024, 128, 32768
PAIRS, WIDTH = 8192, 512
each = optax.softmax_cross_entropy_with_integer_labels
Program = Callable[..., jax.Array]


def means(x: Any, w: Any, a: Any, b: Any, q: Any) -> jax.Array:
    """Two means with shares q and 1 - q, as of mixup."""
    y = x @ w
    return q * each(y, a).mean() + (1 - q) * each(y, b).mean()


def mixed(x: Any, w: Any, a: Any, b: Any, q: Any) -> jax.Array:
    """One mean, of two one-hot rows that are mixed."""
    target = q * jax.nn.one_hot(a, V) + (1 - q) * jax.nn.one_hot(b, V)
    return optax.softmax_cross_entropy(x @ w, target).mean()


def both_axes(x: Any, w: Any, scale: Any) -> jax.Array:
    """Losses of images by texts and of texts by images, as of CLIP."""
    y, own = x @ w.T * jnp.exp(scale), jnp.arange(x.shape[0])
    return (each(y, own).mean() + each(y.T, own).mean()) / 2


def programs() -> dict[str, tuple[Program, tuple[jax.Array, ...]]]:
    """Each loss with its arguments."""
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
    labels = lambda: jnp.asarray(draw.integers(0, V, ROWS), jnp.int32)
    rows = normal(ROWS, K), normal(K, V) * K**-0.5, labels(), labels()
    share, scale = jnp.float32(0.3), jnp.float32(2)
    unit = lambda a: a / jnp.linalg.norm(a, axis=1, keepdims=True)
    sides = unit(normal(PAIRS, WIDTH)), unit(normal(PAIRS, WIDTH)), scale
    return {
        "two means": (means, (*rows, share)),
        "mixed one-hot rows": (mixed, (*rows, share)),
        "pairs": (both_axes, sides),
    }


def forms(fn: Program) -> dict[str, Any]:
    """Its value and gradients by x and w, in three ways."""
    taken = lambda f: jax.value_and_grad(f, (0, 1))
    return {
        "as written": jax.jit(taken(fn)),
        "optimize(value_and_grad)": jax.jit(rewriter.optimize(taken(fn))),
        "value_and_grad(optimize)": jax.jit(taken(rewriter.optimize(fn))),
    }


def main() -> None:
    """Measures all losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = []
    for name, (fn, args) in programs().items():
        found = measured(forms(fn), args, given.pairs)
        rows.append({"loss": name, **found})
        for form, one in found.items():
            print(
                f"{name:20} {form:25} processor {one['processor_ms']:7.0f} ms"
                f"  wall {one['wall_ms']:6.0f} ms"
                f"  temporary {one['temporary_bytes'] / 2**20:6.1f} MiB",
                flush=True,
            )
    if given.write:
        about = f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}"
        command = f"python3 -m tests.bench.two_losses --pairs {given.pairs} --write"
        record.write(record.named("two_losses"), command, about=about, rows=rows)


if __name__ == "__main__":
    main()
