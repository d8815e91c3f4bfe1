"""Runs a kernel on the operands of one use, forward and backward.

A kernel must return what the op's reference returns. Gradients that it does not compute
are those of the reference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax, errors
from rewriter.ops.kernel import Kernel
from rewriter.site.uses import (
    Shaped,
    Use,
    is_symbolic,
    memoised,
    result,
    shaped,
    structs,
    wide_numbers,
)
from rewriter.support import promotion


def residual_slots(
    use: Use, operands: Sequence[Shaped]
) -> tuple[tuple[Shaped, ...], ...]:
    """Returns the distinct residual groups of all the kernels of a use.

    One program may be lowered for several platforms, whose kernels may save
    different things; each kernel fills its own group and zeros the others.
    """
    groups = [accepted(use, k, operands) for _, k in use.kernels if k is not None]
    return tuple(dict.fromkeys(g for g in groups if g))


def accepted(
    use: Use, kernel: Kernel | None, operands: Sequence[Shaped]
) -> tuple[Shaped, ...] | None:
    """Returns the residuals of a kernel on these operands; None if it refuses.

    Those without elements are left out: they need no saving, and XLA's compiler
    crashes where one enters a `jax.shard_map` (jaxlib before 0.12).

    Raises:
        KernelError: If the kernel gives another shape or dtype than the
            reference.
    """
    saved = None if kernel is None else _saved(use, kernel, operands)
    return None if saved is None else tuple(s for s in saved if not _is_empty(s))


def _saved(
    use: Use, kernel: Kernel, operands: Sequence[Shaped]
) -> tuple[Shaped, ...] | None:
    """All the residuals of a kernel; None if it refuses."""
    return memoised(_accepted, operands)(use, kernel, tuple(operands), wide_numbers())


def _is_empty(value: Shaped) -> bool:
    return any(isinstance(d, int) and d == 0 for d in value[0])


@functools.lru_cache(maxsize=4096)
def _accepted(
    use: Use, kernel: Kernel, operands: tuple[Shaped, ...], x64: bool
) -> tuple[Shaped, ...] | None:
    del x64
    symbolic, spec = is_symbolic(operands), use.spec(operands)
    try:
        if not kernel.limits.supports(spec).ok:
            return None
        stated = None if symbolic else kernel.traits.saves
        if stated is not None:  # tracing takes long, and is done in lowering
            made = stated(spec) if kernel.backward is not None else ()
            return tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in made)
        call = functools.partial(_forward, use, kernel, kernel.backward is not None)
        with _jax.on_one_device():
            out, residuals = jax.eval_shape(call, *structs(operands))
    except Exception:
        if symbolic:  # most kernels need static sizes
            return None
        raise
    wanted = result(use, operands)
    if not hasattr(out, "shape") or shaped(out) != wanted:
        raise _wrong(kernel, "returned", out, wanted)
    return tuple(shaped(r) for r in residuals)


def _wrong(kernel: Kernel, did: str, got: Any, wanted: Shaped) -> errors.KernelError:
    text = _text(shaped(got)) if hasattr(got, "shape") else type(got).__name__
    return errors.KernelError(
        f"kernel {kernel.name!r} of {kernel.op} {did} {text}",
        wanted=_text(wanted),
        next_step="The reference decides shape and dtype",
        where=kernel.where,
    )


def _text(value: Shaped) -> str:
    shape, dtype = value
    return f"{dtype}[{','.join(str(d) for d in shape)}]"


def call_forward(
    use: Use, kernel: Kernel, residuals: bool, *operands: jax.Array, **more: Any
) -> tuple[Any, tuple[Any, ...]]:
    """A kernel's result, and its residuals for the backward.

    Args:
        use: The use of the op.
        kernel: The kernel.
        residuals: Whether to save residuals.
        *operands: The operands.
        **more: What else the kernel takes by its traits, such as ``packed``.
    """
    out, saved = _forward(use, kernel, residuals, *operands, **more)
    if kernel.traits.saves is not None:  # nothing was traced before
        shapes = [shaped(x) for x in operands]
        wanted = [result(use, shapes)]
        if residuals:
            wanted += _saved(use, kernel, shapes) or ()
        got = [out, *saved]
        if len(got) != len(wanted):
            raise errors.KernelError(
                f"kernel {kernel.name!r} of {kernel.op} returned {len(saved)} "
                "residuals",
                wanted=f"{len(wanted) - 1}, as it says in `saves`",
                where=kernel.where,
            )
        for have, want in zip(got, wanted, strict=True):
            if shaped(have) != want:
                raise _wrong(kernel, "returned", have, want)
    return out, tuple(r for r in saved if not _is_empty(shaped(r)))


def call_forward_of_sum(
    use: Use, kernel: Kernel, residuals: bool, addend: jax.Array, *operands: jax.Array
) -> tuple[Any, Any, tuple[Any, ...]]:
    """The result of a kernel that `adds_to`, the sum, and the residuals."""
    both, saved = _forward(use, kernel, residuals, *operands, addend=addend)
    wanted = shaped(addend), result(use, [shaped(x) for x in operands])
    for got, want in zip(both, wanted, strict=True):
        if shaped(got) != want:
            raise _wrong(kernel, "returned, with an addend,", got, want)
    return both[1], both[0], tuple(r for r in saved if not _is_empty(shaped(r)))


def _forward(
    use: Use, kernel: Kernel, residuals: bool, *operands: jax.Array, **more: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The result and all residuals, including those without elements."""
    named = {**dict(zip(use.names, operands, strict=True)), **more}
    arrays = [x for x in jax.tree.leaves(more) if hasattr(x, "shape")]
    with _traced(use, kernel, [*operands, *arrays]):
        if not residuals:
            return kernel.forward(**named, **dict(use.params)), ()
        both = kernel.forward(**named, **dict(use.params), residuals=True)
    if not (isinstance(both, tuple) and len(both) == 2):
        raise errors.KernelError(
            f"kernel {kernel.name!r} of {kernel.op} returned {type(both).__name__}",
            wanted="(result, residuals), since it has a backward",
            where=kernel.where,
        )
    out, saved = both
    return out, tuple(saved)


@contextlib.contextmanager
def _traced(use: Use, kernel: Kernel, arrays: Sequence[Any]) -> Iterator[None]:
    """A context for the calls of a kernel.

    One body of a kernel that is not ours may be called on several grids, see
    `_jax.separate_trace`. Each of our kernels makes the body for the call, and shares
    the traces of functions of JAX.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(promotion.as_usual())
        if kernel.traits.flat:
            stack.enter_context(jax.disable_jit())
        if not getattr(kernel.forward, "__module__", "").startswith(OURS):
            own = _jax.separate_trace((kernel, use, tuple(map(shaped, arrays))))
            stack.enter_context(own)
        yield


OURS = "rewriter.kernels."


def call_backward(
    use: Use,
    kernel: Kernel,
    wrt: tuple[str, ...],
    *args: jax.Array,
    **more: Any,
) -> list[jax.Array]:
    """Gradients of some operands, by the reference where the kernel has none.

    Args:
        use: The use of the op.
        kernel: A kernel with a backward.
        wrt: The operands whose gradients are wanted.
        *args: The operands, the residuals, and the cotangent.
        **more: What else the kernel takes by its traits. Under the name ``addend`` it
            is an array to add to the gradient of the operand that the kernel `adds_to`.
            The kernel must then compute that gradient. With ``joined`` the array of
            those cotangents is the last result, in place of theirs.
    """
    n = len(use.names)
    named = dict(zip(use.names, args[:n], strict=True))
    out, given_back = (args[n], args[n + 1 :]) if use.keeps_out else (None, args[n:])
    assert kernel.backward is not None
    kept = iter(given_back[:-1])
    saved = [
        jnp.zeros(*s) if _is_empty(s) else next(kept)
        for s in _saved(use, kernel, [shaped(a) for a in args[:n]]) or ()
    ]
    with _traced(use, kernel, args):
        cotangents = kernel.backward(
            **named, out=out, residuals=tuple(saved), cotangent=args[-1],
            **dict(use.params), **more,
        )  # fmt: skip
    last: list[jax.Array] = []
    if "joined" in more:
        last = [_joined(kernel, cotangents["joined"], more["joined"], named)]
        wrt = tuple(w for w in wrt if w not in more["joined"])
    absent = tuple(w for w in wrt if cotangents.get(w) is None)
    if "addend" in more and kernel.traits.adds_to in absent:
        raise errors.KernelError(
            f"kernel {kernel.name!r} of {kernel.op} returned no gradient of "
            f"{kernel.traits.adds_to}",
            wanted="one, since it takes an addend for that",
            where=kernel.where,
        )
    rest: Mapping[str, Any] = {}
    if absent:
        rest = dict(zip(absent, pullback(use, absent, use.general, args), strict=True))
    for name in wrt:
        if name not in absent and shaped(cotangents[name]) != shaped(named[name]):
            did = f"returned as the gradient of {name}"
            raise _wrong(kernel, did, cotangents[name], shaped(named[name]))
    return [*(rest[w] if w in absent else cotangents[w] for w in wrt), *last]


def _joined(
    kernel: Kernel, got: Any, places: Mapping[str, Any], named: Mapping[str, Any]
) -> Any:
    """The array of joined cotangents, of the shape that the operands say."""
    name, at = next(iter(places.items()))
    (b, t, _, h), dtype = shaped(named[name])
    want = (b, t, at.all, h), dtype
    if shaped(got) != want:
        raise _wrong(kernel, "returned as joined gradients", got, want)
    return got


def call_together(
    use: Use, kernel: Kernel, wrt: tuple[str, ...], *args: jax.Array
) -> list[jax.Array]:
    """A kernel's result and gradients of some operands, from one call.

    Args:
        use: The use of the op.
        kernel: A kernel that computes both `together`.
        wrt: The operands whose gradients are wanted.
        *args: The operands and the cotangent.
    """
    assert kernel.together is not None
    named = dict(zip(use.names, args[:-1], strict=True))
    with _traced(use, kernel, args):
        out, grads = kernel.together(**named, cotangent=args[-1], **dict(use.params))
    want = result(use, [shaped(x) for x in args[:-1]])
    if shaped(out) != want:
        raise _wrong(kernel, "returned, with gradients,", out, want)
    for name in wrt:
        if name not in grads or shaped(grads[name]) != shaped(named[name]):
            raise errors.KernelError(
                f"kernel {kernel.name!r} of {kernel.op} returned, with its result, no "
                f"gradient like {name}",
                wanted="all gradients of its backward",
                where=kernel.where,
            )
    return [out, *(grads[w] for w in wrt)]


def pullback(
    use: Use, wrt: tuple[str, ...], function: Callable[..., Any], args: Sequence[Any]
) -> list[jax.Array]:
    """Cotangents of the operands of a function; the last argument is its result's."""
    at = [use.names.index(w) for w in wrt]
    operands = list(args[: len(use.names)])

    def of(*chosen: jax.Array) -> jax.Array:
        full = list(operands)
        for i, value in zip(at, chosen, strict=True):
            full[i] = value
        return function(*full)

    _, back = jax.vjp(of, *(operands[i] for i in at))
    return list(back(args[-1]))
