"""Makes the random program of a kind and a seed."""

from __future__ import annotations

from collections.abc import Callable

from tests.soundness import (
    attention,
    caches,
    complex_values,
    computed_masks,
    differences,
    functions,
    group_norms,
    labels,
    latents,
    layers,
    lookups,
    losses,
    merges,
    mutants,
    norms,
    packed,
    quantized,
    ragged,
    routers,
    surroundings,
    triangles,
    units,
    words,
)  # fmt: skip
from tests.soundness.program import Program

KINDS: dict[str, Callable[[int], Program]] = {
    "mask": attention.of_masks,
    "operand": attention.of_operands,
    "norm": norms.program,
    "unit": units.program,
    "ragged": ragged.program,
    "loss": losses.program,
    "lookup": lookups.program,
    "score": functions.program,
    "quantized": quantized.program,
    "packed": packed.program,
    "words": words.program,
    "complex": complex_values.program,
    "group": group_norms.program,
    "difference": differences.program,
    "mutant": mutants.program,
    "computed": computed_masks.program,
    "merge": merges.program,
    "router": routers.program,
    "cache": caches.program,
    "latent": latents.program,
    "triangle": triangles.program,
    "labels": labels.program,
    "layer": layers.program,
    "inside": surroundings.program,
}
TURNS = ("mask", "operand", "mask", "norm", "mask", "operand", "norm", "unit", "ragged")
"""Kinds as they take turns; masks have most to go wrong. The others are asked for."""


def program(seed: int, kind: str | None = None) -> Program:
    """The program of a seed, of a kind that is given or whose turn it is."""
    return KINDS[kind or TURNS[seed % len(TURNS)]](seed)
