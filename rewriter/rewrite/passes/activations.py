"""Computes activations between products, and their gradients, in one pass over memory.

    h = gelu(u)                                   one kernel reads u, writes h
    du = dh * gelu'(u)   db = sum of du      →    one reads u and dh, writes du and db

XLA computes such functions in one pass, too, but its exponentials, quotients and error
functions take longer than the memory: 16384 x 3072 numbers took 90 us for an exact GELU
on an H200, and 126 us for its gradient with the sum. Kernels take 63 and 102: they use
the hardware's functions, in float32 without the roundings in between
(``tests/bench/results/fused_activations_h200.json``). Values of the forward pass are
computed again in the gradient.

Regions are found by `rewriter.rewrite.activation_regions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.ops.device import Device
from rewriter.ops.elementwise_program import ElementwiseProgram
from rewriter.ops.registry import elementwise_kernel
from rewriter.program.bodies import map_bodies
from rewriter.program.contents import contents_of
from rewriter.program.equations import Equations
from rewriter.rewrite.activation_regions import (
    FUNCTIONS,
    INNER,
    Region,
    form_of,
    multiplies_16_bits,
    program_of,
    regions,
    without_calls,
    without_unread,
)
from rewriter.rewrite.beside_sites import BodyPass, Change, Changed
from rewriter.rewrite.ordering import in_order
from rewriter.site import row_site

LEAST = 1 << 23
"""The bytes of the smallest array that is worth it."""

WANTED = FUNCTIONS
"""Primitives of which programs with activations have one."""


@dataclass(frozen=True)
class Fused(Change):
    """An activation, or its gradient, computed by one kernel."""

    by: ClassVar[str] = "activations"

    @classmethod
    def row(cls, same: Sequence[Self]) -> tuple[str, ...]:
        """Returns how many, and what is done."""
        return f"×{len(same)}", "by one kernel, in float32 in between"


def _changed(body: Any, device: Device) -> Changed:
    """Computes activations and their gradients between products in one pass each."""
    names = contents_of(body).names
    if "dot_general" not in names or not names & (WANTED | INNER.keys()):
        return body, ()
    if not multiplies_16_bits(body):
        return body, ()
    equations, kernel = Equations(without_unread(body)), elementwise_kernel()
    if not kernel.kernel.limits.runs_on(device).ok:
        return body, ()
    programs: dict[Any, ElementwiseProgram] = {}
    known: dict[Any, ElementwiseProgram | None] = {}  # by what equal regions have

    def takes(region: Region) -> bool:
        m, d = region.shape
        sums = region.total is not None and kernel.sums(m, d)
        key = m, d, sums, form_of(equations, region)
        if key not in known:
            program = program_of(equations, region, sums)
            taken = (
                program is not None
                and kernel.supports(program, m, d).ok
                and kernel.pays(program, m, d, device).ok
            )
            known[key] = program if taken else None
        if (program := known[key]) is not None:
            programs[region.out] = program
        return program is not None

    chosen = regions(equations, LEAST, takes)
    if not chosen:
        return body, ()
    new = [_equation(body, equations, r, programs[r.out]) for r in chosen]
    totals = {v for eqn in new for v in eqn.outvars[1:]}
    inside = {i for region in chosen for i in region.positions}
    rest = [
        e
        for i, e in enumerate(equations.eqns)
        if i not in inside and totals.isdisjoint(e.outvars)
    ]
    ordered = in_order(rest, new)
    if ordered is None:
        return body, ()
    found = [_change(equations, region) for region in chosen]
    return _jax.with_equations(body, ordered, equations.outs), found


def _equation(
    body: Any, equations: Equations, region: Region, program: ElementwiseProgram
) -> Any:
    """One equation for a region, with the sum of its result if that is computed."""
    places = set(region.positions)
    outputs = region.outputs if program.sums else [region.out]
    places |= {equations.made_at(v) for v in outputs}
    behind = dict(region.behind)
    own = [_jax.reading(equations.eqns[i], behind) for i in sorted(places)]
    whole = _jax.part_of(body, region.inputs, own, outputs)
    use = row_site.use_of(elementwise_kernel(), program)
    return own[-1].replace(
        primitive=row_site.rows_p,
        invars=list(region.inputs),
        outvars=outputs,
        params={"use": use, "equations": whole},
    )


def _change(equations: Equations, region: Region) -> Fused:
    eqn = equations.maker(region.out)
    what = "activation" if len(region.inputs) == 1 else "gradient of an activation"
    return Fused(what, _jax.source_of(eqn))


class _Pass(BodyPass):
    """A pass that looks at programs without calls of elementwise functions."""

    def __call__(
        self, program: ClosedJaxpr, device: Device
    ) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
        """Returns a program after the pass; itself if nothing is found."""
        if device.platform not in self.platforms:
            return program, ()
        after, found = super().__call__(map_bodies(program, without_calls), device)
        return (after, found) if found else (program, ())


PASS = _Pass(Fused, _changed, frozenset({"cuda"}))
