"""Programs whose results a rewritten program may give instead of the original's.

`docs/numerics.md` says what may differ. A sigmoid of exponentials that overflow stays a
number. A finite fill of a mask hides what it is chosen for or added to, however large
the scores are. Gradients of a softmax that overflows are compared with those of
one that does not.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from tests.soundness.program import Program

TOTAL = r"e\.sum\(-1, keepdims=True\)"
STABLE_ROWS = {
    rf"\(lambda e: e / {TOTAL}\)\(jnp\.exp\((\w+)\)\)": r"jax.nn.softmax(\1, -1)",
    rf"\(lambda e: e / \(1\.0 \+ {TOTAL}\)\)\(jnp\.exp\((\w+)\)\)": (
        r"(lambda s, m: jnp.exp(s - m) / "
        r"(jnp.exp(-m) + jnp.exp(s - m).sum(-1, keepdims=True)))"
        r"(\1, jnp.maximum(\1.max(-1, keepdims=True), 0.0))"
    ),
    rf"\(lambda e: e / \(jnp\.exp\(-(\w+)\.max\(-1, keepdims=True\)\) \+ {TOTAL}\)\)"
    r"\(jnp\.exp\(\1 - \1\.max\(-1, keepdims=True\)\)\)": (
        r"(lambda s, m: jnp.exp(s - m) / "
        r"(jnp.exp(-m) + jnp.exp(s - m).sum(-1, keepdims=True)))"
        r"(\1, jnp.maximum(\1.max(-1, keepdims=True), 0.0))"
    ),
    r"jnp\.exp\((\w+) - jax\.nn\.logsumexp\(\1, -1, keepdims=True\)\)": (
        r"jax.nn.softmax(\1, -1)"
    ),
    r"jnp\.exp\(jax\.nn\.log_softmax\((\w+), -1\)\)": r"jax.nn.softmax(\1, -1)",
}
"""How programs write weights of rows that overflow, and the same that do not."""
STABLE = STABLE_ROWS | {
    r"(\w+) \* jnp\.exp\(\1\) / \(1\.0 \+ jnp\.exp\(\1\)\)": (
        r"\1 * jax.nn.sigmoid(\1)"
    ),
    r"jnp\.exp\((\w+)\) / \(1\.0 \+ jnp\.exp\(\1\)\)": r"jax.nn.sigmoid(\1)",
    r"1\.0 / \(1\.0 \+ jnp\.exp\(-(\w+)\)\)": r"jax.nn.sigmoid(\1)",
    r"(\w+) / \(1\.0 \+ jnp\.exp\(-\1\)\)": r"\1 * jax.nn.sigmoid(\1)",
    r"\(jnp\.exp\((\w+)\) - jnp\.exp\(-\1\)\) / "
    r"\(jnp\.exp\(\1\) \+ jnp\.exp\(-\1\)\)": r"jnp.tanh(\1)",
    r"jnp\.log\(1\.0 \+ jnp\.exp\((\w+)\)\)": r"jnp.logaddexp(\1, 0.0)",
    r"jnp\.log1p\(jnp\.exp\((\w+)\)\)": r"jnp.logaddexp(\1, 0.0)",
    r"jnp\.where\((\w+) > 0\.0, \1, jnp\.exp\(\1\) - 1\.0\)": (
        r"jnp.where(\1 > 0.0, \1, jnp.exp(jnp.where(\1 > 0.0, 0.0, \1)) - 1.0)"
    ),
    r"jnp\.where\((\w+) > 0\.0, \1, jnp\.expm1\(\1\)\)": (
        r"jnp.where(\1 > 0.0, \1, jnp.expm1(jnp.where(\1 > 0.0, 0.0, \1)))"
    ),
}
"""How programs write what overflows, and the same that does not."""
TOP = {
    r"(\w+) - \1\.max\(-1, keepdims=True\)": (
        r"\1 - lax.stop_gradient(\1.max(-1, keepdims=True))"
    )
}
"""A maximum that is subtracted. Its gradient is 0, as written by what cancels."""
TOTALS = {
    rf"\(lambda e: e / {TOTAL}\)\(jnp\.exp\((\w+)"
    r"(?: - (?:lax\.stop_gradient\()?\1\.max\(-1, keepdims=True\)\)?)?\)\)": (
        r"jnp.exp(\1 - jax.nn.logsumexp(\1, -1, keepdims=True))"
    ),
    r"jax\.nn\.softmax\((\w+), -1\)": (
        r"jnp.exp(\1 - jax.nn.logsumexp(\1, -1, keepdims=True))"
    ),
}
"""How programs write weights, and the same by the log-sum-exp of their rows."""
NUMBER = r"(-?\d+(?:\.\d*)?)"
FILL = (
    r"(?:-1e9|-1e4|-1e30|-2\.0 \*\* 31|(?:0\.5 \* )?jnp\.finfo\(jnp\.float32\)\.min)"
    r"(?![\w.])"
)
HIDDEN = r"\(1\.0 - \((\w+)\)\.astype\(jnp\.float32\)\) \* "
DEEP = {FILL: "-1e38", rf"({HIDDEN})1e[49](?![\w.])": r"\g<1>1e38"}
"""Fills beside which no score is anything."""
SHIFTED = {
    rf"(\(lambda e: e / (?:\(1\.0 \+ )?{TOTAL}\)?\)\(jnp\.exp\()(\w+)\)": r"\1\2 - 4.0)"
}
"""Exponentials without their maximum, by the logarithm of the number of keys smaller.
What rows that overflow give may differ as much, see `docs/numerics.md`."""
LOWERED = {
    rf"(\(lambda e: e / {TOTAL}\)\(jnp\.exp\()(\w+)\)": r"\1\2 - 4.0)",
}
"""The same of those that give the same weights, unless they overflow or vanish."""
BOTTOMLESS = {
    r"jax\.nn\.dot_product_attention\((\w+), (\w+), (\w+), mask=(.*)\)$": (
        r"jnp.einsum('bnts,bsnh->btnh', jax.nn.softmax(jnp.where(\4, "
        r"jnp.einsum('btnh,bsnh->bnts', \1, \2) / \1.shape[-1] ** 0.5, -jnp.inf)), \3)"
    ),
    rf"\+ {HIDDEN}{FILL}": r"+ jnp.where(\1, 0.0, -jnp.inf)",
    rf"- {HIDDEN}1e9(?![\w.])": r"- jnp.where(\1, 0.0, jnp.inf)",
    FILL: "-jnp.inf",
}
"""The same of which nothing is smaller."""
CHOSEN = {
    rf"(\w+) \+ {HIDDEN}({FILL})": r"jnp.where(\2, \1, \3)",
    rf"(\w+) \+ jnp\.where\((\w+), 0\.0, ({FILL})\)": r"jnp.where(\2, \1, \3)",
    rf"(\w+) - {HIDDEN}1e9(?![\w.])": r"jnp.where(\2, \1, -1e9)",
}
"""How programs add fills, and the same that chooses them: no hidden score counts."""
CHOSEN_ZEROS = {
    rf"jnp\.clip\((\w+), {NUMBER}, {NUMBER}\)": (
        r"jnp.where(\1 < \2, \2, jnp.where(\1 > \3, \3, \1))"
    ),
    rf"(?:jnp|lax)\.max(?:imum)?\((\w+), {NUMBER}\)": r"jnp.where(\1 < \2, \2, \1)",
    rf"(?:jnp|lax)\.min(?:imum)?\((\w+), {NUMBER}\)": r"jnp.where(\1 > \2, \2, \1)",
}
"""How programs limit numbers, and the same with derivatives that are chosen: as
factors, they give NaN for a cotangent that is NaN or infinite."""

MOST_USES = 3
"""Of how many uses of weights it is told which are stable."""

OF_OWN_GROUP = {
    r"lax\.ragged_dot\((\w+)( \* 2\.0)?, (\w+)( \* 2\.0)?, (\w+)\)": (
        r"(lambda x, w, i, some: jnp.where(some, jnp.einsum("
        r"'mk,mkf->mf', jnp.where(some, x, 0.0), w[i]), 0.0))("
        r"\1\2, \3\4, jnp.repeat(jnp.arange(\3.shape[0]), \5, "
        r"total_repeat_length=\1.shape[0]), "
        r"(jnp.arange(\1.shape[0]) < \5.sum())[:, None])"
    )
}
"""Products in which no row meets another group's matrix: JAX multiplies it by zeros."""


def of_own_group(program: Program) -> Program:
    """Returns the program with ragged dots that read only a row's own matrix."""
    return _written(program, OF_OWN_GROUP)


def stable(program: Program) -> Program:
    """Returns the program with what overflows written otherwise."""
    return _written(program, STABLE)


def has_rows_that_overflow(program: Program) -> bool:
    """Whether weights of its rows are written so that they may overflow."""
    return _written(program, STABLE_ROWS) != program


def partly_stable(program: Program) -> tuple[Program, ...]:
    """Returns programs in which some uses of weights that overflow are stable.

    A kernel computes the weights of its own site. What else reads them, such as a
    difference of weights, is as written, and so are the overflows in its gradient.
    """
    found: list[Program] = []
    for at, line in enumerate(program.lines):
        name, _, made = line.partition(" = ")
        other = _stable_text(made)
        places = _uses(program.lines, at, name) if other != made else []
        for some in _some(places):
            lines = [*program.lines]
            for i in some:
                lines[i] = re.sub(rf"\b{name}\b", f"{name}_stable", lines[i])
            lines.insert(at + 1, f"{name}_stable = {other}")
            found.append(replace(program, lines=tuple(lines)))
    return tuple(found)


def _stable_text(text: str) -> str:
    for old, new in STABLE.items():
        text = re.sub(old, new, text)
    return text


def _uses(lines: tuple[str, ...], at: int, name: str) -> list[int]:
    """Lines behind one that read its value."""
    own = re.compile(rf"\b{name}\b")
    return [i for i, line in enumerate(lines) if i > at and own.search(line)]


def _some(places: list[int]) -> list[tuple[int, ...]]:
    """Some of several places: not none, and not all; only of a few."""
    if len(places) > MOST_USES:
        return []
    sizes = range(1, len(places))
    return [c for n in sizes for c in itertools.combinations(places, n)]


def deep(program: Program) -> Program:
    """Returns a stable program whose fills hide all scores."""
    return _written(stable(program), DEEP)


def hiding(program: Program) -> Program:
    """Returns the program with fills that hide all scores."""
    return _written(program, DEEP)


def wide(program: Program) -> Program:
    """Returns a norm without its casts to float32, for runs in float64."""
    casts = {r"\.astype\(jnp\.float32\)": ".astype(jnp.float64)"}
    return _written(program, casts if program.kind == "norm" else {})


def unrounded(program: Program) -> Program:
    """Returns a loss without roundings of logits to 16 bits.

    A kernel may keep logits in float32. What masks and quantized arrays are made of is
    rounded as it is written.
    """
    casts = {r"\.astype\(jnp\.b?float16\)": ".astype(jnp.float32)"}
    return _written(program, casts if program.kind == "loss" else {})


def of_fixed_top(program: Program) -> Program:
    """Returns the program without gradients of maxima that are subtracted.

    They add up what others of a row have, so that both cancel to the last bit. A kernel
    leaves them out: what rounding leaves of the others is seen.
    """
    return _written(program, TOP)


def by_total(program: Program) -> Program:
    """Returns the program with weights by the log-sum-exp of each row.

    Gradients of a kernel are made of that one number of a row, as large as its scores.
    """
    return _written(of_fixed_top(program), TOTALS)


def shifted(program: Program) -> Program:
    """Returns the program with exponentials that overflow later."""
    return _written(program, SHIFTED)


def lowered(program: Program) -> Program:
    """Returns the program with the same weights of smaller exponentials."""
    return _written(program, LOWERED)


def bottomless(program: Program) -> Program:
    """Returns a stable program in which nothing is below its fills."""
    return _written(stable(program), BOTTOMLESS)


def chosen(program: Program) -> Program:
    """Returns the program with fills that are chosen, where it adds them."""
    return _written(program, CHOSEN)


def of_chosen_zeros(program: Program) -> Program:
    """Returns the program with limits whose derivatives are chosen, not multiplied."""
    return _written(program, CHOSEN_ZEROS)


def _written(program: Program, changes: dict[str, str]) -> Program:
    lines = program.lines
    for old, new in changes.items():
        lines = tuple(re.sub(old, new, line) for line in lines)
    return replace(program, lines=lines)
