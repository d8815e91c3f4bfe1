"""Merges a level of `jax.vmap` into an axis of the op, so that a kernel runs once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rewriter.ops.kernel import Kernel
from rewriter.site.kernel_call import accepted
from rewriter.site.uses import (
    Mask,
    Shaped,
    Use,
    is_symbolic,
    level_sizes,
    shaped,
    without_levels,
)

EXPAND_SHARE = 0.25
"""Unbatched operands are copied along a level up to this share of the others' bytes."""


@dataclass(frozen=True)
class Fold:
    """A level merged into the op's parallel letter.

    Attributes:
        level: The level's size.
        size: The letter's size before.
        args: The operands with the level merged.
        kept: For each operand, whether it was left unchanged.
    """

    level: int
    size: int
    args: tuple[jax.Array, ...]
    kept: tuple[bool, ...]


def fold(use: Use, args: Sequence[jax.Array], mask: Mask) -> Fold | None:
    """Merges one level into the op's parallel letter, if that is cheap.

    Args:
        use: The use of the op.
        args: Its operands; those in the mask have the level's axis in front.
        mask: Which operands have it.
    """
    op, shapes = use.op, [shaped(a) for a in args]
    if not op.parallel or is_symbolic(shapes):
        return None
    level = level_sizes(shapes, [mask])[0]
    if not level:
        return None
    inner = [s for s, _ in without_levels(shapes, [mask])]
    places = [op.axis(name) for name in use.names]
    if any(m and axis is None for m, (axis, _) in zip(mask, places, strict=True)):
        return None
    if op.parallel == "...":
        lead = {
            len(s) - len(op.dims[name].split())
            for name, s, (axis, _) in zip(use.names, inner, places, strict=True)
            if axis is not None
        }
        if len(lead) != 1:
            return None
    size = max(
        (s[axis] for s, (axis, _) in zip(inner, places, strict=True)
         if axis is not None and s), default=1,
    )  # fmt: skip
    folded, kept, copied, total = [], [], 0, 0
    for arg, m, shape, (axis, one) in zip(args, mask, inner, places, strict=True):
        stays = axis is None or (not m and one and shape[axis] == 1)
        kept.append(stays)
        if stays:
            folded.append(arg)
            continue
        value, copies = with_level(arg, m, level)
        if op.parallel != "...":
            value, more = merged(value, axis, size)
            copies = copies or more
        folded.append(value)
        total += value.nbytes
        copied += value.nbytes if copies else 0
    if copied > EXPAND_SHARE * total:
        return None
    return Fold(level, size, tuple(folded), tuple(kept))


def with_level(arg: jax.Array, has: bool, level: int) -> tuple[jax.Array, bool]:
    """An argument with the level in front, and whether that needed a copy."""
    return (arg, False) if has else (jnp.broadcast_to(arg, (level, *arg.shape)), True)


def merged(value: jax.Array, axis: int | None, size: int) -> tuple[jax.Array, bool]:
    """Merges axis 0 into an axis of the rest, first widened to ``size``."""
    assert axis is not None
    rest = value.ndim - 1
    at = axis % rest
    copies = value.shape[1 + at] != size
    if copies:
        wide = [size if i == 1 + at else d for i, d in enumerate(value.shape)]
        value = jnp.broadcast_to(value, wide)
    value = jnp.moveaxis(value, 0, at)
    merged = value.shape[at] * value.shape[at + 1]
    shape = (*value.shape[:at], merged, *value.shape[at + 2 :])
    return value.reshape(shape), copies


def unmerged(value: jax.Array, axis: int | None, folded: Fold) -> jax.Array:
    """A result with the level in front again."""
    if axis is None:  # "...": the level is in front already
        return value
    at = axis % value.ndim
    size = value.shape[at] // folded.level
    shape = (*value.shape[:at], folded.level, size, *value.shape[at + 1 :])
    return jnp.moveaxis(value.reshape(shape), at, 0)


def axis_of(use: Use, name: str) -> int | None:
    """The axis into which levels are merged; None if they stay in front."""
    return None if use.op.parallel == "..." else use.op.axis(name)[0]


def residual_axes(
    use: Use, kernel: Kernel, inner: Sequence[Shaped], folded: Fold
) -> list[int | None] | None:
    """The axis of the folded level in each residual; None if unknown."""
    before = accepted(use, kernel, inner)
    after = accepted(use, kernel, [shaped(a) for a in folded.args])
    if before is None or after is None or len(before) != len(after):
        return None
    axes: list[int | None] = []
    for (old, _), (new, _) in zip(before, after, strict=True):
        if use.op.parallel == "...":
            if new != (folded.level, *old):
                return None
            axes.append(None)
            continue
        changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        if folded.level == 1 and not changed:
            return None
        if len(changed) != 1 or new[changed[0]] != folded.level * old[changed[0]]:
            return None
        axes.append(changed[0])
    return axes


def narrowed(grad: jax.Array, wanted: Sequence[int]) -> jax.Array:
    """Sums a gradient over an axis that was widened from 1 for the fold."""
    axes = tuple(
        1 + i
        for i, (a, b) in enumerate(zip(grad.shape[1:], wanted, strict=True))
        if a != b
    )
    return grad.sum(axes, keepdims=True) if axes else grad
