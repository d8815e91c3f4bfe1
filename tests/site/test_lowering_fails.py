"""A kernel that cannot be lowered costs its site, and not the program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.errors import RewriterWarning
from rewriter.ops.registry import registry
from tests.support.programs import FORCED, block, inputs


def broken(monkeypatch: pytest.MonkeyPatch, op: str, where: str) -> None:
    """Makes a kernel fail where it is lowered, in the middle of what it writes."""
    real = registry().kernel(op, "memory_bounded")

    def fails(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, jax.jit(_fails_when_lowered), jnp.sin, x)

    def forward(**given: Any) -> Any:
        out, saved = real.forward(**given)
        return fails(out) if where == "forward" else out, saved

    def backward(**given: Any) -> Any:
        grads = dict(real.backward(**given))
        first = next(n for n, g in grads.items() if g is not None)
        return {**grads, first: fails(grads[first])} if where == "backward" else grads

    made = dataclasses.replace(real, forward=forward, backward=backward)
    kernels = registry().kernels
    monkeypatch.setattr(
        type(registry()),
        "kernels",
        lambda self, name: tuple(
            made if k.name == real.name and name == op else k for k in kernels(name)
        ),
    )


unlowered_p = jax.extend.core.Primitive("unlowered")
unlowered_p.def_abstract_eval(lambda x: x)


def _fails_when_lowered(x: Any) -> Any:
    return unlowered_p.bind(jnp.sin(x))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("op", ["attention", "rms_norm"])
def test_the_others_stay(op: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs()
    loss = jax.value_and_grad(lambda p, x: (block(p, x) ** 2).sum(), (0, 1))
    broken(monkeypatch, op, where)
    fast = rewriter.optimize(loss, implementation=FORCED)
    with pytest.warns(RewriterWarning, match=f"{op}: 'memory_bounded' cannot be low"):
        got = fast(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        got,
        jax.jit(loss)(*args),
    )
