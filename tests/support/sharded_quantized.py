"""Run by test_sharding.py on eight devices: products of matrices of few bits."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
FORCED = {"quantized_dot": ["memory_bounded", "xla"]}
R = np.random.default_rng(0)
K, N = 64, 48
X = R.standard_normal((8, K)).astype("float32")
NUMBERS = R.integers(-99, 99, (K, N)).astype("int8")

SPLITS = {  # of rows, numbers and scales; groups that are scaled; what is split
    "columns": (P("data"), P(None, "model"), P(None, "model"), (1, 2, 8), "n over"),
    "summed, with scales": (P("data", "model"), P("model"), P("model"), (8,), "k over"),
    "summed": (P("data", "model"), P("model"), P(), (1, 8), "k over"),
    "summed, groups on two devices": (P(None, "model"), P("model"), P(), (2,), ""),
    "rows": (P("data"), P(), P(), (1, 8), "over data"),
}


def program(x: Any, numbers: Any, scales: Any) -> Any:
    """Rows times a matrix that is scaled by groups."""
    parts = numbers.reshape(len(scales), -1, N).astype("float32") * scales[:, None]
    return x @ parts.reshape(K, N)


def main() -> None:
    """The result and gradients, however operands are split."""
    loss = lambda f: lambda x, w, s: jnp.square(f(x, w, s)).sum()
    fast = rewriter.optimize(program, implementation=FORCED, strict=True)
    for (name, (*specs, groups, split)), gradients in itertools.product(
        SPLITS.items(), (False, True)
    ):
        for g in groups:
            scales = R.uniform(0.01, 0.03, (g, N)).astype("float32")
            args = [
                jax.device_put(a, NamedSharding(MESH, spec))
                for a, spec in zip((X, NUMBERS, scales), specs, strict=True)
            ]
            f, plain = fast, program
            if gradients:
                f, plain = (jax.grad(loss(h), (0, 2)) for h in (fast, program))
            got, want = jax.jit(f)(*args), plain(X, NUMBERS, scales)
            for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                limit = 3e-6 * float(np.abs(b).max())
                np.testing.assert_allclose(a, b, atol=limit, err_msg=f"{name} {g}")
            (site,) = fast.report(*args).sites
            assert (site.kernel == "memory_bounded") == bool(split), (name, g)
            assert split in site.sharding, (name, g, site.sharding)
            text = fast.lower(*args).compile().as_text()
            assert "all-gather(" not in text, (name, g)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
