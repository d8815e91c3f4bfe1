"""Times layers of which a flag says whether they are local, on one device.

    python3 -m tests.bench.masks_by_layers [--write]

A training step of layers in a scan under a checkpoint. The mask is chosen by `where`,
by a `cond` of masks, or by a `cond` of whole attention. Beside them are masks that are
given as arrays, from which no structure can be read, and layers that are all alike.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rewriter
from tests.bench import record

T, N, H, WIDTH = 8192, 8, 128, 1024
LOCAL = np.array([True, True, True, True, True, False])
TIMES = 20


def causal() -> Any:
    return jnp.arange(T)[:, None] >= jnp.arange(T)


def local() -> Any:
    return causal() & (jnp.arange(T)[:, None] - jnp.arange(T) < WIDTH)


MASKS = {
    "where": lambda flag, given: jnp.where(flag, local(), causal()),
    "cond of masks": lambda flag, given: lax.cond(flag, local, causal),
    "arrays": lambda flag, given: jnp.where(flag, given[0], given[1]),
    "all causal": lambda flag, given: causal(),
    "all local": lambda flag, given: local(),
}


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    wide = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, **wide) / H**0.5
    shares = jax.nn.softmax(jnp.where(mask, scores, -2e38)).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", shares, v)


def step_of(how: str) -> Any:
    def turn(x: Any, w: Any, flag: Any, given: Any) -> Any:
        q, k, v = ((x @ w[i]).reshape(1, T, N, H) for i in range(3))
        if how == "cond":
            y = lax.cond(
                flag,
                lambda: attend(q, k, v, local()),
                lambda: attend(q, k, v, causal()),
            )
        else:
            y = attend(q, k, v, MASKS[how](flag, given))
        return x + y.reshape(x.shape) @ w[3]

    def loss(x: Any, w: Any, flags: Any, given: Any) -> Any:
        body = jax.checkpoint(lambda x, one: (turn(x, *one, given), None))
        return (lax.scan(body, x, (w, flags))[0].astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss, (0, 1))


def milliseconds(how: str) -> float:
    """The least mean time of a step, of three series."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (1, T, N * H), jnp.bfloat16)
    w = jax.random.normal(keys[1], (len(LOCAL), 4, N * H, N * H), jnp.bfloat16) * 0.02
    given = jnp.stack([local(), causal()])
    fast = rewriter.optimize(step_of(how))
    jax.block_until_ready(fast(x, w, LOCAL, given))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        out = [fast(x, w, LOCAL, given) for _ in range(TIMES)][-1]
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / TIMES)
    return round(min(times) * 1e3, 3)


def main() -> None:
    """Prints the time of each way, and keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    rows = []
    for how in ("where", "cond of masks", "cond", "arrays", "all causal", "all local"):
        rows.append({"mask": how, "ms": milliseconds(how)})
        print(rows[-1], flush=True)
    if write:
        command = "python3 -m tests.bench.masks_by_layers --write"
        record.write(record.named("masks_by_layers_h200"), command, rows=rows)


if __name__ == "__main__":
    main()
