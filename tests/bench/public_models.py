"""Public models of their usual sizes, with a batch and a loss for each.

`models` measures them as Hugging Face's flax classes, `models_torch` as PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """A public model and what it is trained on.

    Attributes:
        name: What the figures call it.
        family: The library's name of it.
        head: What the class's name ends in.
        batch: Makes a batch from (config, whether it is small).
        loss: Gives the loss of what the model returns, and the batch.
        tokens: The tokens (patches, frames) of a batch.
        sizes: Settings that differ from the library's defaults.
        small: Settings to try it on a CPU.
    """

    name: str
    family: str
    head: str
    batch: Callable[[Any, bool], Batch]
    loss: Callable[[Any, Batch], jax.Array]
    tokens: Callable[[Batch], int]
    sizes: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)


def words(b: int, t: int, *, padded: bool = False) -> Callable[[Any, bool], Batch]:
    """Batches of tokens; of which, if `padded`, every second row is half padding."""

    def made(config: Any, small: bool) -> Batch:
        rows, length = (2, 64) if small else (b, t)
        draw = np.random.default_rng(0)
        ids = draw.integers(2, config.vocab_size, (rows, length), dtype=np.int32)
        ends = np.where(np.arange(rows) % 2, length // 2, length) if padded else length
        mask = np.arange(length) < np.reshape(ends, (-1, 1))
        mask = np.broadcast_to(mask, ids.shape).astype("int32")
        return {"input_ids": ids, "attention_mask": mask}

    return made


def two_texts(b: int, t: int, s: int) -> Callable[[Any, bool], Batch]:
    """Batches of tokens for an encoder, half of each padded, and for a decoder."""

    def made(config: Any, small: bool) -> Batch:
        both = words(b, t, padded=True)(config, small)
        later = words(b, s)(config, small)
        return {**both, "decoder_input_ids": later["input_ids"]}

    return made


def images(b: int) -> Callable[[Any, bool], Batch]:
    def made(config: Any, small: bool) -> Batch:
        n = config.image_size
        draw = np.random.default_rng(0)
        shape = (2 if small else b, 3, n, n)
        return {"pixel_values": draw.normal(size=shape).astype("float32")}

    return made


def sounds(b: int, t: int) -> Callable[[Any, bool], Batch]:
    def made(config: Any, small: bool) -> Batch:
        rows, length = (2, 16) if small else (b, t)
        draw = np.random.default_rng(0)
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        ids = draw.integers(2, config.vocab_size, (rows, length), dtype=np.int32)
        return {
            "input_features": draw.normal(size=shape).astype("float32"),
            "decoder_input_ids": ids,
        }

    return made


def next_words(key: str = "input_ids") -> Callable[[Any, Batch], jax.Array]:
    """The mean cross entropy of each next token."""

    def loss(out: Any, batch: Batch) -> jax.Array:
        logits = out.logits[:, :-1].astype(jnp.float32)
        labels = jnp.asarray(batch[key])[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean()

    return loss


def masked_words(out: Any, batch: Batch) -> jax.Array:
    """The mean cross entropy of the tokens that are no padding."""
    logits = out.logits.astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"])
    mask = batch["attention_mask"]
    return (each * mask).sum() / mask.sum()


def classes(out: Any, batch: Batch) -> jax.Array:
    labels = jnp.arange(out.logits.shape[0]) % out.logits.shape[1]
    logits = out.logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def count_of(key: str) -> Callable[[Batch], int]:
    return lambda batch: batch[key].size


def patches(batch: Batch) -> int:
    b, _, n, _ = batch["pixel_values"].shape
    return b * ((n // 16) ** 2 + 1)


_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip
_SMALL_DECODER = {
    **_SMALL, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128
}  # fmt: skip
_SMALL_PAIR = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 512,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip

MODELS = (
    Model("BERT-base 32x512, padded", "Bert", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"), {}, _SMALL),
    Model("GPT-2 8x1024", "GPT2", "LMHeadModel", words(8, 1024), next_words(),
          count_of("input_ids"), {},
          {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512}),
    Model("ViT-B 128 images", "ViT", "ForImageClassification", images(128), classes,
          patches, {}, {**_SMALL, "image_size": 32}),
    Model("Whisper-small 16 clips", "Whisper", "ForConditionalGeneration",
          sounds(16, 448), next_words("decoder_input_ids"),
          lambda batch: 16 * (1500 + 448),
          {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
           "encoder_attention_heads": 12, "decoder_attention_heads": 12,
           "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
          {**_SMALL_PAIR, "max_source_positions": 64, "max_target_positions": 64,
           "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1,
           "decoder_start_token_id": 1}),
    Model("Gemma-2B, 8 of 18 layers, 4x2048", "Gemma", "ForCausalLM", words(4, 2048),
          next_words(), count_of("input_ids"),
          {"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8,
           "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 8},
          _SMALL_DECODER),
    Model("GPT-J, 4 of 28 layers, 4x2048", "GPTJ", "ForCausalLM", words(4, 2048),
          next_words(), count_of("input_ids"), {"n_layer": 4},
          {"n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16,
           "vocab_size": 512, "n_positions": 128}),
    Model("OPT-125m 8x1024", "OPT", "ForCausalLM", words(8, 1024), next_words(),
          count_of("input_ids"), {},
          {**_SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64,
           "max_position_embeddings": 128}),
    Model("BART-base 16x512, padded, and 128", "Bart", "ForConditionalGeneration",
          two_texts(16, 512, 128), next_words("decoder_input_ids"),
          lambda batch: batch["input_ids"].size + batch["decoder_input_ids"].size,
          {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
           "encoder_attention_heads": 12, "decoder_attention_heads": 12,
           "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
          {**_SMALL_PAIR, "max_position_embeddings": 128}),
    Model("GPT-Neo-125m 8x1024", "GPTNeo", "ForCausalLM", words(8, 1024), next_words(),
          count_of("input_ids"),
          {"hidden_size": 768, "num_layers": 12, "num_heads": 12,
           "attention_types": [[["global", "local"], 6]],
           "max_position_embeddings": 1024},
          {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 512,
           "attention_types": [[["global", "local"], 1]],
           "max_position_embeddings": 128}),
    Model("Llama 1B, 4 of 16 layers, 4x2048", "Llama", "ForCausalLM", words(4, 2048),
          next_words(), count_of("input_ids"),
          {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
           "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 128256,
           "max_position_embeddings": 2048},
          _SMALL_DECODER),
    Model("RoBERTa-base 32x512, padded", "Roberta", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"),
          {"max_position_embeddings": 514}, {**_SMALL, "max_position_embeddings": 80}),
    Model("DistilBERT 32x512, padded", "DistilBert", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"), {},
          {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128,
           "vocab_size": 512}),
)  # fmt: skip
