"""What is traced and proved once, however often a program or its layers need it."""

from __future__ import annotations

import collections
import gc
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rewriter import _jax
from rewriter.config import resolve
from rewriter.find import check, match
from rewriter.gradients import search
from rewriter.run.rewriting import rewrite
from tests.bench.rewrite_cost import decoder, weights

pytestmark = pytest.mark.once

CONFIG = resolve({"implementation": {
    "attention": "reference", "gated_linear_unit": "reference", "rms_norm": "reference",
}})  # fmt: skip
COUNTED = {
    "references": (_jax, "trace_without_calls"),
    "gradients of references": (_jax, "gradients_of"),
    "gradients of replacements": (_jax, "linearized"),
    "proofs": (match, "check"),
    "proofs of gradients": (search, "proved_gradients"),
}
"""What is counted, and the function that does it."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return real(*args, **kwargs)

        return call

    for name, (module, attribute) in COUNTED.items():
        real = getattr(module, attribute)
        monkeypatch.setattr(module, attribute, counted(name, real))
    return found


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(decoder(params, x) ** 2)


def rewritten(fn: Any, layers: int, length: int) -> None:
    x = jax.ShapeDtypeStruct((2, length, 16), jnp.float32)
    closed = jax.make_jaxpr(fn)(weights(layers, 16), x)
    sites = rewrite(closed, CONFIG).sites
    assert len(sites) == 4 * layers
    assert all(s.replaced for s in sites)


FORWARD = {"references": 3, "proofs": 3}
BOTH = {
    **FORWARD,
    "gradients of references": 3,
    # Beside the three ops, the first norm, whose input has no gradient.
    "gradients of replacements": 4,
    "proofs of gradients": 7,
}


@pytest.mark.parametrize(
    ("fn", "want", "lengths"),
    [(decoder, FORWARD, (19, 21)), (jax.value_and_grad(loss), BOTH, (29, 31))],
)
def test_layers_share_traces_and_proofs(counts, fn, want, lengths) -> None:
    for layers, length in zip((2, 3), lengths, strict=True):
        counts.clear()
        rewritten(fn, layers, length)  # of no other test: nothing is known of it
        assert counts == want


def test_programs_of_known_shapes_share_traces(counts) -> None:
    rewritten(jax.value_and_grad(loss), 2, 25)
    counts.clear()
    jax.clear_caches()
    rewritten(decoder, 3, 25)
    assert counts == {"proofs": 3}


def test_gradients_of_known_shapes_are_traced_once(counts) -> None:
    rewritten(jax.value_and_grad(loss), 2, 27)
    counts.clear()
    rewritten(jax.grad(lambda p, x: 2 * loss(p, x)), 2, 27)
    assert counts == {
        "proofs": 3, "proofs of gradients": 7, "gradients of replacements": 4,
    }  # fmt: skip


@pytest.mark.parametrize("fn", [decoder, jax.value_and_grad(loss)])
def test_nothing_is_left_to_the_collector(fn: Any) -> None:
    """Graphs, forms and proofs are freed with the rewrite: nothing holds itself."""
    rewritten(fn, 1, 24)  # what is made once
    closed = jax.make_jaxpr(fn)(
        weights(1, 16), jax.ShapeDtypeStruct((2, 40, 16), jnp.float32)
    )
    gc.collect()
    gc.disable()
    try:
        rewrite(closed, CONFIG)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = collections.Counter(
            type(x).__name__
            for x in gc.garbage
            if type(x).__module__.startswith("rewriter")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def test_a_plain_replacement_is_the_reference_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where each operand is a leaf, code is not traced; moved axes are."""
    traced: list[Any] = []
    real = check._traced_code

    def noted(graph: Any, op: Any, *rest: Any) -> Any:
        traced.append(op.name)
        return real(graph, op, *rest)

    monkeypatch.setattr(check, "_traced_code", noted)

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w

    def found(fn: Any) -> list[str]:
        shapes = (3, 5, 8), (8,)
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        traced.clear()
        sites = rewrite(jax.make_jaxpr(fn)(*args), CONFIG).sites
        assert [s.op for s in sites] == ["rms_norm"]
        return traced

    assert found(norm) == []
    assert found(lambda x, w: norm(x, jnp.exp(w))) == []
    moved = lambda x: jnp.swapaxes(x, 0, 2)
    columns = lambda x, w: (
        x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6) * w
    )
    assert found(lambda x, w: columns(moved(x), w[:, None][:1] + jnp.zeros((5, 1))))
