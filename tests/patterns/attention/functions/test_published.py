"""Functions of scores as papers and libraries write them, in self-attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow
from tests.patterns.attention.functions.checks import FORCED, exact, far
from tests.patterns.attention.functions.checks import quickly as quickly
from tests.spellings.attention.scores import B, H, N, T

pytestmark = pytest.mark.once

Function = Callable[..., Any]
AT = np.arange(T)
CAUSAL = np.tril(np.ones((T, T), bool))
draw = np.random.default_rng(0)


def array(*shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    """Returns floats between two numbers."""
    return draw.uniform(low, high, shape).astype("f4")


def heads(r: Any) -> Any:
    return r[:, None, None]


def attend(scores: Function, hides: bool = True) -> Function:
    """Returns attention whose scores are a function of products and arrays."""

    def run(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        x = scores(jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H), *arrays)
        x = jnp.where(CAUSAL, x, -jnp.inf) if hides else x
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x, -1), v)

    return run


def forgetting(x: Any, f: Any) -> Any:
    """Sums of log gates between two positions (arXiv 2503.02130), with a cap."""
    sums = jnp.cumsum(jax.nn.log_sigmoid(f), 1).transpose(0, 2, 1)
    return 4 * jnp.tanh(x / 4) + (sums[..., None] - sums[:, :, None])


def of_lengths(x: Any, s: Any) -> Any:
    """Scalable softmax (arXiv 2501.19399): times the log of the number of keys."""
    return x * (heads(s) * jnp.log(jnp.arange(1, T + 1.0))[None, :, None])


def kerple(x: Any, a: Any, p: Any) -> Any:
    """Powers of distances (arXiv 2205.09921)."""
    away = jnp.abs(AT[:, None] - AT).astype(x.dtype)
    return x - jax.nn.softplus(heads(a)) * jnp.power(away + 1e-5, jnp.exp(heads(p)))


def of_times(x: Any, time: Any, p: Any) -> Any:
    """A bias of the time between two events, as recommenders have it."""
    between = jnp.abs(time[:, :, None] - time[:, None])[:, None]
    return jnp.tanh(x) - jnp.exp(heads(p)) * jnp.log1p(between)


def caps_in_a_loop(q: Any, k: Any, v: Any, caps: Any) -> Any:
    """A cap that differs by layer and head, traced in a loop over layers."""
    layer = lambda x, c: (x + attend(lambda s: c * jnp.tanh(s / c))(x, k, v), None)
    return jax.lax.scan(layer, q, caps[..., None, None])[0]


CASES: dict[str, tuple[Function, tuple[np.ndarray, ...]]] = {
    "caps in a loop": (caps_in_a_loop, (array(2, N, low=2, high=9),)),
    "forgetting": (attend(forgetting), (array(B, T, N),)),
    "of lengths": (attend(of_lengths), (array(N, low=0.2),)),
    "kerple": (attend(kerple), (array(N), array(N))),
    "of times": (attend(of_times, False), (array(B, T, low=0, high=9), array(N))),
}
QKV = [array(B, T, N, H) * 2 for _ in range(3)]


@pytest.mark.parametrize("name", slow.first(2, CASES))
def test_published_functions_with_gradients(name: str) -> None:
    f, arrays = CASES[name]
    given = [*QKV, *arrays]

    def step(*given: Any) -> Any:
        weighted = lambda *x: (f(*x) * jnp.cos(jnp.arange(H))).sum()
        return jax.value_and_grad(weighted, tuple(range(len(given))))(*given)

    fast = rewriter.optimize(step, implementation=FORCED)
    (site,) = (s for s in fast.report(*given).sites if s.op == "attention")
    assert (site.kernel, site.backward) == ("memory_bounded", True)
    assert far(jax.jit(fast)(*given), exact(step, given)) < 3e-5
