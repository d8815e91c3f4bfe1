"""The fastest kernel by known times: given, cached, shipped, or of near shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rewriter.choose import residual_add_cost
from rewriter.choose.choice import Choice
from rewriter.choose.estimated import estimated_costs, estimated_us, far_faster
from rewriter.choose.usable import only_deterministic, reasons_of, usable
from rewriter.config import Config
from rewriter.measure.costs import measured_costs
from rewriter.measure.decision import Decision, fastest
from rewriter.measure.key import BOTH, FORWARD, key_of
from rewriter.measure.measurement import (
    BUNDLES,
    ESTIMATES,
    SIMULATED,
    Measurement,
    of_spelling,
    spellings,
    time_text,
    version_of,
)
from rewriter.measure.sources import NEAREST, look_up, sources
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.site.implementation import (
    XLA,
    Implementation,
    config_of,
    configured,
    default_configs,
)


def fastest_known(
    spec: Spec,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    differentiated: bool,
    spelling: Callable[[], str],
    longer: Mapping[str, float],
) -> Choice | None:
    """The fastest choice, measured or else simulated; None if none is still valid."""
    passes = BOTH if differentiated else FORWARD
    look = _looking(spec, config, kernels, device)
    for simulated in (False, True):
        found, origin = look(passes, ESTIMATES if simulated else ())
        if not found:
            continue
        if any(spellings(found)):
            found = of_spelling(found, spelling())
        found = tuple(residual_add_cost.with_reading(m, longer) for m in found)
        decision = fastest(found)
        alone = all(m.implementation.forward == XLA for m in found)
        if decision is None or (simulated and alone):
            continue
        if decision.best.method == BUNDLES:
            continue  # they rank a kernel's configs, see `with_known_config`
        implementation = decision.best.implementation
        if not differentiated:
            gradient, _ = look(BOTH, ESTIMATES if simulated else ())
            gradient = of_spelling(gradient, spelling()) if gradient else ()
            implementation = _with_backward(implementation, gradient)
        timed = {name for m in found for name in m.implementation.kernels}
        others = [
            k for k in kernels
            if device.platform in k.platforms and k.name not in timed
        ]  # fmt: skip
        verdicts = [(k, usable(k, spec, device, config)) for k in others]
        refused = [(k.name, reasons_of(v) or "not measured") for k, v in verdicts]
        here = [k for k, verdict in verdicts if verdict.ok]
        exact = origin != NEAREST  # times of other shapes are not this site's
        best = decision.best.implementation
        took = decision.best.median_us
        if not exact:
            took = estimated_us(best.forward, spec, kernels, device, passes)
        faster = far_faster(spec, here, device, passes, took, longer)
        if faster is not None:
            rest = [(n, why) for n, why in refused if n != faster.name]
            slower = best.name, _lost_to(took or 0.0, exact, faster)
            implementation = default_configs(spec, device, faster)
            lost = (slower, *_by_kernel(decision, exact), *rest)
            costs = estimated_costs(spec, kernels, device, passes, faster.name)
            return Choice(implementation, "estimated", lost, costs=costs)
        costs = (
            measured_costs(decision, found, passes)
            if exact
            else estimated_costs(spec, kernels, device, passes, best.forward)
        )
        lost = (*_by_kernel(decision, exact), *refused)
        return Choice(implementation, origin, lost, costs=costs)
    return None


NEAR = "for a near shape or chip,"
"""What a reason begins with whose times are not of these very shapes on this device."""


def _lost_to(us: float, exact: bool, faster: Kernel) -> str:
    """Why the fastest that was measured loses to a kernel that was not."""
    took = f"{'measured' if exact else 'estimated'} to take {time_text(us)}"
    return f"{took}, and {faster.name} is estimated to take less"


def _looking(
    spec: Spec, config: Config, kernels: Sequence[Kernel], device: Device
) -> Callable[..., tuple[tuple[Measurement, ...], str]]:
    """A lookup by passes and estimation methods: known times, and their origin.

    Without methods it returns measurements.
    """
    none: tuple[tuple[Measurement, ...], str] = ((), "")
    if (config.tune == "off" and not config.tuned) or spec.symbolic or not kernels:
        return lambda passes, methods: none
    by_name = {k.name: k for k in kernels if device.platform in k.platforms}
    known = sources(config, device, spec.op)
    if not known:
        return lambda passes, methods: none

    def look(passes: str, methods: Sequence[str]) -> Any:
        def holds(m: Measurement) -> bool:
            how = m.method in methods if methods else m.method not in ESTIMATES
            return how and _holds(spec, config, by_name, device, m)

        found, origin = look_up(known, key_of(spec, passes, device.kind), holds)
        return found, SIMULATED if methods and found else origin

    return look


def with_known_config(
    choice: Choice,
    spec: Spec,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    differentiated: bool,
) -> Choice:
    """The choice with the kernel's config that has the fewest bundles, if known."""
    if choice.implementation.forward == XLA:
        return choice
    passes = BOTH if differentiated else FORWARD
    look = _looking(spec, config, kernels, device)
    found, _ = look(passes, (BUNDLES,))
    mine = [
        m for m in found if m.implementation.kernels == choice.implementation.kernels
    ]
    decision = fastest(mine)
    if decision is None:
        return choice
    lost = (*_by_kernel(decision), *choice.not_chosen)
    return Choice(decision.best.implementation, SIMULATED, lost, costs=choice.costs)


def _by_kernel(decision: Decision, exact: bool = True) -> list[tuple[str, str]]:
    """Why other kernels lost, each with its best config.

    Args:
        decision: What won, and what lost.
        exact: Whether the times are of these very shapes on this device.
    """
    names: dict[str, str] = {}
    for name, why in decision.lost:
        names.setdefault(name, why if exact else f"{NEAR} {why}")
    names.pop(decision.best.implementation.name, None)
    return list(names.items())


def _with_backward(
    forward: Implementation, measured: Sequence[Measurement]
) -> Implementation:
    """The forward with its fastest measured backward, in case one is needed.

    A program left as written keeps its own gradient.
    """
    same = [m for m in measured if m.implementation.forward == forward.forward]
    exactly = [m for m in same if m.implementation.config == forward.config]
    decision = fastest(exactly or same)
    if decision is None:
        return forward
    return replace(decision.best.implementation, config=forward.config)


def _deterministic(
    implementation: Implementation, kernels: Mapping[str, Kernel]
) -> bool:
    """Whether the backward's config gives the same bits in every run."""
    backward = kernels.get(implementation.backward or implementation.forward)
    if backward is None:
        return True
    config = config_of(backward.backward_space, implementation.backward_config)
    return backward.limits.deterministic(config).ok


def _holds(
    spec: Spec,
    config: Config,
    kernels: Mapping[str, Kernel],
    device: Device,
    m: Measurement,
) -> bool:
    """Whether the measured kernels still exist and support the site."""
    implementation = m.implementation
    if any(name not in kernels for name in implementation.kernels):
        return False
    if m.version != version_of(implementation, kernels, m.spelling):
        return False
    if not configured(implementation, kernels, spec, device):
        return False
    if only_deterministic(config) and not _deterministic(implementation, kernels):
        return False
    return all(
        usable(kernels[n], spec, device, config).ok for n in implementation.kernels
    )
