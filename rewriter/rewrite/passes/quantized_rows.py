"""Computes norms and the rows in 8 bits that are made of them in one pass over memory.

    s = sum x²   y = x · rsqrt(s/d + eps)       one kernel reads x
    a = max |y|  q = int8(round(y · 127/a))  →  and writes q and a, and y if it is read

Programs that quantize activations for each row take a maximum of what a norm gives, and
a norm takes a sum of what it is given. XLA makes a kernel of each, and each reads the
rows again. Here a kernel holds a row, and computes the program's own equations of it:
its casts, its order, its dtypes. So a sum may have its terms in another order, and
nothing else differs.

A region is found from where rows are stored in 8 bits, see `row_regions`. Values that
are read elsewhere, such as scales, the norm itself, or a residual sum in front, are
results too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rewriter import _jax
from rewriter.ops.device import Device
from rewriter.ops.registry import row_kernel
from rewriter.program.contents import contents_of
from rewriter.program.equations import Equations
from rewriter.rewrite.beside_sites import BodyPass, Change, Changed
from rewriter.rewrite.ordering import in_order
from rewriter.rewrite.row_regions import Region, region, seeds
from rewriter.site import row_site


@dataclass(frozen=True)
class Joined(Change):
    """A norm and the quantization of its rows, computed by one kernel."""

    by: ClassVar[str] = "quantized_rows"

    @classmethod
    def row(cls, same: Sequence[Self]) -> tuple[str, ...]:
        """Returns how many, and what is done."""
        return f"×{len(same)}", "with the norm in front, in one pass over them"


def _changed(body: Any, device: Device) -> Changed:
    """Computes norms and the rows in 8 bits made of them in one pass over memory."""
    found: list[Change] = []
    done: set[Any] = set()
    if not seeds(contents_of(body).named({"convert_element_type"})):
        return body, found
    while True:
        step = _one(body, device, done)
        if step is None:
            return body, found
        body, change = step
        found.append(change)


def _one(body: Any, device: Device, done: set[Any]) -> tuple[Any, Change] | None:
    """A body with one more region replaced; None if there is no other."""
    equations = Equations(body)
    for seed in seeds(equations.eqns):
        eqn = equations.eqns[seed]
        if eqn.outvars[0] in done:
            continue
        done.add(eqn.outvars[0])
        found = region(equations, seed)
        if found is None or not _is_chosen(found, device):
            continue
        after = _replaced(body, equations, found)
        if after is not None:
            what = f"{eqn.outvars[0].aval.dtype} rows"
            return after, Joined(what, _jax.source_of(eqn))
    return None


def _is_chosen(found: Region, device: Device) -> bool:
    kernel = row_kernel()
    given = found.program, found.m, found.d
    limits = kernel.kernel.limits
    return bool(
        limits.runs_on(device).ok
        and kernel.supports(*given).ok
        and kernel.pays(*given, device).ok
    )


def _replaced(body: Any, equations: Equations, found: Region) -> Any:
    """The body with one equation for a region; None if others lie in between."""
    inside = set(found.positions)
    own = [equations.eqns[i] for i in found.positions]
    needed = _needed(equations, found)
    inputs = _free(needed, found.inputs)
    whole = _jax.part_of(body, inputs, needed, found.outputs)
    use = row_site.use_of(row_kernel(), found.program)
    new = own[-1].replace(
        primitive=row_site.rows_p,
        invars=inputs,
        outvars=list(found.outputs),
        params={"use": use, "equations": whole},
    )
    rest = [e for i, e in enumerate(equations.eqns) if i not in inside]
    ordered = in_order(rest, [new])
    if ordered is None:
        return None
    return _jax.with_equations(body, ordered, equations.outs)


def _needed(equations: Equations, found: Region) -> list[Any]:
    """The equations that give a region's results, in order."""
    inputs, positions = set(found.inputs), set[int]()
    queue = list(found.outputs)
    while queue:
        var = queue.pop()
        at = equations.made_at(var)
        if at >= 0 and var not in inputs and at not in positions:
            positions.add(at)
            queue += equations.eqns[at].invars
    return [equations.eqns[i] for i in sorted(positions)]


def _free(eqns: Sequence[Any], first: Sequence[Any]) -> list[Any]:
    """The variables that equations read and none of them makes, `first` ones first.

    The others are read by equations that the kernel does not need, such as the branch
    that a known condition never takes.
    """
    made = {v for e in eqns for v in e.outvars}
    read = (v for e in eqns for v in e.invars if not _jax.is_literal(v))
    return list(dict.fromkeys([*first, *(v for v in read if v not in made)]))


PASS = BodyPass(Joined, _changed, frozenset({"cuda"}))

WANTED = frozenset({"reduce_max", "convert_element_type"})
"""Primitives of every program with such rows."""
