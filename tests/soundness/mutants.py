"""Programs of other kinds, in which one step more is done to one value on the way.

A step that an op does not have is not part of the op: a rounding to few bits, a guard,
a derivative that is said to be another one. Whatever the value is, the step stays.
"""

from __future__ import annotations

import dataclasses
import random

from tests.soundness import attention, lookups, losses, norms, ragged, units
from tests.soundness.program import Program

OF = (
    attention.of_operands, attention.of_operands, norms.program, units.program,
    losses.program, ragged.program, lookups.program,
)  # fmt: skip
RULE = "(lambda h: (h.defjvps({rule}), h)[1])(jax.custom_jvp({f}))"
STEPS = (
    "{x}.astype(jnp.float8_e4m3fn).astype({x}.dtype)",
    "{x}.astype(jnp.float8_e5m2).astype({x}.dtype)",
    "lax.reduce_precision({x}, 5, 2)", "lax.reduce_precision({x}, 8, 3)",
    "{x}.astype(jnp.int32).astype({x}.dtype)", "jnp.floor({x} * 8.0) / 8.0",
    "lax.stop_gradient({x})", "0.5 * {x} + 0.5 * lax.stop_gradient({x})",
    "{x} + lax.stop_gradient(jnp.round({x}) - {x})",
    f"{RULE.format(rule='lambda t, o, x: 0.5 * t', f='jnp.positive')}({{x}})",
    f"{RULE.format(rule='lambda t, o, x: t * t.dtype.type(2)', f='jnp.tanh')}({{x}})",
    f"{RULE.format(rule='lambda t, o, x: 0.0 * t', f='lambda x: x * 1.0')}({{x}})",
    "{x} * 1.001", "{x} + 1e-3", "jnp.where({x} > 0.1, {x}, 0.1)", "jnp.sort({x}, -1)",
    "jnp.where(jnp.isfinite({x}), {x}, 0.0)", "jnp.minimum({x}, 2.0)", "{x}[::-1]",
    "jnp.roll({x}, 1, -1)", "jnp.abs({x})", "jnp.cumsum({x}, -1) / 8.0",
)  # fmt: skip


def program(seed: int) -> Program:
    """A program of another kind, with a step behind one of its lines."""
    draw = random.Random(f"mutant {seed}")
    of = draw.choice(OF)(seed)
    *lines, last = of.lines
    places = [i for i, line in enumerate(lines) if " = " in line]
    if not places:
        return of
    at = draw.choice(places[-6:])  # nearly always inside of the op
    name = lines[at].split(" = ")[0]
    step = draw.choice(STEPS).format(x=name)
    kept = (
        f"{name} if {name}.ndim == 0 or not jnp.issubdtype({name}.dtype, jnp.floating)"
    )
    step = f"{name} = {kept} else ({step}).astype({name}.dtype)"
    return dataclasses.replace(
        of, lines=(*lines[: at + 1], step, *lines[at + 1 :], last)
    )
