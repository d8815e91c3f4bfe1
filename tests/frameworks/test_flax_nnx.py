"""Functions of flax.nnx modules train as under nnx.jit: no update is lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.errors import StateLost
from tests.support.programs import FORCED

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")


def optimized(fn: Any, **options: Any) -> Any:
    return rewriter.optimize(fn, implementation=FORCED, **options)


class Model(nnx.Module):
    """A norm with a gain, batch statistics, dropout and a counter of calls."""

    def __init__(self, rngs: Any) -> None:
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.batch = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), int))
        self.tied = self.inner  # one module, met twice

    def __call__(self, x: Any) -> Any:
        self.calls.set_value(self.calls.get_value() + 1)
        return self.tied(self.drop(self.batch(self.norm(self.inner(x)))))

    def loss(self, x: Any) -> Any:
        return ((self(x) - x) ** 2).mean()


def step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(Model.loss)(model, x)
    optimizer.update(model, grads)
    return loss


def of_loss(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        fast = wrap(lambda model, x: model.loss(x))
        loss, grads = nnx.value_and_grad(fast)(model, x)
        optimizer.update(model, grads)
        return loss

    return step


def cached(wrap: Callable[..., Any]) -> Callable[..., Any]:
    made: list[Any] = []

    def run(model: Any, optimizer: Any, x: Any) -> Any:
        if not made:
            made.append(nnx.cached_partial(wrap(step), model, optimizer))
        return made[0](x)

    return run


def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    @rewriter.optimize(implementation=FORCED)
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        """Trains."""
        return fn(model, optimizer, x)

    return step


def named(fn: Callable[..., Any]) -> Callable[..., Any]:
    fast = optimized(lambda state, *, x: fn(*state["both"], x))
    return lambda model, optimizer, x: fast({"both": (model, optimizer)}, x=x)


def tree_mode(fn: Callable[..., Any]) -> Callable[..., Any]:
    return optimized(nnx.jit(fn, graph=False))


WAYS: dict[str, Callable[[], Callable[..., Any]]] = {
    "optimize": lambda: optimized(step),
    "optimize_nnx_jit": lambda: optimized(nnx.jit(step)),
    "nnx_jit_optimize": lambda: nnx.jit(optimized(step)),
    "optimize_optimize": lambda: optimized(optimized(step)),
    "optimize_jit": lambda: optimized(jax.jit(step)),
    "decorated": lambda: decorated(step),
    "named": lambda: named(step),
    "donated": lambda: optimized(step, donate_argnums=(0, 1)),
    "loss_in_nnx_jit": lambda: nnx.jit(of_loss(optimized)),
    "loss_in_optimize": lambda: optimized(of_loss(optimized)),
    "loss_alone": lambda: of_loss(optimized),
    "loss_nnx_jit": lambda: of_loss(lambda f: optimized(nnx.jit(f))),
    "remat": lambda: optimized(of_loss(nnx.remat)),
    "remat_of_optimized": lambda: nnx.jit(of_loss(lambda f: nnx.remat(optimized(f)))),
    "cached_partial": lambda: cached(optimized),
    "cached_partial_nnx_jit": lambda: cached(lambda f: optimized(nnx.jit(f))),
    "once": lambda: optimized(step, verify="once"),
}


def trained(make: Callable[[], Callable[..., Any]], steps: int = 3) -> Any:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (16, 8))
    run = make()
    losses = [float(run(model, optimizer, x)) for _ in range(steps)]
    state = jax.tree.leaves(nnx.state((model, optimizer)))
    numbers = [
        np.asarray(jax.random.key_data(v) if v.dtype == jax.random.key(0).dtype else v)
        for v in state
    ]
    return losses, numbers


@pytest.fixture(scope="module")
def wanted() -> Any:
    return trained(lambda: nnx.jit(step))


def _equal_as_a_whole(got: Any, want: Any) -> None:
    """Adam divides a gradient near zero by itself, so single entries may differ."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want) + 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_under_nnx_jit(way: str, wanted: Any) -> None:
    losses, state = trained(WAYS[way])
    assert wanted[0][-1] < wanted[0][0]
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-4)
    for got, want in zip(state, wanted[1], strict=True):
        _equal_as_a_whole(got, want)


def test_tree_mode() -> None:
    def two(model: Any, x: Any) -> Any:
        model.bias[...] += x.sum()
        return model(x)

    results = []
    for wrap in (lambda f: nnx.jit(f, graph=False), tree_mode):
        model, run = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), wrap(two)
        out = [run(model, jnp.ones((2, 4))) for _ in range(2)][1]
        results.append((out, model.bias[...]))
    jax.tree.map(np.testing.assert_allclose, *results)


def test_scan_and_vmap_of_layers() -> None:
    def forward(wrap: Callable[..., Any], model: Any, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def layers(layer: Any, x: Any) -> Any:
            return wrap(lambda layer, x: x + layer(x))(layer, x)

        return layers(model, x)

    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(key: Any) -> Any:
        return Model(nnx.Rngs(key))

    x, results = jax.random.normal(jax.random.key(1), (16, 8)), []
    for inner, outer in ((lambda f: f, nnx.jit), (optimized, nnx.jit),
                         (lambda f: f, optimized), (optimized, optimized)):  # fmt: skip
        model = stacked(jax.random.split(jax.random.key(0), 3))
        run = outer(lambda model, x, inner=inner: forward(inner, model, x))
        outs = [run(model, x) for _ in range(2)]
        assert model.calls[...].tolist() == [2, 2, 2]
        results.append((outs, model.batch.mean[...]))
    for other in results[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            other,
            results[0],
        )


def test_methods_and_modules_are_read_when_called() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(jnp.zeros(()))

        @rewriter.optimize
        def decorated(self, x: Any) -> Any:
            self.count[...] += 1
            return x + self.count[...]

        def __call__(self, x: Any) -> Any:
            return self.decorated(x)

    counter = Counter()
    assert [counter.decorated(1.0) for _ in range(2)] == [2, 3]
    fast = rewriter.optimize(counter)
    assert [float(fast(1.0)), float(rewriter.optimize(counter.__call__)(1.0))] == [4, 5]
    assert counter.count[...] == 4
    counter.count[...] = 10.0
    assert fast(1.0) == 12  # not what it was when it was traced


def test_variables_streams_and_metrics_on_their_own() -> None:
    def f(v: Any, rngs: Any, metric: Any, x: Any) -> Any:
        v[...] += x
        metric.update(values=x)
        return jax.random.normal(rngs.default(), ())

    seen = []
    for wrap in (nnx.jit, rewriter.optimize):
        given = nnx.Variable(jnp.zeros(())), nnx.Rngs(3), nnx.metrics.Average()
        run = wrap(f)
        draws = [float(run(*given, jnp.float32(2))) for _ in range(2)]
        assert draws[0] != draws[1]
        assert given[0][...] == 4
        assert given[2].compute() == 2
        seen.append(draws)
    assert seen[0] == seen[1]


def test_new_variables_are_kept() -> None:
    class Lazy(nnx.Module):
        def __call__(self, x: Any) -> Any:
            if not hasattr(self, "w"):
                self.w = nnx.Param(jnp.ones(3))
            return x * self.w[...]

    lazy = Lazy()
    rewriter.optimize(lambda m, x: m(x))(lazy, 2.0)
    assert lazy.w[...].sum() == 3


def test_the_functional_kind_stays_a_jit() -> None:
    model = Model(nnx.Rngs(0))
    graph, state = nnx.split(model)

    def call(state: Any, x: Any) -> Any:
        model = nnx.merge(graph, state)
        out = model(x)
        return nnx.state(model), out

    fast, x = rewriter.optimize(call), jnp.ones((4, 8))
    state, _ = fast(state, x)
    state, _ = fast(state, x)
    assert state["calls"].get_value() == 2
    assert fast.lower(state, x).compile() is not None
    assert fast.report().name == "call"


def test_reports() -> None:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x = jnp.ones((16, 8))
    for fast in (optimized(step), optimized(nnx.jit(step))):
        report = fast.report(model, optimizer, x)
        assert report.counts(backward=True)["rms_norm"] == 1
        assert fast.report() is report
        assert fast.original is not fast
        assert "rewriter_site" in str(fast.jaxpr(model, optimizer, x))
        assert rewriter.explain(fast)(model, optimizer, x) is report
    assert rewriter.explain(nnx.jit(step))(model, optimizer, x).name == "step"
    assert model.calls[...] == 0  # a report changes nothing


def test_what_nnx_jit_has_beside_a_call() -> None:
    model = Model(nnx.Rngs(0))
    fast = optimized(nnx.jit(lambda m, x: m(x)))
    x = jnp.ones((16, 8))
    assert fast.eval_shape(model, x).shape == (16, 8)
    fast.lower(model, x).compile()(model, x)
    assert model.calls[...] == 1
    fast.clear_cache()
    fast(model, x)
    assert model.calls[...] == 2


@pytest.mark.parametrize("way", ["lower", "trace", "eval_shape"])
def test_a_change_that_would_be_lost_is_refused(way: str) -> None:
    model = Model(nnx.Rngs(0))
    fast = rewriter.optimize(lambda model, x: model(x))
    with pytest.raises(StateLost, match=r"Use rewriter.optimize\(nnx.jit\(fn\)\)"):
        getattr(fast, way)(model, jnp.ones((4, 8)))
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    getattr(fast, way)(linear, jnp.ones((2, 4)))  # which changes nothing


def test_closed_over_modules_are_refused_as_by_nnx_jit() -> None:
    model = Model(nnx.Rngs(0))
    for wrap in (nnx.jit, rewriter.optimize):
        with pytest.raises(Exception, match="different trace level"):
            wrap(lambda x: model(x))(jnp.ones((4, 8)))


def test_disabled(monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    monkeypatch.setenv("REWRITER_DISABLE", "1")
    assert trained(lambda: optimized(step))[0] == pytest.approx(wanted[0], rel=1e-4)


def test_without_jit() -> None:
    model = Model(nnx.Rngs(0))
    with jax.disable_jit():
        optimized(lambda m, x: m(x))(model, jnp.ones((4, 8)))
    assert model.calls[...] == 1


def test_shardings() -> None:
    mesh = jax.make_mesh((1,), ("a",))
    place = jax.sharding.NamedSharding(mesh, jax.P("a"))
    model = Model(nnx.Rngs(0))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    fast = optimized(
        lambda m, x: m(x), in_shardings=(everywhere, place), out_shardings=place
    )
    assert fast(model, jnp.ones((4, 8))).sharding == place
    assert model.calls[...] == 1
    with pytest.raises(StateLost, match="compiler_options"):
        rewriter.optimize(lambda m, x: m(x), compiler_options={})(model, 1.0)


def test_shardings_by_paths_of_states() -> None:
    mesh = jax.make_mesh((1, 1), ("a", "b"))
    place = jax.sharding.NamedSharding(mesh, jax.P("a", "b"))
    rest = jax.sharding.NamedSharding(mesh, jax.P())
    states = nnx.StateSharding({nnx.PathContains("kernel"): place, ...: rest})
    jitted = nnx.jit(
        lambda m, x: m(x), in_shardings=(states, rest), graph=True, graph_updates=True
    )
    linear, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    wanted = linear(x)
    np.testing.assert_allclose(rewriter.optimize(jitted)(linear, x), wanted, rtol=1e-5)
    assert linear.kernel.sharding == place


def test_modules_of_flax_itself_are_updated() -> None:
    norm, x = nnx.BatchNorm(3, rngs=nnx.Rngs(0)), jnp.arange(12.0).reshape(4, 3)
    fast = rewriter.optimize(norm)
    fast(x)
    assert norm.mean[...].sum() > 0


def test_variables_that_are_types_of_jax() -> None:
    if "hijax" not in inspect.signature(nnx.Variable.__init__).parameters:
        pytest.skip("this flax has no such variables")
    seen: list[Any] = []
    for jit in (jax.jit, rewriter.optimize):
        v = nnx.Param(jnp.arange(2.0), hijax=True)
        assert jit(lambda v: v[...] * 2)(v).tolist() == [0, 2]
        assert jit(lambda d: d["v"][...] + d["x"])({"v": v, "x": 1}).tolist() == [1, 2]
        try:  # newer versions of flax refuse it
            jit(lambda v: v.__setitem__(..., v[...] + 3.0))(v)
            seen.append(v[...].tolist())
        except Exception as error:
            seen.append(type(error))
    assert seen[0] == seen[1]
