"""Hugging Face's Llama of a billion parameters, unmodified, as written and rewritten.

  python3 -m tests.bench.public_decoder [--small] [--repeats N] [--json PATH]

`transformers.FlaxLlamaForCausalLM` of the size of `tests.bench.decoder` in bfloat16:
16 layers written out one after the other, rotary positions, weights as the library
draws them. It measures the forward, the gradient of a whole step, and the same with
every layer in `flax.linen.remat`. The library has no option for that, so it is put
around the layers from outside, by `flax.linen.intercept_methods`. A last run has memory
to keep what those layers compute again. Needs flax and transformers before 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import transformers
from transformers.models.llama.modeling_flax_llama import FlaxLlamaDecoderLayer

from tests.bench import decoder, passes, record


def model_of(
    layers: int,
    width: int,
    heads: int,
    hidden: int,
    tokens: int,
    positions: int,
    key_heads: int | None = None,
) -> Any:
    """The library's model, without weights."""
    config = transformers.LlamaConfig(
        vocab_size=tokens,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=positions,
    )
    model = transformers.FlaxLlamaForCausalLM
    return model(config, dtype=jnp.bfloat16, _do_init=False)


def weights_of(model: Any) -> Any:
    """Weights as the library draws them, in bfloat16."""
    drawn = lambda key: model.to_bf16(model.init_weights(key, (1, 8)))
    return jax.jit(drawn)(jax.random.key(0))


def checkpointed_layer(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    """Puts a decoder layer's call in `flax.linen.remat`, and no other method."""
    layer = context.module
    if (
        not isinstance(layer, FlaxLlamaDecoderLayer)
        or context.method_name != "__call__"
    ):
        return method(*args, **kwargs)
    call = context.orig_method.func
    return nn.remat(lambda layer, x: call(layer, x, **kwargs))(layer, *args)


def loss_of(model: Any, checkpointed: bool) -> Callable[..., jax.Array]:
    """Cross entropy of (weights, token ids [b, t + 1])."""
    layers = checkpointed_layer if checkpointed else None

    def loss(weights: Any, ids: jax.Array) -> jax.Array:
        with nn.intercept_methods(layers) if layers else contextlib.nullcontext():
            logits = model(ids[:, :-1], params=weights).logits
        return passes.cross_entropy(logits, ids)

    return loss


def main() -> None:
    """Measures every row."""
    given = passes.arguments(__doc__)
    d = decoder
    size, batches = (d.LAYERS, d.WIDTH, d.HEADS, d.HIDDEN, d.TOKENS), d.BATCHES
    if given.small:
        size, batches = (2, 128, 2, 256, 512), ((1, 256),)
    model = model_of(*size, positions=max(t for _, t in batches))
    weights = weights_of(model)
    rows = []
    for b, t in batches:
        cases = passes.cases(
            lambda checkpointed: loss_of(model, checkpointed),
            memory=d.KEPT.get(t, 1 << 20),
        )
        ids = jax.random.randint(jax.random.key(1), (b, t + 1), 0, size[-1])
        rows += passes.compare(cases, (weights, ids), given.repeats)
    if given.json:
        command = f"python3 -m tests.bench.public_decoder --repeats {given.repeats}"
        versions = {"transformers": transformers.__version__, "flax": flax.__version__}
        command += " --small" * given.small
        record.write(given.json, command, **versions, results=rows)


if __name__ == "__main__":
    main()
