"""Matches in, sites out: which kernel computes each, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rewriter.config import Config
from rewriter.errors import UnknownKernel, caller, known
from rewriter.kernel import Kernel, Spec
from rewriter.registry import REFERENCE
from rewriter.verdict import Verdict, no


@dataclass(frozen=True)
class Site:
    """One recognised op in the program, and what became of it.

    Attributes:
        index: Its number in the report and in the picture.
        op: The op's name, such as ``"attention"``.
        where: The user's line, such as ``"model.py:88 (Attention.__call__)"``.
        repeats: How often it runs: surrounding scan lengths multiplied.
        scope: What surrounds it: ``""``, ``"scan"``, ``"scan/remat"``.
        shapes: Its operands in text: ``"q f32[2,64,4,32] ..."``.
        params: The parameters read off the program.
        kernel: What computes it; ``"xla"`` means left as written.
        origin: Where the choice comes from: ``"heuristic"``, ``"forced"``.
        replaced: Whether the program changed.
        not_chosen: ``(kernel, reason)`` for every other kernel.
        numerics: What differs in rounding, one sentence each.
        saved_bytes: Bytes no longer stored, where known.
        backward: Whether its gradient was found in the same program.
    """

    index: int
    op: str
    where: str
    repeats: int
    scope: str
    shapes: str
    params: Mapping[str, object]
    kernel: str
    origin: str
    replaced: bool
    not_chosen: tuple[tuple[str, str], ...] = ()
    numerics: tuple[str, ...] = ()
    saved_bytes: int | None = None
    backward: bool = False


@dataclass(frozen=True)
class Choice:
    """The kernel picked for a site on one platform.

    Attributes:
        kernel: The kernel's name; ``"xla"`` leaves the program as written.
        origin: ``"heuristic"``, ``"forced"`` and the like.
        not_chosen: ``(kernel, reason)`` for every other kernel.
    """

    kernel: str
    origin: str
    not_chosen: tuple[tuple[str, str], ...] = field(default=())


XLA = "xla"
"""The name of the choice to leave the program as written."""


def choose(
    spec: Spec, config: Config, kernels: Sequence[Kernel], platform: str
) -> Choice:
    """Returns the kernel for a site: forced, else the first that pays.

    Args:
        spec: The site's shapes, dtypes and parameters.
        config: ``implementation`` forces a kernel for an op; ``numerics="strict"``
            leaves every site as written.
        kernels: The op's kernels, best first.
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``.

    Raises:
        UnknownKernel: If the forced kernel does not exist.
    """
    forced = dict(config.implementation).get(spec.op)
    if forced is not None:
        return _forced(spec, forced, kernels, config)
    if config.numerics == "strict":
        why = "numerics='strict', and every kernel sums in another order"
        return Choice(XLA, "heuristic", tuple((k.name, why) for k in kernels))
    refused: list[tuple[str, str]] = []
    # Of kernels for other platforms nothing is said, unless there are no others.
    for kernel in [k for k in kernels if platform in k.platforms] or kernels:
        verdict = _takes(kernel, spec, platform, config)
        if verdict.ok:
            verdict = kernel.profitable(spec, platform)
        if verdict.ok:
            return Choice(kernel.name, "heuristic", tuple(refused))
        refused.append((kernel.name, "; ".join(r.text for r in verdict.reasons)))
    return Choice(XLA, "heuristic", tuple(refused))


def _takes(kernel: Kernel, spec: Spec, platform: str, config: Config) -> Verdict:
    if config.exporting and not kernel.exportable:
        return no("export", "JAX does not keep its call stable in exported programs")
    if platform not in kernel.platforms:
        return no("platform", f"runs on {', '.join(kernel.platforms)}, not {platform}")
    return kernel.supports(spec)


def _forced(spec: Spec, name: str, kernels: Sequence[Kernel], config: Config) -> Choice:
    if name in (XLA, REFERENCE):
        return Choice(name, "forced")
    kernel = next((k for k in kernels if k.name == name), None)
    if kernel is None:
        names = [*(k.name for k in kernels), REFERENCE, XLA]
        raise UnknownKernel(
            f"{spec.op} has no kernel {name!r}",
            next_step=known(name, names),
            where=caller(),
        )
    verdict = _takes(kernel, spec, kernel.platforms[0], config)
    if verdict.ok:
        return Choice(name, "forced")
    text = "; ".join(r.text for r in verdict.reasons)
    return Choice(XLA, "heuristic", ((name, text),))
