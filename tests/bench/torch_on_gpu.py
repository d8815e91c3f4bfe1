"""PyTorch's Llama on the attached device, as torchax runs it and as rewritten.

``python3 -m tests.bench.torch_on_gpu`` needs the extra ``torch`` and transformers 5. It
answers whether kernels are taken for a module of PyTorch, whether its numbers stay, and
what forward and gradient gain, with all arrays on the device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import rewriter.torch

B, T = 4, 2048


def model() -> torch.nn.Module:
    """A Llama of 0.4 billion parameters in bfloat16."""
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def main() -> None:
    """Prints the report, errors and times."""
    fast = rewriter.torch.optimize(model())
    plain = rewriter.torch.optimize(fast.original, patterns="none")
    tokens = np.random.default_rng(0).integers(0, 32000, (B, T)).astype("i4")
    state = fast.state()
    print(fast.report(input_ids=tokens))

    def of(module):
        def forward(params, tokens):
            held = state._replace(params=params)
            out, _ = module.apply_to(held, input_ids=tokens)
            return out["logits"]

        def loss(params, tokens):
            logits = forward(params, tokens).astype(jnp.float32)[:, :-1]
            log = jax.nn.log_softmax(logits)
            return -jnp.take_along_axis(log, tokens[:, 1:, None], -1).mean()

        return forward, jax.value_and_grad(loss)

    for name, slow, quick in zip(
        ("forward", "gradient"), of(plain), of(fast), strict=True
    ):
        measured = rewriter.benchmark(slow, mode="forward", pairs=5)
        before, after = (jax.jit(f)(state.params, tokens) for f in (slow, quick))
        apart = [
            float(
                jnp.abs(a.astype("f4") - b.astype("f4")).max()
                / (jnp.abs(a).max() + 1e-30)
            )
            for a, b in zip(
                jax.tree.leaves(before), jax.tree.leaves(after), strict=True
            )
        ]
        print(name, "largest difference, relative:", max(apart))
        print(measured(state.params, tokens))  # the whole function is rewritten here


if __name__ == "__main__":
    main()
