"""Gated linear units of experts: found however they are written; look-alikes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.find.match import Found, search
from rewriter.find.region import Regions
from rewriter.ops.activations import ACTIVATIONS as BY_NAME
from rewriter.ops.registry import registry
from rewriter.patterns.sets import in_force
from rewriter.program.graph import Graph

NAME = "ragged_gated_linear_unit"
M, K, F, G = 48, 16, 24, 4


def operands(seed: int = 0, dtype: Any = "float32") -> dict[str, Any]:
    r = np.random.default_rng(seed)
    one, both = (G, K, F), (G, K, 2 * F)
    shapes = {"x": (M, K), "y": (M, K), "w": one, "u": one, "b": both}
    shapes["t"] = (G, F, K)
    made = {n: r.standard_normal(s).astype(jnp.dtype(dtype)) for n, s in shapes.items()}
    sizes = {
        "n": np.array([7, 0, 30, 5], "int32"),
        "o": np.array([9, 9, 9, 9], "int32"),
    }
    return made | sizes


def called(fn: Callable[..., Any], dtype: Any = "float32") -> tuple[Any, ...]:
    """The arrays that a function names."""
    names = inspect.signature(fn).parameters
    return tuple(operands(dtype=dtype)[n] for n in names)


def found(fn: Callable[..., Any], dtype: Any = "float32") -> tuple[list[Any], Found]:
    """Matches of the unit in a function, and all that was found."""
    graph = Graph(jax.make_jaxpr(fn)(*called(fn, dtype)))
    all_found = search(Regions(graph), in_force("default"))
    assert not all_found.failures
    return [m for m in all_found.matches if m.op.name == NAME], all_found


def exact(spec_params: Mapping[str, Any], arrays: Mapping[str, Any]) -> np.ndarray:
    """The op's own definition in float64, row by row."""
    params = {**registry().op(NAME).defaults, **spec_params}
    x, w = (np.asarray(arrays[n], np.float64) for n in ("x", "w"))
    if params["halves"]:
        f = w.shape[-1] // 2
        first, second = w[..., :f], w[..., f:]
        gate, up = (first, second) if params["halves"] == "gate_up" else (second, first)
    else:
        gate, up = w, np.asarray(arrays["w_up"], np.float64)
    out = np.zeros((len(x), gate.shape[-1]))
    of_row = np.repeat(np.arange(len(w)), arrays["group_sizes"])
    with jax.enable_x64(True):
        act = BY_NAME[params["activation"]]
        for i, group in enumerate(of_row[: len(x)]):
            y = jnp.asarray(x[i] @ gate[group])
            out[i] = np.asarray(act(y, params["beta"])) * (x[i] @ up[group])
    return out


# ------------------------------------------------------------------------- found
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": lambda y: jax.nn.gelu(y, approximate=False),
    "gelu_quick": lambda y: y * jax.nn.sigmoid(1.702 * y),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "relu2": lambda y: jnp.square(jax.nn.relu(y)),
    "relu6": jax.nn.relu6,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "hard_silu": jax.nn.hard_silu,
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "swish": lambda y: y / (1 + jnp.exp(-1.5 * y)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    act = ACTIVATIONS[name]

    def unit(x, w, u, n):
        return act(lax.ragged_dot(x, w, n)) * lax.ragged_dot(x, u, n)

    (match,), _ = found(unit)
    assert match.reading.params["activation"] == name
    agrees(unit, match)


def agrees(fn: Callable[..., Any], match: Any) -> None:
    """The op's reference with what was read off is the program, and its definition."""
    given = dict(zip(inspect.signature(fn).parameters, called(fn), strict=True))
    operands = {"x": given["x"], "group_sizes": given["n"]}
    operands |= {"w": given["w"], "w_up": given["u"]} if "w" in given else {}
    operands |= {"w": given["b"]} if "b" in given else {}
    params = dict(match.reading.params)
    got = match.op.reference(**operands, **params)
    scale = 1.0 if match.reading.times is None else 3.0
    want = exact({k: v for k, v in params.items() if k != "out_dtype"}, operands)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(scale * got, fn(*called(fn)), rtol=2e-5, atol=2e-5)


def up_before_gate(x, w, u, n):
    return lax.ragged_dot(x, u, n) * jax.nn.silu(lax.ragged_dot(x, w, n))


def scaled(x, w, u, n):
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * (3 * lax.ragged_dot(x, u, n))


def in_a_call(x, w, u, n):
    dot = jax.jit(lax.ragged_dot)
    return jax.jit(jax.nn.silu)(dot(x, w, n)) * dot(x, u, n)


def halves(x, b, n):
    gate, up = jnp.split(lax.ragged_dot(x, b, n), 2, -1)
    return jax.nn.silu(gate) * up


def halves_turned(x, b, n):
    up, gate = jnp.split(lax.ragged_dot(x, b, n), 2, -1)
    return jax.nn.silu(gate) * up


def halves_by_axis(x, b, n):
    both = lax.ragged_dot(x, b, n).reshape(M, 2, F)
    return jax.nn.gelu(both[:, 0]) * both[:, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fn", "params"),
    [
        (up_before_gate, {}),
        (scaled, {}),
        (in_a_call, {}),
        (halves, {"halves": "gate_up"}),
        (halves_turned, {"halves": "up_gate"}),
        (halves_by_axis, {"halves": "gate_up", "activation": "gelu_tanh"}),
    ],
)
def test_spellings(fn: Callable[..., Any], params: Any, dtype: str) -> None:
    (match,), rest = found(fn, dtype)
    want = {"activation": "silu", "out_dtype": dtype, **params}
    assert dict(match.reading.params) == want
    assert sum(m.op.name == "ragged_dot" for m in rest.matches) == 2 - bool(
        want.get("halves")
    )
    if dtype == "float32":
        agrees(fn, match)


def test_precision_is_kept() -> None:
    def unit(x, w, u, n):
        gate, up = (lax.ragged_dot(x, m, n, precision="highest") for m in (w, u))
        return jax.nn.silu(gate) * up

    (match,), _ = found(unit)
    assert match.reading.params["precision"] == "highest"


def test_the_higher_precision_of_both_counts() -> None:
    def unit(x, w, u, n):
        gate = lax.ragged_dot(x, w, n, precision="highest")
        return jax.nn.silu(gate) * lax.ragged_dot(x, u, n)

    (match,), _ = found(unit)
    assert match.reading.params["precision"] == "highest"


def in_float32(x, w, u, n):
    gate, up = (
        lax.ragged_dot(x, m, n, preferred_element_type=jnp.float32) for m in (w, u)
    )
    return jax.nn.silu(gate) * up


def test_it_is_rounded_where_nothing_reads_more_of_it() -> None:
    """Then no result in float32 is written, and read again for the cast."""

    def rounded(x, w, u, n):
        return in_float32(x, w, u, n).astype(x.dtype)

    def both(x, w, u, n):
        return (y := in_float32(x, w, u, n)).astype(x.dtype), jnp.sin(y)

    (match,), _ = found(rounded, "bfloat16")
    assert match.reading.params["out_dtype"] == "bfloat16"
    (match,), _ = found(both, "bfloat16")
    assert match.reading.params["out_dtype"] == "float32"
    (match,), _ = found(in_float32, "bfloat16")
    assert match.reading.params["out_dtype"] == "float32"


# ------------------------------------------------------------------- look-alikes
def other_sizes(x, w, u, n, o):
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * lax.ragged_dot(x, u, o)


def other_rows(x, y, w, u, n):
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * lax.ragged_dot(y, u, n)


def of_the_product(x, w, u, n):
    return jax.nn.silu(lax.ragged_dot(x, w, n) * lax.ragged_dot(x, u, n))


def two_activations(x, w, u, n):
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * jnp.tanh(lax.ragged_dot(x, u, n))


def gate_alone(x, w, n):
    gate = lax.ragged_dot(x, w, n)
    return jax.nn.silu(gate) * gate


def no_activation(x, w, u, n):
    return lax.ragged_dot(x, w, n) * lax.ragged_dot(x, u, n)


def another_function(x, w, u, n):
    return jnp.sin(lax.ragged_dot(x, w, n)) * lax.ragged_dot(x, u, n)


def in_turns(x, b, n):
    both = lax.ragged_dot(x, b, n)
    return jax.nn.silu(both[:, ::2]) * both[:, 1::2]


def overlapping(x, b, n):
    both = lax.ragged_dot(x, b, n)
    return jax.nn.silu(both[:, : F + 4]) * both[:, 4 : F + 8]


def rows_moved(x, w, u, n):
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * lax.ragged_dot(x, u, n)[::-1]


def added(x, w, u, n):
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * (lax.ragged_dot(x, u, n) + 1)


def rows_left_out(x, w, u, n):
    """As those that fill the last tile are."""
    gate = lax.ragged_dot(x, w, n)[: M // 2]
    return jax.nn.silu(gate) * lax.ragged_dot(x, u, n)[: M // 2]


def stored_transposed(x, t, w, n):
    """Ragged dots read them as they are; the unit would have them copied."""
    gate = lax.ragged_dot(x, t.swapaxes(1, 2), n)
    return jax.nn.silu(gate) * lax.ragged_dot(x, w, n)


LOOK_ALIKES = (
    stored_transposed, rows_left_out,
    other_sizes, other_rows, of_the_product, two_activations, gate_alone, no_activation,
    another_function, in_turns, overlapping, rows_moved, added,
)  # fmt: skip


@pytest.mark.parametrize("fn", LOOK_ALIKES, ids=lambda fn: fn.__name__)
def test_look_alikes(fn: Callable[..., Any]) -> None:
    units, rest = found(fn)
    assert not units
    assert all(m.op.name == "ragged_dot" for m in rest.matches)
    assert not rest.misses


# ------------------------------------------------------------- where nothing is taken
def layer(x, w, u, n):
    return jax.nn.silu(lax.ragged_dot(x, w, n)) * lax.ragged_dot(x, u, n)


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_its_parts_are_sites_where_no_kernel_is_chosen(target: str) -> None:
    report = rewriter.explain(layer, target=target)(*called(layer))
    assert [s.op for s in report.sites] == ["ragged_dot"] * 2
    assert report.counts()["ragged_dot"] == 2
    assert NAME not in report.counts()
    assert not report.misses


@pytest.mark.parametrize("target", ["cpu", "tpu_v5e"])
def test_its_parts_have_their_gradients_in_differentiated_programs(target: str) -> None:
    loss = lambda x, w, u, n: layer(x, w, u, n).sum()
    grad = jax.grad(loss, (0, 1, 2))
    report = rewriter.explain(grad, target=target)(*called(layer, "bfloat16"))
    assert report.counts(backward=True)["ragged_dot"] == 2
    assert {s.op for s in report.sites} == {"ragged_dot"}


def test_without_its_parts_it_is_not_looked_for() -> None:
    assert NAME in {p.name for p in in_force("default")}
    assert NAME not in {p.name for p in in_force("-ragged_dot")}
    assert "ragged_dot" in {p.name for p in in_force(f"-{NAME}")}
