"""Where nothing is rewritten, the program is the one that jax.jit has."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.support.programs import FORCED, block, inputs

TABLE = np.arange(8.0, dtype=np.float32)
WEIGHT = jnp.arange(8.0)


@jax.custom_jvp
def clipped(x: Any) -> Any:
    return jnp.clip(x, 0, 1)


clipped.defjvp(lambda p, t: (clipped(*p), t[0]))


def scopes(x: Any) -> Any:
    with jax.named_scope("hi"):
        return jnp.sin(x) @ x.T


def loops(x: Any) -> Any:
    def step(c: Any, y: Any) -> Any:
        return c * TABLE + y, c.sum()

    def condition(i: Any) -> Any:
        return i[0] < 3

    c, ys = jax.lax.scan(step, x[0], x)
    _, d = jax.lax.while_loop(condition, lambda i: (i[0] + 1, i[1] * WEIGHT), (0, c))
    return jax.lax.cond(ys.sum() > 0, lambda: d, lambda: c)


def effects(x: Any) -> Any:
    jax.debug.print("x {}", x.sum(), ordered=True)
    ref = jax.new_ref(x)
    ref[0] = ref[1] * 2
    return jax.freeze(ref)


def unused(x: Any, y: Any = 2.0, **named: Any) -> Any:
    return {"x": x, "n": None, "z": [named["z"]]}


def softmax(x: Any) -> Any:
    return jax.nn.softmax(x @ x.T) @ x  # recognised, and left to XLA on CPUs


class Doubling:
    def __call__(self, x: Any, y: float = 2.0) -> Any:
        return x * y


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "scopes": (scopes, {}),
    "loops": (loops, {}),
    "effects": (effects, {}),
    "constants": (lambda x: x * TABLE + WEIGHT @ WEIGHT + TABLE, {}),
    "custom": (lambda x: jax.vmap(clipped)(jax.nn.relu(x)), {}),
    "gradient": (jax.value_and_grad(lambda x: clipped(jax.nn.gelu(x)).sum()), {}),
    "remat": (jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())), {}),
    "nested": (lambda x: jax.jit(scopes)(x) + jax.jit(scopes)(2 * x), {}),
    "unused": (lambda x: unused(x, z=x[0]), {"keep_unused": True}),
    "weak": (lambda x: (x * 2, 3, 1.5), {}),
    "random": (lambda x: jax.random.normal(jax.random.key(3), x.shape) + x, {}),
    "inlined": (scopes, {"inline": True}),
    "softmax": (softmax, {}),
    "donated": (lambda x: x + 1, {"donate_argnums": 0}),
    "unnamed": (Doubling(), {}),
    "partial": (functools.partial(Doubling(), y=3.0), {}),
}


def same(*made: Any) -> None:
    """Compares jaxprs, and texts with names and places."""
    x = jnp.ones((8, 8))
    jax.clear_caches()  # or lines are those of an earlier test
    jaxprs = [str(jax.make_jaxpr(j)(x)) for j in made]
    assert jaxprs[0] == jaxprs[1]
    texts = [j.lower(x).as_text(debug_info=True) for j in made]  # on one line
    assert texts[0] == texts[1]


@pytest.mark.parametrize("patterns", ["default", "none"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_text(name: str, patterns: str) -> None:
    f, options = PROGRAMS[name]
    same(jax.jit(f, **options), rewriter.optimize(f, patterns=patterns, **options))


@pytest.mark.parametrize("name", ["inlined", "unused", "donated"])
def test_options_of_a_jitted_function(name: str) -> None:
    f, options = PROGRAMS[name]
    jitted = jax.jit(f, **options)
    same(jitted, rewriter.optimize(jitted))


def test_one_call_around_sites() -> None:
    fast, args = rewriter.optimize(block, implementation=FORCED), inputs()
    outer = jax.make_jaxpr(fast)(*args)
    assert [e.primitive.name for e in outer.eqns] == ["jit"]
    inner = outer.eqns[0].params["jaxpr"].eqns
    assert "rewriter_site" in {e.primitive.name for e in inner}
    assert "jit(block)/jit(block)" not in fast.lower(*args).as_text(debug_info=True)


def test_what_is_not_replaced_keeps_its_lines() -> None:
    def f(p: Any, x: Any) -> Any:
        with jax.named_scope("mine"):
            return jnp.sin(block(p, x))

    found = rewriter.optimize(f, implementation=FORCED).lower(*inputs())
    names = re.findall(r'"(jit\(f\)[^"]*sin[^"]*)"', found.as_text(debug_info=True))
    assert "jit(f)/mine/sin" in names
    assert "test_same_program.py" in found.as_text(debug_info=True)


def test_an_array_of_unknown_place_with_nothing_to_do() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.P("x", None))
    spec = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=spread)
    exported = jax.export.export(rewriter.optimize(lambda a: a @ a.T))(spec)
    assert exported.nr_devices == 2


def test_sites_on_an_abstract_mesh() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.P("x"))
    params, x = jax.eval_shape(inputs)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread)
    fast = rewriter.optimize(block, implementation=FORCED)
    exported = jax.export.export(fast)(params, x)
    assert exported.nr_devices == 2
    assert "rewriter_site" in exported.mlir_module()
