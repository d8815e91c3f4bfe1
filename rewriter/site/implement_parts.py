"""Builds one function from a kernel, of operands that are parts of one array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rewriter.ops.joined import join
from rewriter.ops.kernel import Heads, Kernel
from rewriter.site.implement import backward, forward, in_slots, read_by, run_once
from rewriter.site.kernel_call import (
    accepted,
    call_backward,
    call_forward,
    residual_slots,
)
from rewriter.site.uses import Use, shaped


def forward_of_parts(
    use: Use, kernel: Kernel | None, residuals: bool, parts: Sequence[Any]
) -> Callable[..., list[jax.Array]]:
    """Returns the op of operands that are parts of arrays as a function.

    Args:
        use: The use of the op.
        kernel: As for `forward`; a kernel that does not `packs` reads the operands.
        residuals: As for `forward`.
        parts: Of which array each such operand is a part, and its heads.

    Returns:
        A function of the operands and the arrays giving what `forward`'s gives.
    """
    n = len(use.names)

    def run(*args: jax.Array) -> list[jax.Array]:
        operands, arrays = args[:n], args[n:]
        inner = [shaped(x) for x in operands]
        own = accepted(use, kernel, inner)
        packed = _packed(kernel, parts, arrays)
        if kernel is None or own is None or not packed:
            return forward(use, kernel, (), residuals)(*operands)
        slots = residual_slots(use, inner) if residuals else ()
        out, saved = call_forward(
            use, kernel, residuals and bool(own), *operands, packed=packed
        )
        outs = [out, *saved]
        outs = run_once(kernel, outs) if residuals else outs
        return [outs[0], *in_slots(slots, own, outs[1:])]

    return run


def backward_of_parts(
    use: Use,
    kernel: Kernel | None,
    wrt: tuple[str, ...],
    parts: Sequence[Any],
    joined: Sequence[tuple[str, Heads]],
) -> Callable[..., list[jax.Array]]:
    """Returns the cotangents as a function of operands that are parts of arrays.

    Args:
        use: The use of the op.
        kernel: As for `backward`; a kernel that does not `packs` reads the operands.
        wrt: As for `backward`.
        parts: As for `forward_of_parts`.
        joined: The heads of some cotangents in an array, which are all of it.

    Returns:
        A function of `backward`'s arguments and the arrays. With `joined` it gives that
        array behind the other cotangents.
    """
    n, places = len(use.names), dict(joined)

    def run(*args: jax.Array) -> list[jax.Array]:
        count = len(args) - arrays_of(parts)
        given, arrays = args[:count], args[count:]
        inner = [shaped(x) for x in given[:n]]
        own = accepted(use, kernel, inner)
        if kernel is None or kernel.backward is None or own is None:
            grads = backward(use, kernel, wrt, (), ())(*given)
            return joined_grads(dict(zip(wrt, grads, strict=True)), joined)
        packed = _packed(kernel, parts, arrays)
        more: dict[str, Any] = {"packed": packed} if packed else {}
        joins = bool(joined) and places.keys() <= set(kernel.traits.joins)
        more |= {"joined": places} if joins else {}
        keep = read_by(use, inner, own, len(given))
        grads = call_backward(use, kernel, wrt, *(given[i] for i in keep), **more)
        if joins:
            return grads
        return joined_grads(dict(zip(wrt, grads, strict=True)), joined)

    return run


def arrays_of(parts: Sequence[Any]) -> int:
    """The number of arrays that operands are parts of."""
    return 1 + max((at for _, at, _ in parts), default=-1)


def joined_grads(
    grads: Mapping[str, jax.Array], joined: Sequence[tuple[str, Heads]]
) -> list[jax.Array]:
    """Cotangents, with some of them put together into an array behind the others.

    Args:
        grads: The cotangents by name.
        joined: The heads of some in the array, which are all of it.
    """
    places = dict(joined)
    rest = [x for name, x in grads.items() if name not in places]
    return [*rest, join(grads, places)] if places else rest


def _packed(
    kernel: Kernel | None, parts: Sequence[Any], arrays: Sequence[jax.Array]
) -> dict[str, Any]:
    """The arrays and heads of the operands that a kernel reads from arrays."""
    packs = () if kernel is None else kernel.traits.packs
    return {name: (arrays[at], heads) for name, at, heads in parts if name in packs}
