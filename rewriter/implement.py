"""A kernel or the reference as one function, under any number of vmaps.

In: an op's use (`Use`), a kernel, and for each vmap which arguments have the
batch axis. Out: plain functions of arrays, which `rewriter.site` lowers.

A batch *level* is one `jax.vmap` the use went through, outermost first. An
argument that has a level's axis has it in front, in the order of the levels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import errors
from rewriter.kernel import Kernel, Spec
from rewriter.op import OUT, Op

Mask = tuple[bool, ...]
"""Which arguments (or results) one batch level concerns."""

Shaped = tuple[tuple[Any, ...], Any]
"""A shape and a dtype."""

EXPAND_SHARE = 0.25
"""Unbatched operands are copied along a new axis up to this share of the rest."""


@dataclass(frozen=True)
class Use:
    """One use of an op: everything but the arrays, and hashable.

    Attributes:
        op: The op.
        names: The operands present, in the op's order.
        params: (name, value), sorted by name.
        kernels: (platform or ``"default"``, kernel; None for the reference).
    """

    op: Op
    names: tuple[str, ...]
    params: tuple[tuple[str, Any], ...]
    kernels: tuple[tuple[str, Kernel | None], ...]

    @property
    def keeps_out(self) -> bool:
        """Whether some kernel's backward reads the result."""
        return any(k and k.backward and k.saves_out for _, k in self.kernels)

    @property
    def needs_devices(self) -> bool:
        """Whether some kernel is lowered differently for different devices."""
        return any(k and k.needs_devices for _, k in self.kernels)

    def kernel(self, platform: str) -> Kernel | None:
        """Returns the kernel for a platform, ``None`` for the reference."""
        table = dict(self.kernels)
        both = "gpu" if platform in ("cuda", "rocm") else platform
        for key in (platform, both, "default"):
            if key in table:
                return table[key]
        return None

    def reference(self, *operands: jax.Array) -> jax.Array:
        """The op's reference on the operands in order."""
        named = dict(zip(self.names, operands, strict=True))
        return self.op.reference(**named, **dict(self.params))

    def general(self, *operands: jax.Array) -> jax.Array:
        """The same in the form that every transformation takes."""
        named = dict(zip(self.names, operands, strict=True))
        return (self.op.general or self.op.reference)(**named, **dict(self.params))

    def spec(self, operands: Sequence[Shaped]) -> Spec:
        """Returns what kernels are chosen by."""
        pairs = list(zip(self.names, operands, strict=True))
        return Spec(
            self.op.name,
            tuple((n, tuple(s)) for n, (s, _) in pairs),
            tuple((n, str(d)) for n, (_, d) in pairs),
            self.params,
        )


# ------------------------------------------------------------------ shapes
def shaped(value: Any) -> Shaped:
    """Returns the shape and dtype of an array or an abstract value."""
    return tuple(value.shape), jnp.dtype(value.dtype)


def without_levels(values: Sequence[Shaped], batch: Sequence[Mask]) -> list[Shaped]:
    """Returns the shapes of arguments as the innermost function sees them."""
    counts = [sum(mask[i] for mask in batch) for i in range(len(values))]
    return [(s[c:], d) for (s, d), c in zip(values, counts, strict=True)]


def level_sizes(values: Sequence[Shaped], batch: Sequence[Mask]) -> list[Any]:
    """Returns the size of each level's axis."""
    sizes = []
    for level, mask in enumerate(batch):
        at = mask.index(True)
        axis = sum(other[at] for other in batch[:level])
        sizes.append(values[at][0][axis])
    return sizes


def result(use: Use, operands: Sequence[Shaped]) -> Shaped:
    """Returns the result's shape and dtype, from the reference."""
    return _memoised(_result, operands)(use, tuple(operands), _x64())


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

    Raises:
        KernelError: If the kernel gives another shape or dtype than the
            reference.
    """
    if kernel is None:
        return None
    return _memoised(_accepted, operands)(use, kernel, tuple(operands), _x64())


def _symbolic(operands: Sequence[Shaped]) -> bool:
    return any(not isinstance(d, int) for shape, _ in operands for d in shape)


def _memoised(function: Any, operands: Sequence[Shaped]) -> Callable[..., Any]:
    # Symbolic sizes of different scopes cannot be compared, so are not keys.
    return function.__wrapped__ if _symbolic(operands) else function


def _x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # pyright: ignore


def _structs(operands: Sequence[Shaped]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, d) for s, d in operands]


@functools.lru_cache(maxsize=4096)
def _result(use: Use, operands: tuple[Shaped, ...], x64: bool) -> Shaped:
    del x64
    out = jax.eval_shape(use.reference, *_structs(operands))
    if not hasattr(out, "shape"):
        raise errors.PatternError(
            f"the reference of {use.op.name} returned {type(out).__name__}",
            wanted="one array",
        )
    return shaped(out)


@functools.lru_cache(maxsize=4096)
def _accepted(
    use: Use, kernel: Kernel, operands: tuple[Shaped, ...], x64: bool
) -> tuple[Shaped, ...] | None:
    del x64
    symbolic = _symbolic(operands)
    try:
        if not kernel.supports(use.spec(operands)).ok:
            return None
        call = functools.partial(_forward, use, kernel, kernel.backward is not None)
        out, residuals = jax.eval_shape(call, *_structs(operands))
    except Exception:
        if symbolic:  # most kernels need to know their sizes
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


# ----------------------------------------------------------------- one call
def _forward(
    use: Use, kernel: Kernel, residuals: bool, *operands: jax.Array
) -> tuple[Any, tuple[Any, ...]]:
    named = dict(zip(use.names, operands, strict=True))
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


def _backward(
    use: Use, kernel: Kernel, wrt: tuple[str, ...], *args: jax.Array
) -> list[jax.Array]:
    n = len(use.names)
    named = dict(zip(use.names, args[:n], strict=True))
    out, saved = (args[n], args[n + 1 : -1]) if use.keeps_out else (None, args[n:-1])
    assert kernel.backward is not None
    given = kernel.backward(
        **named, out=out, residuals=tuple(saved), cotangent=args[-1],
        **dict(use.params),
    )  # fmt: skip
    absent = tuple(w for w in wrt if given.get(w) is None)
    rest: Mapping[str, Any] = {}
    if absent:
        rest = dict(zip(absent, _pullback(use, absent, use.general, args), strict=True))
    for name in wrt:
        if name not in absent and shaped(given[name]) != shaped(named[name]):
            did = f"returned as the gradient of {name}"
            raise _wrong(kernel, did, given[name], shaped(named[name]))
    return [rest[w] if w in absent else given[w] for w in wrt]


def _pullback(
    use: Use, wrt: tuple[str, ...], function: Callable[..., Any], args: Sequence[Any]
) -> list[jax.Array]:
    """Cotangents of a function of the operands; the last argument is its own."""
    at = [use.names.index(w) for w in wrt]
    operands = list(args[: len(use.names)])

    def of(*chosen: jax.Array) -> jax.Array:
        full = list(operands)
        for i, value in zip(at, chosen, strict=True):
            full[i] = value
        return function(*full)

    _, back = jax.vjp(of, *(operands[i] for i in at))
    return list(back(args[-1]))


# ------------------------------------------------------------- three functions
def forward(
    use: Use, kernel: Kernel | None, batch: Sequence[Mask], residuals: bool
) -> Callable[..., list[jax.Array]]:
    """Returns the op as a function of its operands.

    Args:
        use: The use of the op.
        kernel: Computes it; the reference if None or if it refuses the shapes.
        batch: For each level, which operands have its axis.
        residuals: Whether to add the residuals of all kernels' groups.

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
        sizes = tuple(level_sizes([shaped(a) for a in args], batch))
        saved: list[jax.Array] = []
        for slot in slots:
            zeros = [jnp.zeros(sizes + s, d) for s, d in slot]
            saved += outs[1:] if slot == own else zeros
        return [outs[0], *saved]

    return run


def tangent(
    use: Use, active: tuple[str, ...], batch: Sequence[Mask]
) -> Callable[..., jax.Array]:
    """Returns the reference's derivative along the tangents of some operands.

    Args:
        use: The use of the op.
        active: The operands that have a tangent.
        batch: For each level, which arguments have its axis.

    Returns:
        A function of the operands, what the forward saved, and the tangents.
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
        first = n + int(use.keeps_out)
        for slot in residual_slots(use, inner):
            if slot == own:
                break
            first += len(slot)
        keep = [*range(n + int(use.keeps_out))]
        keep += [*range(first, first + len(own)), len(args) - 1]
        masks = [tuple(mask[i] for i in keep) for mask in batch]
        call = _kernel_backward(use, kernel, wrt, masks, summed)
        return call(*(args[i] for i in keep))

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
        return _pullback(use, wrt, function, args)

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


# ---------------------------------------------------- levels through the dims
@dataclass(frozen=True)
class Fold:
    """A level merged into the op's parallel letter.

    Attributes:
        level: The level's size.
        size: The letter's size before.
        args: The operands with the level merged.
        kept: For each operand, whether it was left as it was.
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
    if not op.parallel or _symbolic(shapes):
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
        value, copies = _with_level(arg, m, level)
        if op.parallel != "...":
            value, more = _merged(value, axis, size)
            copies = copies or more
        folded.append(value)
        total += value.nbytes
        copied += value.nbytes if copies else 0
    if copied > EXPAND_SHARE * total:
        return None
    return Fold(level, size, tuple(folded), tuple(kept))


def _with_level(arg: jax.Array, has: bool, level: int) -> tuple[jax.Array, bool]:
    return (arg, False) if has else (jnp.broadcast_to(arg, (level, *arg.shape)), True)


def _merged(value: jax.Array, axis: int | None, size: int) -> tuple[jax.Array, bool]:
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


def _unmerged(value: jax.Array, axis: int | None, folded: Fold) -> jax.Array:
    if axis is None:  # "...": the level is in front already
        return value
    at = axis % value.ndim
    size = value.shape[at] // folded.level
    shape = (*value.shape[:at], folded.level, size, *value.shape[at + 1 :])
    return jnp.moveaxis(value.reshape(shape), at, 0)


def _axis_of(use: Use, name: str) -> int | None:
    return None if use.op.parallel == "..." else use.op.axis(name)[0]


def _residual_axes(
    use: Use, kernel: Kernel, inner: Sequence[Shaped], folded: Fold
) -> list[int | None] | None:
    """Where the folded level is in each residual; None if that is unclear."""
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


def _kernel_forward(
    use: Use, kernel: Kernel, batch: Sequence[Mask], residuals: bool
) -> Callable[..., list[jax.Array]]:
    def plain(*args: jax.Array) -> list[jax.Array]:
        out, saved = _forward(use, kernel, residuals, *args)
        return [out, *saved]

    if not batch:
        return plain
    mask = batch[-1]

    def innermost(*args: jax.Array) -> list[jax.Array]:
        inner = without_levels([shaped(a) for a in args], [mask])
        folded = fold(use, args, mask)
        axes = folded and _residual_axes(use, kernel, inner, folded)
        if folded is None or axes is None or use.op.axis(OUT)[0] is None:
            return _vmapped(plain, [mask])(*args)
        outs = plain(*folded.args)
        where = [_axis_of(use, OUT), *axes]
        return [_unmerged(o, a, folded) for o, a in zip(outs, where, strict=False)]

    return _vmapped(innermost, batch[:-1])


def _kernel_backward(
    use: Use,
    kernel: Kernel,
    wrt: tuple[str, ...],
    batch: Sequence[Mask],
    summed: Sequence[Mask],
) -> Callable[..., list[jax.Array]]:
    def plain(*args: jax.Array) -> list[jax.Array]:
        return _backward(use, kernel, wrt, *args)

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
    axes = _residual_axes(use, kernel, inner, folded)
    kept = [folded.kept[use.names.index(w)] for w in wrt]
    if axes is None or any(k and not s for k, s in zip(kept, sums, strict=True)):
        return None
    out = _axis_of(use, OUT)
    places = [out] * use.keeps_out + axes + [out]
    rest = []
    for arg, has, axis in zip(args[n:], mask[n:], places, strict=True):
        value, _ = _with_level(arg, has, folded.level)
        if axis is not None:
            value, _ = _merged(value, axis, value.shape[1:][axis])
        rest.append(value)
    grads = _backward(use, kernel, wrt, *folded.args, *rest)
    results = []
    for name, grad, was_kept, total in zip(wrt, grads, kept, sums, strict=True):
        if not was_kept:
            grad = _unmerged(grad, _axis_of(use, name), folded)
            grad = _narrowed(grad, inner[use.names.index(name)][0])
            grad = grad.sum(0) if total else grad
        results.append(grad)
    return results


def _narrowed(grad: jax.Array, wanted: Sequence[int]) -> jax.Array:
    """Sums a gradient over an axis that was widened from 1 for the fold."""
    axes = tuple(
        1 + i
        for i, (a, b) in enumerate(zip(grad.shape[1:], wanted, strict=True))
        if a != b
    )
    return grad.sum(axes, keepdims=True) if axes else grad
