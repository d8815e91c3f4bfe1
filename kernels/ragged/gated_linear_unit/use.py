"""One use of the gated linear unit of experts, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.slopes import Slopes


@dataclass(frozen=True)
class Use:
    """The operands and parameters of the op, as in `reference`.

    Attributes:
        x: [m, k].
        w: [g, k, f]; [g, k, 2 f] with both branches.
        group_sizes: int [g].
        w_up: [g, k, f], if the branches are apart.
        activation: As in `reference`.
        beta: As in `reference`.
        halves: As in `reference`.
        slopes: As in `reference`; forward passes ignore them.
        precision: As in `reference`.
        out_dtype: The result's dtype; x's by default.
    """

    x: Array
    w: Array
    group_sizes: Array
    w_up: Array | None = None
    activation: str = "silu"
    beta: float = 1.0
    halves: str | None = None
    slopes: Slopes = ()
    precision: str | None = None
    out_dtype: str | None = None

    @property
    def f(self) -> int:
        """The columns of a branch."""
        return self.w.shape[2] // (2 if self.halves else 1)
