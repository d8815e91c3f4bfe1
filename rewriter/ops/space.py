"""The configs that a pass of a kernel may run with, and which are worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rewriter.ops.device import Device
from rewriter.ops.spec import Spec
from rewriter.support.verdict import YES, Verdict


def fits_anywhere(config: Any, spec: Spec, device: Device) -> Verdict:
    """Returns yes: the `fits` of a space that has nothing to prune."""
    del config, spec, device
    return YES


@dataclass(frozen=True, eq=False)
class Space:
    """The configs that one pass of a kernel may run with.

    Attributes:
        config: A frozen dataclass of numbers and words, such as block sizes. The
            pass gets one as ``config=``, or none and uses its rule of thumb.
        default: ``default(spec, device)`` is that rule of thumb.
        configs: ``configs(spec, device)`` gives the configs worth measuring, the most
            promising first.
        fits: Says, with reasons, whether a config can run: shared memory,
            registers, divisibility.
        symbolic: Whether `default` takes symbolic sizes. Else the pass gets no config
            there.

    What a forward saves for its backward must not depend on the config.

    Example:
        >>> from rewriter.support.verdict import no
        >>> @dataclass(frozen=True)
        ... class Rows:
        ...     rows: int = 128
        >>> space = Space(
        ...     Rows,
        ...     default=lambda spec, device: Rows(),
        ...     configs=lambda spec, device: [Rows(64), Rows(256), Rows(512)],
        ...     fits=lambda config, spec, device: YES
        ...     if spec.shape("x")[0] % config.rows == 0
        ...     else no("rows", f"{config.rows} does not divide the rows"),
        ... )
        >>> spec = Spec("f", (("x", (512, 8)),), (("x", "float32"),), ())
        >>> found, pruned = worth_measuring(space, spec, Device("cpu", "cpu"), 8)
        >>> [config.rows for config in found]
        [128, 64, 256, 512]
    """

    config: type
    default: Callable[[Spec, Device], Any] = field(repr=False)
    configs: Callable[[Spec, Device], Iterable[Any]] = field(repr=False)
    fits: Callable[[Any, Spec, Device], Verdict] = field(
        default=fits_anywhere, repr=False
    )
    symbolic: bool = False


def worth_measuring(
    space: Space | None, spec: Spec, device: Device, most: int
) -> tuple[tuple[Any, ...], tuple[tuple[Any, Verdict], ...]]:
    """Returns the configs to measure, and those that were pruned with the reasons.

    Args:
        space: The space; without one there is one config, None.
        spec: The use of the op.
        device: Where it will run.
        most: How many configs at most; the rule of thumb is the first.

    Example:
        >>> worth_measuring(None, Spec("f", (), (), ()), Device("cpu", "cpu"), 8)
        ((None,), ())
    """
    if space is None:
        return (None,), ()
    default = space.default(spec, device)
    proposed = dict.fromkeys((default, *space.configs(spec, device)))
    verdicts = [(c, space.fits(c, spec, device)) for c in proposed]
    good = [c for c, v in verdicts if v.ok]
    return tuple(good[:most]), tuple((c, v) for c, v in verdicts if not v.ok)
