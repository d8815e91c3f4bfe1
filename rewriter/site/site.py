"""One op as one equation: three primitives that support every transformation.

Each takes an op, its operands, its parameters and a kernel per platform.

- ``rewriter_site`` computes the op, and residuals if it is differentiated. Its
  JVP is itself and ``rewriter_site_tangent``. In operands that the op is linear in it
  transposes to the reference's transpose.
- ``rewriter_site_tangent`` is the reference's JVP, linear in the tangents. It
  transposes to ``rewriter_site_backward``.
- ``rewriter_site_backward`` gives the cotangents, linear in its last argument.
  It transposes to ``rewriter_site_tangent``.

The derivatives of the last two along the operands are the reference's. So
reverse mode runs the fused kernels, forward mode the reference, and both
compose to any order. XLA cannot split a kernel over devices: where it splits the
program, all three are the reference. `rewriter.site.shards` writes them for one device
each. Results and residuals carry the name ``rewriter.<op>`` for `jax.checkpoint`
policies once they are differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad

from rewriter import _jax, errors
from rewriter.ops.kernel import PLATFORMS, Kernel
from rewriter.ops.op import Op
from rewriter.ops.registry import registry
from rewriter.site import implement
from rewriter.site.lowering import register
from rewriter.site.result_types import backward_aval, site_aval, tangent_aval
from rewriter.site.uses import (
    Mask,
    Use,
)
from rewriter.support.dtypes import is_inexact

Kernels = Sequence[tuple[str, "str | Kernel | None"]]

site_p = Primitive("rewriter_site")
tangent_p = Primitive("rewriter_site_tangent")
backward_p = Primitive("rewriter_site_backward")
# The same for kernels that JAX lowers only for known devices.
site_on_devices_p = Primitive("rewriter_site")
backward_on_devices_p = Primitive("rewriter_site_backward")


def bind(
    op: Op,
    operands: Mapping[str, Any],
    params: Mapping[str, object] | None = None,
    kernels: Kernels = (),
    label: str = "",
    falls_back: bool = False,
) -> jax.Array:
    """Returns the op's result, computed by one equation.

    Args:
        op: The op.
        operands: Its operands by name, with the axes of ``op.dims``.
        params: Hashable parameters; the op's defaults fill in what is missing.
        kernels: (platform, kernel name) pairs. A platform is ``cpu``,
            ``cuda``, ``rocm``, ``gpu``, ``tpu`` or ``default``; one that is
            not listed, or whose kernel refuses the shapes, gets the reference.
        label: Shown in profiles as ``rewriter/<label>``; the op's name by
            default.
        falls_back: Whether the reference runs where a kernel cannot be lowered, with a
            warning. Otherwise the program fails, as a measurement should.

    Returns:
        The result, with the shape and dtype of the op's reference.

    Raises:
        KernelError: If operands are missing or unknown, a parameter is not
            hashable, or a kernel gives another shape or dtype.
        UnknownKernel: If the op has no kernel of a name.

    Example:
        >>> import jax.numpy as jnp
        >>> from rewriter.ops.op import Op, Operand
        >>> double = Op("double", (Operand("x", "d", True),), "d", lambda x: 2 * x)
        >>> bind(double, {"x": jnp.ones(2)}).tolist()
        [2.0, 2.0]
    """
    names = op.ordered(operands)
    made = _resolved(op, kernels)
    use = Use(op, names, _hashable(op, params or {}), made, falls_back)
    args = _jax.with_common_varying([jnp.asarray(operands[n]) for n in names])
    with jax.named_scope(f"rewriter/{label or op.name}"):
        return _sharded(use, args)(*args)


def _sharded(use: Use, args: Sequence[Any]) -> Callable[..., jax.Array]:
    """The site as a function; shardings stated in types come from the reference."""

    def site(*args: Any) -> jax.Array:
        return _forward_of(use).bind(*args, use=use, batch=(), residuals=False)[0]

    shardings = [_jax.sharding_in_type(a) for a in args]
    if not any(shardings):
        return site
    structs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(args, shardings, strict=True)
    ]
    out = jax.eval_shape(use.reference, *structs)
    return jax.sharding.auto_axes(site, out_sharding=out.sharding)


def _hashable(op: Op, params: Mapping[str, object]) -> tuple[tuple[str, Any], ...]:
    items = tuple(sorted({**op.defaults, **params}.items()))
    for name, value in items:
        try:
            hash(value)
        except TypeError as e:
            raise errors.KernelError(
                f"parameter {name} of {op.name} is a {type(value).__name__}",
                wanted="a hashable value",
                next_step="Pass arrays as operands",
                where=errors.caller(),
            ) from e
    return items


def _resolved(op: Op, kernels: Kernels) -> tuple[tuple[str, Kernel | None], ...]:
    pairs = []
    for platform, kernel in kernels:
        if platform not in (*PLATFORMS, "gpu", "default"):
            raise errors.UnknownKernel(
                f"no platform {platform!r}",
                next_step=errors.known(platform, [*PLATFORMS, "gpu", "default"]),
                where=errors.caller(),
            )
        if isinstance(kernel, str):
            kernel = registry().kernel(op.name, kernel)
        pairs.append((platform, kernel))
    return tuple(pairs)


# ------------------------------------------------------------ differentiation
def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is known to be zero."""
    return type(tangent) is ad.Zero


def zero_of(value: Any) -> Any:
    """The zero tangent of a value."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _site_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    use: Use,
    batch: tuple[Mask, ...],
    residuals: bool,
) -> tuple[list[Any], list[Any]]:
    moving = [
        i
        for i, (p, t) in enumerate(zip(primals, tangents, strict=True))
        if is_inexact(p) and not is_zero(t)
    ]
    if not moving:
        outs = _forward_of(use).bind(
            *primals, use=use, batch=batch, residuals=residuals
        )
        return outs, [zero_of(o) for o in outs]
    value = use.differentiated
    outs = _forward_of(use).bind(*primals, use=value, batch=batch, residuals=True)
    outs = [checkpoint_name(o, f"rewriter.{use.op.name}") for o in outs]
    saved = outs if use.keeps_out else outs[1:]
    every = (True,) * len(saved)
    tangent = tangent_p.bind(
        *primals,
        *saved,
        *(tangents[i] for i in moving),
        use=use,
        active=tuple(use.names[i] for i in moving),
        batch=tuple(m + every + tuple(m[i] for i in moving) for m in batch),
    )
    # Residuals depend on the operands alone, and the other two primitives differentiate
    # by the operands, so residuals have no tangent of their own.
    outs = outs if residuals else outs[:1]
    return outs, [tangent, *(zero_of(r) for r in outs[1:])]


def site_transpose(
    cotangents: Sequence[Any],
    *args: Any,
    use: Use,
    batch: tuple[Mask, ...],
    residuals: bool,
) -> list[Any]:
    """Transposes a use that is linear in some operands, as attention is in values."""
    del residuals
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    results: list[Any] = [None] * len(args)
    if not is_zero(cotangents[0]):
        operands = [x.aval if i in linear else x for i, x in enumerate(args)]
        grads = implement.transposed(use, linear, batch)(*operands, cotangents[0])
        for i, grad in zip(linear, grads, strict=True):
            results[i] = grad
    return results


def _tangent_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    use: Use,
    active: tuple[str, ...],
    batch: tuple[Mask, ...],
) -> tuple[Any, Any]:
    n, t = len(use.names), len(active)
    params = {"use": use, "active": active, "batch": batch}
    out = tangent_p.bind(*primals, **params)
    linear = [*primals[:-t], *map(ad.instantiate_zeros, tangents[-t:])]
    terms = []
    if any(not is_zero(x) for x in tangents[-t:]):
        terms.append(tangent_p.bind(*linear, **params))
    function = implement.tangent(use, active, batch)
    terms += _along_operands(function, primals, tangents, n)
    return out, _total(terms, out)


def _backward_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    use: Use,
    wrt: tuple[str, ...],
    batch: tuple[Mask, ...],
    summed: tuple[Mask, ...],
) -> tuple[list[Any], list[Any]]:
    params = {"use": use, "wrt": wrt, "batch": batch, "summed": summed}
    outs = _backward_of(use).bind(*primals, **params)
    terms = []
    if not is_zero(tangents[-1]):
        primitive = _backward_of(use)
        terms.append(primitive.bind(*primals[:-1], tangents[-1], **params))
    function = implement.backward(use, None, wrt, batch, summed)
    terms += _along_operands(function, primals, tangents, len(use.names))
    columns = [[term[i] for term in terms] for i in range(len(outs))]
    return outs, [_total(c, o) for c, o in zip(columns, outs, strict=True)]


def _along_operands(
    function: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    n: int,
) -> list[Any]:
    """The derivative of a function along its first n arguments, if they move."""
    moving = [
        i for i in range(n) if is_inexact(primals[i]) and not is_zero(tangents[i])
    ]
    if not moving:
        return []

    def of(*chosen: Any) -> Any:
        full = list(primals)
        for i, value in zip(moving, chosen, strict=True):
            full[i] = value
        return function(*full)

    points = tuple(primals[i] for i in moving)
    return [jax.jvp(of, points, tuple(tangents[i] for i in moving))[1]]


def _total(terms: Sequence[Any], value: Any) -> Any:
    return functools.reduce(ad.add_tangents, terms) if terms else zero_of(value)


def tangent_transpose(
    cotangent: Any,
    *args: Any,
    use: Use,
    active: tuple[str, ...],
    batch: tuple[Mask, ...],
) -> list[Any]:
    """Cotangents of the tangents: a backward's results."""
    n, t = len(args), len(active)
    linear = [i for i in range(n - t, n) if ad.is_undefined_primal(args[i])]
    results: list[Any] = [None] * n
    if is_zero(cotangent) or not linear:
        return results
    grads = _backward_of(use).bind(
        *args[: n - t],
        cotangent,
        use=use,
        wrt=tuple(active[i - (n - t)] for i in linear),
        batch=tuple((*m[: n - t], True) for m in batch),
        summed=tuple(tuple(not m[i] for i in linear) for m in batch),
    )
    for i, grad in zip(linear, grads, strict=True):
        results[i] = grad
    return results


def backward_transpose(
    cotangents: Sequence[Any],
    *args: Any,
    use: Use,
    wrt: tuple[str, ...],
    batch: tuple[Mask, ...],
    summed: tuple[Mask, ...],
) -> list[Any]:
    """The cotangent of a backward's cotangent: a tangent."""
    results: list[Any] = [None] * len(args)
    moving = [i for i, c in enumerate(cotangents) if not is_zero(c)]
    if not moving or not ad.is_undefined_primal(args[-1]):
        return results
    levels = zip(batch, summed, strict=True)
    tangent = tangent_p.bind(
        *args[:-1],
        *(cotangents[i] for i in moving),
        use=use,
        active=tuple(wrt[i] for i in moving),
        batch=tuple((*m[:-1], *(not s[i] for i in moving)) for m, s in levels),
    )
    # A cotangent without a level's axis was shared by the whole level.
    axes = tuple(i for i, m in enumerate(batch) if not m[-1])
    results[-1] = tangent.sum(axes) if axes else tangent
    return results


# --------------------------------------------------------------------- batching
def _batch_rule(primitive: Primitive) -> Callable[..., Any]:
    def rule(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        moved = [
            a if d is None else jnp.moveaxis(a, d, 0)
            for a, d in zip(args, dims, strict=True)
        ]
        level = tuple(d is not None for d in dims)
        params["batch"] = (level, *params["batch"])
        if "summed" in params:
            never = (False,) * len(params["wrt"])
            params["summed"] = (never, *params["summed"])
        out = primitive.bind(*moved, **params)
        return (out, [0] * len(out)) if primitive.multiple_results else (out, 0)

    return rule


# ----------------------------------------------------------------- registration
def _forward_of(use: Use) -> Primitive:
    return site_on_devices_p if use.needs_devices else site_p


def _backward_of(use: Use) -> Primitive:
    return backward_on_devices_p if use.needs_devices else backward_p


def _forward_made(kernel: Kernel | None, *, use: Use, **params: Any) -> Any:
    return implement.forward(use, kernel, **params)


def _tangent_made(kernel: Kernel | None, *, use: Use, **params: Any) -> Any:
    del kernel
    return implement.tangent(use, **params)


def _backward_made(kernel: Kernel | None, *, use: Use, **params: Any) -> Any:
    return implement.backward(use, kernel, **params)


register(tangent_p, tangent_aval, _batch_rule(tangent_p), _tangent_made)
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = tangent_transpose
for _primitive in (site_p, site_on_devices_p):
    _primitive.multiple_results = True
    register(_primitive, site_aval, _batch_rule(_primitive), _forward_made)
    ad.primitive_jvps[_primitive] = _site_jvp
    ad.primitive_transposes[_primitive] = site_transpose
for _primitive in (backward_p, backward_on_devices_p):
    _primitive.multiple_results = True
    register(_primitive, backward_aval, _batch_rule(_primitive), _backward_made)
    ad.primitive_jvps[_primitive] = _backward_jvp
    ad.primitive_transposes[_primitive] = backward_transpose
for _primitive in (site_on_devices_p, backward_on_devices_p):
    _jax.lower_with_devices(_primitive)
