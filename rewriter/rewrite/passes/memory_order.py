"""Passes transposed operands to kernels without a copy.

    k = transpose[0 2 1 3] cache            the same, but the site's kernel takes its
    y = site q k v                     →    operand back to the order of the cache

A cache of [b, n, s, h] is transposed in front of a site whose op has [b, s, n, h]. XLA
cannot look into a kernel, and would copy all of the cache at each step. A kernel that
`swaps` gets the order as a parameter, and transposes the operand back. XLA cancels the
two transposes, and the kernel reads the cache as it lies in memory. A wrong order would
give the same numbers, with a copy the other way. So only inputs of the body count as
lying in memory, perhaps after an update in place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.ops.kernel import Kernel
from rewriter.program.bodies import map_bodies, map_equations
from rewriter.site import site, site_with_gradients

IN_PLACE = frozenset({
    "copy", "copy_p", "dynamic_slice", "dynamic_update_slice", "name", "reshape",
    "scatter", "slice", "squeeze",
})  # fmt: skip
"""Primitives whose result has the memory layout of their first operand."""


SITES = frozenset({
    site.site_p, site.site_on_devices_p, site_with_gradients.together_p,
})  # fmt: skip


def use_memory_order(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose kernels take transposed operands; itself without any.

    Args:
        program: A rewritten program.
    """
    change = lambda body: map_equations(body, SITES, _may_swap, _with_order)
    return map_bodies(program, change, wanted={p.name for p in SITES})


def _may_swap(eqn: Any) -> bool:
    """Whether a site has a kernel that supports transposed operands."""
    kernels = (k for _, k in eqn.params["use"].kernels)
    return not eqn.params.get("batch") and any(k and k.traits.swaps for k in kernels)


def _with_order(eqn: Any, makers: Mapping[Any, Any]) -> Any:
    use = eqn.params["use"]
    operands = dict(zip(use.names, eqn.invars, strict=False))

    def knowing(kernel: Kernel | None) -> Kernel | None:
        names = tuple(
            name
            for name, first, second in (kernel.traits.swaps if kernel else ())
            if name in operands and _lies_swapped(operands[name], first, second, makers)
        )
        return _knowing(kernel, names) if kernel and names else kernel

    kernels = tuple((platform, knowing(k)) for platform, k in use.kernels)
    if all(new is old for (_, new), (_, old) in zip(kernels, use.kernels, strict=True)):
        return eqn
    return eqn.replace(params={**eqn.params, "use": replace(use, kernels=kernels)})


def _lies_swapped(
    atom: Any, first: int, second: int, makers: Mapping[Any, Any]
) -> bool:
    """Whether an operand is a transpose of these axes of an array in memory."""
    maker = None if _jax.is_literal(atom) else makers.get(atom)
    if maker is None or maker.primitive.name != "transpose":
        return False
    order = list(range(len(atom.aval.shape)))
    order[first], order[second] = second, first
    if list(maker.params["permutation"]) != order:
        return False
    source = maker.invars[0]
    while (maker := makers.get(source)) is not None:
        if maker.primitive.name not in IN_PLACE or _jax.is_literal(maker.invars[0]):
            return False
        source = maker.invars[0]
    return True


@functools.lru_cache(maxsize=256)
def _knowing(kernel: Kernel, names: tuple[str, ...]) -> Kernel:
    """The kernel, with the names of its transposed operands; equal ones are one."""
    forward = functools.partial(kernel.forward, swapped=names)
    both = kernel.together and functools.partial(kernel.together, swapped=names)
    return replace(kernel, forward=forward, together=both, swaps=())
