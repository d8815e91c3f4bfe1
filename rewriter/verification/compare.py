"""Finds where two functions of the same arguments differ by more than rounding.

Both are compiled once, and run on the user's arguments and on probes made from them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from rewriter.measure import oracle
from rewriter.support.dtypes import is_float
from rewriter.verification.decision_inputs import deciding, only_deciding
from rewriter.verification.judge import Verdicts, judged
from rewriter.verification.probes import Probe, draws, perturbed, probes
from rewriter.verification.rounding import coarsest

log = logging.getLogger("rewriter.compare")

YOURS = "your arguments"
SHAKES = 4
"""Runs with arguments moved by a rounding, where the two differ."""

Flat = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Difference:
    """The difference of one result.

    Attributes:
        result: Its position.
        on: The arguments: `YOURS`, or a probe's name.
        texts: What differs, one sentence each.
    """

    result: int
    on: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """The outcome of running both functions.

    Attributes:
        verdicts: The verdict on each result, on the user's arguments.
        dtypes: The results' dtypes.
        coarse: The coarsest dtype behind each.
        differences: All differences, those on the user's arguments first.
        probes: The number of probes that ran.
        silent: Names of probes on which the program as written gives no number.
        note: The parts that could not run in float64, or ``""``.
    """

    verdicts: tuple[Verdicts, ...]
    dtypes: tuple[str, ...]
    coarse: tuple[str, ...]
    differences: tuple[Difference, ...]
    probes: int = 0
    silent: tuple[str, ...] = ()
    note: str = ""

    @property
    def off(self) -> tuple[int, ...]:
        """Positions of the results that differ anywhere."""
        return tuple(dict.fromkeys(d.result for d in self.differences))

    def of(self, result: int) -> Difference | None:
        """The first difference of a result."""
        return next((d for d in self.differences if d.result == result), None)


def compared(
    written: Flat,
    rewritten: Flat,
    leaves: Sequence[Any],
    names: Sequence[str] = (),
    *,
    gradients: Iterable[int] = (),
    most: int | None = None,
    errors: bool = False,
    called: str = YOURS,
    compiled: bool = True,
    again: int = 0,
) -> Comparison:
    """Returns where two functions of a list of arrays differ.

    Args:
        written: Returns a list of arrays.
        rewritten: Should return the same arrays.
        leaves: The arguments.
        names: Their names.
        gradients: Positions of results whose rows of zeros must stay so.
        most: Probes at most; all by default.
        compiled: Whether to compile the second function, which may know the devices of
            its arguments only outside another `jax.jit`.
        called: The name for the user's arguments.
        errors: Whether to report errors against float64 even without a difference.
        again: How often to compare on arguments drawn anew.

    Example:
        >>> f = lambda xs: [jnp.where(xs[0] >= xs[0], 1.0, 2.0)]
        >>> g = lambda xs: [jnp.where(xs[0] - xs[0] >= 0, 1.0, 2.0)]
        >>> compared(f, g, [jnp.ones(4)]).off
        (0,)
        >>> compared(f, f, [jnp.ones(4)]).off
        ()
    """
    pair = _Both(written, rewritten, leaves, frozenset(gradients), compiled)
    verdicts = pair.on(leaves, always=errors)
    differences = _differences(verdicts, called)
    silent, count = [], 0
    others = draws(leaves, pair.deciding, again)
    for probe in [*others, *probes(leaves, pair.deciding, names)[:most]]:
        reported = frozenset(d.result for d in differences)
        if len(reported) == len(verdicts):
            break
        found = pair.on(probe.of(leaves), probe, reported)
        count += probe not in others
        if found is None:
            silent.append(probe.name)
            continue
        differences += _differences(found, probe.name)
    return Comparison(
        tuple(verdicts),
        tuple(str(v.dtype) for v in pair.program.out_avals),
        tuple(pair.coarse),
        tuple(differences),
        count,
        tuple(silent),
        pair.note,
    )


def _differences(verdicts: Sequence[Verdicts], on: str) -> list[Difference]:
    return [Difference(k, on, v.differs) for k, v in enumerate(verdicts) if v.differs]


class _Both:
    """Both functions, each compiled at most once."""

    def __init__(
        self,
        written: Flat,
        rewritten: Flat,
        leaves: Sequence[Any],
        gradients: frozenset[int],
        compiled: bool,
    ) -> None:
        self.written = jax.jit(lambda xs: list(written(xs)))
        self.rewritten = lambda xs: list(rewritten(xs))
        if compiled:
            self.rewritten = jax.jit(self.rewritten)
        self.gradients, self.note = gradients, ""
        self.program: ClosedJaxpr = jax.make_jaxpr(lambda *xs: self.written(list(xs)))(
            *leaves
        )
        self.unit = _unit(leaves)
        self.deciding = deciding(self.program)
        self.stay = only_deciding(self.program)
        self.coarse = coarsest(self.program)
        self.replay = functools.cache(lambda: oracle.replay_of(self.program))

    def on(
        self,
        leaves: Sequence[Any],
        probe: Probe | None = None,
        reported: frozenset[int] = frozenset(),
        always: bool = False,
    ) -> Any:
        """The verdict on each result; None if the original gives no number.

        Results with an earlier difference get no second one.
        """
        arguments = list(leaves)
        before = self.written(arguments)
        if probe is not None and not _says_something(before):
            return None
        after = self.rewritten(arguments)
        moved = functools.cache(lambda: self._moved(self.written, arguments))
        again = functools.cache(lambda: self._moved(self.rewritten, arguments))
        exact = functools.cache(lambda: self._exact(arguments))
        unit = max(self.unit, _unit(arguments))
        return [
            Verdicts()
            if k in reported
            else judged(
                a,
                b,
                self.coarse[k],
                lambda k=k: [run[k] for run in moved()],
                lambda k=k: exact()[k],
                again=lambda k=k: [run[k] for run in again()],
                gradient=k in self.gradients,
                scaled=probe is not None and probe.scaled,
                infinite=probe is not None and probe.infinite,
                always=always,
                together=probe is None,
                unit=unit,
            )
            for k, (a, b) in enumerate(zip(before, after, strict=True))
        ]

    def _moved(self, function: Flat, leaves: Sequence[Any]) -> list[Any]:
        """Results for arguments that are moved by a rounding, several times.

        Those that only comparisons read stay: what they decide is not a rounding.
        """
        coarse = max(self.coarse, key=lambda name: jnp.finfo(name or "float64").eps)
        return [
            function(
                [
                    x if stays else perturbed(x, decides, coarse, seed)
                    for x, decides, stays in zip(
                        leaves, self.deciding, self.stay, strict=True
                    )
                ]
            )
            for seed in range(SHAKES)
        ]

    def _exact(self, leaves: Sequence[Any]) -> Sequence[Any]:
        found, self.note = self.replay()(leaves)
        return found


def _unit(leaves: Sequence[Any]) -> float:
    """The largest root mean square of arguments that are floats."""
    floats = [np.asarray(x).astype(np.float64) for x in leaves if is_float(x)]
    with np.errstate(all="ignore"):
        finite = [x[np.isfinite(x)] for x in floats]
        sizes = [np.sqrt(np.mean(x**2)) for x in finite if x.size]
    return max((float(n) for n in sizes if np.isfinite(n)), default=0.0)


def _says_something(results: Sequence[Any]) -> bool:
    """Whether any result holds a number."""
    for x in results:
        real = jnp.issubdtype(x.dtype, jnp.inexact)
        if not real or np.isfinite(np.asarray(x).astype(np.complex128)).any():
            return True
    return False
