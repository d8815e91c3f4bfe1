"""Measures whole programs: the same function rewritten in several ways."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from rewriter.hardware import conditions
from rewriter.measure.candidate import Compiled
from rewriter.measure.inputs import Inputs
from rewriter.measure.key import PROGRAM
from rewriter.measure.measurement import Measurement
from rewriter.measure.times import measurement, time_in_turns
from rewriter.site.implementation import Implementation
from rewriter.support.threads import first_line, side_by_side

WHOLE_TURNS = 12
"""Turns of whole programs."""


def race_programs(
    programs: Mapping[str, Any], leaves: Sequence[Any]
) -> tuple[Measurement, ...]:
    """Returns the times of whole programs on the same arguments, in turns.

    Args:
        programs: Jitted functions by the name of their rewrite.
        leaves: Their arguments.
    """
    forever = time.monotonic() + 1e6
    jobs = [lambda p=p: p.lower(*leaves).compile() for p in programs.values()]
    made = side_by_side(jobs, forever, forever)
    compiled = [
        Compiled(n, reason=p) if isinstance(p, str) else _tried(Compiled(n, p), leaves)
        for n, p in zip(programs, made, strict=True)
    ]
    sets = [Inputs("", (tuple(leaves),))]
    times = time_in_turns([c for c in compiled if not c.reason], sets, WHOLE_TURNS)
    at = conditions.now()
    found = []
    for c in compiled:
        made, its = Implementation(c.name), times.get(c.name, c.reason)
        if isinstance(its, str):
            failed = Measurement(made, PROGRAM, jax.__version__, None, problem=its)
            found.append(failed)
        else:
            found.append(measurement(made, PROGRAM, its, c, at))
    return tuple(found)


def _tried(c: Compiled, leaves: Sequence[Any]) -> Compiled:
    try:
        jax.block_until_ready(c.program(*leaves))
    except Exception as problem:
        return replace(c, reason=f"does not run: {first_line(problem)}")
    return c
