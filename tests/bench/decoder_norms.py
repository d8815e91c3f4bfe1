"""What norms' kernel for Hopper GPUs is worth in a training step of a decoder.

  python3 -m tests.bench.decoder_norms [--small] [--repeats N] [--json PATH]

The decoder of `tests.bench.decoder` at 2 × 4096 tokens, loss and gradients, with its
RMS norms and with layer norms in their place. Norms are computed by XLA, by our kernel
for the gradients alone, and by it for both passes. Times are wall-clock medians, memory
is XLA's temporary memory. On a GPU there is the device's time by CUPTI, too.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from rewriter import _jax
from rewriter.hardware import timing
from tests.bench import decoder, passes, record

BY = {"xla": "xla", "gradients": {"backward": "hopper"}, "hopper": "hopper"}


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    root = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-6)
    return (centred * root).astype(x.dtype) * scale


def measured(step: Any, args: Any, op: str, by: str, repeats: int) -> dict[str, Any]:
    """A row: the step with its norms by one of `BY`."""
    fast = rewriter.optimize(step, implementation={op: BY[by]})
    compiled = fast.lower(*args).compile()
    loss, _ = jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - start))
    row = {
        "norm": op, "by": by, "ms": round(statistics.median(times), 2),
        "bytes": compiled.memory_analysis().temp_size_in_bytes, "loss": float(loss),
        "sites": passes.sites(fast.report(*args)),
    }  # fmt: skip
    if timing.method() == "cupti":
        kernels = _jax.kernel_seconds(lambda: compiled(*args))
        row["device_ms"] = round(1e3 * sum(s for _, s in kernels), 2)
    return row


def main() -> None:
    """Measures every row."""
    given = passes.arguments(__doc__)
    size, heads, (b, t) = (16, 2048, 5632, 32000), decoder.HEADS, decoder.BATCHES[0]
    if given.small:
        size, heads, (b, t) = (2, 128, 256, 512), 2, (1, 256)
    weights = decoder.weights_of(*size)
    ids = jax.random.randint(jax.random.key(1), (b, t + 1), 0, size[-1])
    rows = []
    for op, norm in (("rms_norm", decoder.norm), ("layer_norm", layer_norm)):
        step = jax.value_and_grad(decoder.loss_of(heads, norm=norm))
        for by in BY:
            rows.append(measured(step, (weights, ids), op, by, given.repeats))
            print(json.dumps(rows[-1]), flush=True)
    if given.json:
        command = f"python3 -m tests.bench.decoder_norms --repeats {given.repeats}"
        record.write(given.json, command + " --small" * given.small, results=rows)


if __name__ == "__main__":
    main()
