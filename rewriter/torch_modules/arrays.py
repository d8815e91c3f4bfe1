"""Tensors of PyTorch as arrays of JAX, and back, without a change of their numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from rewriter.errors import RewriterError
from rewriter.torch_modules.imported import torchax

WIDE = {torch.int64: "int32", torch.uint64: "uint32"}
"""Integers of 64 bits, and what JAX holds them as unless ``jax_enable_x64`` is set."""
TOO_WIDE = (torch.float64, torch.complex128)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, an array, or the shape and dtype of one."""
    kinds = (torch.Tensor, jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    return isinstance(value, kinds)


def on_jax(value: Any) -> bool:
    """Whether a tensor holds an array of JAX: one of torchax's."""
    if not isinstance(value, torch.Tensor):
        return False
    return isinstance(value, (torchax().tensor.Tensor, torchax().tensor.View))


def array_of(tensor: Any) -> Any:
    """Returns a copy of a tensor on JAX's default device.

    Tensors on PyTorch's device "meta" give their shape and dtype.

    Raises:
        RewriterError: If JAX would drop bits of its numbers.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if on_jax(tensor):
        return tensor.jax()
    dtype = torchax().ops.mappings.t2j_dtype(tensor.dtype)
    narrow = not jax.config.jax_enable_x64
    if narrow and tensor.dtype in TOO_WIDE:
        raise RewriterError(
            f"a tensor of {tensor.dtype}, which JAX would round to 32 bits",
            next_step="Call module.float(), or set jax_enable_x64",
        )
    if narrow and tensor.dtype in WIDE:
        dtype = np.dtype(WIDE[tensor.dtype])
    if tensor.device.type == "meta":
        return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)
    numbers = _numpy(tensor.detach().cpu().resolve_conj().resolve_neg())
    if narrow and tensor.dtype in WIDE and numbers.size:
        info = np.iinfo(dtype)
        if numbers.min() < info.min or numbers.max() > info.max:
            raise RewriterError(
                f"integers up to {numbers.max()}, which {dtype} does not hold",
                next_step="Set jax_enable_x64 by jax.config.update",
            )
    return jnp.array(numbers.view(dtype) if _as_bits(tensor) else numbers, dtype=dtype)


def tensor_of(array: jax.Array) -> torch.Tensor:
    """Returns a copy of an array as a tensor on the CPU."""
    dtype = torchax().ops.mappings.j2t_dtype(array.dtype)
    numbers = np.array(array)
    if dtype.is_floating_point and dtype not in (
        torch.float16, torch.float32, torch.float64,
    ):  # fmt: skip
        whole = {1: np.uint8, 2: np.int16}[numbers.dtype.itemsize]
        return torch.from_numpy(numbers.view(whole)).view(dtype)
    return torch.from_numpy(numbers)


def _as_bits(tensor: torch.Tensor) -> bool:
    """Whether NumPy knows a tensor's dtype not, so that its bits are handed over."""
    plain = (torch.float16, torch.float32, torch.float64)
    return tensor.dtype.is_floating_point and tensor.dtype not in plain


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    if _as_bits(tensor):
        size = tensor.element_size()
        bits = torch.uint8 if size == 1 else torch.int16
        return tensor.contiguous().view(bits).numpy()
    return tensor.contiguous().numpy()
