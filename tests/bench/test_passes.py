"""What the comparison of passes refuses, and what it calls a difference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench import passes


def test_figures_of_a_loss_and_its_gradients() -> None:
    gradients = {"a": jnp.array([3.0], jnp.bfloat16), "b": jnp.array([[0.0, 4.0]])}
    found = passes.figures((jnp.float32(2.0), gradients))
    assert {k: float(v) for k, v in found.items()} == {"loss": 2.0, "norm": 5.0}
    assert set(passes.figures(jnp.float32(2.0))) == {"loss"}


def test_difference_is_that_of_the_worst_result() -> None:
    before = (jnp.array(8.0), {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])})
    after = (jnp.array(8.0), {"a": jnp.array([3.0, 4.5]), "b": jnp.array([1.01])})
    np.testing.assert_allclose(passes.difference(before, after), 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    "after",
    [
        {"loss": 10.1, "norm": 2.0},
        {"loss": 10.0, "norm": 2.1},
        {"loss": float("nan"), "norm": 2.0},
    ],
)
def test_other_results_are_refused(after: dict[str, float]) -> None:
    before = {"loss": 10.0, "norm": 2.0}
    passes._check("gradient", before, {"loss": 10.01, "norm": 2.01})
    with pytest.raises(passes.Disagreement, match=r"gradient: (loss|norm)"):
        passes._check("gradient", before, after)


def test_cross_entropy_is_of_the_next_token() -> None:
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    ids = jnp.array([[0, 1, 2, 3], [4, 3, 2, 1]])
    chances = np.asarray(jax.nn.softmax(logits), np.float64)
    chosen = [chances[b, t, ids[b, t + 1]] for b in range(2) for t in range(3)]
    expected = -np.mean(np.log(chosen))
    np.testing.assert_allclose(passes.cross_entropy(logits, ids), expected, rtol=1e-6)


def test_a_row_has_every_pass_with_its_sites() -> None:
    def loss(checkpointed: bool) -> passes.Loss:
        def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
            return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

        one = jax.checkpoint(norm) if checkpointed else norm
        return lambda scale, x: jnp.sum(jnp.sin(one(scale, x)))

    args = (jnp.ones(8), jax.random.normal(jax.random.key(0), (4, 8)))
    rows = passes.compare(passes.cases(loss), args, repeats=1)
    assert [row["sites"] for row in rows[:2]] == [
        {"rms_norm xla": 1},
        {"rms_norm xla +backward": 1},
    ]
    assert [row["difference"] < 1e-6 for row in rows] == [True] * 3
    assert rows[1]["written"]["norm"] == pytest.approx(rows[2]["rewritten"]["norm"])
