"""Run by test_sharding.py on eight devices: what else becomes of sharded programs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.program.collectives import collectives_in
from tests.support.sharded_programs import FORCED, attention

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
HEADS = NamedSharding(MESH, P("data", None, "model"))
PLAIN = tuple(
    jax.random.normal(jax.random.key(i), (8, 64, 4, 16), jnp.float32) for i in range(3)
)
ARGS = jax.device_put(PLAIN, HEADS)
TRUE = np.asarray(attention(*PLAIN))


def optimized(f: Any = attention, **options: Any) -> Any:
    """The function with kernels forced, which run on small arrays too."""
    return rewriter.optimize(f, implementation=FORCED, **options)


def close(got: Any, want: Any = TRUE) -> None:
    """Asserts that results agree to float32, in which sums lose what cancels."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        largest = max(1.0, float(np.abs(b).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * largest)


def one_site(fast: Any, *args: Any) -> Any:
    """The only site of a report."""
    (site,) = fast.report(*args).sites
    return site


@contextlib.contextmanager
def warns(text: str) -> Iterator[None]:
    """Asserts that a warning says this."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert any(text in str(w.message) for w in seen), seen


def loss(q: Any, k: Any, v: Any) -> jax.Array:
    """A scalar."""
    return (attention(q, k, v) ** 2).sum()


def known_arguments() -> None:
    """Committed, given, described, closed over, asked for in the program."""
    split = "b over data, n over model, k over model"
    fast = optimized()
    close(fast(*ARGS))
    assert one_site(fast, *ARGS).sharding == split
    rows = jax.device_put(PLAIN, NamedSharding(MESH, P("data")))
    close(fast(*rows))  # the same trace, lowered once more
    assert one_site(fast, *rows).sharding == "b over data"
    close(fast(*PLAIN))
    assert one_site(fast, *PLAIN).sharding == ""
    assert fast(*ARGS).sharding.is_equivalent_to(HEADS, 4)
    assert f"on each device: {split}" in fast.report(*ARGS).text()
    assert fast.report(*PLAIN).collectives() == ({}, {})
    seq = jax.device_put(PLAIN, NamedSharding(MESH, P("data", "model")))
    before, after = fast.report(*seq).collectives()
    assert after == {"all-gather": (2, 2 * PLAIN[0].nbytes // 4)}
    assert sum(n for _, n in before.values()) >= sum(n for _, n in after.values())

    moved = jax.device_put(ARGS, jax.devices()[1])  # whose types have the mesh still
    close(fast(*moved))
    assert "rewriter_site" in fast.lower(*moved).as_text()
    site = one_site(fast, *moved)
    assert (site.replaced, site.sharding) == (True, "")

    given = optimized(in_shardings=(HEADS,) * 3, out_shardings=HEADS)
    close(given(*PLAIN))
    assert one_site(given, *PLAIN).sharding == split
    lifted = optimized(jax.jit(attention, in_shardings=HEADS))
    close(lifted(*PLAIN))
    assert one_site(lifted, *PLAIN).sharding == split

    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HEADS) for x in PLAIN]
    assert one_site(optimized(), *specs).sharding == split
    assert not collectives_in(optimized().lower(*specs).compile().as_text())

    closed = optimized(lambda q: attention(q, *ARGS[1:]))
    close(closed(ARGS[0]))
    assert one_site(closed, ARGS[0]).sharding == split

    def asks(q: Any, k: Any, v: Any) -> jax.Array:
        q, k, v = (jax.lax.with_sharding_constraint(x, HEADS) for x in (q, k, v))
        return attention(q, k, v)

    close(optimized(asks)(*PLAIN))
    assert one_site(optimized(asks), *PLAIN).sharding == split


def unknown_arguments() -> None:
    """In the middle of other programs sites are left to XLA, and say so."""
    fast = optimized()
    close(jax.jit(lambda *a: fast(*a) + 0)(*ARGS))
    with warns("attention: this program runs on several devices"):
        close(jax.jit(fast, in_shardings=HEADS)(*PLAIN))
    close(jax.jit(jax.vmap(fast))(*(x[None] for x in ARGS)), TRUE[None])
    want = jax.grad(loss, (0, 1, 2))(*PLAIN)
    close(jax.jit(jax.grad(optimized(loss), (0, 1, 2)))(*ARGS), want)
    close(jax.grad(optimized(loss), (0, 1, 2))(*ARGS), want)
    _, tangent = jax.jvp(attention, PLAIN, PLAIN)
    close(jax.jvp(fast, ARGS, ARGS)[1], tangent)
    out: dict[str, Any] = {}

    def around(*args: Any) -> jax.Array:
        out["report"] = fast.report(*args)
        return fast(*args)

    jax.jit(around)(*ARGS)
    (site,) = out["report"].sites
    assert not site.replaced
    assert "optimize the outermost function" in site.not_chosen[0][1]
    # Where in_shardings are given, they are known inside as well.
    given = optimized(loss, in_shardings=(HEADS,) * 3)
    step = jax.jit(jax.grad(given, (0, 1, 2)))
    close(step(*ARGS), want)
    text = str(step.trace(*ARGS).jaxpr)
    assert "rewriter_site_backward" in text
    assert "shard_map" in text


def never_bare() -> None:
    """A kernel is lowered for one device only, wherever the site came from."""

    @rewriter.pattern(dims="x: b d -> b d")
    def shifted(x: Any) -> jax.Array:
        return jnp.sin(x) * jnp.exp(-x * x)

    @shifted.kernel(platform="cpu", version=1)
    def callback(x: Any) -> jax.Array:  # XLA cannot split this
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        run = lambda x: np.sin(x) * np.exp(-x * x)
        return jax.pure_callback(run, shape, x)

    def f(x: Any) -> jax.Array:
        return 2 * (jnp.sin(x) * jnp.exp(-x * x))

    x = PLAIN[0].reshape(64, -1)
    fast = rewriter.optimize(f, patterns=["none", shifted])
    assert "callback" in fast.lower(x).as_text()
    rows = NamedSharding(MESH, P("data"))
    outer = jax.jit(fast, in_shardings=rows)
    with warns("gives way to plain JAX"):
        assert "callback" not in outer.lower(x).as_text()
    warnings.simplefilter("ignore")
    close(outer(x), f(x))
    warnings.simplefilter("error")
    # Along which of its letters it may be split was tried out.
    placed = jax.device_put(x, rows)
    assert one_site(fast, placed).sharding == "b over data"
    compiled = fast.lower(placed).compile()
    assert not collectives_in(compiled.as_text())
    close(compiled(placed), f(x))


def in_shard_map() -> None:
    """What is one device's already is rewritten as it is."""

    def mapped(*args: Any) -> jax.Array:
        specs = HEADS.spec
        call = jax.shard_map(attention, mesh=MESH, in_specs=specs, out_specs=specs)
        return call(*args)

    fast = optimized(mapped)
    close(fast(*ARGS))
    site = one_site(fast, *ARGS)
    assert site.replaced
    assert not site.sharding
    inside = jax.shard_map(
        optimized(), mesh=MESH, in_specs=HEADS.spec, out_specs=HEADS.spec
    )
    close(jax.jit(inside)(*ARGS))
    assert "rewriter_site" in str(jax.jit(inside).trace(*ARGS).jaxpr)

    partly = jax.shard_map(
        attention, mesh=MESH, in_specs=P("data"), out_specs=P("data"),
        axis_names={"data"},
    )  # fmt: skip
    fast = optimized(partly)
    close(fast(*ARGS))
    assert one_site(fast, *ARGS).sharding == "n over model, k over model"
    small = tuple(x[:, :4] for x in ARGS)  # both modes, and once more
    tangent = lambda f: jax.jit(lambda *a: jax.jvp(f, a, a)[1])
    close(tangent(fast)(*small), tangent(attention)(*small))
    square = lambda f: lambda *a: sum((x**2).sum() for x in f(*a))
    step = lambda f: jax.grad(square(f), (0, 1, 2))
    twice = jax.jit(jax.grad(square(optimized(step(partly)))))
    close(twice(*small), jax.jit(jax.grad(square(step(attention))))(*small))
    inside = jax.shard_map(
        optimized(), mesh=MESH, in_specs=P("data"), out_specs=P("data"),
        axis_names={"data"},
    )  # fmt: skip
    close(jax.jit(inside)(*ARGS))  # nothing states how `model` splits its arguments
    assert "rewriter_site" not in str(jax.jit(inside).trace(*ARGS).jaxpr)


def differentiated_shard_map() -> None:
    """Gradients in a shard_map of their own read what each device keeps for itself."""

    def mixed(x: Any, scale: Any) -> jax.Array:
        y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
        first = jax.lax.axis_index("data") + 1.0
        return jax.lax.psum(attention(y, y, x), "model") * first

    x, scale = PLAIN[0], jnp.linspace(0.5, 2, 16)
    for check in (False, True):
        spread = jax.shard_map(
            mixed, mesh=MESH, in_specs=(P("data", None, "model"), P()),
            out_specs=P("data"), check_vma=check,
        )  # fmt: skip
        step = jax.grad(lambda x, s, f=spread: jnp.sin(f(x, s)).sum(), (0, 1))
        fast = optimized(step, strict=True)
        counts = fast.report(x, scale).counts(backward=True)
        assert (counts["attention"], counts["rms_norm"]) == (1, 1)
        close(fast(x, scale), jax.jit(step)(x, scale))


def optimized_in_shard_map() -> None:
    """One that sees a part already is rewritten, and so are its gradients and loops."""

    def norm(x: Any) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def spread(f: Any) -> Any:
        fast = rewriter.optimize(
            f, implementation={"rms_norm": "memory_bounded"}, strict=True
        )
        return jax.shard_map(fast, mesh=MESH, in_specs=P("data"), out_specs=P("data"))

    def layers(x: Any) -> jax.Array:
        return jax.lax.scan(lambda x, _: (norm(x) * 2, None), x, None, length=2)[0]

    x = PLAIN[0]
    for f in (norm, layers):
        close(spread(f)(x), f(x))
        assert "rewriter_site" in str(jax.make_jaxpr(spread(f))(x))
        total = lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())
        close(total(spread(f))(x), total(f)(x))


def explicit() -> None:
    """Types that state shardings say where a site's operands are, also in a jit."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def plain(q: Any, k: Any, v: Any) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    def scalar(f: Any) -> Any:
        return lambda *args: (f(*args) ** 2).sum()

    want, grads = plain(*PLAIN), jax.grad(scalar(plain), (0, 1, 2))(*PLAIN)
    with jax.set_mesh(mesh):
        args = jax.device_put(PLAIN, HEADS.spec)
        fast = optimized(plain)
        assert (
            one_site(fast, *args).sharding == "b over data, n over model, k over model"
        )
        close(fast(*args), want)
        assert jax.typeof(fast(*args)) == jax.typeof(jax.jit(plain)(*args))
        nested = jax.jit(jax.grad(scalar(fast), (0, 1, 2)))
        close(nested(*args), grads)
        assert "rewriter_site_backward" in str(nested.trace(*args).jaxpr)
        step = optimized(jax.grad(scalar(plain), (0, 1, 2)))
        close(step(*args), grads)
        assert one_site(step, *args).backward
        rows = jax.device_put(PLAIN, P("data", "model"))

        def gathering(q: Any, k: Any, v: Any) -> jax.Array:
            return plain(q, *(jax.sharding.reshard(x, P("data")) for x in (k, v)))

        fast = optimized(gathering)
        assert one_site(fast, *rows).sharding == "b over data, t over model"
        close(fast(*rows), want)


def partly_automatic() -> None:
    """Where only some axes of the mesh are automatic, sites are split over all."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def f(*args: Any) -> jax.Array:
        rows = P("data", None, None, None)
        return jax.sharding.auto_axes(attention, axes="model", out_sharding=rows)(*args)

    with jax.set_mesh(mesh):
        args = jax.device_put(PLAIN, P("data"))
        fast = optimized(f)
        close(fast(*args))  # without a warning that rewriting failed
        assert one_site(fast, *args).sharding == "b over data"


def elsewhere() -> None:
    """Heads are split for attention, positions before and after it, as asked for."""
    rows = NamedSharding(MESH, P("data", "model"))

    def moved(*args: Any) -> jax.Array:
        by_heads = (jax.lax.with_sharding_constraint(x, HEADS) for x in args)
        return jax.lax.with_sharding_constraint(attention(*by_heads), rows)

    def gradient(*args: Any) -> Any:
        return jax.grad(lambda *a: (moved(*a) ** 2).sum(), (0, 1, 2))(*args)

    args = jax.device_put(PLAIN, rows)
    for f in (moved, gradient):
        fast = optimized(f)
        close(fast(*args), f(*PLAIN))
        said = one_site(fast, *args).sharding
        assert said == "b over data, n over model, k over model"
        before, after = fast.report(*args).collectives()
        assert set(after) == {"all-to-all"}
        assert after["all-to-all"][1] <= before["all-to-all"][1]


def tuned() -> None:
    """What is measured is what one device computes."""
    found = rewriter.tune(attention, level="quick", budget_s=20)(*ARGS)
    shapes = {dict(key.shapes)["q"] for key, _ in found.entries}
    assert shapes == {(2, 64, 2, 16)}, found.entries


def measured() -> None:
    """Numbers are compared on the devices, and ops with effects are left to XLA."""
    assert rewriter.verify(optimized())(*ARGS).ok

    def prints(q: Any, k: Any, v: Any) -> jax.Array:
        jax.debug.callback(lambda x: None, q[0, 0, 0, 0])
        return attention(q, k, v)

    fast = optimized(prints)
    close(fast(*ARGS))
    assert "shard_map" not in str(fast.trace(*ARGS).jaxpr)
    given = optimized(prints, in_shardings=(HEADS,) * 3)
    close(given(*PLAIN))
    assert "shard_map" in str(given.trace(*PLAIN).jaxpr)


def exported() -> None:
    """An exported program keeps its devices and its numbers."""
    fast = optimized(in_shardings=(HEADS,) * 3)
    made = jax.export.export(fast)(*PLAIN)
    assert made.nr_devices == 8
    close(made.call(*ARGS))


def exported_for_all_platforms() -> None:
    """A kernel for each; with symbolic sizes JAX cannot call a `jax.shard_map`."""
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=HEADS) for x in PLAIN]
    options = {"implementation": FORCED, "platforms": ("cpu", "cuda")}
    with jax.set_mesh(MESH):
        made = rewriter.export(attention, **options)(*specs)
        assert len(made.manifest["kernels"][0]["by_platform"]) == 2
        close(made.call(*ARGS))
        length = jax.export.symbolic_shape("8, t, 4, 16")
        specs = [jax.ShapeDtypeStruct(length, x.dtype, sharding=HEADS) for x in PLAIN]
        made = rewriter.export(attention, **options)(*specs)
        assert not made.manifest["kernels"]
        assert not made.manifest["fallbacks"]
        close(made.call(*ARGS))


if __name__ == "__main__":
    warnings.simplefilter("error")
    known_arguments()
    unknown_arguments()
    never_bare()
    in_shard_map()
    differentiated_shard_map()
    optimized_in_shard_map()
    explicit()
    partly_automatic()
    elsewhere()
    tuned()
    measured()
    exported()
    exported_for_all_platforms()
