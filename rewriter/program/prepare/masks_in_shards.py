"""Makes masks in the shard_maps that read parts of them.

    m = segments == segments.T                     shard_map(segments split over d):
    shard_map(m split over d): … m …         →       … segments == segments.T …

    shard_map(m): … slice(m, axis_index) …   →     shard_map: … rows + axis_index …

A mask is often made for all devices, and split with its queries. From one device's part
of it no structure can be read. So each device makes its part from parts of what the
mask is made of. That takes less memory, and moves less between devices.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.loops import inserted, loop_of, traced
from rewriter.program.prepare.parts_of_masks import (
    LIGHT,
    Cut,
    Cuts,
    Makers,
    Parts,
    Source,
    cuts_of,
    has_products,
    is_smaller,
)

log = logging.getLogger("rewriter.masks_in_shards")


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask that a shard_map is given.

    Attributes:
        atom: The mask, outside.
        cuts: The part that a device has.
        sources: What that is made of.
    """

    atom: Any
    cuts: Cuts
    sources: tuple[Source, ...]


def make_masks_in_shards(program: Any) -> Any:
    """Returns a program whose shard_maps make their masks; itself if none is given one.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, _with_rows_of_masks, _with_masks_inside)


def _with_masks_inside(body: Any) -> Any:
    """A body whose inner bodies make the masks of which they read parts."""
    if not any(_jax.call_kind(e) in GIVEN for e in body.eqns):
        return body
    makers, eqns, changed = Makers.in_body(body), [], False
    rest = list(reversed(body.eqns))
    while rest:
        eqn = rest.pop()
        kind, new = _jax.call_kind(eqn), None
        if kind in GIVEN:
            masks = _masks_of(eqn, kind, makers)
            new = _attempted(eqn, kind, masks, makers) if masks else None
        changed = changed or new is not None
        if kind == "call" and new is not None:
            rest += reversed(new)
            continue
        eqns += [eqn] if new is None else new
        makers.add([eqn])
    if not changed:
        return body
    outs = getattr(body, "jaxpr", body).outvars
    return _jax.with_equations(body, live(eqns, outs)[0], outs)


def _masks_of(eqn: Any, kind: str, makers: Makers) -> dict[int, Mask]:
    """By operand of an equation, the masks that its bodies can make themselves."""
    found: dict[int, Mask] = {}
    for k, atom in enumerate(eqn.invars):
        known = _jax.is_literal(atom) or len(atom.aval.shape) < 2
        if known or not _takes_part(eqn, kind, k):
            continue
        cuts: Cuts | None = (None,) * len(atom.aval.shape)
        if kind == "shard_map":
            into, _, around = _jax.parts_of(eqn)
            cuts = cuts_of(atom.aval.shape, into[k], around)
        copied = kind != "shard_map"
        sources = None if cuts is None else makers.sources(atom, cuts, copied)
        if sources is not None and is_smaller(sources, atom.aval):
            found[k] = Mask(atom, cuts, tuple(sources))
    return found


def _takes_part(eqn: Any, kind: str, k: int) -> bool:
    """Whether what an equation does with an operand is to read parts of it."""
    if kind == "shard_map" and not has_products(eqn):
        return False  # JAX took it out of a loop, whose own reads what it returns
    if kind == "shard_map" and any(a is not None for a in _jax.parts_of(eqn)[0][k]):
        return True
    if kind == "scan" and k >= _jax.scan_parts(eqn)[1]:
        return False
    first = kind == "cond"
    bodies = eqn.params["branches"] if first else (_body_of(eqn, kind),)
    return k >= first and any(
        _reads_part(_open(b), _open(b).invars[k - first]) for b in bodies
    )


def _body_of(eqn: Any, kind: str) -> Any:
    return eqn.params["jaxpr"] if kind in ("scan", "shard_map") else _jax.call_body(eqn)


def _open(body: Any) -> Any:
    return getattr(body, "jaxpr", body)


def _reads_part(body: Any, var: Any) -> bool:
    """Whether a body reads parts of a value: at computed places, or on each device."""
    names = {var}
    for eqn in body.eqns:
        here = [
            k for k, a in enumerate(eqn.invars) if not _jax.is_literal(a) and a in names
        ]
        if not here:
            continue
        kind = _jax.call_kind(eqn)
        if _is_slice(eqn) and 0 in here:
            return True
        if kind in GIVEN and any(_takes_part(eqn, kind, k) for k in here):
            return True
        if eqn.primitive.name in LIGHT:
            names.update(eqn.outvars)
    return False


def _attempted(
    eqn: Any, kind: str, masks: Mapping[int, Mask], makers: Makers
) -> list[Any] | None:
    """The equations of a body that makes its masks; None if JAX cannot trace it."""
    if eqn.effects:
        return None
    if kind == "call":
        return _inlined(eqn)
    try:
        return WRITTEN[kind](eqn, masks, makers)
    except Exception as why:  # JAX has no rule for their placement
        log.debug("masks stay outside of a %s: %s", kind, why)
        return None


def _inlined(eqn: Any) -> list[Any] | None:
    """The equations of a call; None if it holds constants."""
    jaxpr = _open(_jax.call_body(eqn))
    if jaxpr.constvars:
        return None
    equations, results = inserted(jaxpr, eqn.invars, eqn.source_info)
    made = {v for e in equations for v in e.outvars}
    if len(set(map(id, results))) < len(results) or not made.issuperset(results):
        return None
    return _renamed(equations, results, eqn.outvars)


def _in_shard_map(eqn: Any, masks: Mapping[int, Mask], makers: Makers) -> list[Any]:
    """A shard_map whose devices make their parts of masks."""
    into, out_of, (mesh, manual, typed) = _jax.parts_of(eqn)
    body = eqn.params["jaxpr"]
    kept = [k for k in range(len(eqn.invars)) if k not in masks]
    sources = _sources(masks)
    specs = [jax.P(*(c and c.start for c in cuts)) for _, cuts in sources]

    def on_a_device(*given: Any) -> tuple[Any, ...]:
        own = dict(zip(kept, given, strict=False))
        made = dict(zip(sources, given[len(kept) :], strict=True))
        parts = Parts(makers, made, lambda cut: lax.axis_index(cut.start) * cut.size)
        for k, mask in masks.items():
            part = parts.of(mask.atom, mask.cuts)
            own[k] = _jax.placed_as(part, body.invars[k].aval)
        args = [own[k] for k in range(len(body.invars))]
        return tuple(_jax.inlined(ClosedJaxpr(body, ()), args))

    def code(*given: Any) -> Any:
        return jax.shard_map(
            on_a_device,
            mesh=mesh,
            in_specs=(*(into[k] for k in kept), *specs),
            out_specs=tuple(out_of),
            axis_names=set(manual),
            check_vma=typed,
        )(*given)

    atoms = [*(eqn.invars[k] for k in kept), *(value for value, _ in sources)]
    fragment = _jax.trace_placed(code, [a.aval for a in atoms])
    if fragment.constvars:
        raise ValueError("a shard_map holds constants")
    equations, results = inserted(fragment, atoms, eqn.source_info)
    return _renamed(equations, results, eqn.outvars)


def _sources(masks: Mapping[int, Mask]) -> list[Source]:
    return list(dict.fromkeys(s for m in masks.values() for s in m.sources))


def _renamed(
    eqns: Sequence[Any], outs: Sequence[Any], wanted: Sequence[Any]
) -> list[Any]:
    """Equations whose results have other names."""
    names = dict(zip(outs, wanted, strict=True))
    renamed = (e.replace(outvars=[names.get(v, v) for v in e.outvars]) for e in eqns)
    return [_jax.reading(e, names) for e in renamed]


def _making(body: Any, masks: Mapping[int, Mask], makers: Makers) -> Any:
    """A body that makes masks: what these are made of comes first, and they are gone.

    Args:
        body: The body.
        masks: The masks, by input.
        makers: The equations that make them.
    """
    jaxpr = _open(body)
    given = {value: _jax.new_var(value.aval) for value, _ in _sources(masks)}
    instead, eqns = {}, []
    for k, mask in masks.items():
        more, instead[jaxpr.invars[k]] = makers.copied(mask.atom, given)
        eqns += more
    eqns += [_jax.reading(e, instead) for e in jaxpr.eqns]
    kept = [v for k, v in enumerate(jaxpr.invars) if k not in masks]
    outs = [v if _jax.is_literal(v) else instead.get(v, v) for v in jaxpr.outvars]
    return _jax.with_signature(body, [*given.values(), *kept], eqns, outs)


def _in_checkpoint(eqn: Any, masks: Mapping[int, Mask], makers: Makers) -> list[Any]:
    """A checkpoint that makes masks, and saves what they are made of."""
    new = _making(_jax.call_body(eqn), masks, makers)
    kept = [a for k, a in enumerate(eqn.invars) if k not in masks]
    atoms = [*(value for value, _ in _sources(masks)), *kept]
    params = {**eqn.params, _jax.call_body_name(eqn): new}
    return [eqn.replace(invars=atoms, params=params)]


def _in_branches(eqn: Any, masks: Mapping[int, Mask], makers: Makers) -> list[Any]:
    """A cond whose branches make masks."""
    own = {k - 1: mask for k, mask in masks.items()}
    bodies = [_making(b, own, makers) for b in eqn.params["branches"]]
    kept = [a for k, a in enumerate(eqn.invars) if k not in masks]
    atoms = [value for value, _ in _sources(masks)]
    return [_jax.with_constants_first(eqn.replace(invars=kept), bodies, atoms)]


def _in_scan(eqn: Any, masks: Mapping[int, Mask], makers: Makers) -> list[Any]:
    """A loop whose steps make masks."""
    loop = loop_of(0, eqn)
    body = _making(loop.body, masks, makers)
    kept = [a for k, a in enumerate(eqn.invars[: loop.n_consts]) if k not in masks]
    consts = [*(value for value, _ in _sources(masks)), *kept]
    carry = eqn.invars[loop.n_consts : loop.first]
    closed = body if hasattr(body, "consts") else ClosedJaxpr(body, ())
    step = lambda whole, carry, x: _jax.inlined(closed, [*whole, *carry, *x])
    equations, results = traced(loop, consts, carry, loop.xs, step)
    return _renamed(equations, results, eqn.outvars)


WRITTEN = {
    "shard_map": _in_shard_map,
    "remat": _in_checkpoint,
    "cond": _in_branches,
    "scan": _in_scan,
}
GIVEN = frozenset({"call", *WRITTEN})
"""The bodies that can make masks."""


# ----------------------------------------------------------- rows of whole masks
def _with_rows_of_masks(body: Any) -> Any:
    """A body that slices what a mask is made of, in place of the mask."""
    if not any(_is_slice(e) for e in body.eqns):
        return body
    makers, eqns = Makers.in_body(body), []
    for eqn in body.eqns:
        new = _sliced(eqn, makers) if _is_slice(eqn) else None
        eqns += [eqn] if new is None else new
        makers.add([eqn])
    if len(eqns) == len(body.eqns):
        return body
    outs = getattr(body, "jaxpr", body).outvars
    return _jax.with_equations(body, live(eqns, outs)[0], outs)


def _is_slice(eqn: Any) -> bool:
    """Whether an equation takes several rows of a table at a computed place."""
    if eqn.primitive.name != "dynamic_slice" or _jax.is_literal(eqn.invars[0]):
        return False
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    known = all(isinstance(n, int) for n in shape)
    return known and len(shape) > 1 and shape != sizes


def _sliced(eqn: Any, makers: Makers) -> list[Any] | None:
    """The equations of a slice of a mask, by slices of what it is made of."""
    table, *starts = eqn.invars
    pairs = zip(table.aval.shape, eqn.params["slice_sizes"], starts, strict=True)
    ends = {k: (n, m, at) for k, (n, m, at) in enumerate(pairs) if m != n}
    cuts = tuple(Cut(k, ends[k][1]) if k in ends else None for k in range(len(starts)))
    sources = makers.sources(table, cuts)
    if sources is None or not is_smaller(sources, table.aval):
        return None
    if not sources and max(m for _, m, _ in ends.values()) == 1:
        return None  # a row of positions is read as it is
    atoms = [*(value for value, _ in sources), *(at for _, _, at in ends.values())]

    def code(*given: Any) -> Any:
        first = {
            k: lax.clamp(jnp.zeros_like(at), at, jnp.asarray(n - m, at.dtype))
            for (k, (n, m, _)), at in zip(
                ends.items(), given[len(sources) :], strict=True
            )
        }
        made = {
            (value, its): _cut(x, its, first)
            for (value, its), x in zip(sources, given, strict=False)
        }
        part = Parts(makers, made, lambda cut: first[cut.start]).of(table, cuts)
        return _jax.placed_as(part, eqn.outvars[0].aval)

    try:
        fragment = _jax.trace_placed(code, [a.aval for a in atoms])
    except Exception as why:  # JAX has no rule for their placement
        log.debug("rows of a mask stay rows: %s", why)
        return None
    equations, results = inserted(fragment, atoms, eqn.source_info)
    return _renamed(equations, results, eqn.outvars)


def _cut(array: Any, cuts: Cuts, first: Mapping[int, Any]) -> Any:
    """A part of what a mask is made of."""
    for axis, cut in enumerate(cuts):
        if cut is not None:
            array = lax.dynamic_slice_in_dim(array, first[cut.start], cut.size, axis)
    return array
