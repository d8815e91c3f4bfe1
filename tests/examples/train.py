"""Trains Hugging Face's GPT-2, unmodified, on the standard library's own sources.

    pip install "transformers<5" optax
    python3 -m tests.examples.train [--steps 300] [--write]

The same training step runs three times: as written, as written from weights that
differ in the last bits (how far do two equal runs drift apart?), and through
`rewriter.optimize`. Nothing in the model or in the step knows about the rewriter.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rewriter
from tests.bench import record

BYTES = 256
"""The vocabulary: every byte is a token."""


def batches(steps: int, rows: int, tokens: int) -> Iterator[jax.Array]:
    """Token ids [rows, tokens] from random places in the standard library."""
    paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(p.read_bytes() for p in paths), np.uint8)
    chance = random.Random(0)
    for _ in range(steps):
        starts = [chance.randrange(len(text) - tokens) for _ in range(rows)]
        yield jnp.asarray(np.stack([text[s : s + tokens] for s in starts]), jnp.int32)


def gpt2(tokens: int) -> tuple[Callable[..., jax.Array], Any]:
    """GPT-2's loss of (weights, token ids), and its weights; four small layers."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(
        vocab_size=BYTES, n_positions=tokens, n_embd=128, n_layer=4, n_head=4
    )
    model = FlaxGPT2LMHeadModel(config, seed=0)

    def loss(weights: Any, ids: jax.Array) -> jax.Array:
        logits = model(ids, params=weights).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], ids[:, 1:]
        )
        return losses.mean()

    return loss, model.params


def training_step(loss: Callable[..., jax.Array], rate: float = 1e-3):
    """``step((weights, optimizer state), ids)`` with AdamW, and its start."""
    optimizer = optax.adamw(rate)

    def step(state: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        weights, moments = state
        value, gradients = jax.value_and_grad(loss)(weights, ids)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return step, lambda weights: (weights, optimizer.init(weights))


def run(step: Any, state: Any, data: list[jax.Array]) -> tuple[list[float], float]:
    """Losses of all steps, and the median seconds of one."""
    losses, seconds = [], []
    for ids in data:
        start = time.perf_counter()
        state, value = step(state, ids)
        losses.append(float(value))
        seconds.append(time.perf_counter() - start)
    return losses, sorted(seconds)[len(seconds) // 2]


def compare(
    loss: Callable[..., jax.Array], weights: Any, data: list[jax.Array]
) -> dict[str, Any]:
    """Trains as written, from nearly the same weights, and rewritten."""
    step, start = training_step(loss)
    nearly = jax.tree.map(lambda w: w * (1 + 2.0**-23), weights)
    fast = rewriter.optimize(step)
    written, before = run(jax.jit(step), start(weights), data)
    drifted, _ = run(jax.jit(step), start(nearly), data)
    rewritten, after = run(fast, start(weights), data)
    report = rewriter.explain(step)(start(weights), data[0])
    print(report)
    gap = lambda a: float(np.abs(np.subtract(a, written)).max())
    return {
        "steps": len(data),
        "loss": {"first": written[0], "last": written[-1]},
        "loss_rewritten": {"first": rewritten[0], "last": rewritten[-1]},
        "largest_difference": gap(rewritten),
        "largest_difference_of_equal_runs": gap(drifted),
        "step_seconds": {"original": before, "rewritten": after},
        "sites": dict(report.counts(backward=True)),
    }


def main() -> None:
    """Trains and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    loss, weights = gpt2(given.tokens)
    data = list(batches(given.steps, given.rows, given.tokens))
    result = compare(loss, weights, data)
    print(json.dumps(result, indent=1))
    if given.write:
        command = (
            f"python3 -m tests.examples.train --steps {given.steps}"
            f" --rows {given.rows} --tokens {given.tokens} --write"
        )
        record.write(record.named("training"), command, results=result)


if __name__ == "__main__":
    main()
