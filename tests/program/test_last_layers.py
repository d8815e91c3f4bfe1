"""Programs whose last layer is unlike the others, or is read in another way."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.program import fold
from rewriter.program.repeats import Numbered, ends_alike, runs
from rewriter.rewrite import unfold
from tests.program.test_fold import (
    X,
    decoder,
    layer,
    norm,
    unit,
    weights,
    written_out_twice,
)

LEAST = 100
"""The fewest equations that are worth leaving out, in these small programs."""


def tied(ps: Any, x: Any) -> Any:
    return decoder([*ps[:-1], ps[-2]], x)


def as_the_first(ps: Any, x: Any) -> Any:
    return decoder([*ps[:-1], ps[0]], x)


def swapped(ps: Any, x: Any) -> Any:
    return decoder([*ps[:-2], ps[-1], ps[-2]], x)


def scaled_weights(ps: Any, x: Any) -> Any:
    return decoder([*ps[:-1], {k: 2 * v for k, v in ps[-1].items()}], x)


def half_of_the_weights_tied(ps: Any, x: Any) -> Any:
    return decoder([*ps[:-1], {**ps[-1], "up": ps[-2]["up"], "n1": ps[-1]["n2"]}], x)


def other_epsilon(ps: Any, x: Any) -> Any:
    return layer(ps[-1], decoder(ps[:-1], x), 1e-4)


def attends_to_the_input(ps: Any, x: Any) -> Any:
    return layer(ps[-1], decoder(ps[:-1], x) + x)


def of_the_input_alone(ps: Any, x: Any) -> Any:
    return decoder(ps[:-1], x) + layer(ps[-1], x)


def one_value_carried_in_vain(ps: Any, x: Any) -> Any:
    y = x
    for p in ps:
        x, y = layer(p, x), y + unit(p, norm(x, p["n2"]))
    return x


def normed_at_the_end(ps: Any, x: Any) -> Any:
    return norm(decoder(ps, x), ps[0]["n1"])


def multiplied_at_the_end(ps: Any, x: Any) -> Any:
    return jax.nn.silu(decoder(ps, x) @ ps[0]["gate"]) @ ps[0]["down"]


def last_two_returned(ps: Any, x: Any) -> Any:
    y = decoder(ps[:-1], x)
    return y, layer(ps[-1], y)


def last_one_not_returned(ps: Any, x: Any) -> Any:
    y = decoder(ps[:-1], x)
    layer(ps[-1], y)
    return y


def inner_value_returned(ps: Any, x: Any) -> Any:
    y = decoder(ps[:-1], x)
    h = norm(y, ps[-1]["n1"])
    return layer(ps[-1], y), h


def gate_alone_at_the_end(ps: Any, x: Any) -> Any:
    x = decoder(ps, x)
    return x + unit(ps[0], norm(x, ps[0]["n2"]))


PROGRAMS = [
    tied, as_the_first, swapped, scaled_weights, half_of_the_weights_tied,
    other_epsilon, attends_to_the_input, of_the_input_alone,
    one_value_carried_in_vain, normed_at_the_end, multiplied_at_the_end,
    last_two_returned, last_one_not_returned, inner_value_returned,
    gate_alone_at_the_end,
]  # fmt: skip


WHOLE = (one_value_carried_in_vain,)
"""Those of which no layer is left out in the end."""


def found(sites: Any) -> list[str]:
    """The sites of a report, in whatever order."""
    return sorted(repr(dataclasses.replace(s, index=0)) for s in sites)


@pytest.mark.once
@pytest.mark.parametrize("program", PROGRAMS)
def test_same_program_comes_out_as_without_leaving_layers_out(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "WORTH", LEAST)
    ps = weights()
    closed, short, whole = written_out_twice(program, ps, X)
    assert ("unfold" in short.seconds) == (program not in WHOLE)
    assert str(short.closed_jaxpr) == str(whole.closed_jaxpr)
    assert found(short.sites) == found(whole.sites)
    leaves = jax.tree.leaves((ps, X))
    results = (jaxpr_as_fun(p)(*leaves) for p in (closed, short.closed_jaxpr))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("program", "alike"), [(decoder, True), (tied, False), (scaled_weights, False)]
)
def test_last_layer_counts_as_alike_only_if_it_reads_its_own_inputs(
    program: Any, alike: bool
) -> None:
    numbered = Numbered(jax.make_jaxpr(program)(weights(), X))
    (run,) = runs(numbered)
    assert ends_alike(numbered, run) == alike


def test_fewest_layers_are_left_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "WORTH", LEAST)
    left = {}
    for program in (decoder, tied):
        folded = fold.fold(jax.make_jaxpr(program)(weights(), X), fold.FEWEST)
        assert folded is not None
        (cut,) = folded.cuts
        left[program] = cut.run.count - len(cut.out)
    assert left == {decoder: 3, tied: 4}


def test_results_that_only_one_of_two_turns_drops_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = [lambda x: jnp.split(x, 2), lambda x: jnp.split(x, 2)[::-1]]
    both, one = (jax.make_jaxpr(f)(jnp.ones(4)).eqns for f in programs)
    unfold._check_alike(both, one)
    dropped = one[0].outvars[1]
    monkeypatch.setattr(_jax, "is_drop", lambda v: v is dropped)
    with pytest.raises(unfold.TurnsDiffer):
        unfold._check_alike(both, one)
