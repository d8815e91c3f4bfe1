"""Small PyTorch models of Hugging Face, as they come, with arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip
rng = np.random.default_rng(0)


def _tokens(length: int = 12) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 64, (2, length)))


def llama() -> Any:
    """A decoder with grouped heads."""
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=1, vocab_size=64, use_cache=False
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": _tokens()}


def bert() -> Any:
    """An encoder of padded sequences."""
    config = transformers.BertConfig(**SMALL, vocab_size=64)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    arguments = {"input_ids": _tokens(), "attention_mask": mask}
    return transformers.BertModel(config, add_pooling_layer=False), arguments


def vit() -> Any:
    """An encoder of images."""
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=8)
    images = torch.from_numpy(rng.normal(size=(2, 3, 16, 16)).astype("f4"))
    model = transformers.ViTModel(config, add_pooling_layer=False)
    return model, {"pixel_values": images}


def whisper() -> Any:
    """An encoder of sound, and a decoder that attends to it."""
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10,
        max_target_positions=16, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.from_numpy(rng.normal(size=(2, 8, 20)).astype("f4"))
    arguments = {"input_features": sound, "decoder_input_ids": _tokens(8)}
    return transformers.WhisperModel(config), arguments


def mixtral() -> Any:
    """A decoder with experts."""
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=1, vocab_size=64, num_local_experts=4,
        use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), {"input_ids": _tokens()}


def gpt2() -> Any:
    """A decoder with learned positions."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": _tokens()}


MODELS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "Llama": (llama, {"attention": 2, "rms_norm": 5, "gated_linear_unit": 2}),
    "BERT": (bert, {"attention": 2, "layer_norm": 5}),
    "ViT": (vit, {"attention": 2, "layer_norm": 5}),
    "Whisper": (whisper, {"attention": 6, "layer_norm": 12}),
    "Mixtral": (mixtral, {"attention": 2, "rms_norm": 5, "ragged_dot": 4}),
    "GPT-2": (gpt2, {"attention": 2, "layer_norm": 5}),
}
"""By name: what makes a model and its arguments, and the ops in it, counted by hand."""

OPS = ("attention", "rms_norm", "layer_norm", "gated_linear_unit", "ragged_dot")
FORCED = dict.fromkeys(OPS, "memory_bounded")


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns a model of this name, in evaluation, and its arguments."""
    torch.manual_seed(0)
    model, arguments = MODELS[name][0]()
    return model.eval(), arguments


def gradients(model: Any, arguments: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns a model's first result, and gradients of the mean of its square."""
    model.zero_grad()
    out = model(**arguments)[0]
    (out**2).mean().backward()
    grads = {k: p.grad for k, p in model.named_parameters()}
    return out.detach(), {k: g if g is None else g.clone() for k, g in grads.items()}
