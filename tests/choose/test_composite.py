"""Ops made of others: taken whole where a kernel is chosen, else by their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.config import resolve
from rewriter.hardware import ahead_of_time
from rewriter.ops.registry import registry
from rewriter.run import rewriting
from tests.support.kernels import tpu as on_tpu

pytestmark = pytest.mark.once

UNIT = "ragged_gated_linear_unit"
TARGET = "tpu_v6e"
M, K, F, G = 4096, 2048, 1024, 4


def hidden(x: Any, w: Any, u: Any, n: Any) -> Any:
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * lax.ragged_dot(x, u, n)


def unit(x: Any, w: Any, u: Any, d: Any, n: Any) -> Any:
    return lax.ragged_dot(hidden(x, w, u, n), d, n)


def of_halves(x: Any, b: Any, d: Any, n: Any) -> Any:
    gate, up = jnp.split(lax.ragged_dot(x, b, n), 2, -1)
    return lax.ragged_dot(jax.nn.silu(gate) * up, d, n)


def specs(fn: Callable[..., Any], m: int = M, k: int = K, f: int = F) -> list[Any]:
    shapes = {"x": (m, k), "w": (G, k, f), "u": (G, k, f), "d": (G, f, k),
              "b": (G, k, 2 * f)}  # fmt: skip
    names = ("x", "b", "d") if fn is of_halves else ("x", "w", "u", "d")
    made = [jax.ShapeDtypeStruct(shapes[n], jnp.bfloat16) for n in names]
    return [*made, jax.ShapeDtypeStruct((G,), jnp.int32)]


def ops(report: Any) -> list[str]:
    return [s.op for s in report.sites]


# ----------------------------------------------------------------------- the choice
@pytest.mark.parametrize(("fn", "parts"), [(unit, 2), (of_halves, 1)])
def test_one_row_that_counts_as_its_parts(fn: Callable[..., Any], parts: int) -> None:
    report = rewriter.explain(fn, target=TARGET)(*specs(fn))
    assert ops(report) == [UNIT, "ragged_dot"]
    (site, down) = report.sites
    assert (site.kernel, site.origin) == ("mosaic_tpu", "estimated")
    assert site.parts == ("ragged_dot",) * parts
    assert not down.parts
    assert report.counts()["ragged_dot"] == parts + 1
    assert UNIT not in report.counts()
    assert not report.misses
    assert not report.failures
    counts = {"found": parts + 1, "replaced": parts}
    rewriter.optimize(fn, target=TARGET, require={"ragged_dot": counts}).trace(
        *specs(fn)
    )


def test_few_rows_take_the_parts() -> None:
    """With few rows all of the time goes to the matrices, which both read once."""
    few = rewriter.explain(unit, target=TARGET)(*specs(unit, m=64))
    assert ops(few) == ["ragged_dot"] * 3


@pytest.mark.parametrize("target", ["cpu", "a100", "tpu_v5p"])
def test_parts_stay_where_no_kernel_is_chosen(target: str) -> None:
    """On v5p too, where parts are estimated to be nearly as fast."""
    with_it = rewriter.explain(unit, target=target)(*specs(unit))
    without = rewriter.explain(unit, target=target, patterns=f"-{UNIT}")(*specs(unit))
    assert ops(with_it) == ["ragged_dot"] * 3
    assert with_it.sites == without.sites


@pytest.mark.parametrize(
    "options",
    [
        {"numerics": "strict"},
        {"implementation": {"ragged_dot": ["mosaic_tpu", "xla"]}},
        {"implementation": {UNIT: "xla"}},
        {"implementation": {UNIT: "by_parts"}},
        {"patterns": f"-{UNIT}"},
    ],
    ids=str,
)
def test_parts_that_are_asked_for(options: Any) -> None:
    report = rewriter.explain(unit, target=TARGET, **options)(*specs(unit))
    assert ops(report) == ["ragged_dot"] * 3


def test_neither_is_looked_for_without_ragged_dots() -> None:
    report = rewriter.explain(unit, target=TARGET, patterns="-ragged_dot")(*specs(unit))
    assert not report.sites


def test_it_can_be_forced() -> None:
    forced = {UNIT: ["mosaic_tpu", "xla"]}
    report = rewriter.explain(unit, target="tpu_v5p", implementation=forced)(
        *specs(unit)
    )
    assert (report.sites[0].op, report.sites[0].origin) == (UNIT, "forced")


def test_parts_whose_products_are_read_elsewhere() -> None:
    def both(*given: Any) -> Any:
        return unit(*given), lax.ragged_dot(given[0], given[1], given[-1])

    report = rewriter.explain(both, target=TARGET)(*specs(unit))
    assert set(ops(report)) == {"ragged_dot"}


def test_exported_programs_hold_the_parts() -> None:
    """They may run on another platform, for which the parts have kernels."""
    fast = rewriter.optimize(unit, target=TARGET)
    artifact = rewriter.export(fast, platforms=("cpu", "tpu"))(
        *specs(unit, 256, 64, 128)
    )
    assert {k["op"] for k in artifact.manifest["kernels"]} <= {"ragged_dot"}


# -------------------------------------------------------------------- differentiated
def loss(*given: Any) -> Any:
    return jnp.sum(jnp.sin(unit(*given).astype(jnp.float32)))


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_differentiated_programs_keep_the_parts_and_their_gradients(
    around: Callable[..., Any],
) -> None:
    grad = jax.grad(around(loss), (0, 1, 2, 3))
    with_it = rewriter.explain(grad, target=TARGET)(*specs(unit))
    without = rewriter.explain(grad, target=TARGET, patterns=f"-{UNIT}")(*specs(unit))
    assert set(ops(with_it)) == {"ragged_dot"}
    assert with_it.sites == without.sites
    assert with_it.counts(backward=True)["ragged_dot"] >= 2


# ---------------------------------------------------------------------------- numbers
def arrays(fn: Callable[..., Any], m: int = 96, k: int = 64, f: int = 128) -> list[Any]:
    r = np.random.default_rng(0)
    made = [
        (r.standard_normal(s.shape) * s.shape[1] ** -0.5).astype(np.float32)
        for s in specs(fn, m, k, f)[:-1]
    ]
    return [*made, np.array([40, 0, 7, 30], np.int32)]


FORCED = {UNIT: ["mosaic_tpu", "xla"]}


def exact(fn: Callable[..., Any], given: list[Any]) -> Any:
    """The function and its gradients in float64, without ragged dots."""

    def dot(x: Any, w: Any, n: Any) -> Any:
        of_row = jnp.repeat(jnp.arange(G), n, total_repeat_length=int(n.sum()))
        out = jnp.einsum("mk,mkn->mn", x[: len(of_row)], w[of_row])
        return jnp.zeros((len(x), w.shape[2]), out.dtype).at[: len(of_row)].set(out)

    def plain(*given: Any) -> Any:
        *matrices, down, n = given[1:]
        if fn is of_halves:
            gate, up = jnp.split(dot(given[0], matrices[0], n), 2, -1)
        else:
            gate, up = (dot(given[0], w, n) for w in matrices)
        return dot(jax.nn.silu(gate) * up, down, n)

    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in given[:-1]]
        total = lambda *x: jnp.sum(jnp.sin(plain(*x, given[-1])))
        grads = jax.grad(total, tuple(range(len(wide))))(*wide)
        return plain(*wide, given[-1]), grads


@pytest.mark.parametrize("fn", [unit, of_halves])
def test_numbers_and_gradients(fn: Callable[..., Any]) -> None:
    """Computed by the op's plain form here, and by the kernel in the interpreter."""
    given = arrays(fn)
    out, grads = exact(fn, given)
    fast = rewriter.optimize(fn, target=TARGET, implementation=FORCED)
    assert ops(fast.report(*given))[0] == UNIT
    total = lambda *x: jnp.sum(jnp.sin(fast(*x, given[-1])))
    made = jax.grad(total, tuple(range(len(grads))))(*given[:-1])
    np.testing.assert_allclose(fast(*given), out, rtol=1e-5, atol=1e-5)
    for got, want in zip(made, grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_second_derivatives_and_vmap() -> None:
    given = arrays(unit, 24, 8, 16)
    fast = rewriter.optimize(unit, target=TARGET, implementation=FORCED)
    rows = jnp.stack([given[0], 2 * given[0]])
    many = jax.vmap(fast, (0, None, None, None, None))(rows, *given[1:])
    np.testing.assert_allclose(many[1], unit(rows[1], *given[1:]), rtol=1e-5, atol=1e-5)

    def curved(f: Callable[..., Any], x: Any) -> Any:
        slope = jax.grad(lambda y: jnp.sum(jnp.sin(f(y, *given[1:]))))
        return jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]

    plain = registry().op("ragged_dot").general

    def by_groups(x: Any, w: Any, u: Any, d: Any, n: Any) -> Any:
        return plain(jax.nn.silu(plain(x, w, n)) * plain(x, u, n), d, n)

    x = jnp.asarray(given[0])
    np.testing.assert_allclose(
        curved(fast, x), curved(by_groups, x), rtol=1e-4, atol=1e-4
    )


def in_layers(x: Any, w: Any, u: Any, d: Any, n: Any) -> Any:
    layer = lambda x, ws: (x + unit(x, *ws, n), None)
    return lax.scan(layer, x, (w, u, d))[0]


def test_in_a_loop() -> None:
    given = arrays(unit)
    stacked = [
        given[0],
        *(np.stack([w, 2 * w, 0.5 * w]) for w in given[1:-1]),
        given[-1],
    ]
    fast = rewriter.optimize(in_layers, target=TARGET, implementation=FORCED)
    report = fast.report(*stacked)
    assert report.counts()["ragged_dot"] == 9
    assert report.counts(repeats=False)["ragged_dot"] == 3
    np.testing.assert_allclose(
        fast(*stacked), in_layers(*stacked), rtol=1e-4, atol=1e-4
    )


# --------------------------------------------------------------------------- measured
def test_both_are_measured() -> None:
    """Whole, against its parts and XLA; and each part."""
    config = resolve({"target": TARGET})
    closed = jax.make_jaxpr(unit)(*specs(unit))
    found = {
        t.op.name: {k.name for k in t.kernels if "tpu" in k.platforms}
        for t in rewriting.tasks(closed, config)
    }
    assert set(found) == {"ragged_dot", UNIT}
    assert found[UNIT] == {"mosaic_tpu", "by_parts"}
    on_cpu = rewriting.tasks(closed, resolve({"target": "cpu"}))
    assert {t.op.name for t in on_cpu} == {"ragged_dot"}


# --------------------------------------------------------------------------- compiled
@on_tpu.needs_compiler
@pytest.mark.parametrize("generation", ["v5e", "v6e", "7x"])
def test_programs_for_tpus_hold_it(generation: str) -> None:
    fast = rewriter.optimize(unit, target=f"tpu_{generation}", implementation=FORCED)
    text = on_tpu.compiled(generation, fast, *specs(unit, 512, 256, 384))
    assert "ragged_gated_linear_unit" in text


@on_tpu.needs_compiler
def test_gradients_and_batches_for_tpus() -> None:
    """The forward keeps both branches; their ragged dots' kernels take over."""
    fast = rewriter.optimize(hidden, target="tpu_v5e", implementation=FORCED)
    x, w, u, _, n = specs(unit, 512, 256, 384)
    total = lambda *given: jnp.sum(jnp.sin(fast(*given).astype(jnp.float32)))
    text = on_tpu.compiled("v5e", jax.grad(total, (0, 1, 2)), x, w, u, n)
    for name in (UNIT, "ragged_dot_transposed", "ragged_dot_of_groups"):
        assert name in text
    x = jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    many = jax.vmap(fast, (0, None, None, None))
    assert UNIT in on_tpu.compiled("v5e", many, x, w, u, n)


@on_tpu.needs_compiler
@pytest.mark.parametrize("split", ["m", "f", "g"])
def test_spread_over_chips(split: str) -> None:
    """Rows, columns or experts over four chips; no operand is gathered."""
    P = jax.P
    mesh = jax.sharding.Mesh(np.array(ahead_of_time.topology("v5e:2x2")), ("x",))
    of_x, of_w = {
        "m": (P("x"), P()), "f": (P(), P(None, None, "x")), "g": (P(), P("x")),
    }[split]  # fmt: skip
    x, w, _, _, n = specs(unit, 1024, 256, 512)
    given = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=jax.NamedSharding(mesh, p))
        for s, p in ((x, of_x), (w, of_w), (w, of_w), (n, P()))
    ]

    fast = rewriter.optimize(
        hidden, target="tpu_v5e", implementation=FORCED,
        in_shardings=tuple(x.sharding for x in given),
    )  # fmt: skip
    (site,) = fast.report(*given).sites
    assert (site.op, site.kernel) == (UNIT, "mosaic_tpu")
    assert site.sharding.startswith(f"{split} over x")
    text = fast.trace(*given).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert "ragged_gated_linear_unit" in text
    assert " all-gather(" not in text
