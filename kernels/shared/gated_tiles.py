"""Tiles of gated linear units on Hopper that are worth trying for one use.

The columns of a tile are those of both branches, one half each. So a tile takes the
shared memory and registers of a product of as many columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rewriter.kernels.ragged.dot.hopper.config import STEP, Tiles
from rewriter.kernels.ragged.dot.hopper.config import fits as fits_product
from rewriter.kernels.shared.activations_hopper import WITHOUT
from rewriter.ops.kernel import Space
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

SEPARATE = Tiles(128, 128, 6, apart=True)
"""Each warpgroup with tiles of its own: one combines while the other multiplies."""


def computes(activation: str) -> Verdict:
    """Returns whether a kernel can compute an activation."""
    if (missing := WITHOUT.get(activation)) is None:
        return YES
    return no("activation", f"{activation} needs {missing}, which Mosaic GPU lacks")


def space(rows: Callable[[Spec], int]) -> Space:
    """Returns the configs of a gated linear unit.

    Args:
        rows: Gives the rows of a group of a use.
    """
    return Space(
        Tiles,
        lambda spec, device: default(rows(spec)),
        lambda spec, device: configs(rows(spec)),
        fits,
    )


def of_product(product: Space, part_of: Callable[[Spec], Spec]) -> Space:
    """Returns the configs of a unit that are those of a product, where they fit.

    Args:
        product: The configs of the product.
        part_of: Gives a branch of a use as a use of the product.
    """

    def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
        assert product.fits is not None
        return both_alike(config, product.fits(config, part_of(spec), device))

    def configs(spec: Spec, device: Device) -> list[Tiles]:
        made = product.configs(part_of(spec), device)
        return [config for config in made if fits(config, spec, device).ok]

    return Space(
        product.config,
        lambda spec, device: product.default(part_of(spec), device),
        configs,
        fits,
    )


def default(rows: int) -> Tiles:
    """Returns the default config, by rows of a group.

    On an H200 it was the fastest for 512 and 1024 rows a group. Without groups it took
    1.02 of the time of 256 x 128, the fastest one. Fewer rows were not measured
    (``tests/bench/results/hopper_glu_h200.json``).
    """
    return Tiles(64, 256) if rows <= 32 else Tiles()


def configs(rows: int) -> list[Tiles]:
    """Returns tiles worth measuring for groups of some rows, the best guess first."""
    made = [Tiles(width=16), Tiles(width=4), Tiles(256, 128), SEPARATE]
    if rows <= 512:
        alike = [Tiles(64, 256), Tiles(64, 256, apart=True), Tiles(64, 512, 2)]
        made += [replace(x, claimed=False) for x in alike]
    return made


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether tiles can run: as for a product, and both branches alike."""
    return both_alike(config, fits_product(config, spec, device))


def both_alike(config: Tiles, product: Verdict) -> Verdict:
    """Returns whether tiles that fit a product have whole steps of both branches."""
    if config.columns % (2 * STEP) == 0:
        return product
    text = f"{config.columns} columns a warpgroup, not a multiple of {2 * STEP}"
    return all_of(product, no("block_n", text))
