"""The laws of real numbers are not applied to complex ones.

Each function below has an op in it, and complex numbers between or behind its
equations. Kernels compute the op, or nothing does, and the numbers stay as they were.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.support.programs import FORCED, rms_norm

X = jnp.linspace(-1, 2, 64).reshape(4, 16)
SCALE = 1 + jnp.arange(16) / 16
Z, J = np.complex64(1 + 2j), np.complex64(1j)


def as_complex(x: Any) -> Any:
    return x.astype(jnp.complex64)


def real(z: Any) -> Any:
    return lax.convert_element_type(z, jnp.float32)


def squares(x: Any) -> Any:
    return jnp.mean(x * x, -1, keepdims=True)


REAL = {
    "result": lambda x: jnp.real(as_complex(rms_norm(x, SCALE)) * Z * Z),
    "result_cast": lambda x: real(as_complex(rms_norm(x, SCALE)) * Z * Z),
    "scale": lambda x: jnp.abs(x * lax.rsqrt(squares(x) + 1e-6) * np.full(16, Z)),
    "scale_cast": lambda x: real(
        as_complex(x * lax.rsqrt(squares(x) + 1e-6)) * np.full(16, Z) * J
    ),
    "scores": lambda x: jax.nn.softmax(real(as_complex(x @ x.T) * Z * Z)) @ x,
    "moduli": lambda x: (
        x * lax.rsqrt(jnp.mean(jnp.abs(x * Z) ** 2, -1, keepdims=True) + 1e-6)
    ),
    "mean": lambda x: x * lax.rsqrt(real(squares(as_complex(x) * J)) * -1 + 1e-6),
    "fill": lambda x: (
        jax.nn.softmax(real(jnp.where(x @ x.T > 0, as_complex(x @ x.T), Z) * Z)) @ x
    ),
    "product": lambda x: real(as_complex(jax.nn.silu(x @ x.T)) * Z * ((x @ x.T) * Z)),
    "powers": lambda x: rms_norm(jnp.real((as_complex(x) + J) ** 2), SCALE),
}


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_complex_numbers_are_leaves() -> None:
    def all_of(x: Any) -> dict[str, Any]:
        return {name: fn(x) for name, fn in REAL.items()}

    fast = rewriter.optimize(all_of, implementation=FORCED)
    got, want = fast(X), jax.jit(all_of)(X)
    for name in REAL:
        np.testing.assert_allclose(got[name], want[name], 1e-4, 1e-5, err_msg=name)
    replaced = [site.op for site in fast.report(X).sites if site.replaced]
    assert replaced.count("rms_norm") >= 4
    assert replaced.count("attention") >= 2
