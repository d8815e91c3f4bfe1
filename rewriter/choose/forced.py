"""Kernels that the user names: the first that supports the use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.choose.usable import reasons_of, usable
from rewriter.config import Config
from rewriter.errors import KernelError, UnknownKernel, caller, known
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.registry import REFERENCE
from rewriter.site.implementation import RING, XLA, default_configs


def forced_by_name(
    spec: Spec,
    asked: tuple[Sequence[str], Sequence[str]],
    kernels: Sequence[Kernel],
    config: Config,
    device: Device,
    where: str,
) -> Choice:
    """Returns the named kernels of both passes that are available.

    Args:
        spec: The use.
        asked: Names for the forward, and for the backward, best first.
        kernels: The op's kernels.
        config: Whether bits must not vary.
        device: Where it will run.
        where: The user's line, for errors.

    Raises:
        UnknownKernel: If there is no kernel of a name.
        KernelError: If none of them supports the use.
    """
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
    check_names(names, spec.op, [k.name for k in kernels])
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
        why.append((name, reasons_of(verdict)))
    return None


def check_names(names: Sequence[str], op: str, kernels: Sequence[str]) -> None:
    """Raises `UnknownKernel` if a requested name is no kernel of the op."""
    there = [*dict.fromkeys((*kernels, REFERENCE, XLA, RING))]
    for name in names:
        if name not in there:
            raise UnknownKernel(
                f"{op} has no kernel {name!r}",
                next_step=known(name, there),
                where=caller(),
            )
