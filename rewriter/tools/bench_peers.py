"""Computes a use of an op with other libraries, where they are installed.

Nothing here runs unless ``--peers`` asks for it, and a library that is missing is a
line in the table.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.hardware.timing import Samples
from rewriter.ops.kernel import Spec

Named = Mapping[str, Any]
Call = Callable[[Named], Any]


def candidates(
    spec: Spec, platform: str
) -> tuple[list[tuple[str, Call]], dict[str, str]]:
    """Returns other libraries' functions of the operands by name, and what is missing.

    Args:
        spec: The use.
        platform: ``"cuda"``, or another.

    Returns:
        (name, function) pairs for JAX libraries; names and reasons for the others.
    """
    found: list[tuple[str, Call]] = []
    missing: dict[str, str] = {}
    there = lambda name: importlib.util.find_spec(name) is not None
    call = _TOKAMAX.get(spec.op, lambda spec: None)(spec)
    if call is not None and not there("tokamax"):
        missing["tokamax"] = "tokamax is not installed"
    elif call is not None:
        found.append(("tokamax", call))
    if torch_takes(spec) and not there("torch"):
        missing["torch"] = "torch is not installed"
    elif torch_takes(spec) and platform != "cuda":
        missing["torch"] = "torch is compared on NVIDIA GPUs only"
    return found, missing


# ----------------------------------------------------------------------- Tokamax
def _library() -> Any:
    """The library, whose options are absl's flags, which are not for our arguments."""
    found = importlib.import_module("tokamax")
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return found


def _tokamax_attention(spec: Spec) -> Call | None:
    takes = {"q", "k", "v", "bias", "mask", "kv_lengths"}
    left, right = spec.param("window", (None, None))
    behind = right == 0 and spec.param("shift", 0) == 0
    if not set(spec.operands) <= takes or not (behind or (left, right) == (None, None)):
        return None
    more = {"bias": "bias", "mask": "mask", "kv_lengths": "key_value_seq_lengths"}

    def run(operands: Named) -> Any:
        return _library().dot_product_attention(
            *(operands[n] for n in "qkv"),
            scale=spec.param("scale"),
            is_causal=right is not None,
            local_window_size=None if left is None else (left, 0),
            logits_soft_cap=spec.param("softcap"),
            **{theirs: operands[n] for n, theirs in more.items() if n in operands},
        )

    return run


def _tokamax_norm(spec: Spec) -> Call | None:
    if spec.has("epsilon") or spec.param("out_dtype") not in (None, spec.dtype("x")):
        return None

    def run(operands: Named) -> Any:
        return _library().layer_norm(
            operands["x"], operands.get("scale"), operands.get("bias"),
            epsilon=spec.param("eps"), subtract_mean=spec.op == "layer_norm",
        )  # fmt: skip

    return run


_TOKAMAX_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
}


def _tokamax_unit(spec: Spec) -> Call | None:
    activation = _TOKAMAX_ACTIVATIONS.get(spec.param("activation"))
    if activation is None or not _is_plain_unit(spec):
        return None
    names = ("w_gate", "w_up")
    return lambda operands: _library().gated_linear_unit(
        operands["x"], tuple(operands[n] for n in names), activation=activation
    )


def _tokamax_ragged(spec: Spec) -> Call | None:
    if spec.param("mode") != "forward" or spec.param("out_dtype") is not None:
        return None
    names = ("lhs", "rhs", "group_sizes")
    return lambda operands: _library().ragged_dot(*(operands[n] for n in names))


_TOKAMAX: dict[str, Callable[[Spec], Call | None]] = {
    "attention": _tokamax_attention,
    "rms_norm": _tokamax_norm,
    "layer_norm": _tokamax_norm,
    "gated_linear_unit": _tokamax_unit,
    "ragged_dot": _tokamax_ragged,
}


def _is_plain_unit(spec: Spec) -> bool:
    """Whether a gated linear unit has neither biases nor clips nor factors."""
    plain = {"beta": 1.0, "up_shift": 0.0, "out_dtype": None}
    plain |= {"clip_gate": (None, None), "clip_up": (None, None)}
    return spec.operands == ("x", "w_gate", "w_up") and all(
        spec.param(name, value) == value for name, value in plain.items()
    )


# ----------------------------------------------------------------------- PyTorch
def torch_takes(spec: Spec) -> bool:
    """Whether PyTorch supports a use: plain attention, norms and plain units."""
    if spec.op in ("rms_norm", "layer_norm"):
        return not spec.has("epsilon") and spec.param("out_dtype") is None
    if spec.op == "gated_linear_unit":
        return _is_plain_unit(spec) and spec.param("activation") == "silu"
    if spec.op != "attention" or spec.operands != ("q", "k", "v"):
        return False
    left, right = spec.param("window", (None, None))
    square = spec.shape("q")[1] == spec.shape("k")[1]
    plain = not spec.param("shift", 0) and spec.param("softcap") is None
    return plain and left is None and (right is None or (right == 0 and square))


def _torch_call(torch: Any, spec: Spec) -> Call:
    """PyTorch's own function of tensors by name, in the op's layout."""
    functional = torch.nn.functional
    if spec.op == "gated_linear_unit":
        return lambda x: functional.silu(x["x"] @ x["w_gate"]) * (x["x"] @ x["w_up"])
    if spec.op in ("rms_norm", "layer_norm"):
        width = (spec.shape("x")[-1],)
        norm = getattr(functional, spec.op)
        names = ("scale", "bias") if spec.op == "layer_norm" else ("scale",)
        return lambda x: norm(
            x["x"], width, *(x.get(n) for n in names), eps=spec.param("eps")
        )
    return lambda x: functional.scaled_dot_product_attention(
        *(x[n].transpose(1, 2) for n in "qkv"),
        is_causal=spec.param("window", (None, None))[1] == 0,
        scale=spec.param("scale"),
        enable_gqa=spec.shape("q")[2] != spec.shape("k")[2],
    ).transpose(1, 2)


def torch_samples(
    spec: Spec, mode: str, inputs: Sequence[Any], turns: int
) -> tuple[Samples, Any]:
    """Returns PyTorch's times by CUDA events, and its results on the first inputs.

    Args:
        spec: The use.
        mode: Selects the result, the gradients by name, or both.
        inputs: The same sets as for JAX; they take turns here too.
        turns: How many samples.

    Raises:
        ImportError: If PyTorch is not installed.
    """
    torch = importlib.import_module("torch")
    sets = [_to_torch(torch, args) for args in inputs]
    call = _torch_call(torch, spec)

    def run(i: int) -> Any:
        operands, cotangent = sets[i % len(sets)]
        out = call(operands)
        if cotangent is None:
            return out
        gradients = torch.autograd.grad(out, list(operands.values()), cotangent)
        named = dict(zip(operands, gradients, strict=True))
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


def _to_torch(torch: Any, args: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """Operands by name and the cotangent, sharing memory with JAX."""
    operands = {n: torch.from_dlpack(x) for n, x in args[0].items()}
    if len(args) == 1:
        return operands, None
    leaves = {n: x.detach().requires_grad_() for n, x in operands.items()}
    return leaves, torch.from_dlpack(args[1])


def _to_jax(results: Any) -> Any:
    if isinstance(results, tuple):
        return tuple(map(_to_jax, results))
    if isinstance(results, dict):
        return {n: _to_jax(x) for n, x in results.items()}
    return jnp.from_dlpack(results.detach().contiguous())
