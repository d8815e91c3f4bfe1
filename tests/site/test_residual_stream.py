"""Sums that go on beside a norm: what is absorbed, what is not, and their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter import errors
from rewriter.ops.kernel import PLATFORMS, Kernel
from rewriter.ops.registry import registry
from rewriter.rewrite.passes import fuse_residual_adds
from rewriter.site import residual_stream, site
from rewriter.site.uses import Use
from tests import slow
from tests.support import transforms
from tests.support.streams import (
    FORCED,
    LAYERS,
    PROGRAMS,
    SCALE,
    SCALES,
    Calls,
    R,
    X,
    check,
    loss,
    rms,
    sites,
    stacked,
)  # fmt: skip

pytestmark = pytest.mark.once


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    kernels = registry()
    kernels.op("rms_norm")
    monkeypatch.setitem(kernels._kernels["rms_norm"], "adding", made.kernel)
    return made


def use_of(kernel: Kernel) -> Use:
    params = (("eps", 1e-3), ("out_dtype", None))
    op = registry().op("rms_norm")
    return Use(op, ("x", "scale"), params, (("default", kernel),))


# ------------------------------------------------------------------- the primitives
def plain(x: jax.Array, r: jax.Array, scale: jax.Array) -> jax.Array:
    h = x + r
    out = registry().op("rms_norm").reference(x=h, scale=scale, eps=1e-3)
    return jnp.sin(h) + out * h


@pytest.mark.parametrize("name", transforms.EACH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("added", [True, False])
def test_every_transform(name: str, dtype: str, added: bool, calls: Calls) -> None:
    if dtype == "bfloat16" and name not in transforms.LOW_PRECISION:
        pytest.skip("not among the transforms that are run in bfloat16")
    use = use_of(calls.kernel)

    def of_site(x: jax.Array, r: jax.Array, scale: jax.Array) -> jax.Array:
        given = (x, scale, r) if added else (x + r, scale)
        out, h = residual_stream.site_p.bind(*given, use=use, residuals=False)
        return jnp.sin(h) + out * h

    args = [a.astype(dtype) for a in (X, R, SCALE)]
    transforms.check(name, of_site, plain, args)


def test_kernels_are_given_addends(calls: Calls) -> None:
    def of_site(x: jax.Array, r: jax.Array, scale: jax.Array) -> jax.Array:
        use = use_of(calls.kernel)
        out, h = residual_stream.site_p.bind(x, scale, r, use=use, residuals=False)
        return (jnp.sin(h) + out * h).sum()

    jax.jit(jax.grad(of_site, (0, 1, 2)))(X, R, SCALE)
    assert (calls.forward, calls.backward) == (1, 1)
    # Nothing comes back along the sum.
    jaxpr = jax.make_jaxpr(jax.grad(of_site, 2))(X, R, SCALE).jaxpr
    assert sites(jaxpr, residual_stream.backward_p) == 0
    assert sites(jaxpr, site.backward_p) == 1


def test_only_the_scale_is_linear(calls: Calls) -> None:
    use = use_of(calls.kernel)

    def of_site(scale: jax.Array) -> jax.Array:
        out, _ = residual_stream.site_p.bind(X, scale, R, use=use, residuals=False)
        return out

    op = registry().op("rms_norm")
    wanted = lambda scale: op.reference(x=X + R, scale=scale, eps=1e-3)
    got, want = (
        jax.linear_transpose(f, SCALE)(jnp.cos(X))[0] for f in (of_site, wanted)
    )
    np.testing.assert_allclose(got, want, 1e-5)


@pytest.mark.parametrize("part", ["sum", "out"])
def test_wrong_kernels_are_told(part: str, calls: Calls) -> None:
    def wrong(*, addend: Any = None, residuals: bool = False, **given: Any) -> Any:
        made = calls.normalize(addend=addend, residuals=residuals, **given)
        if addend is None:
            return made
        (total, out), saved = made if residuals else (made, ())
        both = (total[0], out) if part == "sum" else (total, out[0])
        return (both, saved) if residuals else both

    use = use_of(Kernel("w", "rms_norm", PLATFORMS, 1, forward=wrong, adds_to="x"))
    run = lambda *a: residual_stream.site_p.bind(*a, use=use, residuals=False)
    with pytest.raises(errors.KernelError, match="with an addend"):
        jax.jit(run)(X, SCALE, R)


# -------------------------------------------------------------------------- programs
@pytest.mark.parametrize("program", PROGRAMS)
def test_forward(program: str, calls: Calls) -> None:
    f, norms, in_front, _ = PROGRAMS[program]
    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    jaxpr = fast.jaxpr(X, SCALES)
    if program != "recomputed":  # bodies of calls are not looked out of
        assert sites(jaxpr, residual_stream.site_p, True) == in_front
    assert sites(jaxpr, residual_stream.site_p) == norms
    check(fast, f, X, SCALES)
    assert calls.forward > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_of_a_rewritten_program(program: str, calls: Calls) -> None:
    f, norms, _, back = PROGRAMS[program]
    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    grad = jax.grad(loss(fast), (0, 1))
    jaxpr = jax.make_jaxpr(grad)(X, SCALES)
    assert sites(jaxpr, residual_stream.backward_p) == back
    assert sites(jaxpr, site.backward_p) == norms - back
    check(grad, jax.grad(loss(f), (0, 1)), X, SCALES)
    assert calls.backward > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_rewritten_gradients(program: str, calls: Calls) -> None:
    f, norms, _, back = PROGRAMS[program]
    step = jax.grad(loss(f), (0, 1))
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    jaxpr = fast.jaxpr(X, SCALES)
    assert sites(jaxpr, residual_stream.backward_p) == back
    assert sites(jaxpr, site.backward_p) == norms - back
    check(fast, step, X, SCALES)
    assert calls.backward > 0


def test_second_derivatives(calls: Calls) -> None:
    fast = rewriter.optimize(stacked, implementation=FORCED, strict=True)
    norm_of = lambda f: lambda *a: sum((g**2).sum() for g in jax.grad(f, (0, 1))(*a))
    check(
        jax.grad(norm_of(loss(fast)), (0, 1)),
        jax.grad(norm_of(loss(stacked)), (0, 1)), X, SCALES,
    )  # fmt: skip
    step = jax.grad(loss(stacked), (0, 1))
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    squares = lambda f: lambda *a: sum((g**2).sum() for g in f(*a))
    check(jax.grad(squares(fast), (0, 1)), jax.grad(squares(step), (0, 1)), X, SCALES)


@pytest.mark.parametrize(
    ("by", "forward", "backward"),
    [({"backward": "adding"}, False, True),
     ({"forward": "adding", "backward": "memory_bounded"}, False, False)],
)  # fmt: skip
def test_passes_of_two_kernels(
    by: Any, forward: bool, backward: bool, calls: Calls
) -> None:
    """The backward's says whether it adds; a forward that does not gets the sum."""
    fast = rewriter.optimize(stacked, implementation={"rms_norm": by}, strict=True)
    check(jax.grad(loss(fast), (0, 1)), jax.grad(loss(stacked), (0, 1)), X, SCALES)
    assert (calls.forward > 0, calls.backward > 0) == (forward, backward)
    check(fast, stacked, X, SCALES)


def test_checked_against_the_reference(calls: Calls) -> None:
    given = {"implementation": FORCED, "strict": True, "verify": "once"}
    rewriter.optimize(stacked, **given)(X, SCALES)
    forward = calls.kernel.forward
    ignoring = lambda *, addend=None, **more: (
        forward(**more) if addend is None else (addend, forward(**more))
    )
    registry()._kernels["rms_norm"]["adding"] = Kernel(
        "adding", "rms_norm", PLATFORMS, 1, forward=ignoring, adds_to="x"
    )
    anew = lambda x, scales: stacked(x, scales)  # equal functions share a program
    with pytest.raises(errors.RewriterError):
        rewriter.optimize(anew, **given)(X, SCALES)


def test_half_precision(calls: Calls) -> None:
    """The cotangent is rounded once: nearer to the exact one, not farther."""
    step = jax.grad(loss(stacked))
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    half = X.astype(jnp.bfloat16), SCALES.astype(jnp.bfloat16)
    assert sites(fast.jaxpr(*half), residual_stream.backward_p) == LAYERS
    with jax.enable_x64(True):
        true = np.asarray(step(*(np.asarray(a, np.float64) for a in half)))
    ours, theirs = (np.asarray(f(*half), np.float64) - true for f in (fast, step))
    assert np.abs(ours).max() <= 2 * np.abs(theirs).max() + 1e-3 * np.abs(true).max()


# ---------------------------------------------------------------------- look-alikes
def of_row(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    h = h + r[0, 0]
    return h, rms(h, scale)


def of_number(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    h = h + 2.0
    return h, rms(h, scale)


def of_another(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    return h + r, rms(h, scale)


def of_itself(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    h = r + r
    return h, rms(h, scale)


def of_other_dtype(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    h = (h + r).astype(jnp.float16)
    return h, rms(h, scale)


def of_product(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    h = h + r @ jnp.outer(scale, scale)
    return h, rms(h, scale)


def of_biased_product(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    h = (r @ jnp.outer(scale, scale) + scale).astype(h.dtype) + h
    return h, rms(h, scale)


def read_once(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    return rms(h + r, scale)


def difference(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    h = h - r
    return h, rms(h, scale)


def read_before(h: jax.Array, r: jax.Array, scale: jax.Array) -> Any:
    """What the norm reads is computed from the sum."""
    h = h + r
    return h, rms(h, jnp.sin(h[0, 0]))


def test_a_scale_made_of_the_sum_comes_after_the_norm(calls: Calls) -> None:
    """The sum is made beside the norm, and its result is scaled by the program."""
    fast = rewriter.optimize(read_before, implementation=FORCED, strict=True)
    assert sites(fast.jaxpr(X, R, SCALE), residual_stream.site_p, True) == 1
    check(fast, read_before, X, R, SCALE)


def test_a_product_with_a_bias_is_added_in_the_kernel(calls: Calls) -> None:
    """XLA's kernel of the product adds the bias, and then cannot add an array."""
    fast = rewriter.optimize(of_biased_product, implementation=FORCED, strict=True)
    assert sites(fast.jaxpr(X, R, SCALE), residual_stream.site_p, True) == 1
    check(fast, of_biased_product, X, R, SCALE)
    assert calls.forward > 0


@pytest.mark.parametrize(
    "f",
    [of_row, of_number, of_another, of_itself, of_product,
     read_once, difference],
)  # fmt: skip
def test_sums_that_are_left(f: Callable[..., Any], calls: Calls) -> None:
    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    jaxpr = fast.jaxpr(X, R, SCALE)
    every = (site.site_p, residual_stream.site_p)
    assert sum(sites(jaxpr, p) for p in every) == 1
    assert sites(jaxpr, residual_stream.site_p, True) == 0
    check(fast, f, X, R, SCALE)
    check(
        jax.grad(lambda *a: sum((y**2).sum() for y in jax.tree.leaves(fast(*a)))),
        jax.grad(lambda *a: sum((y**2).sum() for y in jax.tree.leaves(f(*a)))),
        X, R, SCALE,
    )  # fmt: skip


def test_sums_in_other_dtypes_are_left(calls: Calls) -> None:
    fast = rewriter.optimize(of_other_dtype, implementation=FORCED, strict=True)
    jaxpr = fast.jaxpr(X, R, SCALE)
    assert sites(jaxpr, residual_stream.site_p, False) == 1
    assert sites(jaxpr, residual_stream.site_p, True) == 0


def twice(h: jax.Array, r: jax.Array, scale: jax.Array) -> jax.Array:
    h = h + r
    return jnp.sin(rms(h, scale)) + rms(h, 2 + scale) * h


def early(h: jax.Array, r: jax.Array, scale: jax.Array) -> jax.Array:
    """The sum is read before the norm."""
    h = h + r
    before = jnp.sin(h)
    return before * rms(h, scale) + h


def of_given(h: jax.Array, r: jax.Array, scale: jax.Array) -> jax.Array:
    """What is handed on was given, and is returned."""
    return rms(h, scale) * r + h


@pytest.mark.parametrize("f", [twice, early, of_given])
def test_other_readers(f: Callable[..., jax.Array], calls: Calls) -> None:
    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    jaxpr = fast.jaxpr(X, R, SCALE)
    assert sites(jaxpr, residual_stream.site_p, True) == (f is not of_given)
    assert sites(jaxpr, site.site_p) == 0
    check(fast, f, X, R, SCALE)
    grad = jax.grad(loss(fast), (0, 1, 2))
    check(grad, jax.grad(loss(f), (0, 1, 2)), X, R, SCALE)
    step = jax.grad(loss(f), (0, 1, 2))
    check(rewriter.optimize(step, implementation=FORCED), step, X, R, SCALE)


def cotangent_read_twice(x: jax.Array, scale: jax.Array) -> Any:
    out, back = jax.vjp(rms, x, scale)
    dx, dscale = back(jnp.cos(out))
    return dx + x, dx * 2, dscale


def cotangent_of_row(x: jax.Array, scale: jax.Array) -> Any:
    out, back = jax.vjp(rms, x, scale)
    dx, dscale = back(jnp.cos(out))
    return dx + scale, dscale


def cotangent_of_sum(x: jax.Array, scale: jax.Array) -> Any:
    """What is added is computed from the other cotangent."""
    out, back = jax.vjp(rms, x, scale)
    dx, dscale = back(jnp.cos(out))
    return dx + jnp.broadcast_to(jnp.sin(dscale), dx.shape), dscale


@pytest.mark.parametrize(
    "f", [cotangent_read_twice, cotangent_of_row, cotangent_of_sum]
)
def test_cotangents_that_are_left(f: Callable[..., Any], calls: Calls) -> None:
    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    jaxpr = fast.jaxpr(X, SCALE)
    assert sites(jaxpr, residual_stream.backward_p) == 0
    assert sites(jaxpr, site.backward_p) == 1
    check(fast, f, X, SCALE)


def test_an_addend_that_is_made_later(calls: Calls) -> None:
    def f(x: jax.Array, scale: jax.Array) -> Any:
        out, back = jax.vjp(lambda x: rms(x, scale), x)
        (dx,) = back(jnp.cos(out))
        return dx + jnp.sin(x)

    fast = rewriter.optimize(f, implementation=FORCED, strict=True)
    assert sites(fast.jaxpr(X, SCALE), residual_stream.backward_p) == 1
    check(fast, f, X, SCALE)


def test_kernels_that_do_not_add_are_left_alone() -> None:
    chosen = {"rms_norm": "memory_bounded"}
    for f in (stacked, jax.grad(loss(stacked))):
        fast = rewriter.optimize(f, implementation=chosen, strict=True)
        jaxpr = fast.jaxpr(X, SCALES)
        assert sites(jaxpr, residual_stream.site_p) == 0
        assert sites(jaxpr, residual_stream.backward_p) == 0
        program = fast.jaxpr(X, SCALES)
        assert fuse_residual_adds.fuse_residual_adds(program) is program


@pytest.mark.parametrize("target", ["h200", "tpu_v5p"])
def test_chosen_kernels_add(target: str) -> None:
    """By what was measured on an H200, and estimated for a TPU."""
    given = (
        jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((LAYERS, 4096), jnp.bfloat16),
    )
    fast = rewriter.optimize(stacked, target=target, strict=True)
    found = sites(fast.jaxpr(*given), residual_stream.site_p, True)
    assert found == LAYERS - 1
    for chosen in fast.report(*given).sites:
        in_a_stream = "the sum that is its operand" in str(chosen)
        assert in_a_stream == (chosen.kernel in ("hopper", "mosaic_tpu"))
    step = jax.grad(loss(stacked))
    fast = rewriter.optimize(step, target=target, strict=True)
    found = sites(fast.jaxpr(*given), residual_stream.backward_p)
    assert found == LAYERS


# -------------------------------------------------------------------- at random
def drawn(seed: int) -> Callable[..., jax.Array]:
    """A program of sums, norms and other functions of values before."""
    draw = np.random.default_rng(seed)
    steps = [
        (draw.choice(["norm", "norm", "add", "add", "sin", "mul", "row", "product"]),
         *draw.integers(0, k + 2, 2))
        for k in range(draw.integers(3, 12))
    ]  # fmt: skip
    returned = draw.integers(0, len(steps) + 2, 2)
    called = draw.integers(0, 3)

    def made(what: str, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        functions = {
            "norm": lambda: rms(a, scale),
            "add": lambda: a + b,
            "sin": lambda: jnp.sin(a),
            "mul": lambda: a * b / 2,
            "row": lambda: a + b[:, :1],
            "product": lambda: a @ jnp.outer(scale, scale) / 8,
        }
        return functions[what]()

    def f(x: jax.Array, r: jax.Array, scale: jax.Array) -> jax.Array:
        values = [x, r]
        for what, i, j in steps:
            a, b = values[i], values[-1 - j % 2]
            values.append(made(what, a, b, b[0, 0] * (i == j) + scale))
        return values[-1] + sum(jnp.cos(values[k]) for k in returned)

    if called == 1:
        return jax.checkpoint(f)
    if called == 2:
        step = lambda x, r, scale: (f(x, r, scale), None)
        return lambda x, r, scale: jax.lax.scan(
            lambda h, _: step(h, r, scale), x, length=2
        )[0]
    return f


@pytest.mark.parametrize("seed", slow.first(10, range(200)))
def test_random_programs(seed: int, calls: Calls) -> None:
    f = drawn(seed)
    step = jax.grad(loss(f), (0, 1, 2))
    fast, fast_step = (
        rewriter.optimize(g, implementation=FORCED, strict=True) for g in (f, step)
    )
    args = X, R, SCALE
    check(fast, f, *args)
    check(fast_step, step, *args)
    check(jax.grad(loss(fast), (0, 1, 2)), step, *args)
    with jax.enable_checks(True):
        for program in (fast.jaxpr(*args), fast_step.jaxpr(*args)):
            jax.jit(jax.extend.core.jaxpr_as_fun(program)).trace(*args)
