"""Ten programs or more of each kind that a rewrite could change, with their gradients.

`test_kinds` compares what the programs give. Here arrays that they hold are arguments,
by which they are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from tests.measure import test_end_to_end as replaced
from tests.soundness import test_behind_masks as behind
from tests.soundness import test_kinds as kinds
from tests.soundness import test_near_constants as near

pytestmark = pytest.mark.once

TEN = 10
CANCELS = 0.25
"""Smaller gradients are rounded as this one is: those of a row that sees a single key
are what rounding leaves of a sum that is 0, see `docs/numerics.md`."""
GUARDED = {n: of for n, of in kinds.KINDS["guarded scores"].items() if "inf" in n}
ROWS: dict[str, Mapping[str, tuple]] = {
    "masks of floats respelled": kinds.FLOATS,
    "masks true of all numbers": kinds.KINDS["cancelled"],
    "masks of unsigned and saturated integers": kinds.INTEGERS,
    "floats taken for integers": kinds.LOW_PRECISION,
    "constants snapped": dict([*kinds.THRESHOLDS.items()][::3]),
    "integers folded": kinds.FOLDED,
    "stable forms undone": kinds.KINDS["stable"],
    "products respelled": kinds.CONTRACTED,
    "weights chosen by themselves": kinds.KINDS["pruned"],
    "guards of variances removed": kinds.KINDS["guarded rows"],
    "guards of scores removed": GUARDED,
}
"""Programs by kind, each with its arguments."""
ELSEWHERE = {
    "two scales that are nearly one": near.PROGRAMS,
    "rows without keys": kinds.WEIGHING,
    "NaN and infinities behind a mask": behind.MASKS,
    "checks that compare operands": replaced.CASES,
}
"""Kinds whose gradients are compared beside their values, in the tests of each."""


@pytest.mark.parametrize("kind", [*ROWS, *ELSEWHERE])
def test_each_kind_has_ten_programs(kind: str) -> None:
    assert len({**ROWS, **ELSEWHERE}[kind]) >= TEN


def lifted(f: Callable, args: Sequence[Any]) -> tuple[Callable, list[Any]]:
    """A program with the arrays that it holds as arguments, and all of these."""
    closed = jax.make_jaxpr(f)(*args)

    def run(*given: Any) -> Any:
        consts, rest = given[: len(closed.consts)], given[len(closed.consts) :]
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *rest)[0]

    return run, [*closed.consts, *args]


def gradients(f: Callable, given: Sequence[Any]) -> Callable:
    """What gives a program's gradients by its arrays of floats."""
    floats = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    which = tuple(i for i, x in enumerate(given) if floats(x))

    def loss(*given: Any) -> Any:
        out = f(*given)
        return (out * jnp.cos(0.37 * jnp.arange(out.size).reshape(out.shape))).sum()

    return jax.grad(loss, which)


@pytest.mark.parametrize("kind", ROWS)
def test_gradients_of_each_kind(kind: str) -> None:
    """By `grad(optimize(f))` and by `optimize(grad(f))`, as those of the program."""
    programs = {n: lifted(f, args) for n, (f, *args) in ROWS[kind].items()}
    given = {n: args for n, (_, args) in programs.items()}
    fast = lambda f: rewriter.optimize(f, implementation=kinds.FORCED, strict=True)
    ways: dict[str, Callable[[Callable, Any], Callable]] = {
        "as written": gradients,
        "grad(optimize)": lambda f, args: gradients(fast(f), args),
        "optimize(grad)": lambda f, args: fast(gradients(f, args)),
    }
    results = {
        way: jax.jit(
            lambda g, of=of: {n: of(programs[n][0], given[n])(*g[n]) for n in g}
        )(given)
        for way, of in ways.items()
    }
    want = results.pop("as written")
    for way, got in results.items():
        pairs = {n: zip(want[n], got[n], strict=True) for n in want}
        wrong = {
            n: [kinds.differs(*xy, CANCELS) for xy in of] for n, of in pairs.items()
        }
        assert not {n: text for n, text in wrong.items() if any(text)}, way
