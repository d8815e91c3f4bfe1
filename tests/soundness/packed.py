"""Attention under masks of structure: segments, windows, lengths, prefixes, chunks.

Such masks are read as what they are, with what is known of their numbers: whether a
length is at least one, or whether every query sees itself.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.soundness import scores
from tests.soundness.masks import Sizes
from tests.soundness.program import Program
from tests.soundness.writer import Writer

NUMBERS = (
    "{n}", "jnp.maximum({n}, 1)", "jnp.maximum({n}, 0)", "jnp.minimum({n}, {half})",
    "jnp.clip({n}, 1, {half})", "{n} - 1", "1 + {n} // 2", "{half}", "1", "0", "-2",
)  # fmt: skip
"""Lengths and distances; `half` is half of the keys."""
SAME = (
    "{a}[:, None] == {b}[None]", "({a}[:, None] - {b}[None]) == 0",
    "~({a}[:, None] != {b}[None])", "jnp.equal({a}[:, None], {b}[None])",
)  # fmt: skip
BEFORE = (
    "{r} >= {c}", "{r} > {c}", "{c} <= {r} + {n}", "({r} >= {c}) & ({r} - {c} < {n})",
    "abs({r} - {c}) <= {n}", "({c} - {r} < {n}) & ({r} - {c} <= 3)", "{r} - {n} >= {c}",
    "({r} >= {c}) | ({c} < {n})", "({r} > {c}) | ({c} < {n})", "{r} != {c}",
    "{r} // 4 == {c} // 4", "{r} // 4 > {c} // 4", "({r} - {c}) % 3 == 0",
)  # fmt: skip
LENGTH = ("{c} < {n}", "{c} <= {n}", "~({c} >= {n})", "{c} >= {n}", "{n} > {c}")


def program(seed: int) -> Program:
    """Attention whose result is its weights, under one to three such conditions."""
    w = Writer("packed", seed)
    size = scores.sizes(w)
    given = scores.given(w, size, (8, size.keys), {"v": "identity"})
    mask = _condition(w, size)
    for _ in range(w.one((0, 1, 1, 2))):
        other = _condition(w, size)
        mask = w.let(w.mostly("{a} & {b}", ("{a} | {b}",)).format(a=mask, b=other), "m")
    score = scores.masked(w, scores.scores(w, given), mask)
    weights = scores.weights(w, score, mask)
    return w.program(scores.weighed(w, weights, given), entries=True)


def _condition(w: Writer, size: Sizes) -> str:
    ways: tuple[Callable[[], str], ...] = (
        lambda: _segments(w, size),
        lambda: _positions(w, size, BEFORE),
        lambda: _positions(w, size, LENGTH),
    )
    return w.let(w.branch(*ways), "m")


def _positions(w: Writer, size: Sizes, texts: tuple[str, ...]) -> str:
    """A condition of positions, and of a number that the program has or is given."""
    rows, columns = _arange(w, size.queries), _arange(w, size.keys)
    n = w.argument("n", (), "lengths", "int32")
    n = w.let(w.one(NUMBERS).format(n=n, half=size.keys // 2), "n")
    text = w.one(texts).format(r=f"{rows}[:, None]", c=f"{columns}[None]", n=n)
    return f"({text})"


def _arange(w: Writer, size: int) -> str:
    return w.let(f"jnp.arange({size})", "t")


def _segments(w: Writer, size: Sizes) -> str:
    """Equal numbers of a query and a key; perhaps those of padding hide it."""
    queries = _numbers(w, size.queries)
    same = size.queries == size.keys and w.chance(0.85)
    keys = queries if same else _numbers(w, size.keys)
    text = w.one(SAME).format(a=queries, b=keys)
    if w.chance(0.5):
        kept = w.one(("{k} >= 0", "{k} != -1", "{k} > 0")).format(k=keys)
        text = f"({text}) & ({kept})[None]"
    return f"({text})"


def _numbers(w: Writer, size: int) -> str:
    """Numbers that rise, with padding of -1 behind them: known, or given."""
    if w.chance(0.4):
        return w.argument("s", (size,), "segments", "int32")
    first, last = size // w.one((2, 3, 4)), size - w.one((0, 0, 3, 5))
    numbers = [(-1 if i >= last else int(i >= first)) for i in range(size)]
    return w.let(f"jnp.array({numbers})", "s")
