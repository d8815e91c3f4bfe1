"""Programs that look like an operation and are not, or are only with care.

`REFUSED` must not be found at all; `CAREFUL` may be found, and then the
rewritten program must still give the numbers of the original.
"""

import importlib

from tests.spellings.look_alikes.pieces import CAREFUL as CAREFUL
from tests.spellings.look_alikes.pieces import REFUSED as REFUSED
from tests.spellings.look_alikes.pieces import LookAlike as LookAlike

PARTS = (
    "attention_refused",
    "attention_careful",
    "norms",
    "gated_linear_units",
    "ragged_dots",
    "losses",
)
"""Modules in the order of their programs in the lists, which each adds to."""

for part in PARTS:
    importlib.import_module(f"{__name__}.{part}")
