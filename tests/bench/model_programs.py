"""The programs of a public model: a training step and inference, and their arguments.

Needs flax, optax and transformers before 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import transformers

from tests.bench.public_models import Batch, Model


@dataclass(frozen=True)
class Programs:
    """A model's programs, and what they are given.

    Attributes:
        inference: Of weights and a batch.
        step: Of weights, the optimizer's state and a batch: a loss, its gradients and
            an update by `optax.adamw`.
        initial: Draws weights in bfloat16.
        optimizer: The optimizer.
        weights: The shapes of the weights.
        state: Those of the optimizer's state.
        given: Those of a batch.
        batch: The batch.
    """

    inference: Callable[..., Any]
    step: Callable[..., Any]
    initial: Callable[..., Any]
    optimizer: optax.GradientTransformation
    weights: Any
    state: Any
    given: Any
    batch: Batch


def programs_of(model: Model, small: bool = False) -> Programs:
    """Returns the programs of the library's own model, unmodified."""
    config = getattr(transformers, f"{model.family}Config")(
        **(model.small if small else model.sizes)
    )
    made = getattr(transformers, f"Flax{model.family}{model.head}")(
        config, dtype=jnp.bfloat16, _do_init=False
    )
    batch = model.batch(config, small)
    optimizer = optax.adamw(1e-4)

    def initial(key: jax.Array) -> Any:
        return made.to_bf16(made.init_weights(key, _input_shape(batch)))

    def loss(weights: Any, given: Batch) -> jax.Array:
        return model.loss(made(**given, params=weights), given)

    def step(weights: Any, state: Any, given: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, given)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    def inference(weights: Any, given: Batch) -> jax.Array:
        return made(**given, params=weights)[0]

    weights = jax.eval_shape(initial, jax.random.key(0))
    state = jax.eval_shape(optimizer.init, weights)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return Programs(inference, step, initial, optimizer, weights, state, given, batch)


def _input_shape(batch: Batch) -> Any:
    """The shape that the library makes weights for: of one row, images channels last.

    Models of images and texts want both.
    """
    images = [x.shape for x in batch.values() if x.ndim == 4]
    others = [(1, *x.shape[1:]) for x in batch.values() if x.ndim < 4]
    last = [(1, *shape[2:], shape[1]) for shape in images]
    return (others[0], last[0]) if others and last else (others + last)[0]
