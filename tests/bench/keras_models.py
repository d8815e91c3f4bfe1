"""What is found in Keras Hub's models, unmodified, and how far off the numbers are.

  KERAS_BACKEND=jax python3 -m tests.bench.keras_models [--only NAMES] [--write]

Two layers of each backbone, with random weights, padded tokens and kernels forced. Each
is run forward and differentiated. ``--write`` fills the table of
docs/frameworks/keras.md. Needs ``pip install keras keras-hub``.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

import rewriter
from tests.bench import record
from tests.support.corpus import FORCED

BATCH, LENGTH = 2, 24
ENCODER = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 64,
    "intermediate_dim": 96,
}
BOUNDED = {**ENCODER, "max_sequence_length": LENGTH}
DECODER = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 64,
    "intermediate_dim": 96,
}
VISION = {
    "image_shape": (32, 32, 3),
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 64,
}


# ------------------------------------------------------------------ inputs
def _ids() -> jax.Array:
    return jnp.asarray(np.random.RandomState(0).randint(0, 50, (BATCH, LENGTH)))


def _kept() -> jax.Array:
    return (jnp.arange(LENGTH) < jnp.array([[LENGTH], [15]])).astype(jnp.int32)


def tokens() -> dict[str, jax.Array]:
    """Tokens [2, 24], the second row padded behind 15."""
    return {"token_ids": _ids(), "padding_mask": _kept()}


def segments() -> dict[str, jax.Array]:
    """Padded tokens, and types of tokens."""
    return {**tokens(), "segment_ids": 0 * _ids()}


def unpadded() -> dict[str, jax.Array]:
    """Tokens, and types of tokens, without padding."""
    return {"token_ids": _ids(), "segment_ids": 0 * _ids()}


def only_tokens() -> dict[str, jax.Array]:
    """Tokens alone."""
    return {"token_ids": _ids()}


def two_sides() -> dict[str, jax.Array]:
    """Padded tokens of an encoder and of a decoder."""
    sides = ("encoder", "decoder")
    return {f"{side}_{k}": v for side in sides for k, v in tokens().items()}


def images() -> jax.Array:
    """Images [2, 32, 32, 3]."""
    shape = (BATCH, 32, 32, 3)
    return jnp.asarray(np.random.RandomState(0).rand(*shape), jnp.float32)


def sound() -> dict[str, jax.Array]:
    """Sound [2, 4000, 1] for an encoder, and padded tokens for a decoder."""
    shape = (BATCH, 4000, 1)
    return {
        "encoder_input_values": jnp.asarray(
            np.random.RandomState(0).rand(*shape), jnp.float32
        ),
        "encoder_padding_mask": jnp.ones(shape[:2], jnp.int32),
        "decoder_token_ids": _ids(),
        "decoder_padding_mask": _kept(),
    }


# ------------------------------------------------------------------ models
@dataclass(frozen=True)
class Backbone:
    """A backbone of Keras Hub, and what its source has.

    Attributes:
        attention: How many attentions it has.
        norms: How many layer norms or RMS norms.
        units: How many gated linear units.
        options: Arguments of its class.
        inputs: Makes its inputs.
        of: The class's name, without ``Backbone``; the backbone's own by default.
    """

    attention: int
    norms: int
    units: int
    options: dict[str, Any]
    inputs: Callable[[], Any] = tokens
    of: str = ""


EXPERTS = {**DECODER, "num_experts": 4, "top_k": 2}
MODELS = {
    "ALBERT": Backbone(
        2, 5, 0, BOUNDED | {"embedding_dim": 16, "num_groups": 1}, segments, "Albert"
    ),
    "BART": Backbone(6, 12, 0, BOUNDED, two_sides, "Bart"),
    "BERT": Backbone(2, 5, 0, BOUNDED, segments, "Bert"),
    "BLOOM": Backbone(2, 6, 0, ENCODER, of="Bloom"),
    "DeBERTa V3": Backbone(2, 6, 0, BOUNDED | {"bucket_size": 8}, of="DebertaV3"),
    "DeiT": Backbone(2, 5, 0, VISION | {"intermediate_dim": 96}, images),
    "DistilBERT": Backbone(2, 5, 0, BOUNDED, of="DistilBert"),
    "ESM": Backbone(2, 5, 0, ENCODER, only_tokens),
    "Falcon": Backbone(
        2, 5, 0,
        {k: v for k, v in ENCODER.items() if k != "num_heads"}
        | {"num_attention_heads": 4},
    ),
    "FNet": Backbone(
        0, 5, 0, {k: v for k, v in ENCODER.items() if k != "num_heads"}, unpadded
    ),
    "Gemma": Backbone(2, 5, 2, DECODER | {"head_dim": 16}),
    "Gemma 2": Backbone(
        2, 9, 2,
        DECODER | {
            "head_dim": 16, "use_post_ffw_norm": True, "use_post_attention_norm": True,
            "attention_logit_soft_cap": 50, "final_logit_soft_cap": 30,
            "use_sliding_window_attention": True, "sliding_window_size": 8,
        },
        of="Gemma",
    ),
    "Gemma 3": Backbone(
        2, 9, 2,
        DECODER | {
            "head_dim": 16, "image_size": 16, "use_sliding_window_attention": True,
            "sliding_window_size": 8, "use_query_key_norm": True,
            "vision_encoder": None,
        },
        of="Gemma3",
    ),
    "GPT-2": Backbone(2, 5, 0, BOUNDED, of="GPT2"),
    "GPT-NeoX": Backbone(2, 5, 0, BOUNDED, of="GPTNeoX"),
    "gpt-oss": Backbone(
        2, 5, 0, EXPERTS | {"sliding_window": 8, "head_dim": 16}, of="GptOss"
    ),
    "Llama": Backbone(2, 5, 2, DECODER),
    "Llama 3": Backbone(2, 5, 2, DECODER, of="Llama3"),
    "Mistral": Backbone(2, 5, 2, DECODER | {"sliding_window": 8}),
    "Mixtral": Backbone(2, 5, 0, EXPERTS | {"sliding_window": 8}),
    "Moonshine": Backbone(
        6, 12, 2,
        {
            "vocabulary_size": 50, "filter_dim": 64, "hidden_dim": 64,
            "intermediate_dim": 96, "encoder_num_layers": 2, "decoder_num_layers": 2,
            "encoder_num_heads": 4, "decoder_num_heads": 4,
        },
        sound,
    ),
    "OPT": Backbone(2, 5, 0, BOUNDED),
    "Phi-3": Backbone(2, 5, 2, DECODER, of="Phi3"),
    "Qwen 2.5": Backbone(2, 5, 2, DECODER, of="Qwen"),
    "Qwen 3": Backbone(2, 9, 2, DECODER | {"head_dim": 16}, of="Qwen3"),
    "Qwen 3 MoE": Backbone(
        2, 9, 0, EXPERTS | {"head_dim": 16, "moe_intermediate_dim": 32}, of="Qwen3Moe"
    ),
    "RoBERTa": Backbone(2, 5, 0, BOUNDED, of="Roberta"),
    "Swin": Backbone(
        4, 11, 0,
        {
            "image_shape": (32, 32, 3), "patch_size": 4, "embed_dim": 32,
            "depths": (2, 2), "num_heads": (2, 4), "window_size": 4,
        },
        images, "SwinTransformer",
    ),
    "T5": Backbone(
        6, 12, 4, ENCODER | {"activation": "gelu", "use_gated_activation": True},
        two_sides,
    ),
    "ViT": Backbone(2, 5, 0, VISION | {"mlp_dim": 96}, images),
    "XLNet": Backbone(2, 4, 0, ENCODER, segments),
}  # fmt: skip
"""Backbones by name. Keras's experts compute every expert for every token, which no
ragged dot does, so that only a mixture's attention and norms count."""


# ------------------------------------------------------------------ figures
def made(model: Backbone, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a backbone as a function of its weights and inputs, and both of them."""
    keras.utils.set_random_seed(0)
    kind = getattr(keras_hub.models, f"{model.of or name}Backbone")
    backbone = kind(**model.options)
    others = [v.value for v in backbone.non_trainable_variables]
    weights = [v.value for v in backbone.trainable_variables]
    keys = jax.random.split(jax.random.key(0), len(weights))
    drawn = [
        w + jax.random.normal(k, w.shape, w.dtype) / 50
        for w, k in zip(weights, keys, strict=True)
    ]

    def run(weights: Any, inputs: Any) -> Any:
        return backbone.stateless_call(weights, others, inputs, training=False)[0]

    return run, (drawn, model.inputs())


def differentiated(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradient, by weights, of a loss of a function's results."""

    def loss(weights: Any, inputs: Any) -> jax.Array:
        return sum(jnp.sin(y).sum() for y in numbers(run(weights, inputs)))

    return jax.grad(loss)


def numbers(results: Any) -> list[jax.Array]:
    """Returns a program's arrays of floating numbers; masks are left out."""
    leaves = jax.tree.leaves(results)
    return [y for y in leaves if jnp.issubdtype(y.dtype, jnp.floating)]


def measured(name: str, model: Backbone) -> dict[str, Any]:
    """One model's row: sites found and written, and the largest relative errors.

    Errors are relative to the largest number of all results, or of all gradients.
    """
    run, args = made(model, name)
    row: dict[str, Any] = {
        "model": name,
        "written": [model.attention, model.norms, model.units],
    }
    for what, fn in (("forward", run), ("gradient", differentiated(run))):
        fast = rewriter.optimize(fn, implementation=FORCED)
        got, want = numbers(fast(*args)), numbers(jax.jit(fn)(*args))
        counts = fast.report(*args).counts(backward=what == "gradient", replaced=True)
        found = (
            counts["attention"],
            counts["layer_norm"] + counts["rms_norm"],
            counts["gated_linear_unit"],
        )
        most = max(float(jnp.abs(y).max()) for y in want)
        error = max(float(jnp.abs(a - b).max()) for a, b in zip(got, want, strict=True))
        row[what] = {"replaced": found, "error": error / most}
    return row


def main() -> None:
    """Measures, prints, and keeps the rows if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in given.only or MODELS:
        rows.append(measured(name, MODELS[name]))
        print(rows[-1], flush=True)
        jax.clear_caches()
        gc.collect()
    if given.write:
        packages = ("keras", "keras-hub")
        record.write(
            record.named("keras_models"),
            "KERAS_BACKEND=jax python3 -m tests.bench.keras_models --write",
            versions={n: importlib.metadata.version(n) for n in packages},
            rows=rows,
        )


if __name__ == "__main__":
    main()
