"""Units whose relu is spelled so that infinities and NaN matter: they stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

FORCED = {"gated_linear_unit": ["memory_bounded", "xla"]}
SPELLINGS = {
    "half the absolute": lambda a: (a + abs(a)) / 2,
    "times a half": lambda a: 0.5 * (abs(a) + a),
    "by sign": lambda a: a * (1 + jnp.sign(a)) / 2,
    "maximum": lambda a: jnp.maximum(a, 0),
    "jax.nn.relu": jax.nn.relu,
    "times a comparison": lambda a: a * (a > 0),
    "times a cast": lambda a: (a > 0).astype(a.dtype) * a,
    "clipped": lambda a: jnp.clip(a, 0, None),
    "squared": lambda a: jnp.square(jax.nn.relu(a)),
    "squared by absolute": lambda a: ((a + abs(a)) / 2) ** 2,
    "squared comparison": lambda a: (a * (a > 0)) ** 2,
    "chosen": lambda a: jnp.where(a > 0, a, 0),
}
LIMITS = {
    "as it is": lambda a: a,
    "at most 1e4": lambda a: jnp.where(a > 1e4, 1e4, a),
    "minimum": lambda a: jnp.minimum(a, 1e4),
    "at least -1e4": lambda a: jnp.where(a < -1e4, -1e4, a),
}


def extreme() -> tuple[np.ndarray, ...]:
    """Rows and weights whose gates are -inf, inf, NaN and plain numbers."""
    draw = np.random.default_rng(0)
    x, gate, up = (
        draw.normal(size=s).astype("f4") for s in ((8, 16), (16, 16), (16, 16))
    )
    gate[3, 4], gate[5, 6], x[1, 2] = np.inf, -np.inf, np.nan
    return x, gate, up


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_same_entries_are_finite(spelling: str, limit: str) -> None:
    def unit(x, gate, up):
        return SPELLINGS[spelling](LIMITS[limit](x @ gate)) * (x @ up)

    given = extreme()
    want = np.asarray(jax.jit(unit)(*given))
    got = np.asarray(rewriter.optimize(unit, implementation=FORCED)(*given))
    assert not np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_some_are_units() -> None:
    """The test above compares kernels with programs, and not programs alone."""
    given = extreme()
    found = 0
    for spelling in SPELLINGS.values():

        def unit(x, gate, up, spelling=spelling):
            return spelling(x @ gate) * (x @ up)

        report = rewriter.explain(unit, implementation=FORCED)(*given)
        found += report.counts(replaced=True).get("gated_linear_unit", 0)
    assert found >= 6
