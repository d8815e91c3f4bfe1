"""Whether larger ops would pay: a residual sum with its norm, a whole expert block.

    python3 -m tests.bench.parts [--write]

For each it prints what one op could save at most. These are the time and temporary
memory of all of it as it is rewritten now, beside those of its parts alone. Times are
of the process' CPUs, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from tests.bench import record

COMMAND = "python3 -m tests.bench.parts --write"
ROWS, WIDTH, HIDDEN, EXPERTS = 4096, 512, 1024, 16
RUNS = 20


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def residual(x: jax.Array, y: jax.Array, scale: jax.Array) -> tuple[Any, Any]:
    """A residual sum and its norm, both of which are read on."""
    total = x + y
    return total, norm(total, scale)


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """What stands between the ragged dots of an expert block."""
    return jax.nn.silu(gate) * up


def experts(x: jax.Array, gate: Any, up: Any, down: Any, sizes: Any) -> jax.Array:
    """The experts of tokens that are sorted by expert."""
    hidden = gated(jax.lax.ragged_dot(x, gate, sizes), jax.lax.ragged_dot(x, up, sizes))
    return jax.lax.ragged_dot(hidden, down, sizes)


def cost(fn: Callable[..., Any], *args: jax.Array) -> dict[str, float]:
    """CPU milliseconds of one run, the least of some, and temporary MiB."""
    program = rewriter.optimize(fn).lower(*args).compile()
    jax.block_until_ready(program(*args))
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        jax.block_until_ready(program(*args))
        seconds.append(time.process_time() - start)
    temporary = program.memory_analysis().temp_size_in_bytes
    return {"cpu_ms": round(1e3 * min(seconds), 1), "MiB": round(temporary / 2**20, 1)}


def measured() -> dict[str, Any]:
    """Both blocks, and their parts."""
    keys = jax.random.split(jax.random.key(0), 6)
    x, y = (jax.random.normal(k, (ROWS, WIDTH)) for k in keys[:2])
    scale = jnp.ones(WIDTH)
    gate, up = (jax.random.normal(k, (EXPERTS, WIDTH, HIDDEN)) for k in keys[2:4])
    down = jax.random.normal(keys[4], (EXPERTS, HIDDEN, WIDTH))
    sizes = jnp.full(EXPERTS, ROWS // EXPERTS, jnp.int32)
    hidden = jax.random.normal(keys[5], (ROWS, HIDDEN))
    dot = jax.lax.ragged_dot
    return {
        "residual": {
            "shape": [ROWS, WIDTH],
            "together": cost(residual, x, y, scale),
            "sum": cost(jnp.add, x, y),
            "norm": cost(norm, x, scale),
        },
        "experts": {
            "shape": [ROWS, WIDTH, HIDDEN, EXPERTS],
            "together": cost(experts, x, gate, up, down, sizes),
            "gate": cost(dot, x, gate, sizes),
            "up": cost(dot, x, up, sizes),
            "activation": cost(gated, hidden, hidden),
            "down": cost(dot, hidden, down, sizes),
            "hidden_MiB": hidden.nbytes / 2**20,
        },
    }


def main() -> None:
    """Prints the figures, and stores them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    found = measured()
    print(json.dumps(found, indent=1))
    if write:
        record.write(record.named("parts"), COMMAND, **found)


if __name__ == "__main__":
    main()
