"""Makes branches of a cond alike again, after some were given more inputs and results.

Branches of a cond have equal inputs and results. A branch that hands residuals to its
gradients returns them, and the other branches return zeros. A branch that reads
residuals has them as inputs, which the other branches do not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rewriter import _jax
from rewriter.program.loops import inserted


def alike(
    bodies: Sequence[Any],
    read: Sequence[Sequence[Any]],
    made: Sequence[Sequence[Any]],
    source: Any,
) -> list[Any]:
    """Returns branches with equal inputs and results.

    Args:
        bodies: The branches. Each has its own further inputs and results as its last.
        read: By branch, the types of its further inputs.
        made: By branch, the types of its further results.
        source: The source info for equations that make zeros.
    """
    return [_padded(body, k, read, made, source) for k, body in enumerate(bodies)]


def _padded(
    body: Any,
    branch: int,
    read: Sequence[Sequence[Any]],
    made: Sequence[Sequence[Any]],
    source: Any,
) -> Any:
    """A branch with the further inputs and results of all branches, in their order."""
    own, own_outs = list(body.invars), list(body.outvars)
    at, to = len(own) - len(read[branch]), len(own_outs) - len(made[branch])
    inputs = [[_jax.new_var(a) for a in avals] for avals in read]
    inputs[branch] = own[at:]
    absent = [a for k, avals in enumerate(made) if k != branch for a in avals]
    eqns, zeros = _zeros(absent, source)
    before = sum(map(len, made[:branch]))
    return _jax.with_signature(
        body,
        [*own[:at], *itertools.chain.from_iterable(inputs)],
        [*body.eqns, *eqns],
        [*own_outs[:to], *zeros[:before], *own_outs[to:], *zeros[before:]],
    )


def _zeros(avals: Sequence[Any], source: Any) -> tuple[list[Any], list[Any]]:
    """Equations and results that are zeros of some types."""
    if not avals:
        return [], []
    fragment = _jax.zeros(avals)
    if fragment.constvars:
        raise ValueError("zeros hold constants")
    return inserted(fragment, (), source)
