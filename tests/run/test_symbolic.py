"""Symbolic sizes: one exported program, called with several sizes, as written."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import rewriter
from rewriter.kernels.attention.xla import by_size
from rewriter.kernels.attention.xla.config import Blocks
from rewriter.kernels.ragged.dot import xla
from rewriter.kernels.ragged.dot.xla import Tile

pytestmark = pytest.mark.once

FORCED = {
    "attention": ["memory_bounded"],
    "ragged_dot": ["memory_bounded"],
    "rms_norm": ["memory_bounded"],
    "layer_norm": ["memory_bounded"],
    "gated_linear_unit": ["memory_bounded"],
}


def attention(mask=None, fill=-1e30, cap=None):
    def f(q, k, v, *more):
        s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        s = s if cap is None else jnp.tanh(s / cap) * cap
        if mask is not None:
            s = jnp.where(mask(q.shape[1], k.shape[1], *more), s, fill)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v)

    return f


def below(t, s):
    return jnp.arange(t)[:, None] >= jnp.arange(s)[None]


def near(t, s):
    d = jnp.arange(t)[:, None] - jnp.arange(s)[None]
    return (d >= 0) & (d < 20)


def biased(q, k, v, bias):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 6 + bias
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v)


def grouped(q, k, v):
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    s = jnp.einsum("btkgd,bskd->bkgts", q, k) / 6
    s = jnp.where(below(q.shape[1], k.shape[1]), s, -jnp.inf)
    y = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(s, -1), v)
    return y.reshape(*y.shape[:2], -1, y.shape[-1])


def numpy_of(shape, dtype, seed):
    r = np.random.default_rng(seed)
    if dtype == jnp.bool_:
        return jnp.asarray(r.random(shape) < 0.7).at[..., 0].set(True)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(np.sort(r.integers(0, 3, shape)), dtype)
    return jnp.asarray(r.normal(size=shape), dtype)


Q, F, B, N = ("b", "t", 4, 16), jnp.float32, jnp.bool_, jnp.int32
CASES = {
    "full": (attention(), [Q] * 3),
    "causal": (attention(below), [Q] * 3),
    "causal, -inf": (attention(below, -jnp.inf), [Q] * 3),
    "window": (attention(near), [Q] * 3),
    "soft cap": (attention(below, cap=5.0), [Q] * 3),
    "cross": (attention(), [Q, ("b", "s", 4, 16), ("b", "s", 4, 16)]),
    "padding": (
        attention(lambda t, s, m: m[:, None, None, :]), [*[Q] * 3, (("b", "t"), B)],
    ),
    "packed": (
        attention(lambda t, s, g: (g[:, :, None] == g[:, None])[:, None] & below(t, s)),
        [*[Q] * 3, (("b", "t"), N)],
    ),
    "bias": (biased, [*[Q] * 3, ((1, 4, "t", "t"), F)]),
    "grouped": (grouped, [("b", "t", 8, 16), Q, Q]),
    "vmap": (
        jax.vmap(lambda q, k, v: attention(below)(q[None], k[None], v[None])[0]),
        [Q] * 3,
    ),
    "twice the batch": (attention(below), [("2*b", 40, 4, 16)] * 3),
    "blocks": (
        lambda *qkv: attention()(*(x.reshape(-1, 8, 4, 16) for x in qkv)),
        [("b", "8*t", 4, 16)] * 3,
    ),
    "heads": (attention(below), [("b", 16, "t", 16)] * 3),
    "a loop over the batch": (
        lambda *qkv: jax.lax.map(
            lambda one: attention(below)(*(x[None] for x in one))[0], qkv
        ),
        [Q] * 3,
    ),
    "rms norm": (
        lambda x, w: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w,
        [("b", "t", 64), (64,)],
    ),
    "gated unit": (
        lambda x, w, u: jax.nn.silu(x @ w) * (x @ u), [("t", 32), (32, 64), (32, 64)],
    ),
}  # fmt: skip


def specs_of(shapes):
    given = [s if isinstance(s[0], tuple) else (s, F) for s in shapes]
    there = {d for s, _ in given for d in s} & {"t", "s"}
    scope = export.SymbolicScope([f"{d} >= 8" for d in there])
    text = lambda shape: ", ".join(map(str, shape))
    return [
        jax.ShapeDtypeStruct(export.symbolic_shape(text(s), scope=scope), d)
        for s, d in given
    ]


def arrays_of(specs, sizes):
    known = lambda d: eval(str(d), dict(sizes)) if not isinstance(d, int) else d
    return [
        numpy_of(tuple(map(known, x.shape)), x.dtype, i) for i, x in enumerate(specs)
    ]


SIZES = ((1, 8, 9), (3, 77, 50))


def gradient(f, shapes):
    floats = tuple(
        i for i, s in enumerate(shapes) if not isinstance(s[0], tuple) or s[1] == F
    )
    return jax.grad(lambda *a: (f(*a) ** 2).sum(), floats)


def assert_same(f, shapes, forced):
    specs = specs_of(shapes)
    art = rewriter.export(f, platforms=("cpu", "cuda", "tpu"), implementation=forced)(
        *specs
    )
    assert [s["kernel"] for s in art.manifest["sites"]] == ["memory_bounded"]
    assert not art.manifest["fallbacks"]
    for b, t, s in SIZES:
        arrays = arrays_of(specs, {"b": b, "t": t, "s": s})
        got, want = art.call(*arrays), jax.jit(f)(*arrays)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


def sample(*names):
    """All cases, those beside `names` only where slow tests run."""
    return [n if n in names else pytest.param(n, marks=pytest.mark.slow) for n in CASES]


@pytest.mark.parametrize("name", sample("cross", "padding", "packed", "grouped"))
def test_forward(name):
    assert_same(*CASES[name], FORCED)


@pytest.mark.parametrize("name", sample("causal, -inf", "rms norm"))
def test_gradient(name):
    f, shapes = CASES[name]
    assert_same(gradient(f, shapes), shapes, FORCED)


@pytest.mark.parametrize("backward", [False, True])
def test_ragged_rows(backward):
    def f(x, w, n):
        return jax.lax.ragged_dot(x, w, n)

    g = jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1)) if backward else f
    (t,) = export.symbolic_shape("t")
    w = jax.ShapeDtypeStruct((4, 16, 32), F)
    n = jax.ShapeDtypeStruct((4,), N)
    x = jax.ShapeDtypeStruct((t, 16), F)
    art = rewriter.export(g, platforms=("cpu", "cuda"), implementation=FORCED)(x, w, n)
    assert {s["kernel"] for s in art.manifest["sites"]} == {"memory_bounded"}
    for rows, sizes in ((5, (1, 0, 3, 1)), (300, (100, 7, 0, 190)), (64, (9, 9, 9, 9))):
        arrays = numpy_of((rows, 16), F, 0), numpy_of(w.shape, F, 1), jnp.array(sizes)
        got, want = art.call(*arrays), jax.jit(g)(*arrays)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def loss(x, w, y):
    rows = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(rows, y[..., None], -1)[..., 0].mean()


def loss_of_some(x, w, y):
    keep = y > 0
    rows = jax.nn.logsumexp(x @ w, -1)
    picked = jnp.take_along_axis(x @ w, y[..., None], -1)[..., 0]
    return jnp.where(keep, rows - picked, 0).sum() / keep.sum()


def loss_of_given(x, y):
    rows = jax.nn.log_softmax(x)
    return -jnp.take_along_axis(rows, y[..., None], -1)[..., 0].mean()


def unit(x, w, u):
    return jax.nn.silu(x @ w) * (x @ u)


W = (8, 20011)  # of which the plain kernel holds 209 rows of logits at once
BLOCKS = {
    "loss": (loss, "linear_cross_entropy", [("b", "t", 8), W, (("b", "t"), N)]),
    "some": (loss_of_some, "linear_cross_entropy", [("t", 8), W, (("t",), N)]),
    "given": (loss_of_given, "cross_entropy", [("b", "t", 16), (("b", "t"), N)]),
    "unit": (unit, "gated_linear_unit", [("b", "t", 4), (4, 8), (4, 8)]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_rows(name):
    """Fewer rows than a block of the kernel has, and more."""
    f, op, shapes = BLOCKS[name]
    fast = rewriter.optimize(f, implementation={op: "memory_bounded"})
    specs = specs_of(shapes)
    sites = fast.report(*specs).sites
    assert [(s.op, s.kernel) for s in sites] == [(op, "memory_bounded")]
    floats = tuple(i for i, x in enumerate(specs) if x.dtype == F)
    both = lambda f: jax.value_and_grad(lambda *a: jnp.sum(f(*a) ** 2), floats)
    art = export.export(jax.jit(both(fast)), platforms=["cpu", "cuda", "tpu"])(*specs)
    for b, t in ((1, 8), (3, 190)):
        arrays = arrays_of(specs, {"b": b, "t": t})
        got, want = art.call(*arrays), jax.jit(both(f))(*arrays)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


def test_no_kernel_is_named_that_gives_way_to_the_reference():
    """What is named in a report is what is lowered: here loops over blocks of rows."""
    specs = specs_of(BLOCKS["unit"][2])
    fast = rewriter.optimize(unit, implementation=FORCED)
    (site,) = fast.report(*specs).sites
    assert site.kernel == "memory_bounded"
    text = export.export(jax.jit(fast))(*specs).mlir_module()
    assert "stablehlo.while" in text


def test_a_mask_made_before_checkpointed_layers():
    def layers(x, w, g):
        mask = (g[:, :, None] == g[:, None]) & below(x.shape[1], x.shape[1])

        @jax.checkpoint
        def layer(x, w):
            q, k, v = jnp.split((x @ w / 9).reshape(*x.shape[:2], 2, 24), 3, -1)
            return x + attention(lambda t, s: mask[:, None])(q, k, v).reshape(x.shape)

        for i in range(2):
            x = layer(x, w[i])
        return (x**2).sum()

    specs = specs_of([("b", "t", 16), (2, 16, 48), (("b", "t"), N)])
    g = rewriter.optimize(jax.grad(layers, (0, 1)), implementation=FORCED)
    sites = g.report(*specs).sites
    assert [bool(s.backward) for s in sites] == [True, True]
    assert {s.kernel for s in sites} == {"memory_bounded"}
    art = export.export(jax.jit(g), platforms=["cpu"])(*specs)
    arrays = arrays_of(specs, {"b": 3, "t": 21})
    got, want = art.call(*arrays), jax.jit(jax.grad(layers, (0, 1)))(*arrays)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-3)


TARGETS = {"h200": "hopper", "TPU v5e": "mosaic_tpu", "cpu": "memory_bounded"}


@pytest.mark.parametrize(
    ("target", "backward"), [*itertools.product(TARGETS, [False, True])]
)
def test_symbolic_batch_gets_the_kernel_of_a_known_one(target, backward):
    f = attention(below)
    f = gradient(f, [Q] * 3) if backward else f
    (b,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 2048, 16, 128), jnp.bfloat16)
    (site,) = rewriter.explain(f, target=target)(x, x, x).sites
    if target == "h200" and "Mosaic" in str(site.not_chosen):
        pytest.skip("this jaxlib cannot build kernels for NVIDIA GPUs")
    assert site.kernel == TARGETS[target]
    assert bool(site.backward) == backward


@pytest.mark.parametrize("target", ["h200", "TPU v5e"])
def test_the_reason_why_a_symbolic_length_has_no_pallas_kernel(target):
    (t,) = export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((2, t, 16, 128), jnp.bfloat16)
    report = rewriter.explain(attention(below), target=target)(x, x, x)
    (site,) = report.sites
    assert not report.failures
    assert "lengths that are numbers" in dict(site.not_chosen)[TARGETS[target]]


def dot(x, w, n):
    return jax.lax.ragged_dot(x, w, n)


def seen(q, k, v, lengths):
    mask = jnp.arange(k.shape[1])[None] < lengths[:, None]
    return attention(lambda t, s: mask[:, None, None])(q, k, v)


LARGE = ("b", "t", 16, 128)
ON_ALL = {
    "length": (attention(below), [LARGE] * 3, ("cuda", "tpu")),
    "batch and cache": (
        seen, [("b", 1, 16, 128), LARGE, LARGE, (("b",), N)], ("cuda", "tpu"),
    ),
    # A TPU has a kernel of XLA's own.
    "rows": (dot, [("t", 512), (8, 512, 512), ((8,), N)], ("cuda",)),
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ON_ALL)
def test_bounded_memory_on_all_platforms(name, backward):
    """Where Pallas kernels need known sizes, the plain kernels serve."""
    f, shapes, platforms = ON_ALL[name]
    bf16 = [(s, jnp.bfloat16) if not isinstance(s[0], tuple) else s for s in shapes]
    g = gradient(f, [((), F) if x[1] == jnp.bfloat16 else x for x in bf16])
    art = rewriter.export(g if backward else f)(*specs_of(bf16))
    (kernels,) = art.manifest["kernels"]
    assert {kernels["by_platform"][p] for p in platforms} == {"memory_bounded"}
    assert not art.manifest["fallbacks"]


def test_the_sizes_of_a_call_choose_the_branch():
    """Few scores are dense, many in tiles; XLA leaves the other branch out."""
    how = {"scale": 0.3, "window": (None, 0), "empty_rows": "zero"}

    def both(config):
        def run(q, k, v, up):
            made = by_size.forward(q, k, v, residuals=True, config=config, **how)
            out, saved = made
            more = {"out": out, "residuals": saved, "cotangent": up, "config": config}
            return out, by_size.backward(q, k, v, **more, **how)

        return run

    config = Blocks(16, 16, dense_below=4 * 2 * 4 * 32 * 32)
    specs = specs_of([Q] * 4)
    call = export.export(jax.jit(both(config)))(*specs).call
    for t, dense in ((31, True), (32, False)):
        arrays = arrays_of(specs, {"b": 2, "t": t})
        text = jax.jit(call).lower(*arrays).compile().as_text()
        chosen = [x for x in text.splitlines() if " conditional(" in x]
        assert all("/while/" in x for x in chosen)  # those of tiles alone
        assert ("while" in text) != dense
        for x, y in zip(
            jax.tree.leaves(call(*arrays)),
            jax.tree.leaves(jax.jit(both(None))(*arrays)),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("backward", [False, True])
def test_the_rows_of_a_call_choose_the_branch(backward):
    """Few rows are multiplied by XLA, many by a loop over groups."""
    config = Tile(16, dense_below=64)
    how = {"config": config}
    ours = lambda x, w, n, up: (
        xla.backward(x, w, n, cotangent=up, **how)
        if backward
        else xla.forward(x, w, n, **how)
    )
    theirs = lambda x, w, n, up: (
        dict(zip(("lhs", "rhs"), jax.vjp(dot, x, w, n)[1](up), strict=False))
        if backward
        else dot(x, w, n)
    )
    specs = specs_of([("t", 16), (4, 16, 32), ((4,), N), ("t", 32)])
    call = export.export(jax.jit(ours))(*specs).call
    for t, sizes in ((63, (1, 0, 30, 30)), (64, (1, 0, 30, 33)), (200, (7, 99, 0, 3))):
        x, w, _, up = arrays_of(specs, {"t": t})
        arrays = x, w, jnp.array(sizes, N), up
        assert "conditional" not in jax.jit(call).lower(*arrays).compile().as_text()
        got, want = call(*arrays), jax.jit(theirs)(*arrays)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


LOOK_ALIKES = {
    "strictly below": lambda t, s: jnp.arange(t)[:, None] > jnp.arange(s)[None],
    "above": lambda t, s: jnp.arange(t)[:, None] <= jnp.arange(s)[None],
    "from the end": lambda t, s: jnp.arange(t)[:, None] + 3 >= jnp.arange(s)[None],
    "reversed": lambda t, s: t - 1 - jnp.arange(t)[:, None] >= jnp.arange(s)[None],
    "every second": lambda t, s: (jnp.arange(t)[:, None] - jnp.arange(s)) % 2 == 0,
    "half": lambda t, s: jnp.arange(s)[None] * 2 < jnp.arange(t)[:, None] + 1,
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_masks_like_the_causal_one(name):
    """Whatever is read of them, results are those of the program."""
    f = attention(LOOK_ALIKES[name])
    specs = specs_of([Q] * 3)
    art = rewriter.export(
        f, platforms=("cpu",), implementation={"attention": ["memory_bounded", "xla"]}
    )(*specs)
    arrays = arrays_of(specs, {"b": 2, "t": 21})
    np.testing.assert_allclose(
        art.call(*arrays), jax.jit(f)(*arrays), rtol=2e-4, atol=2e-4
    )
