"""Types that our own traces know at once are those of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter import _jax
from rewriter._jax.lean_trace import RULES, LeanTrace, result_type

X = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
Y = jax.ShapeDtypeStruct((2, 3, 1), jnp.float32)
HALF = jax.ShapeDtypeStruct((2, 3, 4), jnp.bfloat16)
INTS = jax.ShapeDtypeStruct((3, 4), jnp.int32)
FLAG = jax.ShapeDtypeStruct((2, 3, 4), bool)

CODE = {
    "arithmetic": (lambda x, y: jnp.maximum(x * y - x / y, -x) + 1.5, X, Y),
    "functions": (lambda x: jnp.exp(jnp.log1p(x**2) * jax.lax.rsqrt(x)), X),
    "widths": (lambda x, h: x + h.astype(jnp.float32) * h, X, HALF),
    "integers": (
        lambda n: (n - 2) * n + jax.lax.broadcasted_iota("int32", (3, 4), 1),
        INTS,
    ),
    "comparisons": (lambda x, n: jnp.where(n[None] >= 2, x, -jnp.inf) > 0, X, INTS),
    "choices": (lambda f, x, y: jnp.where(f, x, y), FLAG, X, Y),
    "layout": (
        lambda x: (x.reshape(6, 4).T, x.transpose(2, 0, 1).sum(1), x[:, None]),
        X,
    ),
    "sums": (lambda x: (x.sum((0, 2)), x.max(-1, keepdims=True), x.mean()), X),
    "products": (lambda x: jnp.einsum("abc,adc->abd", x, x), X),
    "mixed products": (
        lambda h: jnp.einsum("abc,abd->acd", h, h, preferred_element_type="float32"),
        HALF,
    ),
    "weak numbers": (lambda x: x * jnp.asarray(2.0) + jax.lax.full((), 3), X),
    "softmax": (lambda x: jax.grad(lambda y: jax.nn.softmax(y)[..., 0].sum())(x), X),
    "no elements": (lambda x: x[:, :0].sum(1) * 2, X),
}


@pytest.mark.parametrize("name", CODE)
def test_traces_are_those_of_jax(name):
    """The same equations with the same types as `jax.make_jaxpr` gives."""
    fn, *args = CODE[name]
    ours = _jax.trace_flat(fn, [jax.typeof(jnp.zeros(a.shape, a.dtype)) for a in args])
    assert str(ours) == str(jax.make_jaxpr(fn)(*args))


def test_each_rule_is_used(monkeypatch):
    """Each type that is known here is the one that JAX finds."""
    met = set()
    trace_of_jax = LeanTrace.__base__
    ask = trace_of_jax.default_process_primitive

    def compared(self, primitive, tracers, params, source_info=None):
        avals = [t.aval for t in tracers]
        found = result_type(primitive.name, avals, params)
        if found is not None:
            met.add(primitive.name)
            assert found == primitive.abstract_eval(*avals, **params)[0], primitive
        return ask(self, primitive, tracers, params, source_info)

    monkeypatch.setattr(trace_of_jax, "default_process_primitive", compared)
    others = (
        lambda x: jax.lax.exp2(x) + jax.lax.log(x) + jax.lax.expm1(jnp.tanh(x)),
        lambda x: jax.lax.logistic(x) + jax.lax.erf(x) + jax.lax.sqrt(x * x),
        lambda x: jax.lax.square(x) + jax.lax.sin(x) + jax.lax.cos(jax.lax.min(x, x)),
        lambda x: (x == 1, x != 1, x < 1, x <= 1, x > 1, x >= 1),
    )
    with jax.disable_jit():
        for fn, *args in (*CODE.values(), *((fn, X) for fn in others)):
            jax.make_jaxpr(lambda *given, fn=fn: fn(*given))(*args)
    assert set(RULES) - met == set()


@pytest.mark.parametrize(
    ("name", "shapes", "params"),
    [
        ("add", [(2, 3), (3, 2)], {}),
        ("transpose", [(2, 3)], {"permutation": (0, 0)}),
        ("reduce_sum", [(2, 3)], {"axes": (2,), "out_sharding": None}),
        (
            "reshape",
            [(2, 3)],
            {"new_sizes": (5,), "dimensions": None, "sharding": None},
        ),
        (
            "dot_general",
            [(2, 3), (2, 4)],
            {
                "dimension_numbers": (((1,), (1,)), ((), ())),
                "precision": None,
                "preferred_element_type": None,
                "out_sharding": None,
            },
        ),
    ],
)
def test_what_does_not_fit_is_asked(name, shapes, params):
    """JAX says what is wrong."""
    avals = [jax.typeof(np.zeros(s, np.float32)) for s in shapes]
    assert result_type(name, avals, params) is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "complex64", "uint32"])
def test_other_dtypes_are_asked(dtype):
    """Their rules differ."""
    aval = jax.typeof(jnp.zeros((2, 3), dtype))
    assert result_type("mul", [aval, aval], {}) is None
