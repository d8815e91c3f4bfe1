"""Tunix's Gemma 4 with experts, unmodified, as written and rewritten.

  python3 -m tests.bench.public_experts [--small] [--repeats N] [--json PATH]

`tunix.models.gemma4` as `ModelConfig.gemma4_26b_a4b` says, but with 6 of its 30 layers
(5 with a window, 1 without) and 32768 tokens in the vocabulary, in bfloat16. Each layer
has attention, a dense unit, and 128 experts of 704 columns on `jax.lax.ragged_dot`. A
router picks 8 of them for a token. Forward, and the gradient of a whole step. Needs
google-tunix.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.gemma4.model import Gemma4, ModelConfig

from tests.bench import passes, record

LAYERS, TOKENS = 6, 32768
BATCHES = ((1, 2048), (1, 4096))
SMALL = {
    "num_layers": 2, "num_embed": 512, "embed_dim": 128, "hidden_dim": 256,
    "num_heads": 4, "head_dim": 32, "num_kv_heads": 2, "num_global_kv_heads": 2,
    "global_key_size": 32, "sliding_window_size": 64, "num_experts": 16,
    "expert_dim": 64, "num_experts_per_tok": 2, "moe_dense_hidden_dim": 256,
}  # fmt: skip


def config_of(small: bool) -> ModelConfig:
    """The library's config, of fewer layers and tokens."""
    more = SMALL if small else {"num_layers": LAYERS, "num_embed": TOKENS}
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    plain = {"use_flash_attention": False, "use_sliding_window_kv_cache": False}
    return dataclasses.replace(ModelConfig.gemma4_26b_a4b(), **more, **types, **plain)


def parts_of(config: ModelConfig) -> tuple[Any, Any]:
    """The model's structure, and weights as the library draws them."""
    build = lambda: nnx.split(Gemma4(config, rngs=nnx.Rngs(0)))
    structure, _ = nnx.eval_shape(build)
    return structure, jax.jit(lambda: build()[1])()


def loss_of(structure: Any) -> Callable[..., jax.Array]:
    """Cross entropy of (weights, token ids [b, t + 1])."""

    def loss(weights: Any, ids: jax.Array) -> jax.Array:
        b, t = ids.shape[0], ids.shape[1] - 1
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
        model = nnx.merge(structure, weights)
        logits, _ = model(ids[:, :-1], attention_mask=mask)
        return passes.cross_entropy(logits, ids)

    return loss


def main() -> None:
    """Measures both passes."""
    given = passes.arguments(__doc__)
    config = config_of(given.small)
    structure, weights = parts_of(config)
    loss = loss_of(structure)
    cases = [
        passes.Case("forward", loss),
        passes.Case("gradient", jax.value_and_grad(loss)),
    ]
    rows = []
    for b, t in ((1, 256),) if given.small else BATCHES:
        ids = jax.random.randint(jax.random.key(1), (b, t + 1), 0, config.num_embed)
        rows += passes.compare(cases, (weights, ids), given.repeats)
    if given.json:
        command = f"python3 -m tests.bench.public_experts --repeats {given.repeats}"
        command += " --small" * given.small
        version = importlib.metadata.version("google-tunix")
        record.write(given.json, command, tunix=version, results=rows)


if __name__ == "__main__":
    main()
