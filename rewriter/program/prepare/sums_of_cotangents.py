"""Gives each layer its cotangent of a shared bias, and adds these up afterwards.

    c = add_any a b                  r = transpose (reduce_sum a)
    t = reduce_sum c        →        s = transpose (reduce_sum b)
    u = transpose t                  u = r + s

Layers that share a bias add up the changes of their scores. The sums over the batch and
the layout of the bias come last. Then no value of the program is one layer's cotangent,
and an attention's kernel cannot give it. What a loop over layers adds up is one term.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.loops import inserted

LAYOUT = frozenset({"expand_dims", "reshape", "squeeze", "transpose"})
"""What may follow the sum: it is done to each term."""


def sum_each(program: Any) -> Any:
    """Returns a program with such sums taken apart; itself without one.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, lambda body: _changed(body) or body, wanted={"add_any"})


def _changed(body: Any) -> Any:
    """A body whose sums of cotangents are taken one by one; None without any."""
    added = {e.outvars[0] for e in body.eqns if e.primitive.name == "add_any"}
    sums = (e for e in body.eqns if e.primitive.name == "reduce_sum")
    read = (e for e in sums if not _jax.is_literal(e.invars[0]))
    if not any(e.invars[0] in added and _is_sum(e) for e in read):
        return None
    here, done = _Body(body), set[int]()
    eqns: list[Any] = []
    for eqn in body.eqns:
        terms = here.terms(eqn.invars[0]) if _is_sum(eqn) else []
        if id(eqn) in done:
            continue
        groups = here.groups(terms)
        if len(groups) > 1:
            chain = here.chain(eqn)
            done.update(map(id, chain))
            eqns += _one_by_one(chain, groups)
        else:
            eqns.append(eqn)
    if not done:
        return None
    return _jax.with_equations(body, live(eqns, here.outs)[0], here.outs)


def _is_sum(eqn: Any) -> bool:
    """Whether an equation sums floats over some axes, wherever they lie."""
    if eqn.primitive.name != "reduce_sum" or _jax.is_literal(eqn.invars[0]):
        return False
    floats = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
    return floats and eqn.params.get("out_sharding") is None


class _Body:
    """Who makes and who reads the values of a body."""

    def __init__(self, body: Any) -> None:
        self.outs = getattr(body, "jaxpr", body).outvars
        self.makers = {v: e for e in body.eqns for v in e.outvars}
        self.readers: dict[Any, list[Any]] = defaultdict(list)
        for eqn in body.eqns:
            for v in eqn.invars:
                if not _jax.is_literal(v):
                    self.readers[v].append(eqn)
        self.returned = {v for v in self.outs if not _jax.is_literal(v)}

    def only_reader(self, value: Any) -> Any:
        """The one equation that reads a value; None if it is read elsewhere too."""
        readers = self.readers[value]
        return readers[0] if len(readers) == 1 and value not in self.returned else None

    def terms(self, atom: Any) -> list[Any]:
        """What adds up to a value, through sums that nothing else reads."""
        eqn = None if _jax.is_literal(atom) else self.makers.get(atom)
        if eqn is None or eqn.primitive.name != "add_any":
            return [atom]
        if self.only_reader(atom) is None:
            return [atom]
        return [t for v in eqn.invars for t in self.terms(v)]

    def groups(self, terms: list[Any]) -> list[list[Any]]:
        """One group for each layer's cotangent, and one for all else, as a loop's sum.

        Without a layer's cotangent, all terms are one group.
        """
        layers = [[t] for t in terms if self.is_multiplied(t)]
        others = [t for t in terms if [t] not in layers]
        return [*layers, others] if others else layers

    def is_multiplied(self, atom: Any) -> bool:
        """Whether products read a value, perhaps before it was rounded, or rounded.

        So it is with changes of scores: queries and keys are multiplied by them.
        """
        eqn = None if _jax.is_literal(atom) else self.makers.get(atom)
        if eqn is None:
            return False
        source = atom
        if eqn.primitive.name == "convert_element_type":
            source = eqn.invars[0]
        alike = [source, *(e.outvars[0] for e in self.readers[source] if _casts(e))]
        return any(
            e.primitive.name == "dot_general" for v in alike for e in self.readers[v]
        )

    def chain(self, eqn: Any) -> list[Any]:
        """A sum, and what is done to it alone."""
        found = [eqn]
        while True:
            later = self.only_reader(found[-1].outvars[0])
            if later is None or not (later.primitive.name in LAYOUT or _is_sum(later)):
                return found
            found.append(later)


def _casts(eqn: Any) -> bool:
    return eqn.primitive.name == "convert_element_type"


def _one_by_one(chain: list[Any], groups: list[list[Any]]) -> list[Any]:
    """The equations that do to each group what was done to its sum, and add up."""

    def done(x: jax.Array) -> jax.Array:
        for eqn in chain:
            x = eqn.primitive.bind(x, **eqn.params)
        return x

    def code(*arrays: jax.Array) -> jax.Array:
        rest = iter(arrays)
        each = ([next(rest) for _ in group] for group in groups)
        return _sum([done(_sum(terms)) for terms in each])

    terms = [t for group in groups for t in group]
    fragment = _jax.trace_placed(code, [t.aval for t in terms])
    made, _ = inserted(fragment, terms, chain[0].source_info)
    return [*made[:-1], made[-1].replace(outvars=list(chain[-1].outvars))]


def _sum(arrays: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, arrays)
