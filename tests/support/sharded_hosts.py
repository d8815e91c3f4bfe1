"""Run twice by test_sharding.py, as two hosts of four devices: one program on both.

``python -m tests.support.sharded_hosts PORT HOST`` prints a digest of the program.
"""

from __future__ import annotations

import hashlib
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from tests.support.sharded_programs import attention, train_step


def main(port: str, host: str) -> None:
    """Runs a training step on both hosts."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(host))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    heads = NamedSharding(mesh, P("data", None, "model"))
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((8, 64, 4, 16), np.float32) for _ in range(3)]
    args = [jax.make_array_from_callback(x.shape, heads, x.__getitem__) for x in whole]
    fast = rewriter.optimize(train_step(attention), tune="quick")  # times nothing here
    forced = rewriter.optimize(
        train_step(attention), implementation={"attention": "memory_bounded"}
    )
    got = [float(f(*args)[0]) for f in (fast, forced)]
    want = float((np.asarray(attention(*whole)) ** 2).mean())
    np.testing.assert_allclose(got, want, rtol=1e-5)
    texts = [f.lower(*args).as_text() for f in (fast, forced)]
    assert "manual_computation" in texts[1]
    print("digest", hashlib.sha256("".join(texts).encode()).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
