"""Passes packed operands to kernels without a copy.

    qkv = dot x w                                the same, but the site's kernel reads
    q, k, v = split qkv        →                 the heads of q, k and v from qkv
    y = site q k v

Many programs compute queries, keys and values by one product. XLA cannot look into a
kernel, and would copy each of the three to an array of its own. A kernel that `packs`
gets the product too, and where the heads of each operand lie in it. It reads them in
place, and XLA leaves out the copies. Gradients read them in place likewise.

All of an array must be read by the site that gets it. Another one would be held in
memory for a part of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter.ops.kernel import Heads
from rewriter.program.bodies import map_bodies, map_equations
from rewriter.program.strided_views import View, view_of
from rewriter.site import packed, site
from rewriter.site.uses import Use

SITES = frozenset({site.site_p, site.backward_p})


def use_packed_operands(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose kernels read packed operands; itself without any.

    Args:
        program: A rewritten program.
    """
    change = lambda body: map_equations(body, SITES, _may_read, _packed)
    return map_bodies(program, change, wanted={p.name for p in SITES})


def _may_read(eqn: Any) -> bool:
    """Whether a site, or its gradients, has a kernel that reads packed operands."""
    return not eqn.params["batch"] and bool(_names(eqn.params["use"]))


def _names(use: Use) -> set[str]:
    """The operands that some kernel of a use reads in place."""
    return {n for _, k in use.kernels if k for n in k.traits.packs}


def _packed(eqn: Any, makers: Mapping[Any, Any]) -> Any:
    """An equation that gets the arrays that its operands are parts of."""
    use = eqn.params["use"]
    found = {}
    for name in _names(use) & set(use.names):
        view = view_of(eqn.invars[use.names.index(name)], makers)
        if view is not None and (heads := heads_of(view)) is not None:
            found[name] = view.source, heads
    read = Counter[Any]()
    for source, heads in found.values():
        read[source] += heads.count
    found = {
        name: (source, heads)
        for name, (source, heads) in found.items()
        if heads.all > heads.count and read[source] == heads.all
    }
    if not found:
        return eqn
    sources = list(dict.fromkeys(source for source, _ in found.values()))
    parts = tuple(
        (name, sources.index(source), heads)
        for name, (source, heads) in sorted(found.items(), key=lambda item: item[0])
    )
    params = {k: v for k, v in eqn.params.items() if k not in ("batch", "summed")}
    params |= {"parts": parts}
    if eqn.primitive is site.backward_p:
        params |= {"joined": ()}
    return eqn.replace(
        primitive=packed.OF[eqn.primitive],
        invars=[*eqn.invars, *sources],
        params=params,
    )


def heads_of(view: View) -> Heads | None:
    """Returns where the heads of [b, t, n, h] lie in an array [b, t, heads, h].

    Args:
        view: An operand as a part of an array.

    Returns:
        None if they are no heads of the same positions.
    """
    if len(view.shape) != 4 or 0 in view.shape:
        return None
    (b, t, n, h), (of_b, of_t, of_n, of_h) = view.shape, view.strides
    size = math.prod(view.source.aval.shape)
    row, rest = divmod(size, b * t)
    step = of_n // h if n > 1 else 1
    lies = (
        rest == 0
        and row % h == 0
        and view.offset % h == 0
        and (h == 1 or of_h == 1)
        and (b == 1 or of_b == t * row)
        and (t == 1 or of_t == row)
        and (n == 1 or (of_n % h == 0 and step > 0))
    )
    first, every = view.offset // h, row // h
    if not lies or first + (n - 1) * step >= every:
        return None
    return Heads(first, step, n, every)
