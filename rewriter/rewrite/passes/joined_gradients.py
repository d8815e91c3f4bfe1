"""Makes kernels write the gradients of packed operands into one array.

    dq, dk, dv = gradients q k v            the same, but the site's kernel writes
    x = concatenate dq dk dv           →    the heads of dq, dk and dv into x
    dw = dot x ...

Queries, keys and values may be parts of one product. The product's gradient is then put
together from theirs, which XLA does in a kernel that reads and writes all of them. A
kernel that `joins` writes each into the array instead.

The array must consist of these gradients alone, and each must be read for nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.ops.kernel import Heads
from rewriter.program.assembled import ASSEMBLING, SUMS, Assembly, assembly_of
from rewriter.program.bodies import map_bodies
from rewriter.program.contents import Contents, contents_of
from rewriter.rewrite.passes.packed_operands import heads_of
from rewriter.site import packed, site
from rewriter.site.result_types import joined_avals

GRADIENTS = frozenset({site.backward_p, packed.backward_p})

ENDS = frozenset({*SUMS, "concatenate", "stack"})
"""Primitives whose result may be put together from gradients."""


def join_gradients(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose kernels write gradients into one array, where one is.

    Args:
        program: A rewritten program.
    """
    return map_bodies(program, _joined_in, wanted={site.backward_p.name})


def _joined_in(body: Any) -> Any:
    """A body with the gradients of each of its sites joined that are put together."""
    held = contents_of(body)
    sites = (body.eqns[k] for k in held.positions(GRADIENTS))
    ends = {v: e for e in sites if _may_join(e) for v in e.outvars}
    wholes = _made_of(held, ends.keys()) if ends else []
    if not wholes:
        return body
    reads = Counter[Any](
        v for e in body.eqns for v in e.invars if not _jax.is_literal(v)
    )
    outvars = getattr(body, "jaxpr", body).outvars
    reads.update(v for v in outvars if not _jax.is_literal(v))
    changed: dict[int, Any] = {}
    gone: set[int] = set()
    for eqn in reversed(wholes):
        if id(eqn) in gone:
            continue
        found = assembly_of(eqn.outvars[0], held.makers, reads, ends.keys())
        of = {id(ends[v]): ends[v] for v in found.parts} if found else {}
        if found is None or len(of) != 1:
            continue
        (of_site,) = of.values()
        places = _places(of_site, found)
        if places and id(of_site) not in changed:
            changed |= _with_one_array(of_site, eqn, places)
            gone |= found.equations - {id(eqn)}
    if not changed:
        return body
    eqns = [changed.get(id(e), e) for e in body.eqns if id(e) not in gone]
    return _jax.with_equations(body, eqns, outvars)


def _made_of(held: Contents, values: Iterable[Any]) -> list[Any]:
    """The equations, in order, that may end an array made of some values alone."""
    made, wholes = set(values), []
    for eqn in held.named(ASSEMBLING):
        operands = eqn.invars[:1] if eqn.primitive.name == "pad" else eqn.invars
        if all(not _jax.is_literal(a) and a in made for a in operands):
            made.update(eqn.outvars)
            if eqn.primitive.name in ENDS:
                wholes.append(eqn)
    return wholes


def _may_join(eqn: Any) -> bool:
    """Whether an equation gives gradients that some kernel writes into one array."""
    alone = not (eqn.params.get("batch") or eqn.params.get("joined"))
    return alone and bool(_names(eqn))


def _names(eqn: Any) -> set[str]:
    """The operands whose gradients some kernel writes into an array."""
    return {n for _, k in eqn.params["use"].kernels if k for n in k.traits.joins}


def _places(eqn: Any, found: Assembly) -> dict[str, Heads]:
    """The heads of gradients in an array, by operand; nothing if they are not all."""
    names = dict(zip(eqn.outvars, eqn.params["wrt"], strict=True))
    made, taken = {}, list[int]()
    for variable, view in found.parts.items():
        heads, name = heads_of(view), names[variable]
        if heads is None or name not in _names(eqn):
            return {}
        made[name] = heads
        taken += range(heads.all)[heads.indices]
    every = {heads.all for heads in made.values()}
    whole = len(every) == 1 and sorted(taken) == list(range(*every))
    return made if whole and len(made) > 1 else {}


def _with_one_array(eqn: Any, end: Any, places: Mapping[str, Heads]) -> dict[int, Any]:
    """The equations of the gradients, and of the array that they make."""
    params = dict(eqn.params)
    wrt, outs = params["wrt"], dict(zip(params["wrt"], eqn.outvars, strict=True))
    joined = tuple(sorted(places.items()))
    grads = {n: v.aval for n, v in outs.items()}
    array = _jax.new_var(joined_avals(grads, joined)[-1])
    kept = {k: x for k, x in params.items() if k not in ("batch", "summed")}
    others = [outs[n] for n in wrt if n not in places]
    shape = tuple(end.outvars[0].aval.shape)
    return {
        id(eqn): eqn.replace(
            primitive=packed.backward_p,
            params={"parts": (), **kept, "joined": joined},
            outvars=[*others, array],
        ),
        id(end): end.replace(
            primitive=lax.reshape_p,
            params={"new_sizes": shape, "dimensions": None, "sharding": None},
            invars=[array],
        ),
    }
