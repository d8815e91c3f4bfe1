"""Matches of an op and of its special forms in, one of them for each result out.

A use of paged attention is one of attention too, over keys that are gathered first:
both are found. The special form is taken where one of its kernels is chosen, else the
general op, which has kernels of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rewriter.choose import choose
from rewriter.config import Config
from rewriter.device import Device
from rewriter.implementation import XLA
from rewriter.match import Match


def of_one_form(
    matches: Sequence[Match], config: Config, target: Device
) -> tuple[Match, ...]:
    """Returns the matches, one for each result that several forms of an op compute.

    Args:
        matches: What was found in a program.
        config: Forced kernels, measurements.
        target: Where the program will run.
    """
    general = {(m.op.name, m.value) for m in matches}
    forms = [m for m in matches if (m.op.form_of, m.value) in general]
    known: dict[int, tuple[str, tuple[tuple[str, str], ...]]] = {}
    taken: dict[tuple[str, int], Match] = {}
    why: dict[tuple[str, int], tuple[tuple[str, str], ...]] = {}
    for m in forms:
        if id(m.reading) not in known:
            known[id(m.reading)] = _chosen(m, config, target)
        kernel, reasons = known[id(m.reading)]
        if kernel == XLA:
            why[m.op.form_of, m.value] = reasons
        else:
            taken[m.op.form_of, m.value] = m
    found = [taken.get((m.op.name, m.value), m) for m in matches if m not in forms]
    return tuple(
        dataclasses.replace(m, not_chosen=why[m.op.name, m.value])
        if (m.op.name, m.value) in why
        else m
        for m in found
    )


def _chosen(
    match: Match, config: Config, target: Device
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The kernel of a special form; for XLA, why it is none of the form's."""
    op = match.op
    forced = {name for name, *_ in config.implementation}
    if op.form_of in forced and op.name not in forced:
        return XLA, ((op.name, f"a kernel of {op.form_of} is forced"),)
    kernels = match.pattern.kernels
    choice = choose(match.spec, config, kernels, target, where=match.where)
    why = tuple((f"{op.name} {name}", text) for name, text in choice.not_chosen)
    return choice.kernel, why
