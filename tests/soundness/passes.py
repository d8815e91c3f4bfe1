"""The forward pass and the gradients of a program, as functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from tests.soundness.program import Program

KERNELS = {
    "attention": ["memory_bounded", "xla"],
    "rms_norm": ["memory_bounded", "xla"],
    "layer_norm": ["memory_bounded", "xla"],
    "group_norm": ["memory_bounded", "xla"],
    "scored_attention": ["memory_bounded", "xla"],
    "quantized_attention": ["memory_bounded", "xla"],
    "latent_attention": ["joined", "xla"],
    "gated_linear_unit": ["memory_bounded", "xla"],
    "quantized_gated_linear_unit": ["memory_bounded", "xla"],
    "ragged_gated_linear_unit": ["by_parts", "xla"],
    "packed_dot": ["memory_bounded", "xla"],
    "ragged_dot": ["memory_bounded", "tiled", "xla"],
    "cross_entropy": ["memory_bounded", "xla"],
    "linear_cross_entropy": ["memory_bounded", "xla"],
    "quantized_dot": ["memory_bounded", "xla"],
    "embedding": ["counted", "in_float32", "xla"],
    "embedding_lookup": ["counted", "in_float32", "xla"],
}
"""Whichever is not as written, so that what a program computes is another program."""

Values = Sequence[Any]
Joined = Callable[[Sequence[Values]], list[Any]]


def joined(programs: Sequence[Program]) -> Joined:
    """All programs as one, which takes half of the time to compile."""
    functions = [p.function for p in programs]

    def run(given: Sequence[Values]) -> list[Any]:
        return [f(*values) for f, values in zip(functions, given, strict=True)]

    return run


def rewritten(run: Joined) -> Any:
    """The same, with kernels wherever one can be had."""
    return rewriter.optimize(run, implementation=KERNELS)


def compiled(run: Any, *, as_usual: bool = False) -> Any:
    """A function that is compiled in as little time as can be, or as users do.

    Without optimizations, XLA may compute one value twice, rounded in two ways.
    """
    usual = {"xla_backend_optimization_level": 3}
    return jax.jit(run, compiler_options=usual if as_usual else _options())


@functools.cache
def _options() -> dict[str, bool]:
    """XLA's older way to write loops, where it still is, takes a fifth of the time.

    jax 0.10.2 has it, 0.11.2 has not.
    """
    older = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(jnp.sin, compiler_options=older).lower(0.0).compile()
    except Exception:
        return {}
    return older


def forward(run: Joined, programs: Sequence[Program]) -> Joined:
    """What programs return, as one array in a list of each."""
    return lambda given: [[out] for out in run(given)]


def gradients(run: Joined, programs: Sequence[Program], size: float = 1.0) -> Joined:
    """Gradients of programs by their operands, a list of each.

    Args:
        run: The programs as one.
        programs: The programs.
        size: What all cotangents are multiplied by.
    """

    def results(given: Sequence[Values]) -> list[Any]:
        def of(operands: Sequence[Values]) -> list[Any]:
            return run([
                _with(p, values, own)
                for p, values, own in zip(programs, given, operands, strict=True)
            ])  # fmt: skip

        operands = [
            [values[i] for i in p.operands]
            for p, values in zip(programs, given, strict=True)
        ]
        out, pull = jax.vjp(of, operands)
        return pull([_cotangent(o, size) for o in out])[0]

    return results


def _with(program: Program, values: Values, operands: Values) -> list[Any]:
    """All arguments, those among them that are differentiated by as given."""
    changed = dict(zip(program.operands, operands, strict=True))
    return [changed.get(i, value) for i, value in enumerate(values)]


def _cotangent(out: Any, size: float) -> Any:
    """Numbers between -1 and 1, no two of which are the same, times one number."""
    places = jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)
    return (size * jnp.cos(places * 0.37)).astype(out.dtype)
