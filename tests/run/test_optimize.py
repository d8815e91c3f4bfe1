"""optimize is jax.jit with better insides: same values, same transformations."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.errors import (
    RequirementNotMet,
    RewriterError,
    RewriterWarning,
    TraceError,
)
from rewriter.rewrite.rewritten import Rewritten
from tests.support.programs import FORCED, attention, block, inputs

engine = importlib.import_module("rewriter.run.analysis")


@pytest.fixture
def counted(monkeypatch):
    """Counts how often the pipeline runs."""
    calls = []
    real = engine.rewrite
    monkeypatch.setattr(engine, "rewrite", lambda *a: (calls.append(1), real(*a))[1])
    return calls


@pytest.fixture
def broken(monkeypatch):
    """A pipeline that always fails."""

    def fail(*args):
        raise KeyError("inside")

    monkeypatch.setattr(engine, "rewrite", fail)


def close(a, b, tol=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)


def test_result_and_report():
    fast = rewriter.optimize(block, implementation=FORCED)
    args = inputs()
    close(fast(*args), block(*args))
    assert all(s.replaced for s in fast.report(*args).sites)
    counts = fast.report(*args).counts()
    assert (counts["attention"], counts["rms_norm"]) == (1, 1)
    assert fast.report() is fast.report(*args)
    assert fast.original is block
    assert fast.jaxpr(*args).eqns


def test_is_a_jit_object():
    fast = rewriter.optimize(block)
    args = inputs()
    assert type(fast) is type(jax.jit(block))
    assert fast.eval_shape(*args).shape == args[1].shape
    assert "func" in fast.lower(*args).as_text()
    assert fast.trace(*args).jaxpr.eqns
    assert fast.__name__ == "block"
    assert fast.__doc__ == block.__doc__
    fast.clear_cache()
    close(fast(*args), block(*args))


def test_an_optimized_function_can_be_looked_at_again():
    def f(x, n):
        return block(inputs()[0], x) * n

    fast = rewriter.optimize(f, static_argnums=1, patterns="none")
    x = inputs()[1]
    assert not rewriter.explain(fast)(x, 2).sites
    assert rewriter.explain(fast, patterns="default")(x, 2).sites
    assert rewriter.verify(fast)(x, 2).ok
    assert rewriter.benchmark(fast, mode="forward", pairs=1)(x, 2).rows


def test_decorators():
    @rewriter.optimize
    def one(x):
        return x + 1

    @rewriter.optimize(patterns="-attention", static_argnames="n")
    def two(x, *, n):
        return x * n

    assert one(1) == 2
    assert two(2, n=3) == 6


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jitted", "plain"])
def test_static_arguments(wrap):
    def f(x, power, *, scale="one"):
        assert isinstance(power, int)
        return x**power * {"one": 1.0, "two": 2.0}[scale]

    if wrap is jax.jit:
        fast = rewriter.optimize(jax.jit(f, static_argnums=1, static_argnames="scale"))
    else:
        fast = rewriter.optimize(f, static_argnums=1, static_argnames="scale")
    assert fast(3.0, 2) == 9.0
    assert fast(3.0, 2, scale="two") == 18.0
    assert fast.report(3.0, 2, scale="two").name == "f"


def test_pytrees_and_keywords():
    def f(tree, *rest, extra=None):
        return {"sum": tree["a"][0] + rest[0], "none": None, "extra": extra}

    fast = rewriter.optimize(f)
    args = ({"a": (jnp.ones(2), 3)}, 4)
    for kwargs in ({}, {"extra": jnp.zeros(1)}):
        got, want = fast(*args, **kwargs), jax.jit(f)(*args, **kwargs)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        close(got, want)


def test_leaves_that_are_no_arrays_fail_as_under_jit():
    for f in (jax.jit(lambda x: x), rewriter.optimize(lambda x: x)):
        with pytest.raises(TypeError, match="as an abstract array"):
            f("text")


def test_weak_types_and_x64():
    def f(x):
        return x, x * 2, jnp.sum(jnp.ones(3) * x)

    fast = rewriter.optimize(f)
    with jax.enable_x64(True):
        values = [1, 1.5, np.float32(2), jnp.float64(3), jnp.int64(2)]
        for x in values:
            for a, b in zip(fast(x), jax.jit(f)(x), strict=True):
                assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
    assert [a.dtype for a in fast(1.5)] == [a.dtype for a in jax.jit(f)(1.5)]


def test_donation_is_lifted():
    def f(x, y):
        return x + y

    text = jax.jit(f, donate_argnums=0).lower(jnp.ones(3), jnp.ones(3)).as_text()
    assert "tf.aliasing_output" in text
    fast = rewriter.optimize(jax.jit(f, donate_argnums=0))
    assert "tf.aliasing_output" in fast.lower(jnp.ones(3), jnp.ones(3)).as_text()
    x = jnp.ones(3)
    fast(x, jnp.ones(3))
    assert x.is_deleted()


def test_shardings_are_lifted():
    mesh = jax.make_mesh((1,), ("a",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("a"))
    plain = jax.jit(lambda x: x * 2, in_shardings=sharding, out_shardings=sharding)
    fast = rewriter.optimize(plain)
    compiled = fast.lower(jnp.ones(4)).compile()
    assert compiled.input_shardings[0][0] == sharding
    assert compiled.output_shardings == sharding
    given = rewriter.optimize(lambda x: x * 2, in_shardings=sharding)
    assert given(jnp.ones(4)).sharding.is_equivalent_to(sharding, 1)


def test_callables_of_every_kind():
    class Model:
        __slots__ = ()
        __hash__ = None

        def __call__(self, x):
            return x + 1

        def method(self, x):
            return x + 2

    assert rewriter.optimize(Model())(1) == 2
    assert rewriter.optimize(Model().method)(1) == 3
    assert rewriter.optimize(functools.partial(lambda a, b: a * b, 4))(2) == 8
    assert rewriter.optimize(lambda: 5)() == 5
    assert rewriter.optimize(lambda x: None)(1) is None


def test_closed_over_values():
    table = np.tril(np.ones((4, 4), bool))
    weight = jnp.arange(4.0)

    def outer(z):
        inner = rewriter.optimize(lambda x: jnp.where(table, x * z, 0.0) @ weight)
        return inner(jnp.ones((4, 4))).sum()

    def plain(z):
        return (jnp.where(table, jnp.ones((4, 4)) * z, 0.0) @ weight).sum()

    close(jax.grad(outer)(2.0), jax.grad(plain)(2.0))
    close(jax.vmap(jax.grad(outer))(weight), jax.vmap(jax.grad(plain))(weight))
    with jax.checking_leaks():
        close(jax.jit(outer)(3.0), plain(3.0))


def loss(f):
    return lambda p, x: jnp.sum(jnp.tanh(f(p, x)))


TRANSFORMS = {
    "jit": lambda f: jax.jit(f),
    "optimize": lambda f: rewriter.optimize(f),
    "grad": lambda f: jax.grad(loss(f)),
    "jit_grad": lambda f: jax.jit(jax.value_and_grad(loss(f), argnums=1)),
    "optimize_grad": lambda f: rewriter.optimize(jax.grad(loss(f))),
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, jnp.stack([x, 2 * x])),
    "grad_vmap": lambda f: jax.grad(
        lambda p, x: jnp.sum(jax.vmap(f, (None, 0))(p, jnp.stack([x, 2 * x])) ** 2)
    ),
    "vmap_grad": lambda f: (
        lambda p, x: jax.vmap(jax.grad(loss(f)), (None, 0))(p, jnp.stack([x, 2 * x]))
    ),
    "scan": lambda f: (
        lambda p, x: jax.lax.scan(lambda c, _: (f(p, c), None), x, None, length=2)[0]
    ),
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f))),
    "jvp": lambda f: lambda p, x: jax.jvp(lambda x: f(p, x), (x,), (x,)),
    "hessian": lambda f: (
        lambda p, x: jax.hessian(lambda s: loss(f)({**p, "scale": s}, x))(p["scale"])
    ),
    "cond": lambda f: (
        lambda p, x: jax.lax.cond(x[0, 0, 0] > 0, f, lambda p, x: x, p, x)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nesting(name):
    args = inputs(tokens=6)
    transform = TRANSFORMS[name]
    got = transform(rewriter.optimize(block, implementation=FORCED))(*args)
    close(got, jax.jit(transform(block))(*args), 1e-4)


def test_effects_stay():
    seen = []
    ref = jax.new_ref(jnp.zeros(()))

    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        ref[...] += x.sum()
        return x + 1

    fast = rewriter.optimize(f)
    fast(jnp.ones(3))
    fast(jnp.ones(3))
    jax.effects_barrier()
    assert seen == [3.0, 3.0]
    assert ref[...] == 6.0


def test_analysed_once_per_signature(counted):
    fast = rewriter.optimize(block)
    args = inputs()
    for _ in range(3):
        fast(*args)
    fast.report(*args)
    fast.lower(*args)
    rewriter.explain(fast)(*args)
    assert len(counted) == 1
    fast(*inputs(tokens=8))
    assert len(counted) == 2


def test_config_retraces_and_comes_back(counted):
    fast = rewriter.optimize(block)
    args = inputs()
    fast(*args)
    for _ in range(2):
        with rewriter.config(patterns="none"):
            fast(*args)
            assert not fast.report(*args).sites
        fast(*args)
    assert len(counted) == 2
    assert fast.report(*args).sites


def test_records_are_bounded(monkeypatch):
    monkeypatch.setattr(engine, "REMEMBERED", 2)
    fast = rewriter.optimize(lambda x: x + 1)
    for n in range(1, 6):
        fast(jnp.ones(n))
    assert fast.report(jnp.ones(1)).name == "<lambda>"


def test_disabled(monkeypatch, counted):
    monkeypatch.setenv("REWRITER_DISABLE", "1")
    fast = rewriter.optimize(block)
    close(fast(*inputs()), block(*inputs()))
    assert not counted


def test_disable_jit():
    with jax.disable_jit():
        seen = rewriter.optimize(lambda x: x if x > 0 else -x)(jnp.float32(-2))
    assert seen == 2


def test_a_failure_leaves_the_program(broken):
    fast = rewriter.optimize(block)
    with pytest.warns(RewriterWarning, match=r"block: left as written: KeyError"):
        got = fast(*inputs())
    close(got, block(*inputs()))


def test_a_failure_is_an_error_when_strict(broken):
    with pytest.raises(RewriterError, match="rewriting block failed") as caught:
        rewriter.optimize(block, strict=True)(*inputs())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_changed_signature_is_refused(monkeypatch):
    other = jax.make_jaxpr(lambda p, x: x[0])(*inputs())
    monkeypatch.setattr(engine, "rewrite", lambda *a: Rewritten(other))
    with pytest.warns(RewriterWarning, match="outputs became"):
        got = rewriter.optimize(block)(*inputs())
    close(got, block(*inputs()))


def test_require():
    args = inputs()
    forced = {"implementation": FORCED}
    rewriter.optimize(block, require={"attention": 1, "rms_norm": 1}, **forced)(*args)
    with pytest.raises(RequirementNotMet, match="attention: 1 of 2"):
        rewriter.optimize(block, require={"attention": 2}, **forced)(*args)
    with pytest.raises(RequirementNotMet, match="layer_norm: 0 of 1"):
        rewriter.explain(block, require="layer_norm")(*args)


def test_verify_once():
    args = inputs()
    fast = rewriter.optimize(block, verify="once", implementation=FORCED)
    close(fast(*args), block(*args))


@pytest.mark.parametrize("verify", ["off", "once"])
@pytest.mark.parametrize("transformed", [jax.grad, jax.jit, jax.checkpoint])
def test_a_transformed_function_is_taken_as_what_it_is(transformed, verify):
    def f(q, k, v):
        w = jax.nn.softmax(jnp.einsum("td,sd->ts", q, k))
        return (w @ v).sum()

    args = (jnp.ones((64, 16)),) * 3
    fast = rewriter.optimize(f, implementation=FORCED, verify=verify)
    about = transformed(fast)  # which has the attributes of `fast`
    report = rewriter.explain(about)(*args)
    assert not report.sites
    assert "attention ×1: rewritten by an `optimize` inside" in report.text()
    assert rewriter.explain(fast)(*args) is fast.report(*args)
    assert "inside" not in fast.report(*args).text()

    again = rewriter.optimize(about)
    assert again.original is about
    want = transformed(f)(*args)
    assert [x.shape for x in again.jaxpr(*args).out_avals] == [want.shape]
    close(again(*args), want)
    if verify == "off":
        artifact = rewriter.export(about, platforms=("cpu",))(*args)
        close(artifact.call(*args), want)


def test_an_error_inside_a_library_has_the_users_line():
    def uneven(x):
        return jnp.einsum("ab,bc->ac", x, x[:, :2])

    with pytest.raises(TraceError, match=r"test_optimize.py:\d+: uneven could not"):
        rewriter.explain(uneven)(jnp.ones((3, 4)))


@pytest.mark.parametrize("value", [3, None])
def test_what_is_not_callable(value):
    with pytest.raises(
        RewriterError, match=r"test_optimize.py:\d+: Expected a callable"
    ):
        rewriter.optimize(value)


def test_a_function_that_does_not_trace():
    def bad(x):
        y = x + 1
        return y if y.sum() > 0 else -y

    with pytest.raises(TraceError, match=r"test_optimize.py:\d+: bad could not") as e:
        rewriter.explain(bad)(jnp.ones(3))
    assert isinstance(e.value.__cause__, jax.errors.TracerBoolConversionError)
    with pytest.raises(jax.errors.TracerBoolConversionError) as e:
        rewriter.optimize(bad)(jnp.ones(3))
    assert any("while tracing bad, test_optimize.py" in n for n in e.value.__notes__)


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("looped", [False, True])
def test_results_of_sites_stay_weak(looped: bool, derived: bool) -> None:
    """As of `jnp.full`, which gives way to the type of what it meets next."""

    def norm(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def layers(x):
        if not looped:
            return norm(norm(x) * 2.0)
        return jax.lax.scan(lambda x, _: (norm(x) * 2.0, None), x, None, length=3)[0]

    program = layers
    if derived:
        program = jax.value_and_grad(lambda x: (layers(x) * jnp.arange(32.0)).sum())
    x = jnp.full((1024, 32), 0.5)
    assert x.weak_type
    fast = rewriter.optimize(
        program, strict=True, implementation={"rms_norm": "memory_bounded"}
    )
    assert fast.report(x).counts()["rms_norm"] >= 1
    for a, b in zip(*map(jax.tree.leaves, (fast(x), program(x))), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8, 4, 16), (2, 0, 4, 16), (2, 8, 4, 0)])
def test_without_numbers_nothing_is_found(shape: tuple[int, ...]) -> None:
    """And nothing is warned of."""
    x = jnp.ones(shape)
    fast = rewriter.optimize(attention, strict=True)
    assert fast(x, x, x).shape == shape
    assert not fast.report().sites


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64"])
def test_numbers_of_other_kinds_are_left_alone(dtype: str) -> None:
    def plain(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    x = jnp.linspace(-1, 1, 1024).reshape(2, 8, 4, 16).astype(dtype)
    fast = rewriter.optimize(plain, strict=True)
    assert fast(x, x, x).dtype == dtype
    assert not fast.report().sites


@pytest.mark.parametrize("many", [False, True])
def test_random_keys_as_constants(many: bool) -> None:
    """A program that holds random keys is rewritten like any other."""
    key = jax.random.key(0)
    keys = jax.random.split(key) if many else key

    def dropped(q, k, v):
        mine = keys[1] if many else jax.random.fold_in(keys, 1)
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(mine, 0.9, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.9, 0), v)

    q = jax.random.normal(key, (2, 8, 2, 16))
    fast = rewriter.optimize(dropped, implementation={"attention": "reference"})
    assert fast.report(q, q, q).counts()["attention"] == 1
    np.testing.assert_allclose(fast(q, q, q), dropped(q, q, q), atol=1e-6)
