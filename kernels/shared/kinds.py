"""Kinds of kernels by their compiler: XLA, Mosaic for Hopper GPUs, Mosaic for TPUs.

Kernels of one kind have most of their declaration in common. What a kernel says of
itself replaces that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.kernels.shared.hopper import runs_on
from rewriter.ops.kernel import PLATFORMS, Kernel, Space, Spec, Speed, saves_nothing
from rewriter.support.verdict import Verdict


@dataclass(frozen=True)
class Kind:
    """Defaults that kernels of one compiler share.

    Attributes:
        fields: Fields of `Kernel`, `Limits` and `Traits`, by name.
        one_space: Whether both passes choose from the same configs.
    """

    fields: Mapping[str, Any]
    one_space: bool = False

    def kernel(
        self,
        op: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None,
        supports: Callable[[Spec], Verdict],
        speed: Speed,
        space: Space | None = None,
        backward_space: Space | None = None,
        **others: Any,
    ) -> Kernel:
        """Returns a kernel of this kind, of version 1 and in bounded memory.

        Args:
            op: The op's name.
            forward: As `Kernel.forward`.
            backward: As `Kernel.backward`. It does not read the result, unless
                ``saves_out=True`` is among the other fields.
            supports: As `Limits.supports`.
            speed: As `Kernel.speed`.
            space: As `Kernel.space`.
            backward_space: As `Kernel.backward_space`.
            **others: Other fields of `Kernel`, `Limits` and `Traits`.

        Example:
            >>> from rewriter.support.verdict import YES
            >>> double = lambda *, x: x + x
            >>> made = XLA.kernel("double", double, None, lambda spec: YES, Speed())
            >>> made, made.platforms, made.traits.memory_bounded
            (Kernel(memory_bounded), ('cpu', 'cuda', 'rocm', 'tpu'), True)
        """
        fields = {
            "version": 1, "memory_bounded": True, "saves_out": backward is None,
            **self.fields,
            "op": op, "forward": forward, "backward": backward, "supports": supports,
            "speed": speed, "space": space, "backward_space": backward_space,
        }  # fmt: skip
        if self.one_space and backward is not None:
            fields["backward_space"] = space
        return Kernel(**{**fields, **others})


XLA = Kind(
    {"name": "memory_bounded", "platforms": PLATFORMS, "saves": saves_nothing},
    one_space=True,
)
"""Plain `jax.numpy`, which runs everywhere. It saves nothing for gradients."""

HOPPER = Kind(
    {
        "name": "hopper",
        "platforms": ("cuda",),
        "runs_on": runs_on,
        "saves": saves_nothing,
    }
)
"""Pallas for NVIDIA GPUs of compute capability 9.0. It saves nothing."""

TPU = Kind(
    {
        "name": "mosaic_tpu",
        "platforms": ("tpu",),
        "tried": False,
        "saves": saves_nothing,
    }
)
"""Pallas for TPUs, which saves nothing. The current code has not run on one."""
