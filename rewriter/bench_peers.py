"""A use of an op in, the same computed by other libraries out, where installed.

Nothing here runs unless ``--peers`` asks for it, and a library that is missing is a
line in the table.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rewriter.kernel import Spec
from rewriter.timing import Samples

PLAIN = ("q", "k", "v")


def candidates(
    spec: Spec, platform: str
) -> tuple[list[tuple[str, Callable[..., Any]]], dict[str, str]]:
    """Returns other libraries' functions of the operands by name, and what is missing.

    Args:
        spec: The use; attention without masks other than a causal one so far.
        platform: ``"cuda"``, or another.

    Returns:
        (name, function) pairs for JAX libraries; names and reasons for the others.
    """
    if not torch_takes(spec):
        return [], {}
    missing = {
        name: f"{name} is not installed"
        for name in ("tokamax", "torch")
        if importlib.util.find_spec(name) is None
    }
    if platform != "cuda":
        missing.setdefault("torch", "torch is compared on NVIDIA GPUs only")
    found = [] if "tokamax" in missing else [("tokamax", _tokamax(spec))]
    return found, missing


def _tokamax(spec: Spec) -> Callable[..., Any]:
    def run(operands: Mapping[str, Any]) -> Any:
        tokamax = importlib.import_module("tokamax")
        return tokamax.dot_product_attention(
            *(operands[n] for n in PLAIN),
            scale=spec.param("scale"),
            is_causal=_causal(spec),
        )

    return run


def torch_takes(spec: Spec) -> bool:
    """Whether PyTorch computes it: attention, causal or full."""
    if spec.op != "attention" or spec.operands != PLAIN:
        return False
    left, right = spec.param("window", (None, None))
    square = spec.shape("q")[1] == spec.shape("k")[1]
    plain = not spec.param("shift", 0) and spec.param("softcap") is None
    return plain and left is None and (right is None or (right == 0 and square))


def _causal(spec: Spec) -> bool:
    return spec.param("window", (None, None))[1] == 0


def torch_samples(
    spec: Spec, mode: str, inputs: Sequence[Any], turns: int
) -> tuple[Samples, Any]:
    """Returns PyTorch's times by CUDA events, and its results on the first inputs.

    Args:
        spec: The use.
        mode: What to return: the result, the gradients by name, or both.
        inputs: The sets that JAX was given; they take turns here too.
        turns: How many samples.

    Raises:
        ImportError: If PyTorch is not installed.
    """
    torch = importlib.import_module("torch")
    sets = [_to_torch(torch, args) for args in inputs]

    def run(i: int) -> Any:
        operands, cotangent = sets[i % len(sets)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *operands,
            is_causal=_causal(spec),
            scale=spec.param("scale"),
            enable_gqa=spec.shape("q")[2] != spec.shape("k")[2],
        )
        if cotangent is None:
            return out
        gradients = torch.autograd.grad(out, operands, cotangent)
        named = dict(zip(PLAIN, gradients, strict=True))
        return named if mode == "vjp" else (out, named)

    results = _to_jax(run(0))
    seconds = []
    for turn in range(turns + 3):  # the first three warm up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(turn)
        end.record()
        torch.cuda.synchronize()
        seconds.append(1e-3 * start.elapsed_time(end))
    return Samples(tuple(seconds[3:]), "cuda events"), results


def _to_torch(torch: Any, args: Sequence[Any]) -> tuple[list[Any], Any]:
    """Operands and cotangent as [b, n, t, h], on the same memory."""
    operands = [torch.from_dlpack(args[0][n]).transpose(1, 2) for n in PLAIN]
    if len(args) == 1:
        return operands, None
    leaves = [x.detach().requires_grad_() for x in operands]
    return leaves, torch.from_dlpack(args[1]).transpose(1, 2)


def _to_jax(results: Any) -> Any:
    if isinstance(results, tuple):
        return tuple(map(_to_jax, results))
    if isinstance(results, dict):
        return {n: _to_jax(x) for n, x in results.items()}
    return jnp.from_dlpack(results.detach().transpose(1, 2).contiguous())
