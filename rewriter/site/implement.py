"""Builds one function from a kernel or the reference, under any number of vmaps.

It takes an op's use (`Use`), a kernel, and for each vmap which arguments have the
batch axis. It returns plain functions of arrays, which `rewriter.site.site` lowers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.kernel import Kernel
from rewriter.ops.op import OUT
from rewriter.site.kernel_call import (
    accepted,
    call_backward,
    call_forward,
    call_forward_of_sum,
    pullback,
    residual_slots,
)
from rewriter.site.uses import Mask, Shaped, Use, level_sizes, shaped, without_levels
from rewriter.site.vmap_levels import (
    axis_of,
    fold,
    merged,
    narrowed,
    residual_axes,
    unmerged,
    with_level,
)


def forward(
    use: Use, kernel: Kernel | None, batch: Sequence[Mask], residuals: bool
) -> Callable[..., list[jax.Array]]:
    """Returns the op as a function of its operands.

    Args:
        use: The use of the op.
        kernel: Computes it; the reference if None or if it refuses the shapes.
        batch: For each level, which operands have its axis.
        residuals: Whether to return the residual groups of all kernels too.

    Returns:
        A function giving ``[result, *residuals]``.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        inner = without_levels([shaped(a) for a in args], batch)
        slots = residual_slots(use, inner) if residuals else ()
        own = accepted(use, kernel, inner)
        if kernel is None or own is None:
            plain = use.general if batch else use.reference
            own, outs = (), [_vmapped(plain, batch)(*args)]
        else:
            with_residuals = residuals and bool(own)
            outs = _kernel_forward(use, kernel, batch, with_residuals)(*args)
            outs = run_once(kernel, outs) if residuals else outs
        sizes = tuple(level_sizes([shaped(a) for a in args], batch))
        return [outs[0], *in_slots(slots, own, outs[1:], sizes)]

    return run


def in_slots(
    slots: Sequence[Sequence[Shaped]],
    own: Sequence[Shaped],
    saved: Sequence[jax.Array],
    sizes: tuple[Any, ...] = (),
) -> list[jax.Array]:
    """Returns a kernel's residuals, with zeros in the slots of other kernels.

    Args:
        slots: The residuals of each kernel, as shapes and dtypes.
        own: Those of this kernel.
        saved: Its residuals.
        sizes: The sizes of levels, which zeros have in front.
    """
    every: list[jax.Array] = []
    for slot in slots:
        zeros = [jnp.zeros(sizes + s, d) for s, d in slot]
        every += saved if slot == own else zeros
    return every


def forward_of_sum(
    use: Use, kernel: Kernel | None, residuals: bool
) -> Callable[..., list[jax.Array]]:
    """Returns the op of an operand and an addend as a function.

    Args:
        use: The use of the op; `use.adds_to` names that operand.
        kernel: As for `forward`; a kernel that does not add reads the sum.
        residuals: As for `forward`.

    Returns:
        A function of the operands and the addend giving
        ``[result, *residuals, sum]``.
    """
    at = use.names.index(use.adds_to)

    def run(*args: jax.Array) -> list[jax.Array]:
        *operands, addend = args
        inner = [shaped(x) for x in operands]
        own = accepted(use, kernel, inner)
        if kernel is None or own is None or kernel.traits.adds_to != use.adds_to:
            operands[at] = operands[at] + addend
            return [*forward(use, kernel, (), residuals)(*operands), operands[at]]
        slots = residual_slots(use, inner) if residuals else ()
        out, total, saved = call_forward_of_sum(
            use, kernel, residuals and bool(own), addend, *operands
        )
        if residuals:
            out, total, *saved = run_once(kernel, [out, total, *saved])
        return [out, *in_slots(slots, own, saved), total]

    return run


def run_once(kernel: Kernel, outs: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns a kernel's results, protected from running twice in a loop.

    A loop may stack a result for gradients and also read it. XLA's dynamic slice fusion
    for GPUs would then fuse the kernel into the stacking, and keep it for the readers
    too.
    """
    if kernel.platforms != ("cuda",):
        return list(outs)
    return list(jax.lax.optimization_barrier(tuple(outs)))


def tangent(
    use: Use, active: tuple[str, ...], batch: Sequence[Mask]
) -> Callable[..., jax.Array]:
    """Returns the reference's derivative along the tangents of some operands.

    Args:
        use: The use of the op.
        active: The operands that have a tangent.
        batch: For each level, which arguments have its axis.

    Returns:
        A function of the operands, the residuals, and the tangents.
    """
    n, t = len(use.names), len(active)

    def run(*args: jax.Array) -> jax.Array:
        def one(*xs: jax.Array) -> jax.Array:
            return _pushforward(use, active, xs[:n], xs[n:])

        masks = [mask[:n] + mask[-t:] for mask in batch]
        return _vmapped(one, masks)(*args[:n], *args[-t:])

    return run


def _pushforward(
    use: Use, active: tuple[str, ...], operands: Sequence[Any], tangents: Sequence[Any]
) -> jax.Array:
    at = [use.names.index(a) for a in active]

    def of(*chosen: jax.Array) -> jax.Array:
        full = list(operands)
        for i, value in zip(at, chosen, strict=True):
            full[i] = value
        return use.general(*full)

    return jax.jvp(of, tuple(operands[i] for i in at), tuple(tangents))[1]


def transposed(
    use: Use, linear: Sequence[int], batch: Sequence[Mask]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the reference's transpose in operands that it is linear in.

    Args:
        use: The use of the op.
        linear: The numbers of those operands.
        batch: For each level, which arguments have its axis.

    Returns:
        A function of the operands and the cotangent. Of the linear operands only types
        matter.
    """

    def run(*args: Any) -> tuple[jax.Array, ...]:
        *operands, cotangent = args

        def of(*chosen: jax.Array) -> jax.Array:
            full = list(operands)
            for i, value in zip(linear, chosen, strict=True):
                full[i] = value
            return _vmapped(use.general, batch)(*full)

        types = [shaped(operands[i]) for i in linear]
        structs = [jax.ShapeDtypeStruct(s, d) for s, d in types]
        return jax.linear_transpose(of, *structs)(cotangent)

    return run


def backward(
    use: Use,
    kernel: Kernel | None,
    wrt: tuple[str, ...],
    batch: Sequence[Mask],
    summed: Sequence[Mask],
) -> Callable[..., list[jax.Array]]:
    """Returns the cotangents of some operands as a function.

    Args:
        use: The use of the op.
        kernel: Computes them, if it has a backward and takes the shapes.
        wrt: The operands whose cotangents are wanted.
        batch: For each level, which arguments have its axis.
        summed: For each level, which results are summed over it.

    Returns:
        A function of the operands, what the forward saved, and the cotangent.
    """
    n = len(use.names)

    def run(*args: jax.Array) -> list[jax.Array]:
        inner = without_levels([shaped(a) for a in args], batch)[:n]
        own = accepted(use, kernel, inner)
        if kernel is None or kernel.backward is None or own is None:
            masks = [mask[:n] + mask[-1:] for mask in batch]
            return _reference_backward(use, wrt, masks, summed)(*args[:n], args[-1])
        keep = read_by(use, inner, own, len(args))
        masks = [tuple(mask[i] for i in keep) for mask in batch]
        call = _kernel_backward(use, kernel, wrt, masks, summed)
        return call(*(args[i] for i in keep))

    return run


def read_by(
    use: Use, inner: Sequence[Shaped], own: Sequence[Shaped], count: int
) -> list[int]:
    """Returns which arguments of a backward one kernel reads: no residuals of others.

    Args:
        use: The use of the op.
        inner: The operands' shapes and dtypes, without levels.
        own: Those of the kernel's residuals.
        count: The number of arguments.
    """
    before = len(use.names) + int(use.keeps_out)
    first = before
    for slot in residual_slots(use, inner):
        if slot == own:
            break
        first += len(slot)
    return [*range(before), *range(first, first + len(own)), count - 1]


def backward_to_sum(
    use: Use, kernel: Kernel | None, wrt: tuple[str, ...]
) -> Callable[..., list[jax.Array]]:
    """Returns the cotangents as a function that adds an addend to one of them.

    Args:
        use: The use of the op; `use.adds_to` names the operand of that cotangent.
        kernel: As for `backward`; for a kernel that does not add, the addition follows
            it.
        wrt: As for `backward`; it contains that operand.

    Returns:
        A function of `backward`'s arguments and the addend.
    """
    n, at = len(use.names), wrt.index(use.adds_to)

    def run(*args: jax.Array) -> list[jax.Array]:
        *operands, addend = args
        inner = [shaped(x) for x in operands[:n]]
        own = accepted(use, kernel, inner)
        adds = kernel is not None and kernel.traits.adds_to == use.adds_to
        if kernel is None or kernel.backward is None or own is None or not adds:
            grads = backward(use, kernel, wrt, (), ())(*operands)
            grads[at] = grads[at] + addend
            return grads
        keep = read_by(use, inner, own, len(operands))
        return call_backward(
            use, kernel, wrt, *(operands[i] for i in keep), addend=addend
        )

    return run


def _reference_backward(
    use: Use, wrt: tuple[str, ...], batch: Sequence[Mask], summed: Sequence[Mask]
) -> Callable[..., list[jax.Array]]:
    # The gradient of a vmapped reference sums inside its contractions, where
    # a vmapped gradient would make one copy per batch element first.
    at = [use.names.index(w) for w in wrt]
    levels = list(zip(batch, summed, strict=True))
    function: Callable[..., Any] = use.general
    while levels:
        mask, sums = levels[-1]
        own = mask[:-1]
        agrees = all(own[i] != s for i, s in zip(at, sums, strict=True))
        if not (mask[-1] and any(own) and agrees):
            break
        function = _vmapped(function, [own])
        levels.pop()

    def call(*args: jax.Array) -> list[jax.Array]:
        return pullback(use, wrt, function, args)

    return _summing(call, levels)


def _vmapped(function: Callable[..., Any], batch: Sequence[Mask]) -> Callable[..., Any]:
    for mask in reversed(batch):
        function = jax.vmap(function, in_axes=tuple(0 if m else None for m in mask))
    return function


def _summing(
    function: Callable[..., list[jax.Array]], levels: Sequence[tuple[Mask, Mask]]
) -> Callable[..., list[jax.Array]]:
    for mask, sums in reversed(levels):
        function = _summed(_vmapped(function, [mask]), sums)
    return function


def _summed(
    function: Callable[..., list[jax.Array]], sums: Mask
) -> Callable[..., list[jax.Array]]:
    def call(*args: jax.Array) -> list[jax.Array]:
        outs = function(*args)
        return [o.sum(0) if s else o for o, s in zip(outs, sums, strict=True)]

    return call


def _kernel_forward(
    use: Use, kernel: Kernel, batch: Sequence[Mask], residuals: bool
) -> Callable[..., list[jax.Array]]:
    def plain(*args: jax.Array) -> list[jax.Array]:
        out, saved = call_forward(use, kernel, residuals, *args)
        return [out, *saved]

    if not batch:
        return plain
    mask = batch[-1]

    def innermost(*args: jax.Array) -> list[jax.Array]:
        inner = without_levels([shaped(a) for a in args], [mask])
        folded = fold(use, args, mask)
        axes = folded and residual_axes(use, kernel, inner, folded)
        if folded is None or axes is None or use.op.axis(OUT)[0] is None:
            return _vmapped(plain, [mask])(*args)
        outs = plain(*folded.args)
        where = [axis_of(use, OUT), *axes]
        return [unmerged(o, a, folded) for o, a in zip(outs, where, strict=False)]

    return _vmapped(innermost, batch[:-1])


def _kernel_backward(
    use: Use,
    kernel: Kernel,
    wrt: tuple[str, ...],
    batch: Sequence[Mask],
    summed: Sequence[Mask],
) -> Callable[..., list[jax.Array]]:
    def plain(*args: jax.Array) -> list[jax.Array]:
        return call_backward(use, kernel, wrt, *args)

    if not batch:
        return plain
    mask, sums = batch[-1], summed[-1]
    outer = list(zip(batch[:-1], summed[:-1], strict=True))

    def innermost(*args: jax.Array) -> list[jax.Array]:
        folded = _folded_backward(use, kernel, wrt, mask, sums, args)
        return _summing(plain, [(mask, sums)])(*args) if folded is None else folded

    return _summing(innermost, outer)


def _folded_backward(
    use: Use,
    kernel: Kernel,
    wrt: tuple[str, ...],
    mask: Mask,
    sums: Mask,
    args: Sequence[jax.Array],
) -> list[jax.Array] | None:
    n = len(use.names)
    if not any(mask[:n]) or use.op.axis(OUT)[0] is None:
        return None
    folded = fold(use, args[:n], mask[:n])
    if folded is None:
        return None
    inner = without_levels([shaped(a) for a in args[:n]], [mask[:n]])
    axes = residual_axes(use, kernel, inner, folded)
    kept = [folded.kept[use.names.index(w)] for w in wrt]
    if axes is None or any(k and not s for k, s in zip(kept, sums, strict=True)):
        return None
    out = axis_of(use, OUT)
    places = [out] * use.keeps_out + axes + [out]
    rest = []
    for arg, has, axis in zip(args[n:], mask[n:], places, strict=True):
        value, _ = with_level(arg, has, folded.level)
        if axis is not None:
            value, _ = merged(value, axis, value.shape[1:][axis])
        rest.append(value)
    grads = call_backward(use, kernel, wrt, *folded.args, *rest)
    results = []
    for name, grad, was_kept, total in zip(wrt, grads, kept, sums, strict=True):
        if not was_kept:
            grad = unmerged(grad, axis_of(use, name), folded)
            grad = narrowed(grad, inner[use.names.index(name)][0])
            grad = grad.sum(0) if total else grad
        results.append(grad)
    return results
