"""Chooses a site's kernels: forced by name, fastest measured, or by rule of thumb."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import InconclusiveDimensionOperation

from rewriter.choose import choose_sum
from rewriter.config import Config
from rewriter.errors import KernelError, UnknownKernel, caller, known
from rewriter.measure.decision import Decision, fastest
from rewriter.measure.key import BOTH, FORWARD, PROGRAM, Key, key_of
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
from rewriter.measure.program_key import REWRITTEN, WITHOUT
from rewriter.measure.sources import look_up, sources
from rewriter.ops.device import Device, deterministic_xla
from rewriter.ops.kernel import Kernel, Spec, of_least_sizes
from rewriter.ops.registry import REFERENCE
from rewriter.site.implementation import (
    RING,
    XLA,
    Implementation,
    config_of,
    configured,
    default_configs,
)
from rewriter.support.verdict import YES, Verdict, no


@dataclass(frozen=True)
class Choice:
    """What computes a site on one platform.

    Attributes:
        implementation: The kernels of both passes.
        origin: ``"forced"``, ``"tuned"`` (given by the user), ``"cached"``,
            ``"shipped"``, ``"nearest"``, ``"simulated"`` (by the device's compiler,
            where nothing was measured), ``"estimated"`` (by a model of the device) or
            ``"heuristic"``.
        not_chosen: (name, reason) for everything else.
        ring: Whether it computes on parts of operands that devices pass around.
    """

    implementation: Implementation
    origin: str
    not_chosen: tuple[tuple[str, str], ...] = field(default=())
    ring: bool = False

    @property
    def kernel(self) -> str:
        """The kernels' names; ``"xla"`` leaves the program as written."""
        name = self.implementation.name
        return f"{RING} of {name}" if self.ring else name


AS_WRITTEN = Implementation()


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
    forced = [f for f in config.implementation if f[0] == spec.op]
    if forced:
        return _forced(spec, forced[0][1:], kernels, config, device, where)
    if config.numerics == "strict":
        why = "numerics='strict', and every kernel sums in another order"
        return Choice(AS_WRITTEN, "heuristic", tuple((k.name, why) for k in kernels))
    arguments = (spec, config, kernels, device)
    longer = choose_sum.reading_us(spec, kernels, device, sum_of) if sum_of else {}
    measured = _measured(*arguments, differentiated > 0, spelling, longer)
    if measured is None:
        estimated = _estimated(*arguments, differentiated, longer)
        choice = estimated or _by_rule(*arguments, differentiated)
        measured = _configured(choice, *arguments, differentiated > 0)
    return _with_reading_said(measured, longer)


def _with_reading_said(choice: Choice, longer: Mapping[str, float]) -> Choice:
    if not longer or choice.implementation.forward in longer:
        return choice
    return replace(
        choice, not_chosen=choose_sum.mention_reading(choice.not_chosen, longer)
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


def usable(kernel: Kernel, spec: Spec, device: Device, config: Config) -> Verdict:
    """Returns whether a kernel may be chosen for a site on a device."""
    if config.exporting and not kernel.traits.exportable:
        return no("export", "JAX does not keep its call stable in exported programs")
    if device.platform not in kernel.platforms:
        names = ", ".join(kernel.platforms)
        return no("platform", f"runs on {names}, not {device.platform}")
    verdict = kernel.limits.runs_on(device)
    if verdict.ok and _only_deterministic(config):
        verdict = kernel.limits.deterministic(None)
    return _decided(kernel.limits.supports, spec) if verdict.ok else verdict


def _decided(check: Callable[..., Verdict], spec: Spec, *args: Any) -> Verdict:
    """A kernel's check; no where it compares symbolic sizes that may be either."""
    try:
        return check(spec, *args)
    except InconclusiveDimensionOperation as why:
        if not spec.symbolic:
            raise
        return no("symbolic", str(why).partition("\n")[0])


def _only_deterministic(config: Config) -> bool:
    return config.deterministic or deterministic_xla()


# --------------------------------------------------------------------- estimated
MARGIN = {"cuda": 0.8}
"""The share of XLA's estimated time that a kernel may take, by platform."""

FAR = 0.5
"""The same on platforms whose models were never compared with measurements."""

OWN = 0.8
"""The same for a TPU-only kernel, whose model simulates both XLA and the kernel."""


def _estimated(
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
    refused: list[tuple[str, str]] = []
    times: dict[str, float] = {}
    xla = 0.0
    for kernel in here:
        verdict = usable(kernel, spec, device, config)
        if verdict.ok and kernel.speed.estimate is None:
            verdict = _pays(kernel, spec, device.platform, differentiated)
            if verdict.ok and not times:
                implementation = default_configs(spec, device, kernel)
                return Choice(implementation, "heuristic", tuple(refused))
        if verdict.ok and kernel.speed.estimate is not None:
            passes = BOTH if differentiated else FORWARD
            found = kernel.speed.estimate(sized, device, passes)
            times[kernel.name], xla = (
                found[name] + 1e-6 * longer.get(name, 0.0)
                for name in (kernel.name, XLA)
            )
        elif not verdict.ok:
            refused.append((kernel.name, _reasons(verdict)))
    limits = {k.name: _margin(k, device.platform) * xla for k in here}
    better = [name for name, t in times.items() if t < limits[name]]
    best = min(better or times, key=times.__getitem__, default="")
    wins = bool(better)
    if spec.symbolic and not wins:
        return None  # larger sizes may pay
    implementation = AS_WRITTEN
    if wins:
        implementation = default_configs(
            spec, device, next(k for k in here if k.name == best)
        )
    against = times[best] if wins else xla
    slower = {**times, XLA: xla} if wins else times
    refused += [
        (name, _by_model(name, us, against)) for name, us in slower.items()
        if name != best or not wins
    ]  # fmt: skip
    return Choice(implementation, "estimated", tuple(refused))


def _margin(kernel: Kernel, platform: str) -> float:
    """The share of XLA's estimated time that a kernel may take."""
    return OWN if kernel.platforms == ("tpu",) else MARGIN.get(platform, FAR)


def _by_model(name: str, mine: float, best: float) -> str:
    """Why an implementation loses by its estimate."""
    if math.isinf(mine) and name == XLA:
        return "what it keeps for a while does not fit into the device's memory"
    if math.isinf(mine):
        return "no estimate: nothing of this size was measured (`rewriter.tune` does)"
    mine, best = 1e6 * mine, 1e6 * best
    return f"estimated to take {time_text(mine)}, and the choice {time_text(best)}"


# --------------------------------------------------------------- rules of thumb
def _by_rule(
    spec: Spec,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    differentiated: int,
) -> Choice:
    refused: list[tuple[str, str]] = []
    here = device.platform
    # Kernels for other platforms are not mentioned, unless there are no others.
    for kernel in [k for k in kernels if here in k.platforms] or kernels:
        asked = kernel.speed.by_rule or device.kind not in ("", here)
        verdict = usable(kernel, spec, device, config) if asked else YES
        if verdict.ok:
            verdict = _pays(kernel, spec, here, differentiated)
        if verdict.ok:
            implementation = default_configs(spec, device, kernel)
            return Choice(implementation, "heuristic", tuple(refused))
        refused.append((kernel.name, _reasons(verdict)))
    return Choice(AS_WRITTEN, "heuristic", tuple(refused))


def _pays(kernel: Kernel, spec: Spec, platform: str, differentiated: int) -> Verdict:
    if differentiated and kernel.speed.profitable_backward is not None:
        check = kernel.speed.profitable_backward
        return _decided(check, spec, platform, differentiated)
    return _decided(kernel.speed.profitable, spec, platform)


def _reasons(verdict: Verdict) -> str:
    return "; ".join(r.text for r in verdict.reasons)


# ----------------------------------------------------------------------- forced
def _forced(
    spec: Spec,
    asked: tuple[Sequence[str], Sequence[str]],
    kernels: Sequence[Kernel],
    config: Config,
    device: Device,
    where: str,
) -> Choice:
    forward, backward = asked
    why: list[tuple[str, str]] = []
    first = _first(forward, spec, kernels, config, device, why)
    second = _first(backward, spec, kernels, config, device, why)
    if first is None and not forward:
        first = REFERENCE  # only the backward was asked for
    if first is None or (backward and second is None):
        names = ", ".join((*forward, *backward))
        text = "; ".join(f"{name}: {reason}" for name, reason in why)
        raise KernelError(
            f"implementation={{{spec.op!r}: {names!r}}} is not available: {text}",
            next_step=f"Add {XLA!r} as the last of a list to leave such sites as they "
            "are",
            where=where or caller(),
        )
    by_name = {k.name: k for k in kernels}
    if XLA in (first, second):
        return Choice(AS_WRITTEN, "forced", tuple(why))
    implementation = default_configs(
        spec, device, by_name.get(first), by_name.get(second or "")
    )
    if second == REFERENCE:
        implementation = replace(
            implementation, backward=REFERENCE, backward_config=None
        )
    return Choice(implementation, "forced", tuple(why))


def _first(
    names: Sequence[str],
    spec: Spec,
    kernels: Sequence[Kernel],
    config: Config,
    device: Device,
    why: list[tuple[str, str]],
) -> str | None:
    """The first available name; reasons against earlier ones are added to `why`."""
    check_names(names, spec, kernels)
    by_name = {k.name: k for k in kernels}
    for name in names:
        if name in (XLA, REFERENCE):
            return name
        if name == RING:
            why.append((name, "nothing goes around devices as its operands are split"))
            continue
        kernel = by_name[name]
        # A kernel for another platform is lowered only there, on a device unknown so
        # far.
        elsewhere = Device("", kernel.platforms[0])
        on = device if device.platform in kernel.platforms else elsewhere
        verdict = usable(kernel, spec, on, config)
        if verdict.ok:
            return name
        why.append((name, _reasons(verdict)))
    return None


def check_names(names: Sequence[str], spec: Spec, kernels: Sequence[Kernel]) -> None:
    """Raises `UnknownKernel` if a requested name is no kernel of the op."""
    there = [*(k.name for k in kernels), REFERENCE, XLA, RING]
    for name in names:
        if name not in there:
            raise UnknownKernel(
                f"{spec.op} has no kernel {name!r}",
                next_step=known(name, there),
                where=caller(),
            )


# --------------------------------------------------------------------- measured
def _measured(
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
        if any(spellings(found)):
            found = of_spelling(found, spelling())
        decision = fastest([choose_sum.with_reading(m, longer) for m in found])
        alone = all(m.implementation.forward == XLA for m in found)
        if decision is None or (simulated and alone):
            continue
        if decision.best.method == BUNDLES:
            continue  # they rank a kernel's configs, see `_configured`
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
        refused = [
            (k.name, _reasons(usable(k, spec, device, config)) or "not measured")
            for k in others
        ]
        here = [k for k in others if usable(k, spec, device, config).ok]
        faster = _far_faster(
            spec, here, device, passes, decision.best.median_us, longer
        )
        if faster is not None:
            rest = [(n, why) for n, why in refused if n != faster.name]
            lost = (decision.best.implementation.name, "its time, measured, is longer")
            implementation = default_configs(spec, device, faster)
            return Choice(
                implementation, "estimated", (lost, *_by_kernel(decision), *rest)
            )
        return Choice(implementation, origin, (*_by_kernel(decision), *refused))
    return None


def _far_faster(
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


def _configured(
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
    return Choice(decision.best.implementation, SIMULATED, lost)


def _by_kernel(decision: Decision) -> list[tuple[str, str]]:
    """Why other kernels lost, each with its best config."""
    names: dict[str, str] = {}
    for name, why in decision.lost:
        names.setdefault(name, why)
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
    if _only_deterministic(config) and not _deterministic(implementation, kernels):
        return False
    return all(
        usable(kernels[n], spec, device, config).ok for n in implementation.kernels
    )
