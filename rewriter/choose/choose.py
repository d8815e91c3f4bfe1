"""Chooses a site's kernels: forced by name, fastest measured, or by rule of thumb.

A use passes these once, and the first that has an answer gives it: `forced`,
`known_times`, `estimated`, `by_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rewriter.choose import residual_add_cost
from rewriter.choose.by_rule import by_rule
from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.choose.estimated import fastest_estimated
from rewriter.choose.forced import forced_by_name
from rewriter.choose.known_times import fastest_known, with_known_config
from rewriter.config import Config
from rewriter.measure.decision import fastest
from rewriter.measure.key import PROGRAM, Key
from rewriter.measure.measurement import time_text
from rewriter.measure.program_key import REWRITTEN, WITHOUT
from rewriter.measure.sources import sources
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.registry import REFERENCE, registry
from rewriter.site.implementation import XLA


def choose(
    spec: Spec,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    differentiated: int = 0,
    where: str = "",
    spelling: Callable[[], str] = str,
    sum_of: str = "",
) -> Choice:
    """Returns what computes a site: forced, measured, estimated, or by its rule.

    Args:
        spec: The site's shapes, dtypes and parameters.
        config: ``implementation`` forces kernels for an op; ``numerics="strict"``
            leaves every site as written; ``tune`` and ``tuned`` name measurements.
        kernels: The op's kernels, best first.
        device: Where it will run.
        differentiated: How often the same program computes its gradient, over all
            layers; 0 without.
        where: The user's line, for errors.
        spelling: Returns the digest of the user's own equations, to look up XLA's time.
        sum_of: The operand that is a sum. A kernel that `adds_to` it computes the sum
            itself; others read it from memory once more.

    Raises:
        UnknownKernel: If a forced kernel does not exist.
        KernelError: If none of the forced kernels supports the site.
    """
    forced = _forced(spec, config, kernels)
    if forced:
        return forced_by_name(spec, forced[0][1:], kernels, config, device, where)
    if config.numerics == "strict":
        why = "numerics='strict', and every kernel sums in another order"
        return Choice(AS_WRITTEN, "heuristic", tuple((k.name, why) for k in kernels))
    arguments = (spec, config, kernels, device)
    longer = (
        residual_add_cost.reading_us(spec, kernels, device, sum_of) if sum_of else {}
    )
    measured = fastest_known(*arguments, differentiated > 0, spelling, longer)
    if measured is None:
        estimated = fastest_estimated(*arguments, differentiated, longer)
        choice = estimated or by_rule(*arguments, differentiated)
        measured = with_known_config(choice, *arguments, differentiated > 0)
    return _with_reading_mentioned(measured, longer)


def _forced(
    spec: Spec, config: Config, kernels: Sequence[Kernel]
) -> list[tuple[str, Sequence[str], Sequence[str]]]:
    """The kernels that are named for an op, or for the op that it is a form of.

    A form has fewer kernels: those that it lacks are not asked for.
    """
    own = [f for f in config.implementation if f[0] == spec.op]
    form_of = registry().op(spec.op).form_of if spec.op in registry().ops() else ""
    if own or not form_of:
        return own
    there = {*(k.name for k in kernels), REFERENCE, XLA}
    general = (f for f in config.implementation if f[0] == form_of)
    return [
        (
            name,
            [k for k in first if k in there] or [XLA],
            [k for k in second if k in there],
        )
        for name, first, second in general
    ]


def _with_reading_mentioned(choice: Choice, longer: Mapping[str, float]) -> Choice:
    if not longer or choice.implementation.forward in longer:
        return choice
    return replace(
        choice, not_chosen=residual_add_cost.mention_reading(choice.not_chosen, longer)
    )


def left_out(
    config: Config, device: Device, key: Key
) -> tuple[tuple[str, ...] | None, str]:
    """Returns the ops to leave as written in a whole program, and why.

    Args:
        config: Where measurements are.
        device: Where the program will run.
        key: The program's.

    Returns:
        Names of ops; None for all ops; () if nothing was measured, or if rewriting
        every op is fastest.
    """
    for _, entries in sources(config, device, PROGRAM):
        decision = fastest(dict(entries).get(key, ()))
        if decision is None:
            continue
        best, name = decision.best, decision.best.implementation.forward
        others = dict(decision.lost)
        why = f"end to end, with it {others.get(REWRITTEN, 'it is slower')}"
        if name == XLA:
            return None, why
        if name.startswith(WITHOUT):
            return (name.removeprefix(WITHOUT),), why
        return (), f"end to end {time_text(best.median_us or 0.0)}"
    return (), ""
