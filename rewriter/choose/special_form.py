"""Prefers a special form of an op where one of its kernels is chosen.

Paged attention is also attention over keys that are gathered first; the search finds
both. The special form is used where one of its kernels is chosen. Otherwise the general
op is used, which has kernels of its own.
"""

from __future__ import annotations

import dataclasses

from rewriter.choose.choose import choose
from rewriter.config import Config
from rewriter.find.match import Found, Match
from rewriter.ops.device import Device
from rewriter.ops.kernel import PLATFORMS
from rewriter.ops.registry import registry
from rewriter.ops.spec import Spec, of_least_sizes
from rewriter.site.implementation import XLA

Reasons = tuple[tuple[str, str], ...]
"""Pairs of a kernel, or a form of an op, and why it is not chosen."""


def prefer_special_ops(
    found: Found, config: Config, target: Device, differentiated: bool
) -> tuple[Match, ...]:
    """Returns the matches, keeping one where several forms of an op match one result.

    Args:
        found: What was found in a program.
        config: Forced kernels, measurements.
        target: Where the program will run.
        differentiated: Whether the program computes gradients.
    """
    matches = found.matches
    general = {(m.op.name, m.value): m for m in matches}
    forms = [m for m in matches if (m.op.form_of, m.value) in general]
    known: dict[int, tuple[str, Reasons]] = {}
    taken: dict[tuple[str, int], Match] = {}
    why: dict[tuple[str, int], Reasons] = {}
    for m in forms:
        if id(m.reading) not in known:
            known[id(m.reading)] = _chosen(
                m, general[m.op.form_of, m.value], config, target, differentiated
            )
        kernel, reasons = known[id(m.reading)]
        if kernel == XLA:
            why[m.op.form_of, m.value] = reasons
        else:
            taken[m.op.form_of, m.value] = m
    refused = _refused(found)
    chosen = []
    for m in matches:
        if m not in forms:
            reasons = why.get((m.op.name, m.value), refused.get(id(m.reading), ()))
            m = taken.get((m.op.name, m.value), m)
            chosen.append(dataclasses.replace(m, not_chosen=reasons) if reasons else m)
    return tuple(chosen)


def _refused(found: Found) -> dict[int, Reasons]:
    """Why each region is not a special form of its op, by the id of its reading."""
    shipped = sorted({name for name, _ in found.refused} & {*registry().ops()})
    forms = {name: registry().op(name).form_of for name in shipped}
    by_reading: dict[int, Reasons] = {}
    for m in found.matches:
        reasons = tuple(
            (name, found.refused[name, m.anchor.outs[0]])
            for name, general in forms.items()
            if general == m.op.name and (name, m.anchor.outs[0]) in found.refused
        )
        if reasons:
            by_reading[id(m.reading)] = reasons
    return by_reading


def _chosen(
    match: Match, general: Match, config: Config, target: Device, differentiated: bool
) -> tuple[str, Reasons]:
    """The chosen kernel of a special form, or why the form has none.

    A kernel that both have in plain JAX does not replace a faster one of the general
    op, such as one for a GPU. It replaces the general op's own where it reads less.
    """
    op = match.op
    forced = {name for name, *_ in config.implementation}
    if op.form_of in forced and op.name not in forced:
        return XLA, ((op.name, f"a kernel of {op.form_of} is forced"),)
    kernels = match.pattern.kernels
    choice = choose(match.spec, config, kernels, target, where=match.where)
    others = general.pattern.kernels
    plain = {k.name for k in kernels if set(k.platforms) == set(PLATFORMS)}
    both = plain & {k.name for k in others}
    why = tuple(
        (f"{op.name} {name}", text)
        for name, text in choice.not_chosen
        if name not in both  # the general op says why its own is not chosen
    )
    if op.name not in forced and choice.kernel in both:
        there = choose(general.spec, config, others, target, where=match.where).kernel
        if there not in (XLA, choice.kernel):
            return XLA, ((op.name, f"{there} computes it as {op.form_of}"),)
        if there != XLA and _bytes(match.spec) >= _bytes(general.spec):
            return XLA, ((op.name, f"it reads no less than {op.form_of}"),)
    elif op.name not in forced and _is_slower(
        match, general, config, target, differentiated
    ):
        return XLA, ((op.name, f"a kernel of {op.form_of} is estimated to be faster"),)
    return choice.kernel, why


FASTER = 0.8
"""The share of the special form's time that the general op's may take."""


def _is_slower(
    match: Match, general: Match, config: Config, target: Device, differentiated: bool
) -> bool:
    """Whether the general op is estimated to be faster than a special form of it.

    It may be given an array that the special form computes of parts. Writing and
    reading it counts. A GPU's kernel for windows of up to 64 positions takes a table of
    biases, and no function of scores that adds two, as shifted windows have them.
    """
    more = {*general.spec.operands} - {*match.spec.operands}
    written = 2 * sum(map(of_least_sizes(general.spec).nbytes, more))
    special, other = (
        choose(m.spec, config, m.pattern.kernels, target, int(differentiated)).costs
        for m in (match, general)
    )
    known = special.source == other.source == "estimated"
    if not known or special.after_us is None or other.after_us is None:
        return False
    return other.after_us + 1e6 * written / target.bandwidth < FASTER * special.after_us


def _bytes(spec: Spec) -> int:
    """Bytes of a use's operands."""
    least = of_least_sizes(spec)
    return sum(map(least.nbytes, least.operands))
