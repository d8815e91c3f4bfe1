"""A primitive for a site with an operand of which all heads share a part.

Its arguments are those of the site, and then for each such operand two arrays, which
joined along the last axis are the operand. One of them is the same for all heads. A
kernel that `shares` reads them, and XLA leaves out the operand that nothing reads.
Everywhere else it is the site: under `jax.vmap`, in derivatives, and on a platform
whose kernel does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad

from rewriter.ops.kernel import Kernel
from rewriter.site import implement, site
from rewriter.site.composed import batch_rule, jvp_rule
from rewriter.site.kernel_call import accepted, call_forward
from rewriter.site.lowering import register
from rewriter.site.result_types import site_aval
from rewriter.site.uses import Use, shaped

site_p = Primitive(site.site_p.name)
site_p.multiple_results = True

Shape = tuple[int, ...]

Shared = tuple[tuple[str, tuple[int, ...], tuple[Shape, Shape]], ...]
"""The operands by name, the axes of their arrays in the operand's order, and the shapes
in which the arrays have these axes."""


def _composed(*, use: Use, shared: Shared) -> Callable[..., Sequence[Any]]:
    del shared
    params = {"use": use, "batch": (), "residuals": False}
    return lambda *args: site.site_p.bind(*args[: len(use.names)], **params)


def _aval(*avals: Any, use: Use, shared: Shared) -> list[Any]:
    del shared
    return site_aval(*avals[: len(use.names)], use=use, batch=(), residuals=False)


def _transpose(
    cotangents: Sequence[Any], *args: Any, use: Use, shared: Shared
) -> list[Any]:
    n = len(use.names)
    results = site.site_transpose(
        cotangents, *args[:n], use=use, batch=(), residuals=False
    )
    return [*results, *(None for _ in range(2 * len(shared)))]


def _made(
    kernel: Kernel | None, *, use: Use, shared: Shared
) -> Callable[..., list[Any]]:
    n = len(use.names)

    def run(*args: Any) -> list[Any]:
        operands, arrays = args[:n], iter(args[n:])
        given = {
            name: tuple(next(arrays).reshape(x).transpose(order) for x in shapes)
            for name, order, shapes in shared
        }
        taken = () if kernel is None else kernel.traits.shares
        given = {name: both for name, both in given.items() if name in taken}
        own = accepted(use, kernel, [shaped(x) for x in operands])
        if kernel is None or own is None or not given:
            return implement.forward(use, kernel, (), False)(*operands)
        return [call_forward(use, kernel, False, *operands, shared=given)[0]]

    return run


register(site_p, _aval, batch_rule(_composed), _made)
ad.primitive_jvps[site_p] = jvp_rule(_composed)
ad.primitive_transposes[site_p] = _transpose
