"""What jax.jit does beside computing, an optimized function does too."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import rewriter
from rewriter import _jax
from rewriter.errors import NotTraceable, UnknownOption
from tests.support.programs import FORCED, block, inputs

WAYS = [jax.jit, rewriter.optimize]
both = pytest.mark.parametrize("jit", WAYS, ids=["jit", "optimize"])


@contextmanager
def uncollected() -> Iterator[None]:
    """What is freed inside is freed at once, and not by the cyclic collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ------------------------------------------------------------ traces and lifetimes
def counted(result: Callable[[Any], Any] = lambda x: x @ x) -> tuple[Any, list[int]]:
    traces: list[int] = []

    def f(x: Any) -> Any:
        traces.append(1)
        return result(x)

    return f, traces


@both
def test_equal_functions_share_a_trace(jit: Any) -> None:
    f, traces = counted()
    for _ in range(5):
        jit(f)(jnp.ones((4, 4)))
    assert len(traces) == 1


def test_a_trace_is_shared_with_jit() -> None:
    f, traces = counted()
    jax.jit(f)(jnp.ones((4, 4)))
    rewriter.optimize(f)(jnp.ones((4, 4)))
    rewriter.explain(f)(jnp.ones((4, 4)))
    assert len(traces) == 1


def test_other_options_are_another_program() -> None:
    args = inputs()
    sites = [
        len(rewriter.optimize(block, patterns=p).report(*args).sites)
        for p in ("default", "none", "attention", "default")
    ]
    assert sites[1] == 0
    assert sites[0] == sites[3] > sites[2] > 0


@both
def test_a_helper_in_a_model_is_lowered_once(jit: Any) -> None:
    f, traces = counted(lambda x: jnp.tanh(x) * x)

    def model(x: Any) -> Any:
        for _ in range(8):
            x = jit(f)(x)
        return x

    text = jax.jit(model).lower(jnp.ones(4)).as_text()
    assert (len(traces), text.count("func.func private")) == (1, 1)


@both
def test_methods_share_by_their_object(jit: Any) -> None:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale, self.traces = scale, 0

        def __call__(self, x: Any) -> Any:
            self.traces += 1
            return self.scale * x

    two, three = Model(2.0), Model(3.0)
    first = jit(two.__call__)
    assert first(1.0) == 2
    second = jit(two.__call__)
    del first
    assert (second(1.0), jit(three.__call__)(1.0)) == (2, 3)
    assert second(jnp.ones(2))[0] == 2  # traced after what shares it is gone
    assert two.traces <= (3 if jit is jax.jit else 2)


@both
def test_closures_are_freed_with_the_function(jit: Any) -> None:
    with uncollected():
        x = jnp.ones(1000)
        gone = weakref.ref(x)
        f = jit((lambda x: lambda: (x * x).sum())(x))
        f()
        f.lower().compile()
        del x, f
        assert gone() is None


@both
def test_an_object_is_freed_with_its_method(jit: Any) -> None:
    class Model:
        def __init__(self) -> None:
            self.w = jnp.ones(1000)

        def __call__(self, x: Any) -> Any:
            return self.w * x

    with uncollected():
        model = Model()
        gone = weakref.ref(model)
        f = jit(model.__call__)
        f(2.0)
        del model, f
        assert gone() is None


def test_reports_keep_nothing_alive() -> None:
    with uncollected():
        w = jnp.ones((16, 16))
        gone = weakref.ref(w)
        f = rewriter.optimize((lambda w: lambda x: jax.nn.softmax(x @ w) @ w)(w))
        report = f.report(jnp.ones((16, 16)))
        f(jnp.ones((16, 16)))
        del w, f, report
        assert gone() is None


@both
def test_clear_cache_forgets_the_trace(jit: Any) -> None:
    state = {"k": 1.0}
    f = jit(lambda x: x * state["k"])
    first = float(f(1.0))
    state["k"] = 2.0
    assert float(f(1.0)) == first == 1.0
    f.clear_cache()
    assert float(f(1.0)) == 2.0
    state["k"] = 3.0
    jax.clear_caches()
    assert float(f(1.0)) == 3.0


# -------------------------------------------------------------------- arguments
@jax.tree_util.register_pytree_node_class
class Checked:
    """A container that checks what it is made of, as many do."""

    def __init__(self, a: Any) -> None:
        assert a.ndim == 1
        assert isinstance(a, jax.Array)
        self.a = a

    def tree_flatten(self) -> Any:
        return (self.a,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


@pytest.mark.parametrize("named", [False, True])
def test_containers_that_check_their_leaves(named: bool) -> None:
    mesh = jax.make_mesh((1,), ("a",))
    place = jax.sharding.NamedSharding(mesh, jax.P("a"))
    options = {"in_shardings": place, "out_shardings": place} if named else {}
    fast = rewriter.optimize(lambda t: Checked(t.a * 2), **options)
    assert fast(Checked(jnp.ones(3))).a.sum() == 6
    assert fast.report(Checked(jnp.ones(3))).name == "<lambda>"
    grads = jax.grad(lambda t: fast(t).a.sum())(Checked(jnp.ones(3)))
    assert grads.a.sum() == 6


@both
def test_trees_of_shardings_that_do_not_fit(jit: Any) -> None:
    place = jax.sharding.NamedSharding(jax.make_mesh((1,), ("a",)), jax.P())
    for tree in ((place,) * 3, {"a": place}):
        with pytest.raises(ValueError, match="pjit out_shardings"):
            jit(lambda x: (x, x), out_shardings=tree)(jnp.ones(3))


@both
def test_tokens(jit: Any) -> None:
    _, token = jit(lambda x, t: (x + 1, t))(1.0, jax.lax.create_token())
    assert type(token).__name__ == "Token"


@both
def test_static_arguments_that_cannot_be_compared(jit: Any) -> None:
    class Opaque:
        def __hash__(self) -> int:
            return id(type(self)) % 1000

        def __eq__(self, other: object) -> bool:
            raise NotImplementedError

    f = jit(lambda x, y: x + 1, static_argnums=1)
    assert f(1.0, Opaque()) == 2
    with pytest.raises((ValueError, NotImplementedError)):
        f(1.0, Opaque())


NOT_TAKEN = [3, lambda x: (yield x), staticmethod(abs), classmethod(abs)]


@pytest.mark.parametrize("given", NOT_TAKEN, ids=lambda x: type(x).__name__)
def test_what_jit_does_not_take(given: Any) -> None:
    with pytest.raises(TypeError) as theirs:
        jax.jit(given)
    with pytest.raises(NotTraceable) as ours:
        rewriter.optimize(given)
    assert isinstance(ours.value, TypeError)
    assert str(theirs.value).rstrip(".") in str(ours.value)
    assert ours.value.next_step


def test_unknown_options_are_type_errors() -> None:
    with pytest.raises(TypeError):
        jax.jit(abs, static_argnum=1)
    with pytest.raises(UnknownOption, match="Did you mean 'static_argnums'"):
        rewriter.optimize(abs, static_argnum=1)


def test_static_methods_below_the_decorator() -> None:
    class Model:
        @staticmethod
        @rewriter.optimize
        def double(x: Any) -> Any:
            return 2 * x

    assert Model.double(2) == Model().double(2) == 4


def rms_norm(x: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def scaled(self: Any, x: Any, times: Any = 1) -> Any:
    """A method; `self` and `times` may be static."""
    return rms_norm(x) * self.scale * times


class Net:
    scale = 3.0
    by_position = functools.partial(jax.jit, static_argnums=(0, 2))(scaled)
    from_behind = functools.partial(jax.jit, static_argnums=(-3, -1))(scaled)
    by_name = functools.partial(jax.jit, static_argnames=("self", "times"))(scaled)
    given_away = functools.partial(jax.jit, static_argnums=0, donate_argnums=1)(scaled)
    fast = rewriter.optimize(
        scaled, static_argnums=(0, 2), implementation={"rms_norm": "memory_bounded"}
    )


class Tree(NamedTuple):
    scale: Any
    step = functools.partial(jax.jit, static_argnums=2, donate_argnums=(1,))(scaled)


METHODS = {
    "by position": (Net().by_position, (2,), False),
    "from behind": (Net().from_behind, (2,), False),
    "by name": (Net().by_name, (2,), False),
    "given away": (Net().given_away, (), True),
    "fast": (Net().fast, (2,), False),
    "of a tree": (Tree(jnp.float32(3)).step, (2,), True),
    "its own": (functools.partial(Net().by_position, times=2), (), False),
}


@pytest.mark.parametrize("name", METHODS)
def test_bound_methods_of_jitted_functions(name: str) -> None:
    method, rest, donated = METHODS[name]
    x = jnp.arange(1024.0).reshape(2, 512) + 1
    want = method(x + 0, *rest)
    report = rewriter.explain(method)(x, *rest)
    assert report.counts()["rms_norm"] == 1
    assert (name == "fast") == (report.sites[0].origin == "forced")
    got = rewriter.optimize(method)(x, *rest)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert x.is_deleted() == donated


class Around:
    """Computes more than a function, and hands its attributes on."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["fn"], name)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args) + 7


def updated(fn: Any) -> Any:
    return functools.update_wrapper(lambda *args: fn(*args) + 7, fn)


@pytest.mark.parametrize("wrap", [Around, updated], ids=["object", "function"])
@both
def test_what_wraps_a_jitted_function_is_not_one(jit: Any, wrap: Any) -> None:
    jitted = jit(lambda x, n: rms_norm(x) * n, static_argnums=1)
    x, around = jnp.ones((2, 512)), wrap(functools.partial(jitted, n=2))
    for fn in (around, wrap(jit(rms_norm)), wrap(around)):
        want = fn(x)
        np.testing.assert_allclose(rewriter.optimize(fn)(x), want, rtol=1e-6)
        assert rewriter.explain(fn)(x).counts()["rms_norm"] == 1


@both
def test_classes(jit: Any) -> None:
    class Point(NamedTuple):
        x: Any
        y: Any = 2.0

    assert jit(Point)(1.0) == (1, 2)


@both
def test_refs(jit: Any) -> None:
    given, closed = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.zeros(3))

    def f(ref: Any, x: Any) -> Any:
        ref[...] += x
        ref[0] = 5.0
        closed[...] += 2 * ref[...]
        return x

    fast = jit(f)
    fast(given, 1.0)
    fast(given, 2.0)
    assert given[...].tolist() == [5, 3, 3]
    assert closed[...].tolist() == [20, 8, 8]


@both
def test_refs_beside_sites(jit: Any) -> None:
    options = {} if jit is jax.jit else {"implementation": FORCED}
    params, x = inputs()
    steps = jax.new_ref(jnp.zeros((), int))
    held = jax.tree.map(jax.new_ref, params)

    def train(held: Any, x: Any) -> Any:
        params = jax.tree.map(lambda r: r[...], held)
        grads = jax.grad(lambda p: (block(p, x) ** 2).mean())(params)
        for name, ref in held.items():
            ref[...] -= 0.1 * grads[name]
        steps[...] += 1

    fast = jit(train, **options)
    for _ in range(3):
        fast(held, x)
    assert steps[...] == 3
    want = params
    for _ in range(3):
        grads = jax.grad(lambda p: (block(p, x) ** 2).mean())(want)
        want = jax.tree.map(lambda p, g: p - 0.1 * g, want, grads)
    for name in params:
        np.testing.assert_allclose(held[name][...], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placed", [False, True])
def test_refs_of_a_loop_with_a_differentiated_site(placed: bool) -> None:
    def loss(x: Any, turns: Any, sums: Any) -> Any:
        def turn(y: Any, _: Any) -> Any:
            turns[...] += 1
            sums[...] += jax.lax.stop_gradient(y.sum(-1))
            norm = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
            return y + norm * norm.sum(), None

        return jax.lax.scan(turn, x, None, length=3)[0].sum()

    x = jax.random.normal(jax.random.key(0), (4, 16))
    mesh = jax.make_mesh((1,), ("rows",), (jax.sharding.AxisType.Explicit,))
    if placed:
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))
    options = {"implementation": FORCED, "strict": True}
    found = []
    for jit in (jax.jit, lambda f: rewriter.optimize(f, **options)):
        refs = jax.new_ref(jnp.zeros((), int)), jax.new_ref(jnp.zeros(4))
        fast = jit(jax.grad(loss))
        fast(x, *refs)
        found.append((fast(2 * x, *refs), *(ref[...] for ref in refs)))
    (site,) = fast.report(x, *refs).sites
    assert site.kernel == "memory_bounded"
    assert site.backward
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)
    assert found[1][1] == 6


# --------------------------------------------------------------------- metadata
@both
def test_metadata(jit: Any) -> None:
    def f(x: int, y: float = 2.0) -> int:
        """Says what it does."""
        return x

    f.tag = 4  # type: ignore[attr-defined]
    g = jit(f)
    assert (g.__name__, g.__doc__, g.tag) == ("f", "Says what it does.", 4)
    assert (g.__qualname__, g.__module__) == (f.__qualname__, f.__module__)
    assert g.__annotations__ == f.__annotations__
    assert g.__wrapped__ is f
    assert inspect.signature(g) == inspect.signature(f)
    assert jit(functools.partial(f, y=3.0))(1) == 1


def test_what_wraps_an_optimized_function_is_not_one() -> None:
    fast = rewriter.optimize(block, implementation=FORCED)
    params, x = inputs()
    gradient = jax.grad(lambda p, x: fast(p, x).sum())
    functools.update_wrapper(gradient, fast)
    report = rewriter.explain(gradient)(params, x)
    assert len(report.before.out_avals) == len(params)
    jitted = jax.jit(jax.grad(lambda p: p["scale"].sum() * 2.0))
    jitted.__dict__.update(report=fast.report, original=block)
    assert rewriter.explain(jitted)(params).counts().get("attention", 0) == 0


def test_cloudpickle() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    scale = jnp.arange(3.0)
    fast = rewriter.optimize(
        lambda x, n: scale * x + n, static_argnums=1, patterns="-attention"
    )
    fast(1.0, 2)
    again = cloudpickle.loads(cloudpickle.dumps(fast))
    assert again(2.0, 1).tolist() == [1, 3, 5]


# ---------------------------------------------------------------------- debugging
@pytest.mark.parametrize("sites", [False, True])
@both
def test_the_first_nan_is_named(jit: Any, sites: bool) -> None:
    options = {} if jit is jax.jit else {"implementation": FORCED}

    def f(p: Any, x: Any) -> Any:
        y = block(p, x) if sites else x
        return jnp.log(y * 0 - 1)

    args = inputs()
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"encountered in log"),
    ):
        jit(f, **options)(*args)
    with jax.debug_nans(True):
        jit(block, **options)(*args)
    step = jit(jax.value_and_grad(lambda x: jnp.sqrt(x).sum()))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        step(jnp.array([-1.0, 1.0]))


@both
def test_the_first_infinity_is_named(jit: Any) -> None:
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="div"):
        jit(lambda x: 1 / x)(jnp.zeros(()))


@both
def test_tracebacks_show_the_users_lines(jit: Any) -> None:
    def inner(x: Any) -> Any:
        return x @ jnp.ones((4, 4))

    def outer(x: Any) -> Any:
        return jax.vmap(inner)(x)

    with pytest.raises(TypeError) as caught:
        jit(outer)(jnp.ones((2, 3, 3)))
    frames = traceback.extract_tb(caught.value.__traceback__)
    mine = [f.name for f in frames if f.filename == __file__]
    assert mine[-2:] == ["outer", "inner"]
    engine = os.path.dirname(os.path.abspath(rewriter.__file__))
    assert not [f for f in frames if f.filename.startswith(engine + os.sep)]


def test_equations_of_calls_have_the_users_lines() -> None:
    fast = rewriter.optimize(lambda x: x + 1)
    eqn = jax.make_jaxpr(lambda x: fast(x))(1.0).eqns[0]
    assert _jax.source_of(eqn).startswith("test_as_jit.py")


@both
def test_cache_misses_are_told_once(jit: Any, caplog: pytest.LogCaptureFixture) -> None:
    helper = jax.jit(lambda x: x * 2)
    f = jit(lambda x: helper(x) + 1)
    with jax.explain_cache_misses(True):
        f(jnp.ones(3))
    told = [r.getMessage() for r in caplog.records if "MISS" in r.getMessage()]
    own = [text for text in told if "<lambda>" in text]
    assert len(own) == 2  # the function, and the helper in it
    assert "test_as_jit.py" in own[0].splitlines()[0]


CHECKS = {
    "floats": (checkify.float_checks, "nan generated"),
    "all": (checkify.all_checks, "nan generated"),
    "users": (checkify.user_checks, None),
}
TRANSFORMS = {
    "forward": lambda f: f,
    "grad": lambda f: jax.grad(lambda p, x: f(p, x).sum()),
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, x[None]),
    "jit": jax.jit,
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_checkify_sees_inside_of_sites(name: str, transform: str) -> None:
    errors, wanted = CHECKS[name]
    params, x = inputs()
    fast = TRANSFORMS[transform](rewriter.optimize(block, implementation=FORCED))
    checked = checkify.checkify(fast, errors=errors)
    error, out = checked(params, x)
    assert error.get() is None
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        out,
        jax.jit(TRANSFORMS[transform](block))(params, x),
    )
    error, _ = checked(params, x.at[0].set(jnp.nan))
    assert (error.get() is None) == (wanted is None)
    assert wanted is None or wanted in error.get()


@both
def test_a_users_check(jit: Any) -> None:
    def f(x: Any) -> Any:
        checkify.check(x.sum() > 0, "not above")
        return jnp.log(x)

    for checked in (checkify.checkify(jit(f)), jit(checkify.checkify(f))):
        assert "not above" in checked(jnp.float32(-1))[0].get()
        assert checked(jnp.float32(1))[0].get() is None


def test_the_differences_that_the_page_lists() -> None:
    """As docs/frameworks/plain_jax.md says; all others are defects."""

    def f(x: Any) -> Any:
        return jnp.sin(x)

    class Slots:
        __slots__ = ()

        def __call__(self, x: Any) -> Any:
            return x + 1

    class Unhashable:
        __hash__ = None

        def __call__(self, x: Any) -> Any:
            return x + 1

    def fails(x: Any) -> Any:
        raise KeyError("mine")

    mine, theirs = rewriter.optimize(f), jax.jit(f)
    assert repr(mine) == repr(theirs)
    assert mine is not rewriter.optimize(f)
    assert theirs is not jax.jit(f)
    for taken in (Slots(), Unhashable()):
        with pytest.raises(TypeError):
            jax.jit(taken)(1.0)
        assert rewriter.optimize(taken)(1.0) == 2.0
    with pytest.raises(TypeError) as refused:
        rewriter.optimize(3)
    assert isinstance(refused.value, NotTraceable)
    with pytest.raises(KeyError) as raised:
        rewriter.optimize(fails)(1.0)
    assert any("while tracing fails" in note for note in raised.value.__notes__)
