"""Equal constants are one: what counts as equal, what is read, what comes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.program import equal_constants, fold
from rewriter.program.equal_constants import Constants, once
from rewriter.program.graph import Graph
from tests.program import test_fold
from tests.program.test_fold import LAYERS, B, T, X, norm, unit, weights

pytestmark = pytest.mark.once


def mask() -> np.ndarray:
    return np.tril(np.ones((T, T), bool))


KEY = jax.random.key(0)

EQUAL = {
    "numpy": (mask, mask),
    "jax": (lambda: jnp.asarray(mask()), lambda: jnp.asarray(mask())),
    "not contiguous": (mask, lambda: np.asfortranarray(mask())),
    "NaN": (lambda: np.full((2, 2), np.nan), lambda: np.full((2, 2), np.nan)),
    "bfloat16": (lambda: jnp.ones((3, 3), "bfloat16"),) * 2,
    "empty": (lambda: np.ones((0, 3)), lambda: np.ones((0, 3))),
}

OTHER = {
    "a number": (mask, lambda: mask() ^ (np.arange(T * T) == T + 1).reshape(T, T)),
    "the dtype": (mask, lambda: mask().astype(np.uint8)),
    "the shape": (lambda: np.ones((2, 8)), lambda: np.ones((4, 4))),
    "a zero's sign": (lambda: np.zeros((2, 2)), lambda: -np.zeros((2, 2))),
    "its kind": (mask, lambda: jnp.asarray(mask())),
    "a weak type": (lambda: jnp.ones((2, 2)), lambda: jnp.broadcast_to(1.0, (2, 2))),
    "where it is": (
        lambda: jnp.ones((2, 2)),
        lambda: jax.device_put(jnp.ones((2, 2)), jax.devices()[0]),
    ),
    "random keys": (lambda: jax.random.split(KEY), lambda: jax.random.split(KEY)),
    "references": (lambda: jax.new_ref(X), lambda: jax.new_ref(X)),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal(kind: str) -> None:
    known = Constants()
    first, second = (make() for make in EQUAL[kind])
    assert first is not second
    for value in (first, second, first):
        assert known.one(value) is first


@pytest.mark.parametrize("kind", OTHER)
def test_other(kind: str) -> None:
    known = Constants()
    for value in [make() for make in OTHER[kind]]:
        assert known.one(value) is value


def test_among_many_that_differ_more_and_more() -> None:
    known, made = Constants(), [np.zeros((9, 9)) for _ in range(6)]
    made[1][0, 0] = made[3][1, 1] = made[5][1, 1] = 1  # corners are looked at first
    assert [known.one(m) is m for m in made] == [True, True, False, True, False, False]
    assert known.one(made[2]) is made[0]
    assert known.one(made[5]) is made[3]


@pytest.fixture
def read(monkeypatch) -> list:
    """The arrays that were read as a whole."""
    found: list = []
    real = equal_constants._digest

    def digest(value) -> bytes:
        found.append(value)
        return real(value)

    monkeypatch.setattr(equal_constants, "_digest", digest)
    return found


def test_little_is_read(read) -> None:
    """Weights are not, since others of their shape begin otherwise."""
    rng = np.random.default_rng(0)
    many = [jnp.asarray(rng.normal(size=(32, 32))) for _ in range(9)]
    known = Constants()
    for value in (*many, mask(), np.ones(5), *many):
        assert known.one(value) is value
    assert read == []
    for value in [jnp.asarray(mask()) for _ in range(3)] * 2:
        known.one(value)
    assert len(read) == 3


def test_a_devices_array_is_copied_once(read, monkeypatch) -> None:
    monkeypatch.setattr(equal_constants, "_is_near", lambda value: False)
    own = [jnp.asarray(mask()) for _ in range(3)]

    def same() -> bool:
        known = Constants()
        return all(known.one(v) is own[0] for v in own)

    seen = []
    for _ in range(3):  # also while something is traced
        jax.make_jaxpr(lambda x: (seen.append(same()), x)[1])(1.0)
    assert seen == [True] * 3
    assert len(read) == 3
    assert same()
    count = len(equal_constants._DIGESTS)
    read.clear()
    own.clear()
    assert len(equal_constants._DIGESTS) == count - 3


def test_a_program_has_each_constant_once() -> None:
    a, b, c = mask(), mask(), ~mask()

    def program(x):
        return (x * a, x * b, x * c, b)

    before = jax.make_jaxpr(program)(jnp.ones((T, T)))
    after = once(before)
    assert (len(before.consts), len(after.consts)) == (3, 2)
    run = jax.extend.core.jaxpr_as_fun
    x = jax.random.normal(KEY, (T, T))
    for want, got in zip(run(before)(x), run(after)(x), strict=True):
        np.testing.assert_array_equal(want, got)
    assert once(after) is after
    assert len(Graph(before).constants) == 2  # at any depth

    ref = jax.new_ref(jnp.ones((T, T)))

    def with_effects(x):
        ref[...] += x * a + x * b
        return ref[...]

    effects = jax.make_jaxpr(with_effects)(jnp.ones((T, T)))
    assert once(effects) is effects


def attention(p, x, keep):
    d = x.shape[-1]
    q, k, v = ((x @ p[w]).reshape(B, T, 2, d // 2) for w in "qkv")
    s = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(d // 2)
    w = jax.nn.softmax(jnp.where(keep, s, -1e30))
    return jnp.einsum("bhts,bshd->bthd", w, v).reshape(x.shape) @ p["o"]


@pytest.mark.parametrize(
    ("make", "grad"), [(mask, True), (lambda: jnp.asarray(mask()), False)]
)
def test_layers_with_masks_of_their_own_repeat_each_other(
    monkeypatch, make, grad: bool
) -> None:
    monkeypatch.setattr(fold, "WORTH", 100)
    masks = [make() for _ in range(LAYERS)]

    def decoder(ps, x):
        for p, keep in zip(ps, masks, strict=True):
            x = x + attention(p, norm(x, p["n1"]), keep)
            x = x + unit(p, norm(x, p["n2"]))
        return x

    fn = decoder
    if grad:
        fn = jax.grad(lambda ps, x: jnp.mean(decoder(ps, x) ** 2))
    short = test_fold.check(fn, weights(), X)
    assert len(short.closed_jaxpr.consts) == 1
    ops = [s.op for s in short.sites]
    assert ops.count("attention") == LAYERS


def test_optimized_functions_compute_the_same() -> None:
    masks = [mask() for _ in range(3)]

    def program(ps, x):
        for p, keep in zip(ps, masks, strict=True):
            x = x + attention(p, x, keep)
        return x

    ps = weights(3)
    fast = rewriter.optimize(program, implementation={"attention": "memory_bounded"})
    report = fast.report(ps, X)
    assert (len(report.before.consts), len(report.after.consts)) == (3, 1)
    np.testing.assert_allclose(fast(ps, X), program(ps, X), rtol=2e-5, atol=2e-5)
    got, want = (
        jax.grad(lambda ps, f=f: jnp.sum(f(ps, X) ** 2))(ps) for f in (fast, program)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
