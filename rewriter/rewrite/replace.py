"""Builds the rewritten program from a plan.

The new equations of a site are spliced in after the equation that made its
result. Later readers are pointed at the new result, and equations that nobody reads any
more are dropped. Untouched equations and bodies stay the same objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rewriter import _jax
from rewriter.find.region import Regions
from rewriter.gradients.backward_place import (
    home_of,
)
from rewriter.program.equations import live
from rewriter.program.graph import Scope
from rewriter.program.loops import loop_of, traced
from rewriter.rewrite.bodies import Bodies
from rewriter.rewrite.branches import alike
from rewriter.rewrite.fragments import Fragments, in_order, leaves_here
from rewriter.rewrite.frame import Frame
from rewriter.rewrite.origins import Origins
from rewriter.rewrite.splice import Splice


def replace(
    regions: Regions, splices: Sequence[Splice]
) -> tuple[ClosedJaxpr, Origins | None]:
    """Returns the program with the splices made, and the origins of its equations.

    That is not known if splices hand residuals from body to body, or leave a loop's
    stacks unread in a checkpoint.

    Raises:
        Exception: If a replacement, or a body around it, cannot be traced.
    """
    top = regions.graph.top
    if not splices:
        return top.jaxpr, None
    work = _Work(regions, splices)
    program = work.body(top)
    if work.carried or work.plan.given or work.leaves_stacks:
        return _jax.pruned(program), None
    frame, position = work.frames[id(top)], {}
    for at, (lo, hi) in enumerate(itertools.pairwise([0, *frame.ends])):
        for eqn in frame.eqns[lo:hi]:
            position[id(eqn)] = at
    return program, Origins(position, frame.labels, work.envs[id(top)])


class _Work:
    """Rewrites bodies, outermost first."""

    def __init__(self, regions: Regions, splices: Sequence[Splice]):
        self.graph, self.regions = regions.graph, regions
        self.plan = Bodies(regions, splices)
        self.carried: dict[tuple[int, int], list[Any]] = {}
        self.stacked: dict[int, list[Any]] = {}
        self.handed: dict[int, list[list[Any]]] = {}
        self.fragments = Fragments(regions.graph)
        self.frames: dict[int, Frame] = {}
        self.envs: dict[int, dict[Any, Any]] = {}
        self.results: dict[int, dict[int, Any]] = {}
        self.residuals: dict[int, Any] = {}
        self.shared: frozenset[int] = frozenset()
        self.leaves_stacks = False

    def _given_to(self, body: Scope) -> list[Any]:
        """What carries, around a body, the values that it is given."""
        defined = self.regions.place(body.parent).defined
        found = [defined[g.outside][1:] for g in self.plan.all_given(body)]
        return [self.envs[id(home)].get(var, var) for home, var in found]

    # ------------------------------------------------------------- bodies
    def body(self, scope: Scope) -> Any:
        """The new jaxpr of a body."""
        if id(scope) not in self.plan.rewritten and not self.plan.is_any_inlined(scope):
            return scope.jaxpr
        frame = self.frames[id(scope)] = Frame()
        self.leaves_stacks |= scope.kind == "scan" and scope.runs_again
        more: list[Any] = []
        for splice in self.plan.read_in.get(id(scope), ()):
            avals = self._avals_in(scope, splice)
            inputs = [_jax.new_var(a) for a in avals]
            self.carried[id(scope), id(splice)] = inputs
            more += inputs
        outs = self._inline(scope, frame, {})
        for splice in self.plan.saved_in.get(id(scope), ()):
            atoms = self._residuals_in(scope, splice)
            self.handed.setdefault(id(splice), []).append([a.aval for a in atoms])
            outs = outs + atoms
        eqns, _ = live(frame.eqns, outs)
        first = self.plan.variables_of(scope)
        return _jax.with_equations(scope.jaxpr, eqns, outs, more, first)

    def _inline(self, scope: Scope, frame: Frame, env: dict[Any, Any]) -> list[Any]:
        """Appends a body's new equations; returns the atoms of its results."""

        def read(atom: Any) -> Any:
            return atom if _jax.is_literal(atom) else env.get(atom, atom)

        self.envs[id(scope)] = env
        done = self.results.setdefault(id(scope), {})
        inlined = id(scope) in self.plan.inlined
        splices = self.plan.at.get(id(scope), {})
        gradients = self.plan.backward_at.get(id(scope), {})
        numbers, eqns = scope.env, frame.eqns
        ends = frame.ends if scope is self.graph.top else []
        for position, eqn in enumerate(scope.jaxpr.eqns):
            children = scope.children.get(position)
            if children or inlined:
                self._with_children(children or [], eqn, frame, env, read, inlined)
            else:
                eqns.append(_jax.reading(eqn, env))
            for splice in splices.get(position, ()):
                result = self._splice(splice, eqn, frame)
                if not any(self.plan.is_spare(splice, v) for v in leaves_here(splice)):
                    done[splice.match.value] = result
            if position in gradients:
                self._backward(gradients[position], eqn, frame)
            if done:
                self._hand_on(done, numbers, eqn, frame, env)
            ends.append(len(eqns))
        return [read(v) for v in scope.jaxpr.outvars]

    def _hand_on(self, done, numbers, eqn, frame, env) -> None:
        """Makes readers of a replaced value, and of its copies, read the new one."""
        for var in eqn.outvars:
            if var.__class__ is _jax.Var and numbers[var] in done:
                new = done[numbers[var]]
                if numbers[var] in self.shared:  # what is left is other ops' share
                    new = frame.insert_sum(env.get(var, var), new, eqn)
                env[var] = new

    def _with_children(self, children, eqn, frame, env, read, inlined) -> None:
        if any(id(c) in self.plan.inlined for c in children):
            self._inlined_call(children[0], eqn, frame, env, read)
        elif any(map(self.plan.changes_signature, children)):
            handing = {
                "remat": self._checkpoint,
                "scan": self._loop,
                "shard_map": self._on_devices,
            }
            if children[0].kind == "cond":
                self._branches(children, eqn, frame, env, read)
            else:
                handing[children[0].kind](children[0], eqn, frame, env, read)
        else:
            self._plain(children, eqn, frame, env, read, inlined)

    def _plain(self, children, eqn, frame, env, read, inlined) -> None:
        new = self._with_bodies(eqn, children) if children else eqn
        ins = [read(a) for a in new.invars]
        outs = list(eqn.outvars)
        if inlined:  # one body may be inlined at several places
            outs = [v if _jax.is_drop(v) else _jax.new_var(v.aval) for v in outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        if inlined or any(a is not b for a, b in zip(ins, new.invars, strict=True)):
            new = new.replace(invars=ins, outvars=outs)
        frame.eqns.append(new)

    def _loop(self, child, eqn, frame, env, read) -> None:
        """Appends a loop that stacks residuals, or reads those of another loop."""
        body, loop = jaxpr_as_fun(self.body(child)), loop_of(0, eqn)
        inputs = self._given_to(child)
        atoms = [*inputs, *self._with_residuals(child, map(read, eqn.invars))]
        start, first = len(inputs) + loop.n_consts, len(inputs) + loop.first
        parts = atoms[:start], atoms[start:first], atoms[first:]
        step = lambda consts, carry, x: body(*consts, *carry, *x)
        eqns, outs = traced(loop, *parts, step)
        frame.eqns += eqns
        env.update(zip(eqn.outvars, outs, strict=False))
        outs = outs[len(eqn.outvars) :]
        for splice in self.plan.saved_in.get(id(child), ()):
            count = len(self.residuals[id(splice)][0])
            self.stacked[id(splice)], outs = outs[:count], outs[count:]

    def _on_devices(self, child, eqn, frame, env, read) -> None:
        """Appends a shard_map that returns residuals, or reads those of another."""
        atoms = self._with_residuals(child, map(read, eqn.invars))
        body = self.body(child)
        given, made = (
            sum(len(self.residuals[id(s)][0]) for s in those.get(id(child), ()))
            for those in (self.plan.read_in, self.plan.saved_in)
        )
        first = [g.spec for g in self.plan.all_given(child)]
        atoms = [*self._given_to(child), *atoms]
        new = _jax.returning_more_parts(eqn, body, atoms, given, made, first)
        frame.eqns.append(new)
        env.update(zip(eqn.outvars, new.outvars, strict=False))
        outs = list(new.outvars[len(eqn.outvars) :])
        for splice in self.plan.saved_in.get(id(child), ()):
            count = len(self.residuals[id(splice)][0])
            self.stacked[id(splice)], outs = outs[:count], outs[count:]

    def _checkpoint(self, child, eqn, frame, env, read) -> None:
        """Appends a checkpoint's recomputation that reads residuals."""
        atoms = self._with_residuals(child, map(read, eqn.invars))
        atoms = [*self._given_to(child), *atoms]
        outs = [v if _jax.is_drop(v) else _jax.new_var(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outs, strict=True))
        params = {**eqn.params, _jax.call_body_name(eqn): self.body(child)}
        frame.eqns.append(eqn.replace(invars=atoms, outvars=outs, params=params))

    def _branches(self, children, eqn, frame, env, read) -> None:
        """Appends a cond whose branches return residuals, or read another one's."""
        which, *operands = map(read, eqn.invars)
        residuals = [self._with_residuals(c, ()) for c in children]
        bodies = [self.body(c) for c in children]
        saved = [s for c in children for s in self.plan.saved_in.get(id(c), ())]
        made = [self._last_made(c, b) for c, b in zip(children, bodies, strict=True)]
        avals = [[a.aval for a in atoms] for atoms in residuals]
        bodies = alike(bodies, avals, made, eqn.source_info)
        outs = [v if _jax.is_drop(v) else _jax.new_var(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, outs, strict=True))
        more = [_jax.new_var(a) for avals in made for a in avals]
        atoms = [which, *self._given_to(children[0]), *operands]
        atoms += [a for those in residuals for a in those]
        params = {**eqn.params, "branches": tuple(bodies)}
        frame.eqns.append(
            eqn.replace(invars=atoms, outvars=[*outs, *more], params=params)
        )
        for splice in saved:
            count = len(self.residuals[id(splice)][0])
            self.stacked[id(splice)], more = more[:count], more[count:]

    def _last_made(self, child: Scope, body: Any) -> list[Any]:
        """The types of the residuals that a branch returns."""
        those = self.plan.saved_in.get(id(child), ())
        count = sum(len(self.residuals[id(s)][0]) for s in those)
        outs = body.outvars
        return [a.aval for a in outs[len(outs) - count :]]

    def _with_residuals(self, child: Scope, atoms: Iterable[Any]) -> list[Any]:
        """The operands of a body, followed by the residuals passed to it."""
        outer, _ = home_of(child.parent)
        those = self.plan.read_in.get(id(child), ())
        return [*atoms, *(a for s in those for a in self._residuals_in(outer, s))]

    def _residuals_in(self, body: Scope, splice: Splice) -> list[Any]:
        """The atoms of a forward's residuals in a body."""
        given = self.carried.get((id(body), id(splice)))
        if given is None:  # the results of an inner body, which they have left
            given = self.stacked.get(id(splice))
        return self.residuals[id(splice)][0] if given is None else given

    def _avals_in(self, body: Scope, splice: Splice) -> list[Any]:
        """The types of the residuals passed to a body."""
        left = self.handed.get(id(splice), [])
        level = self.plan.level[id(body), id(splice)]
        return left[level] if level < len(left) else self._types_behind(splice)

    def _types_behind(self, splice: Splice) -> list[Any]:
        """The types of residuals outside all bodies that they leave."""
        given = self.stacked.get(id(splice)) or self.residuals[id(splice)][0]
        return [a.aval for a in given]

    def _inlined_call(self, child, eqn, frame, env, read) -> None:
        body = child.jaxpr
        inner = _jax.literals_of(body)
        inner.update(zip(body.invars, map(read, eqn.invars), strict=True))
        outs = self._inline(child, frame, inner)
        env.update(zip(eqn.outvars, outs, strict=True))

    def _with_bodies(self, eqn: Any, children: list[Scope]) -> Any:
        new = [self.body(c) for c in children]
        if all(a is c.jaxpr for a, c in zip(new, children, strict=True)):
            return eqn
        if id(children[0]) in self.plan.given:
            return _jax.with_constants_first(eqn, new, self._given_to(children[0]))
        kind = _jax.call_kind(eqn)
        if kind == "cond":
            changed = {"branches": tuple(new)}
        elif kind == "while":
            changed = {"body_jaxpr": new[0]}
        else:
            changed = {_jax.call_body_name(eqn): new[0]}
        return eqn.replace(params={**eqn.params, **changed})

    # ------------------------------------------------------------- splices
    def _splice(self, splice: Splice, eqn: Any, frame: Frame) -> Any:
        """Appends a replacement's equations; returns the atom of its result."""
        read = [self.plan.read_for(splice, v) for v in leaves_here(splice)]
        atoms = [
            self._zero(r.value, eqn, frame)
            if self.plan.is_spare(splice, r.value)
            else self._atom_of(splice, v)
            for v, r in zip(leaves_here(splice), read, strict=True)
        ]
        avals = [atom.aval for atom in atoms]
        fragment, tree = self.fragments.forward(splice, read, avals)
        out, *residuals = frame.insert(fragment, atoms, eqn, splice.label)
        if tree is not None:
            avals = [v.aval for v in fragment.outvars[1:]]
            self.residuals[id(splice)] = residuals, avals, tree
        return out

    def _backward(self, splices: list[Any], eqn: Any, frame: Frame) -> None:
        """Appends gradients, and notes their replacements in the bodies around."""
        for splice, where in splices:
            for value, atom in self._gradients(splice, eqn, frame).items():
                self.results.setdefault(id(where[value]), {})[value] = atom
            self.shared |= splice.backward.shared

    def _gradients(self, splice: Splice, eqn: Any, frame: Frame) -> dict[int, Any]:
        """Appends the gradients' equations; returns their atoms by value."""
        _, avals, tree = self.residuals[id(splice)]
        backward = splice.backward
        fragment = self.fragments.gradients(splice, avals, tree)
        cotangent = self._cotangent(splice, backward.cotangent)
        residuals = self._residuals_in(self.plan.gradients_home[id(splice)], splice)
        given = [*residuals, cotangent]
        atoms = frame.insert(fragment, given, eqn, splice.label)
        grads = (backward.grads[v] for v in in_order(splice))
        return dict(zip((*grads, *backward.others), atoms, strict=True))

    def _cotangent(self, splice: Splice, value: int) -> Any:
        """The atom of a cotangent where gradients are computed."""
        home = self.plan.gradients_home[id(splice)]
        _, scope, var = self.regions.place(home).defined[value]
        return self.envs[id(scope)].get(var, var)

    def _zero(self, value: int, eqn: Any, frame: Frame) -> Any:
        """Appends zeros in place of a value."""
        fragment = _jax.zeros([self.graph.avals[value]])
        return frame.insert(fragment, [], eqn)[0]

    def _atom_of(self, splice: Splice, value: int) -> Any:
        """The atom of a value at a splice: a variable there or in an inlined call."""
        value = self.plan.read_for(splice, value).value
        home = splice.scope
        found = home.first_var.get(value)
        if found is None:
            _, home, var = self.regions.place(splice.scope).defined[value]
        else:
            var = found[1]
        return self.envs[id(home)].get(var, var)
