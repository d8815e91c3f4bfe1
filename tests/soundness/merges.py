"""Attention over parts of the keys, merged by their maxima and sums."""

from __future__ import annotations

import dataclasses

from tests.soundness import masks, operands, scores
from tests.soundness.program import Program
from tests.soundness.writer import Writer

PLAIN = ("{m}", "{m}", "lax.stop_gradient({m})")
FAR_BELOW = (
    "jnp.maximum({m}, -1e30)", "jnp.nan_to_num({m})",
    "jnp.where({m} > -jnp.inf, {m}, -1e30)", "jnp.where(jnp.isfinite({m}), {m}, -1e30)",
)  # fmt: skip
FLOORS = (
    "jnp.where(jnp.isfinite({m}), {m}, 0.0)", "jnp.where({m} == -jnp.inf, 0.0, {m})",
    "jnp.where(jnp.isneginf({m}), 0.0, {m})", "jnp.maximum({m}, -100.0)",
    "jnp.maximum({m}, 0.0)",
)  # fmt: skip
TOGETHER = (
    "jnp.maximum({a}, {b})", "jnp.maximum({b}, {a})", "jnp.where({a} > {b}, {a}, {b})",
)  # fmt: skip
ODD_TOGETHER = (
    "jnp.stack([{a}, {b}]).max(0)", "{a}", "jnp.logaddexp({a}, {b})", "({a} + {b}) / 2",
)  # fmt: skip
SHARES = ("jnp.exp({x} - {m})",)
ODD_SHARES = (
    "jnp.exp2(({x} - {m}) * 1.4426950408889634)", "jnp.exp({x}) / jnp.exp({m})",
)  # fmt: skip
QUOTIENTS = ("{o} / {t}", "{o} / {t}", "{o} * (1.0 / {t})")
ODD_QUOTIENTS = (
    "{o} / ({t} + 1e-6)", "{o} / jnp.maximum({t}, 1e-6)",
    "jnp.where({t} > 0, {o} / {t}, 0.0)", "{o} / jnp.where({t} == 0.0, 1.0, {t})",
    "jnp.nan_to_num({o} / {t})",
)  # fmt: skip
FILLS = ("-jnp.inf", "-jnp.inf", "-1e9", "-1e30", "jnp.finfo(jnp.float32).min")


def program(seed: int) -> Program:
    """Attention of two parts of the keys."""
    w = Writer("merge", seed)
    size = dataclasses.replace(scores.sizes(w), queries=(keys := w.one((16, 24))),
                               keys=keys)  # fmt: skip
    values = {n: operands.values(w, 0.1) for n in "qkv"}
    given = scores.given(w, size, (8, 8), values)
    mask = masks.mask(w, size, 0) if w.chance(0.3) else masks.causal(w, size)
    whole = f"jnp.broadcast_to({mask}, ({size.batch}, {size.heads}, {keys}, {keys}))"
    mask, fill = w.let(whole, "m"), w.one(FILLS)
    guard = w.usually(FAR_BELOW if fill == "-jnp.inf" else PLAIN, FLOORS, 0.3)
    score, cut = scores.scores(w, given), w.one((4, 8, keys // 2))
    score = w.let(f"jnp.where({mask}, {score}, {fill})", "s")
    value = w.let(f"{given.v}.swapaxes(1, 2)", "v")
    parts = []
    for at in (f":{cut}", f"{cut}:"):
        one = w.let(f"{score}[..., {at}]", "s")
        top = w.let(f"{one}.max(-1, keepdims=True)", "top")
        if guard != "{m}":
            top = w.let(guard.format(m=top), "top")
        e = w.let(f"jnp.exp({one} - {top})", "e")
        total = w.let(f"{e}.sum(-1, keepdims=True)", "n")
        parts.append((w.let(f"{e} @ {value}[:, :, {at}]", "o"), total, top))
    (o1, n1, m1), (o2, n2, m2) = parts
    top = w.let(w.usually(TOGETHER, ODD_TOGETHER).format(a=m1, b=m2), "top")
    share = w.usually(SHARES, ODD_SHARES)
    a, b = (w.let(share.format(x=x, m=top), "a") for x in (m1, m2))
    out = w.let(f"{o1} * {a} + {o2} * {b}", "o")
    total = w.let(f"{n1} * {a} + {n2} * {b}", "n")
    out = w.let(w.usually(QUOTIENTS, ODD_QUOTIENTS).format(o=out, t=total), "o")
    return w.program(f"{out}.swapaxes(1, 2)")
