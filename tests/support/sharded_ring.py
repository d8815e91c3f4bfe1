"""Run by test_sharding.py on eight devices: attention whose keys go around a ring."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from rewriter.errors import KernelError, UnknownKernel
from tests.support.sharded_programs import attention, memory

MESH = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
ROWS = NamedSharding(MESH, P("data", "seq"))
SHAPES = ((2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 16))
PLAIN = tuple(
    jax.random.normal(jax.random.key(i), s, jnp.float32) for i, s in enumerate(SHAPES)
)
ARGS = jax.device_put(PLAIN, ROWS)
AROUND = "b over data, t over seq; k, v passed around seq"
RING = "ring of memory_bounded"


def ringed(f: Any = attention, **options: Any) -> Any:
    """The function with its attention in a ring."""
    return rewriter.optimize(f, implementation={"attention": "ring"}, **options)


def exact(f: Callable[..., Any], *args: Any) -> Any:
    """What a function gives in float64, on one device."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in args]
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    """Asserts that results agree to float32."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        limit = tolerance * max(1.0, np.abs(b).max())
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=limit)


def one_site(fast: Any, *args: Any) -> Any:
    """The only site of a report."""
    (site,) = fast.report(*args).sites
    return site


def masked(keep: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """Attention of pairs by the key's position less the query's, heads in groups."""

    def f(q: Any, k: Any, v: Any) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
        at = jnp.arange(k.shape[1])[None] - jnp.arange(q.shape[1])[:, None]
        weights = jax.nn.softmax(jnp.where(keep(at), scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return f


def gradients(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Those of a scalar."""
    return jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2))


def values() -> None:
    """Results, and gradients of programs that are differentiated already."""
    programs = {
        "causal": attention,
        "full": masked(lambda at: jnp.ones(at.shape, bool)),
        "window": masked(lambda at: (at <= 0) & (at >= -20)),
        "both sides": masked(lambda at: (at <= 7) & (at >= -20)),
    }
    permutes = {"causal": 6, "full": 6, "window": 4, "both sides": 6}
    for name, f in programs.items():
        fast = ringed(f)
        close(fast(*ARGS), exact(f, *PLAIN))
        site = one_site(fast, *ARGS)
        assert (site.kernel, site.sharding) == (RING, AROUND), (name, site)
        before, after = fast.report(*ARGS).collectives()
        part = PLAIN[1].nbytes // 8
        assert after == {"collective-permute": (permutes[name], permutes[name] * part)}
        assert sum(n for _, n in before.values()) >= 8 * part
        step = ringed(gradients(f))
        close(step(*ARGS), exact(gradients(f), *PLAIN))
        site = one_site(step, *ARGS)
        assert (site.kernel, site.sharding, site.backward) == (RING, AROUND, True)


def segments() -> None:
    """Keys of a query's own segment; who sees none gives zeros."""
    ids = jnp.asarray(np.arange(64) // 20)[None].repeat(2, 0).at[1, :9].set(7)

    def f(q: Any, k: Any, v: Any, of_queries: Any, of_keys: Any) -> jax.Array:
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        keep = (of_queries[:, :, None] == of_keys[:, None])[:, None]
        weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
        weights = jnp.where(keep.any(-1, keepdims=True), weights, 0)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    keys = ids.at[0, 20:40].set(9)
    args = (*ARGS, *jax.device_put((ids, keys), NamedSharding(MESH, P("data", "seq"))))
    fast = ringed(f)
    close(fast(*args), exact(lambda *a: f(*a, ids, keys), *PLAIN))
    assert one_site(fast, *args).sharding.endswith(
        "k, v, kv_segments passed around seq"
    )


def lengths() -> None:
    """Padded sequences, one of them all padding, whose queries give a mean."""

    def f(q: Any, k: Any, v: Any, of_keys: Any) -> jax.Array:
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        keep = jnp.tril(jnp.ones((64, 64), bool))
        keep = keep & (jnp.arange(64) < of_keys[:, None])[:, None, None]
        least = float(jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(jnp.where(keep, scores, least))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def step(q: Any, k: Any, v: Any, of_keys: Any) -> Any:
        return gradients(lambda *a: f(*a, of_keys))(q, k, v)

    counts = jnp.array([37, 0])
    args = (*ARGS, jax.device_put(counts, NamedSharding(MESH, P("data"))))
    for g in (f, step):
        fast = ringed(g)
        close(fast(*args), exact(lambda *a, g=g: g(*a, counts), *PLAIN))
        site = one_site(fast, *args)
        assert (site.sharding, site.params["empty_rows"]) == (AROUND, "mean"), site


def differentiated_outside() -> None:
    """Gradients of an optimized function, and gradients of those."""
    fast = ringed(in_shardings=(ROWS,) * 3)
    step = jax.jit(gradients(fast))
    close(step(*ARGS), exact(gradients(attention), *PLAIN))
    assert "ppermute" in str(step.trace(*ARGS).jaxpr)

    def twice(f: Any) -> Any:
        inner = jax.grad(lambda q, k, v: (f(q, k, v) ** 2).sum(), (0, 1, 2))
        outer = lambda *a: sum((jnp.sin(x)).sum() for x in inner(*a))
        return jax.grad(outer, (0, 1, 2))

    close(jax.jit(twice(fast))(*ARGS), exact(twice(attention), *PLAIN), 1e-4)

    def layers(q: Any, k: Any, v: Any) -> jax.Array:
        body = jax.checkpoint(lambda q, _: (q + attention(q, k, v), None))
        return jax.lax.scan(body, q, None, length=2)[0]

    step = ringed(gradients(layers))
    close(step(*ARGS), exact(gradients(layers), *PLAIN))


def mapped_and_exported() -> None:
    """Under vmap, and as an exported program."""
    fast = ringed(in_shardings=(ROWS,) * 3)
    two = [jnp.stack([x, x[:, ::-1]]) for x in PLAIN]
    both = jax.jit(jax.vmap(gradients(fast), (0, 0, None)))
    want = exact(jax.vmap(gradients(attention), (0, 0, None)), *two[:2], PLAIN[2])
    close(both(*two[:2], PLAIN[2]), want)
    assert "ppermute" in str(both.trace(*two[:2], PLAIN[2]).jaxpr)
    made = jax.export.export(fast)(*PLAIN)
    close(made.call(*ARGS), exact(attention, *PLAIN))


def of_several_platforms() -> None:
    """What is chosen for a TPU runs on CPUs too, whose kernel saves another array."""
    named = {"attention": ["ring", "mosaic_tpu"]}
    step = rewriter.optimize(
        gradients(attention), implementation=named, target="tpu_v5e"
    )
    assert one_site(step, *ARGS).kernel == "ring of mosaic_tpu"
    close(step(*ARGS), exact(gradients(attention), *PLAIN))


def over_two_axes() -> None:
    """A ring of all devices, along two axes of the mesh."""
    rows = NamedSharding(MESH, P(None, ("data", "seq")))
    args = jax.device_put(PLAIN, rows)
    step = ringed(gradients(attention))
    close(step(*args), exact(gradients(attention), *PLAIN))
    said = one_site(step, *args).sharding
    assert said == "t over data and seq; k, v passed around data and seq"


def explicit() -> None:
    """Where types state shardings."""
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=kinds)

    def plain(q: Any, k: Any, v: Any) -> jax.Array:
        scores = jnp.einsum(
            "btnh,bsnh->bnts", q, k, out_sharding=P("data", None, "seq")
        )
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bnts,bsnh->btnh", weights, v, out_sharding=P("data", "seq"))

    def simple(q: Any, k: Any, v: Any) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    plain_args = (PLAIN[0][:, :, :2], *PLAIN[1:])
    want = exact(gradients(simple), *plain_args)
    with jax.set_mesh(mesh):
        args = jax.device_put(plain_args, P("data", "seq"))
        step = ringed(gradients(plain))
        close(step(*args), want)
        assert one_site(step, *args).sharding == AROUND


def asked_for() -> None:
    """One that cannot be had is an error, or gives way to the next name."""
    for args, why in (
        (PLAIN, "nothing goes around devices"),
        (jax.device_put(PLAIN, NamedSharding(MESH, P("data"))), "nothing goes around"),
    ):
        with pytest.raises(KernelError, match=why):
            ringed()(*args)
        either = {"attention": ["ring", "memory_bounded"]}
        fast = rewriter.optimize(attention, implementation=either)
        close(fast(*args), exact(attention, *PLAIN))
        assert one_site(fast, *args).kernel == "memory_bounded"

    with pytest.raises(UnknownKernel, match="no kernel 'ribbon'"):
        rewriter.optimize(attention, implementation={"attention": ["ring", "ribbon"]})(
            *ARGS
        )
    passes = {"attention": {"forward": "ring", "backward": "memory_bounded"}}
    with pytest.raises(KernelError, match="gradients go around with it"):
        rewriter.optimize(attention, implementation=passes)(*ARGS)
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16, sharding=ROWS)
    for kernel, target in (("hopper", "h200"), ("mosaic_tpu", "tpu_v5e")):
        named = {"attention": ["ring", kernel]}
        fast = rewriter.optimize(attention, implementation=named, target=target)
        assert one_site(fast, x, x, x).kernel == f"ring of {kernel}"
        if kernel == "hopper":
            lowered = fast.trace(x, x, x).lower(lowering_platforms=("cuda",))
            assert "mosaic_gpu" in lowered.as_text()

    def biased(q: Any, k: Any, v: Any) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) + jnp.sin(jnp.arange(64.0))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    args = (ARGS[0][:, :, :2], *ARGS[1:])
    either = {"attention": ["ring", "memory_bounded"]}
    fast = rewriter.optimize(biased, implementation=either)
    assert "gathered over seq" in one_site(fast, *args).sharding
    assert dict(one_site(fast, *args).not_chosen)["ring"] == "a ring does not take bias"
    other = rewriter.optimize(attention, implementation={"attention": "memory_bounded"})
    said = dict(one_site(other, *ARGS).not_chosen)
    assert said["ring"] == "memory_bounded was asked for"


def where_it_pays() -> None:
    """Long sequences go around by themselves, short ones are gathered."""

    def of(t: int, dtype: str = "float32", **options: Any) -> Any:
        x = jax.ShapeDtypeStruct((2, t, 8, 128), dtype, sharding=ROWS)
        return one_site(rewriter.optimize(gradients(attention), **options), x, x, x)

    site = of(8192)
    assert (site.kernel, site.sharding, site.origin) == (RING, AROUND, "heuristic")
    assert of(16384, "bfloat16", target="tpu_v5e").kernel == "ring of mosaic_tpu"
    site = of(4096)
    assert "k, v gathered over seq" in site.sharding
    why = dict(site.not_chosen)["ring"]
    assert "keys and values of 32768 KiB gathered on each device are few" in why
    assert of(8192, target="h200").kernel == "ring of hopper"
    why = dict(of(8192, target="tpu_v5e").not_chosen)["ring"]
    assert why == "xla, which is best for a part, gives none that can be merged"
    strict = of(8192, numerics="strict")
    assert not strict.replaced
    assert "strict" in dict(strict.not_chosen)["ring"]


def forward_mode() -> None:
    """A program that may still be differentiated forward gets no ring by itself."""
    x = jax.ShapeDtypeStruct((2, 8192, 8, 128), "float32", sharding=ROWS)
    fast = rewriter.optimize(attention)
    assert "no jax.jvp" in dict(one_site(fast, x, x, x).not_chosen)["ring"]
    pushed = jax.eval_shape(lambda *a: jax.jvp(fast, a, a), x, x, x)
    assert pushed[1].shape == x.shape


def less_memory() -> None:
    """No device holds the keys, the values and their gradients of all eight."""
    rows = NamedSharding(MESH, P(None, ("data", "seq")))
    x = jax.ShapeDtypeStruct((1, 16384, 2, 64), jnp.float32, sharding=rows)
    found = []
    for kernel in ("memory_bounded", "ring"):
        fast = rewriter.optimize(
            gradients(attention), implementation={"attention": kernel}
        )
        found.append(memory(fast.lower(x, x, x).compile()))
    assert found[1] < 0.8 * found[0], found


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (
        values, segments, lengths, differentiated_outside, mapped_and_exported,
        of_several_platforms, over_two_axes, explicit, asked_for, where_it_pays,
        forward_mode, less_memory,
    ):  # fmt: skip
        check()
        print(check.__name__, flush=True)
