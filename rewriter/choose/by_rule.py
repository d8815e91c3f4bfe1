"""The first kernel that is worth it by its rule of thumb."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.choose.usable import pays, reasons_of, usable
from rewriter.config import Config
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.site.implementation import default_configs
from rewriter.support.verdict import YES


def by_rule(
    spec: Spec,
    config: Config,
    kernels: Sequence[Kernel],
    device: Device,
    differentiated: int,
) -> Choice:
    """Returns the first kernel that pays, or the program as written."""
    refused: list[tuple[str, str]] = []
    here = device.platform
    # Kernels for other platforms are not mentioned, unless there are no others.
    for kernel in [k for k in kernels if here in k.platforms] or kernels:
        asked = kernel.speed.by_rule or device.kind not in ("", here)
        verdict = usable(kernel, spec, device, config) if asked else YES
        if verdict.ok:
            verdict = pays(kernel, spec, here, differentiated)
        if verdict.ok:
            implementation = default_configs(spec, device, kernel)
            return Choice(implementation, "heuristic", tuple(refused))
        refused.append((kernel.name, reasons_of(verdict)))
    return Choice(AS_WRITTEN, "heuristic", tuple(refused))
