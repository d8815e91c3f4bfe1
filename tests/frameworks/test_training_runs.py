"""Training runs of each framework have the losses that they have under jax.jit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

pytestmark = pytest.mark.once

optax = pytest.importorskip("optax")

EVERYWHERE = dict.fromkeys(
    ("attention", "rms_norm", "layer_norm", "gated_linear_unit"), "memory_bounded"
)
STEPS = 4
Jit = Callable[..., Any]


def optimized(fn: Any, **options: Any) -> Any:
    return rewriter.optimize(fn, implementation=EVERYWHERE, strict=True, **options)


def agree(run: Callable[[Jit], list[Any]], found: set[str]) -> None:
    """Compares a run under jax.jit and under optimize, which must replace ops."""
    fast: list[Any] = []

    def kept(fn: Any, **options: Any) -> Any:
        fast.append(optimized(fn, **options))
        return fast[-1]

    want, got = run(jax.jit), run(kept)
    assert want[0] > want[-1]  # it learns
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
    sites = [s for f in fast for s in f.report().sites if s.replaced]
    assert {s.op for s in sites} >= found
    assert all(s.backward for s in sites)


def data(width: int) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(1))
    x, y = (jax.random.normal(k, (2, 16, width)) for k in keys)
    return x, y


def test_linen_train_state() -> None:
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            h = nn.RMSNorm()(x)
            mask = nn.make_causal_mask(h[..., 0])
            x = x + nn.MultiHeadDotProductAttention(2)(h, mask=mask)
            x = x + nn.Dense(16)(nn.silu(nn.Dense(32)(x)) * nn.Dense(32)(x))
            return nn.Dropout(0.1, deterministic=not train)(x)

    x, y = data(16)

    def run(jit: Jit) -> list[Any]:
        model = Block()
        state = train_state.TrainState.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(0), x, False)["params"],
            tx=optax.adamw(1e-2),
        )

        def step(state: Any, x: Any, y: Any, key: Any) -> Any:
            def loss(params: Any) -> Any:
                rngs = {"dropout": jax.random.fold_in(key, state.step)}
                out = state.apply_fn({"params": params}, x, True, rngs=rngs)
                return ((out - y) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        fast, losses = jit(step, donate_argnums=0), []
        for _ in range(STEPS):
            state, value = fast(state, x, y, jax.random.key(2))
            losses.append(float(value))
        assert state.step == STEPS
        return losses

    agree(run, {"attention", "rms_norm", "gated_linear_unit"})


def test_haiku_transform_with_state() -> None:
    hk = pytest.importorskip("haiku")
    x, y = data(16)

    def forward(x: Any) -> Any:
        init = hk.initializers.VarianceScaling()
        x = hk.Linear(16)(x)
        h = hk.LayerNorm(-1, True, True)(x)
        mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None, None]
        x = x + hk.MultiHeadAttention(2, 8, w_init=init)(h, h, h, mask=mask)
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
        count = hk.get_state("count", (), init=jnp.zeros)
        hk.set_state("count", count + 1)
        return hk.Linear(16)(hk.RMSNorm(-1)(x))

    def run(jit: Jit) -> list[Any]:
        model, tx = hk.transform_with_state(forward), optax.adam(1e-2)
        params, state = model.init(jax.random.key(0), x)
        slots = tx.init(params)

        def step(params: Any, state: Any, slots: Any, key: Any) -> Any:
            def loss(params: Any) -> Any:
                out, new = model.apply(params, state, key, x)
                return ((out - y) ** 2).mean(), new

            both, grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, slots = tx.update(grads, slots, params)
            return optax.apply_updates(params, updates), both[1], slots, both[0]

        fast, losses = jit(step), []
        for k in range(STEPS):
            params, state, slots, value = fast(params, state, slots, jax.random.key(k))
            losses.append(float(value))
        assert state["~"]["count"] == STEPS
        return losses

    agree(run, {"attention", "layer_norm", "rms_norm"})


def test_optax_with_accumulation_and_clipping() -> None:
    x, y = data(8)

    def loss(params: Any, x: Any, y: Any) -> Any:
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * params["g"]
        return ((h @ params["w"] - y) ** 2).mean()

    def run(jit: Jit) -> list[Any]:
        params = {"g": jnp.ones(8), "w": jnp.eye(8)}
        inner = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, 0.9))
        tx = optax.MultiSteps(inner, 2)
        slots = tx.init(params)

        def step(params: Any, slots: Any, x: Any, y: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x, y)
            updates, slots = tx.update(grads, slots, params)
            return optax.apply_updates(params, updates), slots, value

        fast, losses = jit(step), []
        for _ in range(2 * STEPS):
            params, slots, value = fast(params, slots, x, y)
            losses.append(float(value))
        return losses

    agree(run, {"rms_norm"})


@pytest.mark.filterwarnings("ignore")
def test_keras_fit() -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    keras = pytest.importorskip("keras", exc_type=ImportError)
    if keras.backend.backend() != "jax":
        pytest.skip("keras was imported with another backend")
    x, y = map(np.asarray, data(16))
    made: list[Any] = []

    class Fast(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            made.append(optimized(super().train_step))
            return made[-1](state, data)

    def fitted(kind: Any) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((16, 16))
        h = keras.layers.LayerNormalization()(inputs)
        h = keras.layers.MultiHeadAttention(2, 8)(h, h, use_causal_mask=True)
        h = keras.layers.RMSNormalization()(keras.layers.Add()([inputs, h]))
        model = kind(inputs, keras.layers.Dense(16)(h))
        model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
        found = model.fit(x, y, epochs=STEPS, batch_size=2, verbose=0, shuffle=False)
        return found.history["loss"]

    want, got = fitted(keras.Model), fitted(Fast)
    assert want[0] > want[-1]
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
    replaced = {s.op for s in made[0].report().sites if s.replaced}
    assert replaced == {"attention", "layer_norm", "rms_norm"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trains_and_generates() -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    if not hasattr(transformers, "FlaxLlamaForCausalLM"):
        pytest.skip("transformers 5 has no flax models")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    model = transformers.FlaxLlamaForCausalLM(config, input_shape=(1, 8), seed=0)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 1, 32)

    def run(jit: Jit) -> list[Any]:
        params, tx = model.params, optax.adam(1e-2)
        slots = tx.init(params)

        def step(params: Any, slots: Any, tokens: Any, key: Any) -> Any:
            def loss(params: Any) -> Any:
                out = model(tokens, params=params, dropout_rng=key, train=True)
                scores = out.logits[:, :-1]
                each = optax.softmax_cross_entropy_with_integer_labels
                return each(scores, tokens[:, 1:]).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, slots = tx.update(grads, slots, params)
            return optax.apply_updates(params, updates), slots, value

        fast, losses = jit(step), []
        for k in range(STEPS):
            params, slots, value = fast(params, slots, tokens, jax.random.key(k))
            losses.append(float(value))
        return losses

    agree(run, {"attention", "rms_norm", "gated_linear_unit"})

    def generate(params: Any, tokens: Any) -> Any:
        return model.generate(
            tokens, params=params, max_new_tokens=6, do_sample=False
        ).sequences

    fast = optimized(generate)
    given = model.params, tokens
    assert fast(*given).tolist() == jax.jit(generate)(*given).tolist()
    assert any(s.replaced for s in fast.report().sites)
