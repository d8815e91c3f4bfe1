"""A proof is reused only where what it was read from is made alike."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rewriter

T = 12
FORCED = {"attention": "memory_bounded"}
KEEP = np.random.default_rng(0).random((T, T)) > 0.97
Q, K = np.random.default_rng(1).standard_normal((2, 1, 1, T, 4), np.float32)
ONE_HOT = np.eye(T, dtype=np.float32)[None, None]  # the result shows the weights


def attention(q, k, v, mask):
    s = jnp.where(mask, jnp.einsum("bnth,bnsh->bnts", q, k), -1e9)
    return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s), v)


def check(masks, *given) -> None:
    def fn(q, k, v, *given):
        return [attention(q, k, v, mask(*given)) for mask in masks]

    fast = rewriter.optimize(fn, implementation=FORCED)
    assert len(fast.report(Q, K, ONE_HOT, *given).sites) == len(masks)
    both = fast(Q, K, ONE_HOT, *given), jax.jit(fn)(Q, K, ONE_HOT, *given)
    for i, (ours, wanted) in enumerate(zip(*both, strict=True)):
        np.testing.assert_allclose(ours, wanted, atol=1e-5, err_msg=str(i))


def test_rows_without_keys_of_arrays_that_differ_in_their_numbers() -> None:
    """With the diagonal each row has a key, and with another one it may have none."""
    diagonals = [np.eye(T, k=k, dtype=bool) for k in (0, 0, 1, 0, 3)]
    check([lambda keep, d=d: keep | d for d in diagonals], KEEP)


def test_lengths_that_may_be_zero() -> None:
    lengths = [lambda n: n * 0 + 1, lambda n: n, lambda n: jnp.maximum(n, 1)]
    lengths += [lambda n: n - 1, lambda n: n + 1]
    masks = [lambda n, f=f: jnp.arange(T) < f(n) for f in lengths]
    check(masks, np.int32(0))


def test_steps_of_two_loops() -> None:
    """The first step of one sees a key, that of the other none."""

    def fn(q, k, v):
        def steps(first):
            body = lambda i, x: x + attention(q, k, v, jnp.arange(T) < i + first)
            return lax.fori_loop(0, 3, body, jnp.zeros_like(q @ np.ones((4, T))))

        return steps(1), steps(0)

    ours = rewriter.optimize(fn, implementation=FORCED)(Q, K, ONE_HOT)
    for x, y in zip(ours, jax.jit(fn)(Q, K, ONE_HOT), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# ------------------------------------------------- integers that float64 does not hold
LARGE = (2**63 - 20, -(2**63) + 3, 2**62 + 1, 2**53)


def test_integers_beyond_what_float64_holds() -> None:
    """Pair by pair, in 64 bits: sums wrap around, and neighbours are not equal."""
    with jax.enable_x64(True):
        at = np.arange(T, dtype=np.int64)
        masks = []
        for o in map(np.int64, LARGE):
            near = at + o
            masks += [
                lambda x, o=o: (jnp.arange(T) + o)[:, None] >= (jnp.arange(T) + o),
                lambda x, o=o: jnp.arange(T)[:, None] - jnp.arange(T) - o >= 0,
                lambda x, o=o: (
                    (jnp.arange(T) + o)[:, None] - (jnp.arange(T) + o - 1) > 1
                ),
                lambda x, o=o: (jnp.arange(T) + (x[0] + o))[:, None] >= jnp.arange(T),
                lambda x, near=near: near[:, None] >= jnp.asarray(near) + x[0],
                lambda x, o=o: (x + o)[:, None] == (x + (o - 1)),
                lambda x, o=o: (x + o >= o)[:, None] | (x + o >= o + 1),
            ]
        check(masks, (at % 5))
