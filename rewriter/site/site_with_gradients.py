"""A site and its gradients as one equation, where the cotangent is known before both.

The cotangent of a mean, or of a masked one, does not depend on the values. Then one
kernel may compute the result and the cotangents of the operands in one go. The equation
takes the operands and the cotangent, and gives ``[result, *cotangents]``. It equals a
site and its backward, and is these two in derivatives, under `jax.vmap`, and on a
platform whose kernel does not have both `together`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad

from rewriter.ops.kernel import Kernel
from rewriter.site import implement, site
from rewriter.site.composed import batch_rule, jvp_rule
from rewriter.site.kernel_call import accepted, call_together
from rewriter.site.lowering import register
from rewriter.site.result_types import backward_aval, site_aval
from rewriter.site.uses import Use, shaped

together_p = Primitive("rewriter_site_together")


def may_be_one(use: Use) -> bool:
    """Whether some kernel of a use computes the result and gradients together."""
    kernels = [k for _, k in use.kernels if k]
    return any(k.together for k in kernels) and not (use.keeps_out or use.needs_devices)


def _composed(*, use: Use, wrt: tuple[str, ...]) -> Callable[..., Sequence[Any]]:
    def run(*args: Any) -> list[Any]:
        *operands, cotangent = args
        out, *saved = site.site_p.bind(*operands, use=use, batch=(), residuals=True)
        more = {"use": use, "wrt": wrt, "batch": (), "summed": ()}
        return [out, *site.backward_p.bind(*operands, *saved, cotangent, **more)]

    return run


def _aval(*avals: Any, use: Use, wrt: tuple[str, ...]) -> list[Any]:
    operands = avals[:-1]
    out = site_aval(*operands, use=use, batch=(), residuals=False)
    return [*out, *backward_aval(*avals, use=use, wrt=wrt, batch=(), summed=())]


def _made(
    kernel: Kernel | None, *, use: Use, wrt: tuple[str, ...]
) -> Callable[..., list[Any]]:
    first = implement.forward(use, kernel, (), True)
    then = implement.backward(use, kernel, wrt, (), ())

    def run(*args: Any) -> list[Any]:
        *operands, cotangent = args
        own = accepted(use, kernel, [shaped(x) for x in operands])
        if kernel is not None and kernel.together is not None and own is not None:
            return call_together(use, kernel, wrt, *args)
        out, *saved = first(*operands)
        return [out, *then(*operands, *saved, cotangent)]

    return run


together_p.multiple_results = True
register(together_p, _aval, batch_rule(_composed), _made)
ad.primitive_jvps[together_p] = jvp_rule(_composed)
