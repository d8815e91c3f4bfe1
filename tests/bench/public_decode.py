"""A decoding step of Hugging Face's Llama of a billion parameters, unmodified.

  python3 -m tests.bench.public_decode [--small] [--repeats N] [--json PATH]

`transformers.FlaxLlamaForCausalLM` of the size of `tests.bench.decoder` in bfloat16
gives the next token of every sequence. It has the library's own cache of keys and
values: it writes one row, and reads all that came before. Needs flax and transformers
before 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import transformers

from tests.bench import decoder, passes, record
from tests.bench.public_decoder import model_of, weights_of

BATCHES = ((8, 4096, 16), (32, 4096, 16), (64, 4096, 4))
"""Sequences, the length of the cache, and the heads of its keys, of 16 of queries."""

FULL = 0.75
"""How much of the cache is written."""


def step_of(model: Any, length: int) -> Callable[..., Any]:
    """The mean of the next token's logits, and the cache, of (weights, ids, cache)."""
    place = int(FULL * length)

    def step(weights: Any, ids: jax.Array, cache: Any) -> Any:
        seen = jnp.broadcast_to(jnp.arange(length) <= place, (len(ids), length))
        out = model(
            ids,
            params=weights,
            past_key_values=cache,
            attention_mask=seen.astype(jnp.int32),
            position_ids=jnp.full((len(ids), 1), place),
        )
        return jnp.mean(jnp.abs(out.logits.astype(jnp.float32))), out.past_key_values

    return step


def cache_of(model: Any, b: int, length: int) -> Any:
    """The library's cache with normal keys and values up to `FULL` of its length."""
    empty = jax.eval_shape(lambda: model.init_cache(b, length))
    leaves, tree = jax.tree.flatten(empty)

    def filled(i: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        if not like.shape:  # the index of the next row
            return jnp.full((), int(FULL * length), like.dtype)
        return jax.random.normal(jax.random.key(i), like.shape, jnp.bfloat16)

    return jax.tree.unflatten(tree, [filled(i, x) for i, x in enumerate(leaves)])


def main() -> None:
    """Measures every row."""
    given = passes.arguments(__doc__)
    d = decoder
    size, batches = (d.LAYERS, d.WIDTH, d.HEADS, d.HIDDEN, d.TOKENS), BATCHES
    if given.small:
        size, batches = (2, 128, 2, 256, 512), ((2, 256, 2), (2, 256, 1))
    rows = []
    for b, length, heads in batches:
        model = model_of(*size, positions=length, key_heads=heads)
        ids = jax.random.randint(jax.random.key(1), (b, 1), 0, size[-1])
        what = f"decoding, {heads} key heads, cache of {length}"
        case = passes.Case(what, step_of(model, length))
        args = weights_of(model), ids, cache_of(model, b, length)
        rows += passes.compare([case], args, given.repeats)
    if given.json:
        command = f"python3 -m tests.bench.public_decode --repeats {given.repeats}"
        versions = {"transformers": transformers.__version__, "flax": flax.__version__}
        command += " --small" * given.small
        record.write(given.json, command, **versions, results=rows)


if __name__ == "__main__":
    main()
