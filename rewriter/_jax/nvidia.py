"""Asks JAX about NVIDIA's libraries: cuDNN and CUPTI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def refusal_of_cudnn(
    q: Any, k: Any, v: Any, version: int, *, has_bias: bool = False, training: bool
) -> str:
    """Returns what JAX says against attention by cuDNN, or ``""``.

    JAX looks at the compute capability of the GPU that is here. On a machine without
    one it takes what GPUs before Hopper take.

    Args:
        q: Queries [b, t, n, h]; only shape and dtype count.
        k: Keys [b, s, k, h].
        v: Values [b, s, k, h].
        version: cuDNN's, such as 91002 for 9.10.2.
        has_bias: Whether there is a bias or a mask.
        training: Whether gradients are wanted.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    layout = fused.AttentionLayout.BTNH
    try:
        fused.check_layout(q, k, v, *[None] * 7, layout)
        fused.check_is_flash_attention(
            q, k, v, layout.value, version, has_bias, training
        )
    except (ValueError, NotImplementedError) as refused:
        return str(refused)
    return ""


class NothingSeen(RuntimeError):
    """A profiler saw nothing of a program."""


def _cupti() -> Any:
    """JAX's own binding of CUPTI, loaded with Mosaic; None where there is none."""
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    found = getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
    return found if hasattr(found, "_cupti_init") else None


def has_cupti() -> bool:
    """Whether kernels can be timed by CUPTI; not while a profiler uses it."""
    cupti = _cupti()
    if cupti is None:
        return False
    try:
        cupti._cupti_init()
        cupti._cupti_get_timings(False)
    except Exception:  # of the kinds that a C++ extension makes
        return False
    return True


def kernel_seconds(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Runs a call to its end; returns name and seconds of every GPU kernel.

    Raises:
        NothingSeen: If CUPTI saw no kernel.
        RuntimeError: If another profiler uses CUPTI.
    """
    cupti = _cupti()
    cupti._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        kernels = cupti._cupti_get_timings(False)
    if not kernels:
        raise NothingSeen("CUPTI saw no kernel")
    return [(name, 1e-3 * milliseconds) for name, milliseconds in kernels]
