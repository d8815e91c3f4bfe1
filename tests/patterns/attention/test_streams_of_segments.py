"""Online softmax by hand over blocks with windows, segments and padding.

Steps without a key are skipped by `lax.cond`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

pytestmark = pytest.mark.once

B, N, T, H, BLOCK, WINDOW = 2, 2, 12, 4, 4, 6
COUNT = T // BLOCK
RANDOM = np.random.default_rng(0)
Q, K, V, WEIGHTS = RANDOM.normal(size=(4, B, N, T, H)).astype(np.float32)
DATA = {
    "segments": np.array([[1] * 6 + [2] * 4 + [3] * 2, [1] * 3 + [2] * 9], np.int32),
    "kept": np.arange(T)[None] >= np.array([[0], [5]]),
}
FORCED = {"attention": "memory_bounded"}
Mask = Callable[[Any, Any, Callable[[str, int], Any]], Any]


# ---------------------------------------------------------------- masks and tests
def window(rows: Any, keys: Any, _: Any) -> Any:
    return (rows >= keys) & (rows - keys < WINDOW)


def band(rows: Any, keys: Any, _: Any) -> Any:
    return abs(rows - keys) < WINDOW


def segments(rows: Any, keys: Any, data: Any) -> Any:
    return data("segments", 0)[:, None, :, None] == data("segments", 1)[:, None, None]


def packed(rows: Any, keys: Any, data: Any) -> Any:
    return segments(rows, keys, data) & (rows >= keys)


def packed_window(rows: Any, keys: Any, data: Any) -> Any:
    return segments(rows, keys, data) & window(rows, keys, data)


def padded(rows: Any, keys: Any, data: Any) -> Any:
    return (rows >= keys) & data("kept", 1)[:, None, None]


def upper(i: Any, j: Any, mask: Any, data: Any) -> Any:
    return j <= i


def anywhere(i: Any, j: Any, mask: Any, data: Any) -> Any:
    return mask.any()


def near(i: Any, j: Any, mask: Any, data: Any) -> Any:
    return (j <= i) & ((j + 1) * BLOCK - 1 > i * BLOCK - WINDOW)


def around(i: Any, j: Any, mask: Any, data: Any) -> Any:
    below = j * BLOCK < i * BLOCK + BLOCK - 1 + WINDOW
    return below & ((j + 1) * BLOCK - 1 > i * BLOCK - WINDOW)


def extremes(i: Any, j: Any, data: Any) -> tuple[Any, Any, Any, Any]:
    """The least and largest segments of a block's queries and keys."""
    cut = lambda n: lax.dynamic_slice_in_dim(data["segments"], n * BLOCK, BLOCK, 1)
    a, b = cut(i), cut(j)
    return a.min(1), a.max(1), b.min(1), b.max(1)


def meets(i: Any, j: Any, mask: Any, data: Any) -> Any:
    least, most, first, last = extremes(i, j, data)
    return jnp.any((most >= first) & (least <= last))


def meets_anywhere(i: Any, j: Any, mask: Any, data: Any) -> Any:
    least, most, first, last = extremes(i, j, data)
    return jnp.any(most >= first) & jnp.any(last >= least) & (j <= i)


def meets_at_all(i: Any, j: Any, mask: Any, data: Any) -> Any:
    """By the least and largest of the whole batch."""
    least, most, first, last = extremes(i, j, data)
    return ~((most.max() < first.min()) | (least.min() > last.max()))


def touches(i: Any, j: Any, mask: Any, data: Any) -> Any:
    """Blocks of one segment do not."""
    least, most, first, last = extremes(i, j, data)
    return jnp.any((most > first) & (least <= last))


def meets_everywhere(i: Any, j: Any, mask: Any, data: Any) -> Any:
    """A step is skipped where one entry of the batch needs no key."""
    least, most, first, last = extremes(i, j, data)
    return jnp.all((most >= first) & (least <= last))


def least_of_both(i: Any, j: Any, mask: Any, data: Any) -> Any:
    least, _, first, _ = extremes(i, j, data)
    return jnp.any(least >= first)


def of_other_blocks(i: Any, j: Any, mask: Any, data: Any) -> Any:
    least, most, first, last = extremes(i, (j + 1) % COUNT, data)
    return jnp.any((most >= first) & (least <= last))


def by_ends(i: Any, j: Any, mask: Any, data: Any) -> Any:
    """Right if segments are in order, which nothing says."""
    cut = lambda n: lax.dynamic_slice_in_dim(data["segments"], n * BLOCK, BLOCK, 1)
    return jnp.any(cut(i)[:, -1] >= cut(j)[:, 0])


# -------------------------------------------------------------------------- streams
def begin(lowest: float) -> Any:
    rows = B, N, BLOCK
    return jnp.zeros((*rows, H)), jnp.zeros(rows), jnp.full(rows, lowest, jnp.float32)


def stream(
    mask: Mask,
    runs: Callable[..., Any] | None,
    fill: float = -1e30,
    guard: Callable[[Any], Any] = lambda m: m,
    *,
    zeroed: bool = False,
    safe: bool = False,
    inner: Callable[[Any], Any] = lambda f: f,
    sliced: bool = False,
    first: int = 0,
) -> Callable[..., Any]:
    """Blocks of queries are mapped over, each with a loop over blocks of keys.

    Args:
        mask: The mask of a block.
        runs: Says whether a step runs; None if all do.
        fill: What hidden scores and the first maximum are.
        guard: Replaces a maximum of -inf.
        zeroed: Whether hidden weights are set to zero.
        safe: Whether a sum of zero is replaced.
        inner: What is around a step.
        sliced: Whether a loop that counts slices the keys.
        first: The first block of keys.
    """

    def fn(q: Any, k: Any, v: Any, data: Any) -> Any:
        cut = lambda x, at, axis: lax.dynamic_slice_in_dim(x, at * BLOCK, BLOCK, axis)

        def seen(i: Any, j: Any) -> Any:
            rows, keys = (n * BLOCK + jnp.arange(BLOCK) for n in (i, j))
            part = lambda name, side: cut(data[name], (i, j)[side], 1)
            return mask(rows[:, None], keys, part)

        def queries(x: Any) -> Any:
            qb, i = x

            @inner
            def step(carry: Any, kb: Any, vb: Any, j: Any) -> Any:
                out, total, most = carry
                here = seen(i, j)
                s = jnp.einsum("bnth,bnsh->bnts", qb, kb) * H**-0.5
                s = jnp.where(here, s, fill)
                new = jnp.maximum(most, s.max(-1))
                top = guard(new)
                p, alpha = jnp.exp(s - top[..., None]), jnp.exp(most - top)
                p = jnp.where(here, p, 0.0) if zeroed else p
                more = jnp.einsum("bnts,bnsh->bnth", p, vb)
                return out * alpha[..., None] + more, total * alpha + p.sum(-1), new

            def one(carry: Any, kb: Any, vb: Any, j: Any) -> Any:
                if runs is None:
                    return step(carry, kb, vb, j)
                left = lambda carry, *_: carry
                return lax.cond(
                    runs(i, j, seen(i, j), data), step, left, carry, kb, vb, j
                )

            if sliced:
                at = lambda j, c: one(c, cut(k, j, 2), cut(v, j, 2), j)
                out, total, _ = lax.fori_loop(first, COUNT, at, begin(fill))
            else:
                xs = blocks(k), blocks(v), jnp.arange(COUNT)
                body = lambda c, x: (one(c, *x), None)
                out, total, _ = lax.scan(body, begin(fill), xs)[0]
            total = jnp.where(total == 0, 1.0, total) if safe else total
            return out / total[..., None]

        out = lax.map(queries, (blocks(q), jnp.arange(COUNT)))
        return jnp.moveaxis(out, 0, 2).reshape(q.shape)

    return fn


def blocks(x: Any) -> Any:
    return jnp.moveaxis(x.reshape(B, N, COUNT, BLOCK, H), 2, 0)


def isinf(m: Any) -> Any:
    return jnp.where(jnp.isinf(m), 0.0, m)


GUARDED = {"fill": -jnp.inf, "guard": isinf, "zeroed": True}
SAFE = {**GUARDED, "safe": True}

FOUND: dict[str, tuple[Mask, Callable[..., Any]]] = {
    "window, upper": (window, stream(window, upper)),
    "window, near": (window, stream(window, near)),
    "window, any": (window, stream(window, anywhere)),
    "window, near, sliced": (window, stream(window, near, sliced=True)),
    "window, near, guarded": (window, stream(window, near, **GUARDED)),
    "window, near, recomputed": (window, stream(window, near, inner=jax.checkpoint)),
    "band": (band, stream(band, None)),
    "band, around": (band, stream(band, around)),
    "band, any, guarded": (band, stream(band, anywhere, **GUARDED)),
    "segments, any": (segments, stream(segments, anywhere)),
    "packed": (packed, stream(packed, None)),
    "packed, upper": (packed, stream(packed, upper)),
    "packed, any": (packed, stream(packed, anywhere)),
    "packed, any, sliced": (packed, stream(packed, anywhere, sliced=True)),
    "packed, upper, recomputed": (packed, stream(packed, upper, inner=jax.checkpoint)),
    "packed, upper, zeroed": (packed, stream(packed, upper, zeroed=True)),
    "packed window, near": (packed_window, stream(packed_window, near)),
    "packed window, any": (packed_window, stream(packed_window, anywhere, **GUARDED)),
    "segments, meets": (segments, stream(segments, meets)),
    "segments, meets, guarded": (segments, stream(segments, meets, **GUARDED)),
    "packed, meets": (packed, stream(packed, meets)),
    "packed, meets anywhere": (packed, stream(packed, meets_anywhere)),
    "packed, meets, sliced": (packed, stream(packed, meets, sliced=True)),
    "packed, meets, again": (packed, stream(packed, meets, inner=jax.checkpoint)),
    "packed window, meets": (packed_window, stream(packed_window, meets)),
    "padded, upper": (padded, stream(padded, upper, **SAFE)),
    "padded, any": (padded, stream(padded, anywhere, zeroed=True, safe=True)),
}
"""By name: a mask and a stream. Rows without a key are zero where padding is."""


def diagonal(i: Any, j: Any, mask: Any, data: Any) -> Any:
    return j == i


def once(i: Any, j: Any, mask: Any, data: Any) -> Any:
    return mask[..., 0, 0].any()


def future(rows: Any, keys: Any, data: Any) -> Any:
    return segments(rows, keys, data) & (keys > rows)


def of_next(rows: Any, keys: Any, data: Any) -> Any:
    return (data("segments", 0)[:, None, :, None] + 1 == data("segments", 1)[
        :, None, None
    ]) | (rows == keys + 100)  # fmt: skip


UNEVEN = {
    **DATA,
    "segments": np.array([[1, 1, 4, 4, 2, 2, 2, 3, 3, 3, 3, 4], [2] * 5 + [1] * 7]),
}
"""Segments that are not in order, and blocks that share some of them."""

OTHERS: dict[str, Callable[..., Any]] = {
    "a mean of the keys that ran": stream(padded, upper),
    "no number where no key is": stream(padded, upper, **GUARDED),
    "fewer steps": stream(packed, diagonal),
    "a test of one entry": stream(packed, once),
    "no key of its own": stream(future, anywhere),
    "segments of others": stream(of_next, upper),
    "the first block is left out": stream(packed, upper, sliced=True, first=1),
    "a window that ends before": stream(
        lambda rows, keys, _: (rows - keys >= 2) & (rows - keys < 5), upper
    ),
    "hidden by another test": stream(
        window, lambda i, j, m, d: (m.sum() > 9) & (j <= i)
    ),
    "blocks of one segment are skipped": stream(segments, touches),
    "one entry of the batch decides": stream(segments, meets_everywhere),
    "the least of both": stream(segments, least_of_both),
    "extremes of the whole batch": stream(segments, meets_at_all),
    "extremes of other blocks": stream(segments, of_other_blocks),
    "the first and last segments": stream(segments, by_ends),
    "steps of another array": stream(
        packed, lambda i, j, m, d: (j <= i) & (j * BLOCK < 2 * i * BLOCK + 1)
    ),
}


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    loss = lambda *args: (fn(*args) * WEIGHTS.astype(args[0].dtype)).sum()
    return jax.value_and_grad(loss, (0, 1, 2))


def dense(mask: Mask) -> Callable[..., Any]:
    """All keys at once; a row without keys is zero."""

    def fn(q: Any, k: Any, v: Any, data: Any) -> Any:
        here = mask(jnp.arange(T)[:, None], jnp.arange(T), lambda name, _: data[name])
        s = jnp.einsum("bnth,bnsh->bnts", q, k) * H**-0.5
        w = jnp.where(here, jax.nn.softmax(jnp.where(here, s, -1e30)), 0.0)
        return jnp.einsum("bnts,bnsh->bnth", w, v)

    return fn


@functools.cache
def truth(mask: Mask) -> Any:
    with jax.enable_x64(True):
        wide = (x.astype(np.float64) for x in (Q, K, V))
        return jax.tree.map(np.asarray, jax.jit(gradients(dense(mask)))(*wide, DATA))


@pytest.mark.parametrize("name", FOUND)
def test_streams_are_found_with_gradients(name: str) -> None:
    mask, fn = FOUND[name]
    new = rewriter.optimize(gradients(fn), implementation=FORCED)
    (site,) = new.report(Q, K, V, DATA).sites
    assert site.replaced
    assert site.backward
    got = jax.tree.leaves(new(Q, K, V, DATA))
    for a, b in zip(got, jax.tree.leaves(truth(mask)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()))


FORWARD = ["packed, upper", "packed, any", "window, near", "packed, meets"]


@pytest.mark.parametrize("name", FORWARD)
def test_streams_are_found_forward(name: str) -> None:
    """What the mask of a step slices is sliced in front of the loop."""
    mask, fn = FOUND[name]
    new = rewriter.optimize(fn, implementation=FORCED)
    (site,) = new.report(Q, K, V, DATA).sites
    assert site.replaced
    assert "mask" not in site.shapes
    assert "cond" not in str(new.report(Q, K, V, DATA).after)
    with jax.enable_x64(True):
        want = dense(mask)(*(x.astype(np.float64) for x in (Q, K, V)), DATA)
    np.testing.assert_allclose(new(Q, K, V, DATA), want, atol=2e-5)


@pytest.mark.parametrize("data", [DATA, UNEVEN], ids=["in order", "uneven"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_streams_keep_their_numbers(name: str, data: Any) -> None:
    fn = OTHERS[name]
    new = rewriter.optimize(fn, implementation=FORCED)
    np.testing.assert_allclose(
        new(Q, K, V, data), jax.jit(fn)(Q, K, V, data), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", [n for n in FOUND if "meets" in n])
def test_segments_need_no_order(name: str) -> None:
    fn = FOUND[name][1]
    new = rewriter.optimize(fn, implementation=FORCED)
    np.testing.assert_allclose(
        new(Q, K, V, UNEVEN), jax.jit(fn)(Q, K, V, UNEVEN), rtol=1e-5, atol=1e-6
    )
