"""Hugging Face's BERT, unmodified, on padded sequences: as written and rewritten.

  python3 -m tests.bench.public_bert [--small] [--repeats N] [--json PATH]

`transformers.FlaxBertForMaskedLM` of the base size in bfloat16: 12 layers of width 768,
32 sequences of 512 tokens, of which the later half is padding in every second one.
Forward, gradient of a whole step, and the same with the library's own
`gradient_checkpointing`. Needs flax and transformers before 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import transformers

from tests.bench import passes, record


def model_of(checkpointed: bool, **sizes: int) -> Any:
    """The library's model, without weights."""
    config = transformers.BertConfig(**sizes)
    return transformers.FlaxBertForMaskedLM(
        config, dtype=jnp.bfloat16, _do_init=False,
        gradient_checkpointing=checkpointed,
    )  # fmt: skip


def loss_of(model: Any) -> Callable[..., jax.Array]:
    """Cross entropy of (weights, token ids [b, t + 1]); padding is masked."""

    def loss(weights: Any, ids: jax.Array) -> jax.Array:
        words = ids[:, :-1]
        b, t = words.shape
        ends = jnp.where(jnp.arange(b) % 2, t // 2, t)
        mask = (jnp.arange(t) < ends[:, None]).astype(jnp.int32)
        logits = model(words, attention_mask=mask, params=weights).logits
        return passes.cross_entropy(logits, ids)

    return loss


def main() -> None:
    """Measures every row."""
    given = passes.arguments(__doc__)
    b, t, sizes = 32, 512, {}
    if given.small:
        b, t = 2, 128
        sizes = {
            "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128,
            "num_hidden_layers": 2, "vocab_size": 512,
        }  # fmt: skip
    models = {checkpointed: model_of(checkpointed, **sizes) for checkpointed in (0, 1)}
    plain = models[False]
    drawn = lambda key: plain.to_bf16(plain.init_weights(key, (1, 8)))
    weights = jax.jit(drawn)(jax.random.key(0))
    tokens = plain.config.vocab_size
    ids = jax.random.randint(jax.random.key(1), (b, t + 1), 0, tokens)
    cases = passes.cases(lambda checkpointed: loss_of(models[checkpointed]))
    rows = passes.compare(cases, (weights, ids), given.repeats)
    if given.json:
        command = f"python3 -m tests.bench.public_bert --repeats {given.repeats}"
        versions = {"transformers": transformers.__version__, "flax": flax.__version__}
        command += " --small" * given.small
        record.write(given.json, command, **versions, results=rows)


if __name__ == "__main__":
    main()
