"""Derivatives of derivatives where a function has a kink are the program's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.ops.slopes import with_slopes
from tests.soundness.test_slopes import (
    BIAS,
    GATE,
    KINKED,
    RNG,
    UP,
    USUAL,
    X,
    bounded,
    params,
    unit,
)

Functions = dict[str, Callable[..., Any]]

PER_NUMBER: Functions = KINKED | {
    "gate of one": lambda a: jnp.clip(a * 0.125 + 0.375, 0, 1),
    "square of a maximum": lambda a: jnp.maximum(a, 0) ** 2,
    "square of a choice": lambda a: jnp.where(a < 0, 0.0, a) ** 2,
    "celu": jax.nn.celu,
    "leaky": jax.nn.leaky_relu,
    "silu of a choice": lambda a: jax.nn.silu(jnp.where(a >= 7, 7.0, a)),
    "silu, cut": lambda a: jax.nn.silu(jnp.clip(a, -7, 7)),
}
UNITS = {name: unit(f) for name, f in (PER_NUMBER | USUAL).items()}
UNITS = {"bounded": bounded} | UNITS
FEW = ("maximum", "square of a choice", "own rule")
OPS = "attention", "rms_norm", "layer_norm", "gated_linear_unit"
FORCED = dict.fromkeys(OPS, "memory_bounded")
OPERANDS = X, GATE, UP, np.nan_to_num(BIAS, posinf=0, neginf=0)


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip XLA's optimizations: compiling takes far longer than running here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def gradients(functions: Functions) -> Callable[..., Any]:
    """The gradients of functions, whose cotangents depend on their results."""

    def pulled_back(*operands: Any) -> Any:
        found = {}
        for name, f in functions.items():
            out, back = jax.vjp(f, *operands)
            places = jnp.arange(out.size, dtype="f4").reshape(out.shape)
            found[name] = back((jnp.cos(0.37 * places) * (1 + out)).astype(out.dtype))
        return found

    return pulled_back


def along(function: Callable[..., Any], tangents: Any) -> Callable[..., Any]:
    return lambda *args: jax.jvp(function, args, tangents)[1]


def back(function: Callable[..., Any], tangents: Any) -> Callable[..., Any]:
    def pulled_back(*args: Any) -> Any:
        out, pull = jax.vjp(function, *args)
        return pull(dict.fromkeys(out, tangents))

    return pulled_back


def optimized(function: Callable[..., Any]) -> Any:
    return rewriter.optimize(function, implementation=FORCED)


def each(functions: Functions) -> Functions:
    return {name: optimized(f) for name, f in functions.items()}


WAYS: dict[str, Callable[[Functions, Any], tuple[Any, Any]]] = {
    "jvp(optimize(grad))": lambda f, t: (
        along(optimized(gradients(f)), t), along(gradients(f), t),
    ),
    "grad(optimize(grad))": lambda f, t: (
        back(optimized(gradients(f)), t), back(gradients(f), t),
    ),
    "jvp(grad(optimize))": lambda f, t: (
        along(gradients(each(f)), t), along(gradients(f), t),
    ),
    "grad(grad(optimize))": lambda f, t: (
        back(gradients(each(f)), t), back(gradients(f), t),
    ),
    "optimize(jvp(grad))": lambda f, t: (
        optimized(along(gradients(f), t)), along(gradients(f), t),
    ),
    "optimize(grad(grad))": lambda f, t: (
        optimized(back(gradients(f), t)), back(gradients(f), t),
    ),
}  # fmt: skip


def compare(functions: Functions, operands: Any, way: str) -> None:
    tangents = tuple(np.cos(1.7 * np.arange(a.size, dtype="f4")) for a in operands)
    tangents = tuple(
        t.reshape(a.shape) for t, a in zip(tangents, operands, strict=True)
    )
    got, want = (jax.jit(f)(*operands) for f in WAYS[way](functions, tangents))
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, x), y in zip(paths, jax.tree.leaves(got), strict=True):
        most = np.nanmax(np.abs(x))
        where = f"{way} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(y, x, 1e-3, 1e-5 * most, err_msg=where)


def apart(functions: Functions) -> Functions:
    """Each with weights of its own: units of the same arrays may share gradients."""

    def turned(f: Any, by: int) -> Callable[..., Any]:
        return lambda x, gate, up, bias: f(x, gate, jnp.roll(up, by, 0), bias)

    return {name: turned(f, i) for i, (name, f) in enumerate(functions.items())}


@pytest.mark.parametrize("way", ["jvp(optimize(grad))", "grad(grad(optimize))"])
def test_units(way: str) -> None:
    compare(apart({name: UNITS[name] for name in FEW}), OPERANDS, way)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("usual", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_more_units(way: str, usual: bool) -> None:
    compare(
        apart({n: f for n, f in UNITS.items() if (n in USUAL) == usual}), OPERANDS, way
    )


RELU = jax.nn.relu
PAIRS = {
    "maximum, choice": (KINKED["maximum"], KINKED["zero below"]),
    "rule, choice": (RELU, KINKED["zero below"]),
    "rule, maximum": (RELU, KINKED["maximum"]),
    "two choices": (KINKED["zero up to 0"], KINKED["zero below"]),
    "two rules": (KINKED["own rule"], RELU),
    "bounds": (KINKED["six by clip"], lambda a: jnp.minimum(RELU(a), 6)),
    "bound of a rule": (jax.nn.relu6, KINKED["six by clip"]),
    "leaky": (jax.nn.leaky_relu, KINKED["leaky by maximum"]),
    "elu": (jax.nn.elu, lambda a: jnp.where(a >= 0, a, jnp.expm1(a))),
    "cut": (KINKED["silu, clipped"], lambda a: jax.nn.silu(jnp.minimum(a, 7))),
}


def pair(name: str) -> Callable[..., Any]:
    """Two spellings of one function, of one array."""
    first, second = PAIRS[name]

    def f(x: Any, gate: Any, up: Any, bias: Any) -> Any:
        y = x @ gate + bias
        return first(y) * (x @ up) + second(y) * (x @ jnp.cos(up))

    return f


@pytest.mark.parametrize("way", ["jvp(optimize(grad))"])
def test_two_spellings_of_one_array(way: str) -> None:
    """The gradient of one's weight is the same number by the other's equations."""
    compare({n: pair(n) for n in ("maximum, choice", "rule, maximum")}, OPERANDS, way)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
def test_more_spellings_of_one_array(name: str, way: str) -> None:
    compare({name: pair(name)}, OPERANDS, way)


def test_what_is_found() -> None:
    def slopes(name: str) -> Any:
        (site,) = params(UNITS[name], OPERANDS)
        return site["slopes"][0]

    assert slopes("maximum") == (0.0, 0.5)
    assert slopes("square of a maximum") == (0.0, 0.0, 0.0, 0.5)
    assert slopes("square of a choice") == (0.0, 0.0, 0.0, 2.0)
    assert slopes("celu") == (0.0, 1.0, 1.0, 0.25)


def test_slopes_that_differ_once_differentiated() -> None:
    f = with_slopes(lambda y: jnp.maximum(y, 0) ** 2, ((0.0, 0.25, 4.0, 3.0),))
    for at, slope, value, bend in ((0.0, 0.25, 4.0, 3.0), (2.0, 4.0, 4.0, 2.0)):
        y = jnp.float32(at)
        assert jax.grad(f)(y) == slope
        assert jax.jvp(lambda y: jax.vjp(f, y)[0], (y,), (y * 0 + 1,))[1] == value
        assert jax.grad(jax.grad(f))(y) == bend


# ------------------------------------------------------------------- norms, attention
ROWS = RNG.normal(size=(4, 8)).astype("f4")
ROWS[0], ROWS[1], ROWS[2, :4] = 0, 3, 0
SCALE, SHIFT = RNG.normal(size=(2, 8)).astype("f4")


def mean(x: Any) -> Any:
    return x.mean(-1, keepdims=True)


def rms(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(mean(x * x) + 0.01) * scale


def layer(x: Any, scale: Any, shift: Any, variance: Any = None) -> Any:
    y = x - mean(x)
    variance = mean(y * y) if variance is None else variance
    return y * lax.rsqrt(variance + 0.01) * scale + shift


NORMS: Functions = {
    "rms": lambda x, w, b: rms(x, w),
    "rms of a maximum": lambda x, w, b: rms(jnp.maximum(x, 0), w),
    "rms of sizes": lambda x, w, b: rms(jnp.abs(x), w),
    "layer": layer,
    "variance above 0": lambda x, w, b: layer(
        x, w, b, jnp.maximum(mean(x * x) - mean(x) ** 2, 0)
    ),
    "variance, clipped": lambda x, w, b: layer(
        x, w, b, jnp.clip(x.var(-1, keepdims=True), 0)
    ),
    "guarded": lambda x, w, b: (
        x * lax.rsqrt(jnp.where(mean(x * x) > 0, mean(x * x), 1))
    ),
    "largest": lambda x, w, b: x * lax.rsqrt(jnp.maximum(mean(x * x), 0.01)) * w,
    "relu after": lambda x, w, b: jax.nn.relu(layer(x, w, b)),
}

Q, K, V = RNG.normal(size=(3, 1, 5, 2, 4)).astype("f4")
Q[0, 1], K[0, 2], K[0, 3], V[0, 0] = 0, 0, K[0, 4], 0
SEEN = np.tri(5, dtype=bool)
HOLED = SEEN & (np.arange(5) != 2)[:, None]


def attention(change: Any, weights: Any = jax.nn.softmax) -> Callable[..., Any]:
    def f(q: Any, k: Any, v: Any) -> Any:
        scores = change(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
        return jnp.einsum("bhts,bshd->bthd", weights(scores), v)

    return f


def by_hand(s: Any) -> Any:
    """A softmax whose maximum has a gradient; rows hold it more than once."""
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def one_more(s: Any) -> Any:
    most = jnp.maximum(s.max(-1, keepdims=True), 0)
    e = jnp.exp(s - most)
    return e / (jnp.exp(-most) + e.sum(-1, keepdims=True))


ATTENTION: Functions = {
    "causal": attention(lambda s: jnp.where(SEEN, s, -jnp.inf)),
    "added": attention(lambda s: s + jnp.where(SEEN, 0, -1e9)),
    "a row without keys": attention(lambda s: jnp.where(HOLED, s, -1e9)),
    "a row without keys, added": attention(lambda s: s + jnp.where(HOLED, 0, -1e9)),
    "maximum with a gradient": attention(lambda s: s, by_hand),
    "one more": attention(lambda s: jnp.where(SEEN, s, -jnp.inf), one_more),
    "clipped scores": attention(lambda s: jnp.clip(s, -1, 1)),
    "scores above 0": attention(lambda s: jnp.maximum(s, 0)),
    "sizes of scores": attention(jnp.abs),
    "hidden by scores": attention(lambda s: jnp.where(s > 0, s, -1e9)),
    "hidden by scores, from 0": attention(lambda s: jnp.where(s >= 0, s, -1e9)),
    "capped": attention(lambda s: jnp.where(SEEN, 5 * jnp.tanh(s / 5), -1e9)),
}


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_norms(way: str) -> None:
    compare(NORMS, (ROWS, SCALE, SHIFT), way)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_attention(way: str) -> None:
    compare(ATTENTION, (Q, K, V), way)
