"""Cycles of attention on TPUs that are not there: ours, JAX's own kernels, and XLA.

  python3 -m tests.bench.tpu_attention_cycles [--json PATH] [--seconds 600]

One head of 128, bfloat16. libtpu simulates the schedule of a compiled program (cycles),
or counts the instruction bundles of a kernel's body. Each estimate is made by a child
process; of a record that exists, only what is missing is made.

The simulator takes what is read from memory for scalars as 0, so that a kernel that
reads a list of blocks is not simulated. Ours is, therefore, with all blocks of 4096
tokens, seen by all queries or (in "part") each compared with positions. A causal run of
8192 tokens takes 28 steps of the first and 8 of the second kind. JAX's flash attention
calculates its blocks, and is simulated as it is. Its splash attention reads lists too:
only bundles are known, and compared with those of ours. Each runs its code once for a
block that some query sees; splash's has the mask in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.bench import estimates

WIDTH = 128
OURS, TOKENS = 4096, 8192

WANTED: tuple[tuple[str, str, str], ...] = (
    *(
        ("cycles", generation, name)
        for generation in ("v5e", "v5p", "v6e")
        for name in (
            "ours 1024 1024 1024 512",
            "ours part 1024 1024 1024 512",
            "ours 1024 2048 1024 512",
            "ours 512 1024 512 512",
            "ours 512 512 512 512",
            "flash 1024 1024 1024",
            "flash 1024 1024 512",
            "ours backward 1024 1024 512 512",
            "ours backward part 1024 1024 512 512",
            "ours backward part 1024 1024 1024 512",
            "flash backward 1024 1024 512",
        )
    ),
    *(
        ("bundles", generation, name)
        for generation in ("v5e", "v5p")
        for name in (
            "ours 1024 1024 1024 512",
            "ours part 1024 1024 1024 512",
            "ours backward 1024 1024 512 512",
            "ours backward part 1024 1024 512 512",
            "ours backward 1024 1024 1024 512",
            "ours backward part 1024 1024 1024 512",
            "splash 1024 1024 512",
            "splash 1024 1024 1024",
            "splash 1024 2048 512",
            "splash 2048 1024 512",
            "splash backward 1024 1024 512",
        )
    ),
)
"""What is said, by generation and name: sizes of blocks of queries and keys, then of
the parts that are computed at a time."""


def steps(rows: int, keys: int) -> int:
    """Returns how many blocks of causal scores of all tokens some query sees.

    Example:
        >>> steps(1024, 1024), steps(1024, 2048)
        (36, 20)
    """
    return sum(-(-last // keys) for last in range(rows, TOKENS + 1, rows))


def program(name: str, generation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what a name stands for, and its arguments."""
    heads = 2 if generation == "v5p" else 1  # one for each of its cores
    words = name.split()
    sizes = [int(w) for w in words if w.isdigit()]
    kinds = {w for w in words[1:] if not w.isdigit()}
    made = {"ours": _ours, "flash": _flash, "splash": _splash}[words[0]]
    return made(sizes, kinds, heads)


def _arrays(tokens: int, heads: int) -> tuple[Any, ...]:
    x = jax.ShapeDtypeStruct((1, heads, tokens, WIDTH), jnp.bfloat16)
    return x, x, x


def _ours(sizes: list[int], kinds: set[str], heads: int) -> Any:
    from rewriter.kernels.attention.tpu import backward_kernel, forward_kernel, schedule
    from rewriter.kernels.attention.tpu.config import BackwardBlocks, Blocks
    from rewriter.kernels.attention.tpu.scores import Problem

    part = "part" in kinds
    if part:  # for this child process alone
        whole, steps = schedule.states, schedule.steps
        at = schedule.Steps.at
        schedule.states = lambda cut, given: np.full_like(whole(cut, given), 2)
        schedule.steps = lambda *given, **named: replace(
            steps(*given, **named), kinds=(False, True)
        )
        schedule.Steps.at = lambda *given: at(*given) + schedule.PART
    cut = schedule.Cut(OURS, OURS, 0, 0, right=0 if part else None)
    p = Problem(
        cut, 1, heads, heads, WIDTH, WIDTH, WIDTH**-0.5, None, "nan", frozenset()
    )
    q, k, v = _arrays(OURS, heads)

    def forward(q: Any, k: Any, v: Any) -> Any:
        arrays = {"q": q, "k": k, "v": v}
        return forward_kernel.forward(p, Blocks(*sizes), arrays, q.dtype, False)

    def backward(q: Any, k: Any, v: Any, up: Any, kept: Any) -> Any:
        arrays = {"q": q, "k": k, "v": v, "up": up, "kept": kept}
        blocks = BackwardBlocks(*sizes, fused=True)
        return backward_kernel.backward(p, blocks, arrays, q.dtype)

    if "backward" in kinds:
        kept = jax.ShapeDtypeStruct((1, heads, 2, OURS), jnp.float32)
        return backward, (q, k, v, q, kept)
    return forward, (q, k, v)


def _gradients(function: Callable[..., Any], kinds: set[str]) -> Callable[..., Any]:
    if "backward" not in kinds:
        return function
    total = lambda *x: function(*x).astype(jnp.float32).sum()
    return lambda *x: jax.grad(total, (0, 1, 2))(*x)


def _flash(sizes: list[int], kinds: set[str], heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    rows, keys, inner = sizes
    blocks = flash.BlockSizes(
        block_q=rows, block_k_major=keys, block_k=inner, block_b=1,
        block_q_major_dkv=rows, block_q_dkv=rows, block_k_major_dkv=keys,
        block_k_dkv=inner, block_q_dq=rows, block_k_major_dq=keys, block_k_dq=inner,
    )  # fmt: skip

    def run(q: Any, k: Any, v: Any) -> Any:
        return flash.flash_attention(
            q, k, v, causal=True, sm_scale=WIDTH**-0.5, block_sizes=blocks
        )

    return _gradients(run, kinds), _arrays(TOKENS, heads)


def _splash(sizes: list[int], kinds: set[str], heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, keys, inner = sizes
    mask = splash.MultiHeadMask([splash.CausalMask((TOKENS, TOKENS))] * heads)
    blocks = splash.BlockSizes(
        block_q=rows, block_kv=keys, block_kv_compute=inner, block_q_dkv=rows,
        block_kv_dkv=keys, block_kv_dkv_compute=inner, use_fused_bwd_kernel=True,
    )  # fmt: skip
    made = splash.make_splash_mha(
        mask, block_sizes=blocks, head_shards=1, q_seq_shards=1
    )
    return _gradients(jax.vmap(made), kinds), _arrays(TOKENS, heads)


if __name__ == "__main__":
    estimates.run("tpu_attention_cycles", WANTED, 600.0)
