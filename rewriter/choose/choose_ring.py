"""Decides whether a site on several devices passes its keys around or gathers them.

Keys are passed around where the user asks for the implementation ``"ring"``. Otherwise
three things must hold: the program contains the gradients, the op's rule says that
passing pays, and the kernel chosen for one part saves what merging needs. Names after
``"ring"`` are kernels for the parts; the first available one is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewriter.choose.choice import Choice
from rewriter.choose.choose import choose
from rewriter.choose.forced import check_names
from rewriter.choose.usable import usable
from rewriter.config import Config, Names
from rewriter.errors import KernelError, caller
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.op import Ring
from rewriter.site.implementation import RING, XLA, Implementation, default_configs
from rewriter.support.verdict import Verdict

NO_GRADIENTS = (
    "it would pay, but has no jax.jvp, and this program holds no gradients; to be "
    "asked for where none is needed"
)
"""Why no ring is chosen by default: the program may be differentiated in any mode."""


def choose_ring(
    ring: Ring,
    spec: Spec,
    count: int,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    kept: int = 0,
    where: str = "",
) -> Choice | str:
    """Returns a choice that passes operands around, or why they are gathered.

    Args:
        ring: How they would be passed around.
        spec: What one device has.
        count: The number of devices in the ring.
        config: Forced kernels, numerics, measurements.
        kernels: The op's kernels, best first.
        device: Where it will run.
        kept: How often gathered operands would be saved for gradients.
        where: The user's line, for errors.

    Raises:
        KernelError: If passing around is impossible, and the user asked for nothing
            else.
        UnknownKernel: If the user asked for a kernel that the op does not have.
    """
    forward, backward = _asked(spec, config)
    arguments = ring, spec, count, config, kernels, device
    if forward[:1] == (RING,):
        check_names((*forward, *backward), spec.op, [k.name for k in kernels])
        own = "gradients go around with it, by no other kernel"
        parts = own if backward else by_parts(*arguments)
        if isinstance(parts, str) and forward == (RING,):
            raise KernelError(
                f"implementation={{{spec.op!r}: {RING!r}}} is not available: {parts}",
                next_step=f"Add {XLA!r} as the last of a list to leave such sites as "
                "they are",
                where=where or caller(),
            )
        return parts if isinstance(parts, str) else Choice(parts, "forced", ring=True)
    if forward or backward:
        return f"{', '.join((*forward, *backward))} was asked for"
    if config.numerics == "strict":
        return "numerics='strict', and a ring sums in another order"
    verdict = ring.supports(spec, count)
    if verdict.ok:
        verdict = ring.pays(spec, count, kept)
    parts = by_parts(*arguments, others=False) if verdict.ok else _reasons(verdict)
    if isinstance(parts, str):
        return parts
    return Choice(parts, "heuristic", ring=True) if kept else NO_GRADIENTS


def by_parts(
    ring: Ring,
    spec: Spec,
    count: int,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    others: bool = True,
) -> Implementation | str:
    """Returns the kernel for each part, or why there is none.

    Args:
        ring: How operands would be passed around.
        spec: What one device has.
        count: The number of devices in the ring.
        config: Measurements, and the kernels that the user asked for.
        kernels: The op's kernels, best first.
        device: Where it will run.
        others: Whether any other kernel may be used, if the requested or chosen ones
            cannot.
    """
    verdict = ring.supports(spec, count)
    if not verdict.ok:
        return _reasons(verdict)
    parts = [
        replace(spec, params=tuple(sorted(p.items()))) for p in ring.uses(spec, count)
    ]
    able = [
        k
        for k in kernels
        if k.traits.merges and all(usable(k, p, device, config).ok for p in parts)
    ]
    if not able:
        return f"no kernel for {device.platform} gives parts that can be merged"
    named = {k.name: k for k in able}
    for name in _asked(spec, config)[0]:
        if name in named:
            return default_configs(parts[-1], device, named[name])
    config = replace(config, implementation=())
    chosen = choose(parts[-1], config, kernels, device).implementation
    if chosen.forward in named and len(chosen.kernels) == 1:
        return chosen
    if not others:
        return f"{chosen.name}, which is best for a part, gives none that can be merged"
    kernel = next((k for k in able if k.traits.tried), able[0])
    return default_configs(parts[-1], device, kernel)


def _asked(spec: Spec, config: Config) -> tuple[Names, Names]:
    """The names that the user asked for, for each pass; () for none."""
    found = (f[1:] for f in config.implementation if f[0] == spec.op)
    return next(found, ((), ()))


def _reasons(verdict: Verdict) -> str:
    return "; ".join(r.text for r in verdict.reasons)
