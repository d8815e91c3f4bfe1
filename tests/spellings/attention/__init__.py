"""Attention as libraries and people write it, one spelling per variant.

Arrays are [b, t, n, h] unless the letters say otherwise.
"""

import importlib

from tests.spellings.attention.pieces import SPELLINGS as SPELLINGS

FAMILIES = (
    "scale",
    "softmax",
    "masks",
    "fills",
    "bias",
    "layout",
    "heads",
    "projections",
    "decode",
    "dropout",
    "escape",
    "library",
)
"""Modules in the order of their spellings in `SPELLINGS`, which each adds to."""

for family in FAMILIES:
    importlib.import_module(f"{__name__}.{family}")
