"""FLOPs of an equation, and the bytes that it moves."""

from __future__ import annotations

import math
from typing import Any

from rewriter.ops.cost import Cost
from rewriter.site import packed, residual_stream, site
from rewriter.site.uses import shaped, without_levels

SITES = (site.site_p, site.site_on_devices_p, residual_stream.site_p, packed.site_p)


def flops_of(eqn: Any) -> Cost | None:
    """Returns the least FLOPs and bytes of a matrix product or a site, or None.

    Args:
        eqn: An equation. For a site under `jax.vmap`, one entry is counted.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jnp.ones((8, 16)), jnp.ones((16, 4))
        >>> (eqn,) = jax.make_jaxpr(jax.lax.dot)(*x).eqns
        >>> flops_of(eqn)
        Cost(flops=1024.0, bytes=896.0)
    """
    if eqn.primitive in SITES:
        return _of_site(eqn)
    if eqn.primitive.name != "dot_general":
        return None
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs, out = eqn.invars[0].aval, eqn.outvars[0].aval
    terms = math.prod(lhs.shape[axis] for axis in contracted)
    moved = sum(map(size, (*eqn.invars, *eqn.outvars)))
    return Cost(2.0 * math.prod(out.shape) * terms, float(moved))


def size(atom: Any) -> int:
    """Returns the bytes of a variable's or a literal's value."""
    return math.prod(atom.aval.shape) * atom.aval.dtype.itemsize


def is_sized(atoms: Any) -> bool:
    """Returns whether all axes have numeric sizes, none a symbolic one."""
    kinds = {type(d) for a in atoms for d in a.aval.shape}
    return kinds <= {int} or all(issubclass(kind, int) for kind in kinds)


def _of_site(eqn: Any) -> Cost | None:
    use = eqn.params["use"]
    if use.op.cost is None:
        return None
    operands = [shaped(a.aval) for a in eqn.invars[: len(use.names)]]
    own = without_levels(operands, eqn.params.get("batch", ()))
    shapes = {n: s for n, (s, _) in zip(use.names, own, strict=True)}
    dtypes = {n: str(d) for n, (_, d) in zip(use.names, own, strict=True)}
    return use.op.cost(shapes, dtypes, dict(use.params), "forward")
