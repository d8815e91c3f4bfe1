"""The fastest kernel by models of a known device, where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.choose.usable import pays, reasons_of, usable
from rewriter.config import Config
from rewriter.measure.costs import UNKNOWN, Costs, modelled_costs
from rewriter.measure.key import BOTH, FORWARD
from rewriter.measure.measurement import time_text
from rewriter.ops.device import Device
from rewriter.ops.estimate import ROOM
from rewriter.ops.kernel import Kernel, Spec, of_least_sizes
from rewriter.site.implementation import XLA, default_configs

MARGIN = {"cuda": 0.8}
"""The share of XLA's estimated time that a kernel may take, by platform."""

FAR = 0.5
"""The same on platforms whose models were never compared with measurements."""

OWN = 0.8
"""The same for a TPU-only kernel, whose model simulates both XLA and the kernel."""


def fastest_estimated(
    spec: Spec,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    differentiated: int,
    longer: Mapping[str, float],
) -> Choice | None:
    """The fastest by the kernels' models of a known device; None without models.

    A kernel without a model that comes before them is chosen by its own rule. Symbolic
    sizes count as their least: a kernel that is faster there is chosen.
    """
    here = [k for k in kernels if device.platform in k.platforms]
    modelled = any(k.speed.estimate is not None for k in here)
    if not (device.flops and device.bandwidth and modelled):
        return None
    sized = of_least_sizes(spec)
    passes = BOTH if differentiated else FORWARD
    memory = {} if spec.symbolic else _memory(sized, here, device, passes)
    refused: list[tuple[str, str]] = []
    times: dict[str, float] = {}
    unknown: dict[str, str] = {}
    xla = 0.0
    for kernel in here:
        verdict = usable(kernel, spec, device, config)
        if verdict.ok and kernel.speed.estimate is None:
            verdict = pays(kernel, spec, device.platform, differentiated)
            if verdict.ok and not times:
                chosen = default_configs(spec, device, kernel)
                costs = _modelled(passes, kernel.name, (0.0, 0.0), memory)
                return Choice(chosen, "heuristic", tuple(refused), costs=costs)
        if verdict.ok and kernel.speed.estimate is not None:
            found = kernel.speed.estimate(sized, device, passes)
            modelled_here = kernel.speed.modelled(sized, device, passes)
            unknown[kernel.name] = reasons_of(modelled_here)
            times[kernel.name], xla = (
                found[name] + 1e-6 * longer.get(name, 0.0)
                for name in (kernel.name, XLA)
            )
        elif not verdict.ok:
            refused.append((kernel.name, reasons_of(verdict)))
    limits = {
        k.name: _margin(k, sized, device, passes) * xla for k in here if k.name in times
    }
    better = [name for name, t in times.items() if t < limits[name]]
    best = min(better or times, key=times.__getitem__, default="")
    wins = bool(better)
    if spec.symbolic and not wins:
        return None  # larger sizes may pay
    winner = next((k for k in here if wins and k.name == best), None)
    implementation = default_configs(spec, device, winner) if winner else AS_WRITTEN
    against = times[best] if wins else xla
    slower = {**times, XLA: xla} if wins else times
    refused += [
        (name, unknown.get(name) or _by_model(name, us, against, device))
        for name, us in slower.items()
        if name != best or not wins
    ]  # fmt: skip
    took = (xla, against) if times and not spec.symbolic else (0.0, 0.0)
    costs = _modelled(passes, best if wins else XLA, took, memory)
    return Choice(implementation, "estimated", tuple(refused), costs=costs)


def far_faster(
    spec: Spec,
    kernels: Sequence[Kernel],
    device: Device,
    passes: str,
    best_us: float | None,
    longer: Mapping[str, float],
) -> Kernel | None:
    """An unmeasured kernel that is far faster by its model, or None."""
    margin = MARGIN.get(device.platform)
    if margin is None or best_us is None or not (device.flops and device.bandwidth):
        return None
    times = {
        k: 1e6 * model(spec, device, passes)[k.name] + longer.get(k.name, 0.0)
        for k in kernels
        if (model := k.speed.estimate) is not None
    }
    best = min(times, key=times.__getitem__, default=None)
    return best if best is not None and times[best] < margin * best_us else None


def estimated_costs(
    spec: Spec, kernels: Sequence[Kernel], device: Device, passes: str, chosen: str
) -> Costs:
    """Returns the costs of a choice by models of the device; unknown without them.

    Args:
        spec: The use, of known sizes.
        kernels: The op's kernels.
        device: Where it will run.
        passes: What runs.
        chosen: What is chosen: a kernel's name, or XLA.
    """
    own = [k for k in kernels if device.platform in k.platforms]
    us = [estimated_us(name, spec, own, device, passes) for name in (XLA, chosen)]
    if None in us:
        return UNKNOWN
    times = 1e-6 * (us[0] or 0.0), 1e-6 * (us[1] or 0.0)
    return _modelled(passes, chosen, times, _memory(spec, own, device, passes))


def _memory(
    spec: Spec, kernels: Sequence[Kernel], device: Device, passes: str
) -> Mapping[str, float]:
    """Modelled bytes of temporary memory, by XLA and by kernels that say so."""
    found: dict[str, float] = {}
    for kernel in kernels:
        if kernel.speed.temporary is not None:
            found |= kernel.speed.temporary(spec, device, passes)
    return found


def _modelled(
    passes: str, chosen: str, times: tuple[float, float], memory: Mapping[str, float]
) -> Costs:
    """The costs by seconds as written and as chosen, and by bytes."""
    return modelled_costs(*times, passes, memory.get(XLA), memory.get(chosen))


def estimated_us(
    name: str, spec: Spec, kernels: Sequence[Kernel], device: Device, passes: str
) -> float | None:
    """Returns the estimate of a kernel, or of XLA, in microseconds; None without."""
    if not (device.flops and device.bandwidth):
        return None
    models = (k.speed.estimate for k in kernels if name in (k.name, XLA))
    model = next((x for x in models if x is not None), None)
    return None if model is None else 1e6 * model(spec, device, passes)[name]


def _margin(kernel: Kernel, spec: Spec, device: Device, passes: str) -> float:
    """The share of XLA's estimated time that a kernel may take."""
    if kernel.platforms == ("tpu",):
        return OWN
    if device.platform not in MARGIN:
        return FAR
    own = kernel.speed.margin and kernel.speed.margin(spec, device, passes)
    return own or MARGIN[device.platform]


def _by_model(name: str, mine: float, best: float, device: Device) -> str:
    """Why an implementation loses by its estimate."""
    if math.isinf(mine) and name != XLA:
        return "its model has no time for this use: measure it with tune"
    if math.isinf(mine):
        size = f"{100 * ROOM:.0f}% of the {device.memory >> 30} GiB of {device.kind}"
        return f"its temporary arrays take more than {size}"
    own, other = time_text(1e6 * mine), time_text(1e6 * best)
    if own == other:
        return f"estimated to be as fast: {own}"
    return f"estimated to take {own}, and the choice {other}"
