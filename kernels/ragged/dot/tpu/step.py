"""The numbers of a step, as the bodies of the TPU kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """The fields of a step, in SMEM."""

    table: Any
    steps: int
    step: Any

    def __call__(self, field: int) -> Any:
        """Returns a field, as `schedule` names it."""
        return self.table[field * self.steps + self.step]
