"""Masks made outside a shard_map: whole on every device, or split with its operands."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

B, T, H, D = 2, 32, 4, 8
FORCED = {"attention": ["memory_bounded"]}


def below(p):
    return jnp.tril(jnp.ones((T, T), bool))


def equal(p):
    return (p[:, :, None] == p[:, None])[:, None]


def near(p):
    d = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    return (d >= 0) & (d < 9)


MASKS = {
    "causal": (below, "causal"),
    "window": (near, "window"),
    "segments": (equal, "q_segments"),
    "packed": (lambda p: below(p) & equal(p), "q_segments"),
    "keys": (lambda p: (p > 0)[:, None, None, :], "mask"),
    "keys, causal": (lambda p: (p > 0)[:, None, None, :] & below(p), "mask"),
    "numbers": (lambda p: (below(p) & equal(p)).astype(jnp.int32), "q_segments"),
    "positions": (lambda p: (p[:, :, None] >= p[:, None])[:, None], "kv_positions"),
    "strict": (lambda p: jnp.tril(jnp.ones((T, T), bool), -1), ""),
    "above": (lambda p: jnp.triu(jnp.ones((T, T), bool)), ""),
}
P = jax.P
SPLITS = {
    "heads": (P(None, None, "d"), P()),
    "batch": (P("d"), P()),
    "batch of both": (P("d"), P("d")),
}


def attention(q, k, v, mask):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 3
    s = jnp.where(mask.astype(bool), s, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def program(mask, split, typed, q, k, v, p):
    devices = min(2, jax.device_count())
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays, masks = split
    inner = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(arrays, arrays, arrays, masks),
        out_specs=arrays,
        check_vma=typed,
    )(attention)
    return inner(q, k, v, mask(p))


def arguments():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, H, D)), jnp.float32) for _ in "qkv")
    p = jnp.asarray(np.sort(rng.integers(0, 3, (B, T))), jnp.int32)
    return q, k, v, p


def splits(name):
    """The splits in which a mask of these sizes can be."""
    leading = jax.eval_shape(MASKS[name][0], arguments()[3]).shape[0]
    for split in SPLITS:
        masks = SPLITS[split][1]
        if (split == "batch" and leading != T) or (masks and leading != B):
            continue  # each device has entries of its own
        yield split


CASES = [(name, split) for name in MASKS for split in splits(name)]
SAMPLE = {("packed", "heads"), ("causal", "batch"), ("keys", "batch of both")}


@pytest.mark.parametrize(
    ("name", "split"),
    [c if c in SAMPLE else pytest.param(*c, marks=pytest.mark.slow) for c in CASES],
)
def test_as_in_one_body(name, split):
    mask, structure = MASKS[name]
    f = functools.partial(program, mask, SPLITS[split], True)
    g = jax.value_and_grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    args = arguments()
    fast = rewriter.optimize(g, implementation=FORCED)
    want = jax.jit(g)(*args)
    for x, y in zip(jax.tree.leaves(fast(*args)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)
    report = fast.report(*args)
    (site,) = report.sites
    assert site.replaced
    assert site.backward
    if SPLITS[split][1] or not structure:
        return  # a part of a mask is an array, whatever it was made of
    if structure == "causal":
        assert dict(site.params)["window"] == (None, 0)
    elif structure == "window":
        assert dict(site.params)["window"] == (8, 0)
    else:
        assert structure in site.shapes


@pytest.mark.parametrize(
    "name", ["packed", pytest.param("keys, causal", marks=pytest.mark.slow)]
)
def test_without_types_of_devices(name):
    f = functools.partial(program, MASKS[name][0], SPLITS["heads"], False)
    args = arguments()
    fast = rewriter.optimize(f, implementation=FORCED)
    np.testing.assert_allclose(fast(*args), jax.jit(f)(*args), rtol=2e-4, atol=2e-4)
    assert [s.kernel for s in fast.report(*args).sites] == ["memory_bounded"]
