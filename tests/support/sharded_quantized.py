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


def unit(x: Any, gate: Any, up: Any, s: Any, t: Any) -> Any:
    """A gated linear unit of stored matrices."""
    return jax.nn.silu(x @ (gate.astype(x.dtype) * s)) * (x @ (up.astype(x.dtype) * t))


def packed_unit(x: Any, both: Any, s: Any) -> Any:
    """The same with both branches in one matrix."""
    gate, up = jnp.split(x @ (both.astype(x.dtype) * s), 2, -1)
    return jax.nn.silu(gate) * up


def attention(q: Any, k: Any, v: Any, s: Any, t: Any) -> Any:
    """Attention to keys and values of 8 bits, with scales of tokens and heads."""
    k, v = k.astype(q.dtype) * s[..., None], v.astype(q.dtype) * t[..., None]
    return jax.nn.dot_product_attention(q, k, v)


def rows_of_few_bits(x: Any, w: Any, s: Any) -> Any:
    """A product of 8 bits by 8 bits."""
    m = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    q = jnp.round(x / m).astype(jnp.int8)
    return jnp.dot(q, w, preferred_element_type=jnp.int32).astype(x.dtype) * s * m


def parts_of_rows(x: Any, w: Any, s: Any) -> Any:
    """A product whose parts are scaled and added up."""
    x, w = x.reshape(len(x), len(s), -1), w.reshape(len(s), -1, N)
    return (jnp.einsum("mzk,zkn->mzn", x, w.astype(x.dtype)) * s).sum(1)


def packed(x: Any, p: Any, s: Any) -> Any:
    """A product of numbers packed by two in a byte."""
    w = jnp.stack([(p << 4) >> 4, p >> 4], 1).reshape(2 * p.shape[0], -1)
    return x @ (w.astype(x.dtype) * s)


NUMBERS_UP, BOTH = NUMBERS[::-1].copy(), np.concatenate([NUMBERS, NUMBERS[::-1]], 1)
COLUMN, COLUMNS = (R.uniform(0.01, 0.03, n).astype("float32") for n in (N, 2 * N))
PARTS = R.uniform(0.01, 0.03, (4, N)).astype("float32")
Q = R.standard_normal((4, 8, 8, 16)).astype("float32")
KEYS = R.integers(-99, 99, (4, 24, 4, 16)).astype("int8")
SCALES = R.uniform(0.01, 0.03, (4, 24, 4)).astype("float32")
ROWS, COLS = P("data"), P(None, "model")
HEADS, KV = P("data", None, "model"), P("data", None, "model")

OTHERS = {  # a program, its arguments and how they are split, float ones, what is split
    "unit": (unit, (X, NUMBERS, NUMBERS_UP, COLUMN, COLUMN[::-1]),
             (ROWS, COLS, COLS, P("model"), P("model")), (0, 3, 4), "f over model"),
    "packed": (packed_unit, (X, BOTH, COLUMNS), (ROWS, P(), P()), (0, 2), "over data"),
    "attention": (attention, (Q, KEYS, KEYS[::-1], SCALES, SCALES[::-1]),
                  (HEADS, KV, KV, KV, KV), (0, 3, 4), "n over model"),
    "packed bytes": (packed, (X, NUMBERS[: K // 2], COLUMN), (ROWS, COLS, P("model")),
                     (0, 2), "n over model"),
    "parts": (parts_of_rows, (X, NUMBERS, PARTS), (ROWS, P(), P()), (0, 2),
              "over data"),
    "rows of few bits": (rows_of_few_bits, (X, NUMBERS, COLUMN),
                         (ROWS, COLS, P("model")), (), ""),
}  # fmt: skip
ALSO = {
    "quantized_gated_linear_unit": ["memory_bounded", "xla"],
    "quantized_attention": ["memory_bounded", "xla"],
    "packed_dot": ["memory_bounded", "xla"],
    "block_scaled_dot": ["memory_bounded", "xla"],
}


def gradients(f: Any, by: tuple[int, ...]) -> Any:
    """The gradients of a sum of squares."""
    return jax.grad(lambda *args: jnp.square(f(*args)).sum(), by)


def others() -> None:
    """Units, attention, and products of 8 bits by 8 bits."""
    for name, (plain, given, specs, floats, split) in OTHERS.items():
        fast = rewriter.optimize(plain, implementation=ALSO, strict=True)
        args = [
            jax.device_put(a, NamedSharding(MESH, spec))
            for a, spec in zip(given, specs, strict=True)
        ]
        pairs = [(fast, plain)]
        if floats:
            pairs.append((gradients(fast, floats), gradients(plain, floats)))
        for f, g in pairs:
            got, want = jax.jit(f)(*args), jax.jit(g)(*map(jnp.asarray, given))
            for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                limit = 1e-5 * float(np.abs(b).max())
                np.testing.assert_allclose(a, b, atol=limit, err_msg=name)
        sites = [s for s in fast.report(*args).sites if s.kernel != "xla"]
        assert {s.form or s.op for s in sites} <= ALSO.keys()
        assert len(sites) == bool(split), (name, sites)
        assert all(split in s.sharding for s in sites), (name, sites)
        text = fast.lower(*args).compile().as_text()
        assert "all-gather(" not in text, name


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
    others()
