"""Triangle multiplication of protein models: its norms and gated projections.

Written from algorithms 11 and 12 of the supplement of "Highly accurate protein
structure prediction with AlphaFold" (2021), laid out as the code base does that a
function is named after. The gate of the result is no unit: it reads another value.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow
from tests.bench import triangle
from tests.patterns.attention.functions.checks import exact, far
from tests.patterns.attention.functions.checks import quickly as quickly

pytestmark = pytest.mark.once

L, C, D = 12, 16, 8
FORCED = {"layer_norm": "memory_bounded", "gated_linear_unit": "memory_bounded"}
draw = np.random.default_rng(0)


def matrix(*shape: int) -> Any:
    return (draw.normal(size=shape) / np.sqrt(shape[0])).astype("f4")


PAIRS = draw.normal(size=(L, L, C)).astype("f4")
MASK = (draw.random((L, L)) < 0.8).astype("f4")
WEIGHTS = {
    "scale": np.ones(C, "f4"), "offset": np.zeros(C, "f4"),
    "scale_2": np.ones(D, "f4"), "offset_2": np.zeros(D, "f4"),
    **{name: matrix(C, D) for name in ("a", "b", "a_gate", "b_gate")},
    **{name: matrix(C, 2 * D) for name in ("both", "gates")},
    "bias": np.ones(D, "f4"), "out": matrix(D, C), "gate": matrix(C, C),
}  # fmt: skip


def norm(x: Any, scale: Any, offset: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale + offset


def first(z: Any, p: Any) -> Any:
    return norm(z, p["scale"], p["offset"])


def after(product: Any, x: Any, p: Any) -> Any:
    made = norm(product, p["scale_2"], p["offset_2"]) @ p["out"]
    return made * jax.nn.sigmoid(x @ p["gate"])


def alphafold_2(z: Any, mask: Any, p: Any, outgoing: bool) -> Any:
    """Two projections with biases, masked before the gates."""
    x, mask = first(z, p), mask[..., None]
    a = mask * (x @ p["a"]) * jax.nn.sigmoid(x @ p["a_gate"] + p["bias"])
    b = mask * (x @ p["b"]) * jax.nn.sigmoid(x @ p["b_gate"] + p["bias"])
    edges = "ikc,jkc->ijc" if outgoing else "kjc,kic->ijc"
    return after(jnp.einsum(edges, a, b), x, p)


def alphafold_3(z: Any, mask: Any, p: Any, outgoing: bool) -> Any:
    """One projection, with channels in front, and a and b in turns."""
    x = first(z, p)
    made = jnp.transpose(x @ p["both"], (2, 0, 1)) * mask[None]
    made *= jax.nn.sigmoid(jnp.transpose(x @ p["gates"], (2, 0, 1)))
    a, b = jnp.moveaxis(made.reshape(D, 2, L, L), 1, 0)
    edges = "cik,cjk->cij" if outgoing else "ckj,cki->cij"
    return after(jnp.transpose(jnp.einsum(edges, a, b), (1, 2, 0)), x, p)


def openfold(z: Any, mask: Any, p: Any, outgoing: bool) -> Any:
    """Batched products of matrices, with channels as a batch."""
    x, mask = first(z, p), mask[..., None]
    a = mask * jax.nn.sigmoid(x @ p["a_gate"] + p["bias"]) * (x @ p["a"])
    b = mask * jax.nn.sigmoid(x @ p["b_gate"] + p["bias"]) * (x @ p["b"])
    turn = (2, 0, 1), (2, 1, 0)
    a, b = a.transpose(turn[not outgoing]), b.transpose(turn[outgoing])
    return after((a @ b).transpose(1, 2, 0), x, p)


def boltz(z: Any, mask: Any, p: Any, outgoing: bool) -> Any:
    """One gated projection, masked behind the gate, and split."""
    x = first(z, p)
    made = (x @ p["both"]) * jax.nn.sigmoid(x @ p["gates"]) * mask[..., None]
    a, b = jnp.split(made, 2, axis=-1)
    edges = "ikd,jkd->ijd" if outgoing else "kid,kjd->ijd"
    return after(jnp.einsum(edges, a, b), x, p)


def protenix(z: Any, mask: Any, p: Any, outgoing: bool) -> Any:
    """A residual block in a checkpoint."""
    block = functools.partial(alphafold_2, outgoing=outgoing)
    return z + jax.checkpoint(block)(z, mask, p)


SPELLED = {alphafold_2: 2, alphafold_3: 1, openfold: 2, boltz: 1, protenix: 2}
"""Each spelling, and its gated units."""

CASES = {
    f"{f.__name__}, {way}": (f, way == "outgoing", units)
    for f, units in SPELLED.items() for way in ("outgoing", "incoming")
}  # fmt: skip


@pytest.mark.parametrize("name", slow.first(2, CASES))
def test_norms_and_gated_projections_with_gradients(name: str) -> None:
    f, outgoing, units = CASES[name]

    def step(z: Any, p: Any) -> Any:
        weighted = lambda z, p: (f(z, MASK, p, outgoing) * jnp.cos(jnp.arange(C))).sum()
        return jax.value_and_grad(weighted, (0, 1))(z, p)

    fast = rewriter.optimize(step, implementation=FORCED)
    sites = fast.report(PAIRS, WEIGHTS).sites
    taken = [site.op for site in sites if site.replaced and site.backward]
    assert sorted(taken) == ["gated_linear_unit"] * units + ["layer_norm"] * 2
    got = jax.jit(fast)(PAIRS, WEIGHTS)
    assert far(got, exact(step, [PAIRS, WEIGHTS])) < 3e-5


@pytest.mark.parametrize("n", [512, 768, 1024])
def test_units_of_few_columns_run_no_slower(n: int) -> None:
    """A loop over rows of 128 columns took twice the time of the whole on an H200."""
    args = jax.eval_shape(lambda: triangle.operands(n, 0))
    fn = functools.partial(triangle.with_gradients, "outgoing")
    report = rewriter.explain(fn, target="h200")(*args)
    (unit,) = [s for s in report.sites if s.op == "gated_linear_unit"]
    assert unit.kernel in (None, "xla")
