"""Public models for which nothing was tuned: a check of those that were.

`models --others` measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.bench.public_models import (
    Batch,
    Model,
    classes,
    count_of,
    images,
    masked_words,
    next_words,
    two_texts,
    words,
)


def waves(b: int, samples: int) -> Callable[[Any, bool], Batch]:
    """Batches of sound as numbers over time."""

    def made(config: Any, small: bool) -> Batch:
        del config
        draw = np.random.default_rng(0)
        shape = (2, 4000) if small else (b, samples)
        return {"input_values": draw.normal(size=shape).astype("float32")}

    return made


def pictures_and_texts(b: int, t: int) -> Callable[[Any, bool], Batch]:
    """As many images as texts; every second text is half padding."""

    def made(config: Any, small: bool) -> Batch:
        text = words(b, t, padded=True)(config.text_config, small)
        return {**text, **images(b)(config.vision_config, small)}

    return made


def frames(out: Any, batch: Batch) -> jax.Array:
    """The mean cross entropy of each frame, with labels that follow each other."""
    del batch
    logits = out.logits.astype(jnp.float32)
    labels = jnp.arange(logits.shape[1]) % logits.shape[2]
    labels = jnp.broadcast_to(labels, logits.shape[:2])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def pairs(out: Any, batch: Batch) -> jax.Array:
    """CLIP's loss: each text belongs to the image of its number."""
    del batch
    logits = out.logits_per_image.astype(jnp.float32)
    labels = jnp.arange(logits.shape[0])
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return (entropy(logits, labels) + entropy(logits.T, labels)).mean() / 2


def both_texts(batch: Batch) -> int:
    return batch["input_ids"].size + batch["decoder_input_ids"].size


def patches_of_14(batch: Batch) -> int:
    b, _, n, _ = batch["pixel_values"].shape
    return b * ((n // 14) ** 2 + 1)


_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip
OTHER_MODELS = (
    Model("ELECTRA-base 32x512, padded", "Electra", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"),
          {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12,
           "intermediate_size": 3072}, _SMALL),
    Model("ALBERT-base 32x512, padded", "Albert", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"),
          {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
          _SMALL),
    Model("RoFormer-base 32x512, padded", "RoFormer", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"), {}, _SMALL),
    Model("BigBird-base 4x2048, padded", "BigBird", "ForMaskedLM",
          words(4, 2048, padded=True), masked_words, count_of("input_ids"), {},
          {**_SMALL, "attention_type": "original_full"}),
    Model("BEiT-base 128 images", "Beit", "ForImageClassification", images(128),
          classes, lambda batch: 197 * batch["pixel_values"].shape[0],
          {"use_relative_position_bias": True, "use_mask_token": False},
          {**_SMALL, "image_size": 32, "use_relative_position_bias": True,
           "use_mask_token": False}),
    Model("DINOv2-base 16 images of 518", "Dinov2", "ForImageClassification",
          images(16), classes, patches_of_14, {"image_size": 518},
          {**_SMALL, "image_size": 28}),
    Model("CLIP-B/32 256 pairs", "CLIP", "Model", pictures_and_texts(256, 77), pairs,
          lambda batch: 256 * (50 + 77), {},
          {"text_config": {**_SMALL, "max_position_embeddings": 64},
           "vision_config": {**_SMALL, "image_size": 64}, "projection_dim": 32}),
    Model("Mistral 7B, 4 of 32 layers, 2x8192", "Mistral", "ForCausalLM",
          words(2, 8192), next_words(), count_of("input_ids"),
          {"num_hidden_layers": 4, "max_position_embeddings": 8192},
          {**_SMALL, "num_key_value_heads": 1, "max_position_embeddings": 128}),
    Model("XGLM-564M, 12 of 24 layers, 8x1024", "XGLM", "ForCausalLM", words(8, 1024),
          next_words(), count_of("input_ids"), {"num_layers": 12},
          {"d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 2,
           "vocab_size": 512}),
    Model("Bloom-560m, 12 of 24 layers, 8x1024", "Bloom", "ForCausalLM",
          words(8, 1024), next_words(), count_of("input_ids"),
          {"hidden_size": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 250880},
          {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512}),
    Model("Marian 32x256, padded, and 256", "Marian", "MTModel",
          two_texts(32, 256, 256), next_words("decoder_input_ids"), both_texts,
          {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
           "encoder_attention_heads": 8, "decoder_attention_heads": 8,
           "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 58101,
           "pad_token_id": 0, "decoder_start_token_id": 0},
          {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 512,
           "encoder_attention_heads": 2, "decoder_attention_heads": 2,
           "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "pad_token_id": 0,
           "decoder_start_token_id": 0}),
    Model("wav2vec 2.0-base 8x10 s", "Wav2Vec2", "ForCTC", waves(8, 160000), frames,
          lambda batch: 8 * 499,
          {"do_stable_layer_norm": True, "feat_extract_norm": "layer"},
          {**_SMALL, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}),
)  # fmt: skip
