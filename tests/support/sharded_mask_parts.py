"""Run by test_sharding.py on four devices: masks that a shard_map splits or slices."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rewriter

MESH = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
B, T, N, H = 4, 32, 2, 4
FORCED = {"attention": "memory_bounded"}
RANDOM = np.random.default_rng(0)
Q, K, V = RANDOM.normal(size=(3, B, T, N, H)).astype(np.float32)
IDS = np.sort(RANDOM.integers(0, 3, (B, T))).astype(np.int32)
ROWS, KEYS = jnp.arange(T)[:, None], jnp.arange(T)
BATCH, QUERIES = P("d"), P(None, "d")
CAUSAL_TABLE = np.tril(np.ones((T, T), bool))
"""A mask that the program holds as an array."""


def causal(_: Any) -> Any:
    return jnp.tril(jnp.ones((T, T), bool))[None, None]


def same(ids: Any) -> Any:
    return (ids[:, :, None] == ids[:, None])[:, None]


def lengths(ids: Any) -> Any:
    return (ids.sum(1)[:, None] >= KEYS)[:, None, None]


def every(keep: Any) -> Any:
    return jnp.broadcast_to(keep, (B, 1, T, T))


MASKS: dict[str, Callable[[Any], Any]] = {
    "causal": causal,
    "a table": lambda _: CAUSAL_TABLE[None, None],
    "a window": lambda _: causal(_) & (ROWS - KEYS < 9),
    "segments": same,
    "packed": lambda ids: causal(ids) & same(ids),
    "padding": lambda ids: causal(ids) & (ids > 0)[:, None, None],
    "lengths": lambda ids: causal(ids) & lengths(ids),
    "a prefix": lambda ids: causal(ids) | (ids.sum(1)[:, None] > KEYS)[:, None, None],
    "positions": lambda ids: (ids[:, :, None] >= ids[:, None])[:, None],
}


def attention(q: Any, k: Any, v: Any, keep: Any) -> jax.Array:
    """Attention under a mask, or under a bias that is one."""
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 2
    s = jnp.where(keep, s, -1e30) if keep.dtype == bool else s + keep
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def split(f: Callable[..., Any], *specs: P, typed: bool = True) -> Callable[..., Any]:
    return jax.shard_map(
        f, mesh=MESH, in_specs=specs, out_specs=specs[0], check_vma=typed
    )


def own_rows(table: Any, axis: int, size: int) -> Any:
    return lax.dynamic_slice_in_dim(table, lax.axis_index("d") * size, size, axis)


def sliced(q: Any, k: Any, v: Any, keep: Any) -> jax.Array:
    """A device takes its rows of a mask that it has whole."""
    return attention(q, k, v, own_rows(keep, 2, q.shape[1]))


def made_and_sliced(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    return sliced(q, k, v, MASKS["packed"](ids))


def own_sequences(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    return attention(q, k, v, own_rows(MASKS["packed"](ids), 0, q.shape[0]))


def from_positions(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
    """A device counts its rows, and takes its segments."""
    n = q.shape[1]
    rows = lax.axis_index("d") * n + jnp.arange(n)
    mine = own_rows(ids, 1, n)
    keep = (rows[:, None] >= KEYS) & (mine[:, :, None] == ids[:, None])
    return attention(q, k, v, keep[:, None])


def by_batch(q: Any, k: Any, v: Any, keep: Any, f: Any = attention, **how: Any) -> Any:
    return split(f, *[BATCH] * 4, **how)(q, k, v, every(keep))


def by_queries(q: Any, k: Any, v: Any, keep: Any, **how: Any) -> Any:
    rows = P(None, None, "d")
    return split(attention, QUERIES, P(), P(), rows, **how)(q, k, v, keep)


def layers(f: Callable[..., Any]) -> Callable[..., Any]:
    """Two layers in a loop, with the mask made before it."""

    def run(q: Any, k: Any, v: Any, keep: Any) -> Any:
        step = lambda x, _: (x + f(x, k, v, keep), None)
        return lax.scan(step, q, None, 2)[0]

    return run


def of(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, ids: f(q, k, v, MASKS[name](ids))


def additive(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return by_queries(q, k, v, jnp.where(MASKS["packed"](ids), 0.0, -1e30))


PACKED = "q_segments", (None, 0)
WHOLE = P(None, "d"), P(), P(), P()
CASES: dict[str, tuple[Callable[..., Any], str, Any]] = {
    **{
        f"sequences: {name}": (of(name, by_batch), *said)
        for name, said in {
            "causal": ("", (None, 0)),
            "a table": ("", (None, 0)),
            "packed": PACKED,
            "lengths": ("kv_lengths", (None, 0)),
            "a prefix": ("prefix", (None, 0)),
            "positions": ("kv_positions", None),
        }.items()
    },
    **{
        f"queries: {name}": (of(name, by_queries), *said)
        for name, said in {
            "causal": ("offset", (None, 0)),
            "a table": ("offset", (None, 0)),
            "a window": ("offset", (8, 0)),
            "segments": ("q_segments", None),
            "packed": PACKED,
            "padding": ("bool[4,1,1,32]", (None, 0)),
            "a prefix": ("prefix", (None, 0)),
        }.items()
    },
    "sliced": (of("packed", split(sliced, *WHOLE)), *PACKED),
    "sliced, a table": (of("a table", split(sliced, *WHOLE)), "offset", (None, 0)),
    "made and sliced": (split(made_and_sliced, *WHOLE), *PACKED),
    "sequences sliced": (split(own_sequences, *[BATCH] * 3, P()), *PACKED),
    "from positions": (split(from_positions, *WHOLE), *PACKED),
    "added": (additive, *PACKED),
    "without types": (
        of("packed", lambda *a: by_queries(*a, typed=False)), *PACKED,
    ),
    "a checkpoint inside": (
        of("packed", lambda *a: by_batch(*a, f=jax.checkpoint(attention))), *PACKED,
    ),
    "a checkpoint around": (of("packed", jax.checkpoint(by_queries)), *PACKED),
    "layers": (of("packed", layers(by_queries)), *PACKED),
    "checkpointed layers": (of("packed", layers(jax.checkpoint(by_batch))), *PACKED),
    "in a jit": (of("packed", jax.jit(by_queries)), *PACKED),
    "in a branch": (
        of(
            "packed",
            lambda *a: lax.cond(a[0].sum() < 1e9, by_queries, lambda q, *_: q, *a),
        ),
        *PACKED,
    ),
}  # fmt: skip
"""By name: the program, an operand of its site, and its window."""


LATER = {"sequences: packed", "queries: packed", "sliced", "layers"}
"""Programs that are also differentiated after they are rewritten."""


def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        out = f(*args)
        return (out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def check(name: str) -> None:
    """Values, gradients and structure of a program, against float64."""
    f, operand, window = CASES[name]
    step = with_gradients(f)
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    with jax.enable_x64(True):
        wide = (x.astype("float64") for x in (Q, K, V))
        want = jax.tree.map(np.asarray, jax.jit(step)(*wide, IDS))
    later = jax.jit(with_gradients(rewriter.optimize(f, implementation=FORCED)))
    for one in (fast, later) if name in LATER else (fast,):
        leaves = zip(*map(jax.tree.leaves, (one(Q, K, V, IDS), want)), strict=True)
        for a, b in leaves:
            np.testing.assert_allclose(a, b, atol=3e-5 * abs(b).max(), err_msg=name)
    sites = fast.report(Q, K, V, IDS).sites
    assert sites, name
    for site in sites:
        assert site.replaced, (name, site)
        assert site.backward, (name, site)
        assert operand in site.shapes, (name, site.shapes)
        assert site.params.get("window") == window, (name, site.params)
        tables = re.findall(r"mask bool\[\d+,\d+,(\d+),(\d+)\]", site.shapes)
        assert all("1" in shape for shape in tables), (name, site.shapes)


def look_alikes() -> None:
    """What is no mask of positions stays the program's array, with its numbers."""
    wrong: dict[str, Callable[[Any], Any]] = {
        "above": lambda _: jnp.triu(jnp.ones((T, T), bool))[None, None],
        "rows turned": lambda _: causal(_)[:, :, ::-1],
        "a table with a hole": lambda _: CAUSAL_TABLE & ~np.eye(T, k=-3, dtype=bool),
        "numbers at random": lambda ids: (ids[:, :, None] * ids[:, None] % 2 == 0)[
            :, None
        ],
    }
    for name, mask in wrong.items():
        keep = lambda ids, mask=mask: jnp.broadcast_to(mask(ids), (B, 1, T, T))
        f = lambda q, k, v, ids, keep=keep: by_queries(q, k, v, keep(ids))
        fast = rewriter.optimize(f, implementation=FORCED)
        got, want = fast(Q, K, V, IDS), jax.jit(f)(Q, K, V, IDS)
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)


if __name__ == "__main__":
    warnings.simplefilter("error")
    for case in sys.argv[1:] or CASES:
        check(case)
    if not sys.argv[1:]:
        look_alikes()
