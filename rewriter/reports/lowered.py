"""Says in a report which kernels could not be lowered, each at its site."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jax.extend.core import jaxprs_in_params

from rewriter.ops.device import Device
from rewriter.reports.report import Report
from rewriter.rewrite.plan import Site
from rewriter.site import packed, residual_stream, site
from rewriter.site.lowering import Failure, failure

LABEL = re.compile(r"rewriter/\w+#(\d+)")
"""What a site's equations are called in a program, with its number in the report."""

FORWARD = (site.site_p, site.site_on_devices_p, residual_stream.site_p, packed.site_p)


def as_lowered(report: Report, target: Device, here: Device) -> Report:
    """Returns the report with the sites as they are lowered.

    Kernels that are for some platforms only are lowered now, one by one, if the target
    is the device here. Of others, and of other targets, the report says what earlier
    lowerings showed.

    Args:
        report: The report of a rewritten program.
        target: The device that it was rewritten for.
        here: The device that is attached.
    """
    failed: dict[int, Failure] = {}
    for index, eqn in _sites(report.after):
        found = failure(eqn, target.platform, target.platform == here.platform)
        if found is not None and found.primitive in (*FORWARD, eqn.primitive):
            failed.setdefault(index, found)
    if not failed:
        return report
    return replace(
        report,
        sites=tuple(_as_lowered(s, target.platform, failed) for s in report.sites),
    )


def _sites(program: Any) -> Iterator[tuple[int, Any]]:
    """The equations of sites at any depth, with the numbers of the sites."""
    for eqn in getattr(program, "jaxpr", program).eqns if program else ():
        named = LABEL.findall(str(eqn.source_info.name_stack))
        if named and "use" in eqn.params:
            yield int(named[-1]), eqn
        for body in jaxprs_in_params(eqn.params):
            yield from _sites(body)


def _as_lowered(site: Site, platform: str, failed: Mapping[int, Failure]) -> Site:
    """A site as it is lowered; one whose gradient alone failed keeps its kernel."""
    found = failed.get(site.index)
    if found is None or not site.replaced:
        return site
    forward = found.primitive in FORWARD
    name = site.kernel if forward else f"{site.kernel}, gradient"
    why = (name, f"it cannot be lowered for {platform}: {found.why}")
    changed = replace(site, not_chosen=(why, *site.not_chosen))
    return replace(changed, kernel="xla", replaced=False) if forward else changed
