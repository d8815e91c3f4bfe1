"""Finds the sites of a rewritten program whose numbers differ from the original."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rewriter import _jax
from rewriter.rewrite.differing_inputs import inputs_of_one_side
from rewriter.rewrite.replacements import Pair
from rewriter.rewrite.rewritten import Rewritten
from rewriter.verification.compare import YOURS, Comparison, Difference, compared
from rewriter.verification.probes import drawn

log = logging.getLogger("rewriter.checked")

DRAWN = "drawn arguments"
"""The name of random arguments, used where the user's are unknown while tracing."""

Key = tuple[str, str]


@dataclass(frozen=True)
class Complaint:
    """A site, or the whole program, whose numbers differ.

    Attributes:
        sites: The sites to leave as written: ops and the user's lines.
        text: The difference, and the arguments that show it.
        whole: Whether the program's results differ and no site alone does.
    """

    sites: tuple[Key, ...]
    text: str
    whole: bool = False


def sites_of(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Returns the pairs that can run and whose types agree."""
    return tuple(p for p in pairs if p.written is not None)


def complaints(
    program: ClosedJaxpr,
    rewritten: Rewritten,
    inputs: Sequence[Any] | None,
    names: Sequence[str] = (),
) -> tuple[Complaint, ...]:
    """Returns the differences between a program and its rewritten form.

    Every kind of site is compared with all the equations that lead to it, and the
    whole program with the rewritten one.

    Args:
        program: The program as written.
        rewritten: The rewritten program.
        inputs: Its arguments; None if unknown, then some are drawn.
        names: The names of its arguments.
    """
    on = YOURS if inputs is not None else DRAWN
    inputs = drawn(program.in_avals) if inputs is None else inputs
    if inputs is None or any(_jax.is_tracer(x) for x in (*program.consts, *inputs)):
        log.debug("nothing is compared: arguments are not known")
        return ()
    pairs = sites_of(rewritten.pairs)
    whole = not program.effects
    try:
        found = compared(
            both_of(program, pairs, whole, "written"),
            both_of(rewritten.closed_jaxpr, pairs, whole, "replaced"),
            inputs,
            names,
            called=on,
        )
    except Exception as error:
        return _stopped(program, rewritten, inputs, error)
    return _complaints(program, rewritten, pairs, found, inputs, names, whole)


def both_of(program: ClosedJaxpr, pairs: Sequence[Pair], whole: bool, side: str) -> Any:
    """Returns a function of inputs to a program's results, and those of its sites."""
    run = jaxpr_as_fun(program)

    def call(inputs: Sequence[Any]) -> list[Any]:
        sites = [getattr(p, side)(inputs) for p in pairs]
        return [*(run(*inputs) if whole else ()), *sites]

    return call


def _stopped(
    program: ClosedJaxpr, rewritten: Rewritten, inputs: Sequence[Any], error: Exception
) -> tuple[Complaint, ...]:
    """The complaint about a rewritten program that fails where the original runs."""
    try:
        jax.block_until_ready(jax.jit(jaxpr_as_fun(program))(*inputs))
    except Exception:
        log.debug("nothing is compared: the program cannot be run", exc_info=error)
        return ()
    said = (str(error).splitlines() or [""])[0]
    text = f"cannot be run: {type(error).__name__}: {said}"
    return (Complaint(every(rewritten), text, True),)


def every(rewritten: Rewritten) -> tuple[Key, ...]:
    """Returns the identities of all replaced sites."""
    keys = [(s.op, s.where) for s in rewritten.sites if s.replaced]
    return tuple(dict.fromkeys([*(p.key for p in rewritten.pairs), *keys]))


def _complaints(
    program: ClosedJaxpr,
    rewritten: Rewritten,
    pairs: Sequence[Pair],
    found: Comparison,
    inputs: Sequence[Any],
    names: Sequence[str],
    whole: bool,
) -> tuple[Complaint, ...]:
    first = len(program.out_avals) if whole else 0
    complaints = []
    for k, pair in enumerate(pairs, first):
        if (difference := found.of(k)) is not None:
            text = in_words(difference)
            entries = found.verdicts[k].entries
            entry = entries[0] if entries else None
            text += inputs_of_one_side(pair, entry, inputs, names)
            complaints.append(Complaint((pair.key,), text))
    results = [d for k in range(first) if (d := found.of(k)) is not None]
    if results and not complaints:
        text = f"result {results[0].result} of the program: {in_words(results[0])}"
        complaints.append(Complaint(every(rewritten), text, True))
    return tuple(complaints)


def in_words(difference: Difference) -> str:
    """Returns a difference in words."""
    return f"on {difference.on}: {'; '.join(difference.texts)}"
