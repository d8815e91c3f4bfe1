"""The two branches of a gated linear unit, and how they are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.activations import (
    ACTIVATIONS,
    Activation,
    Bounds,
    clipped_by_choice,
)
from rewriter.ops.slopes import Slopes, with_slopes
from rewriter.ops.spec import Spec
from rewriter.support.verdict import Verdict, no

Rows = Mapping[str, jax.Array]
"""Some rows of ``x``, and of ``rows_gate`` and ``rows_up`` if present."""


@dataclass(frozen=True)
class Use:
    """One use of the op: its operands and parameters.

    Attributes:
        x: [..., k].
        w_gate: [k, f].
        w_up: [k, f].
        b_gate: [f] or None.
        b_up: The same.
        rows_gate: [..., f] or None.
        rows_up: The same.
        precision: As `jax.lax.Precision`, by name.
        out_dtype: The result's dtype; x's by default.
        joining: What `combine` takes beside the branches.
    """

    x: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    b_gate: jax.Array | None = None
    b_up: jax.Array | None = None
    rows_gate: jax.Array | None = None
    rows_up: jax.Array | None = None
    precision: str | None = None
    out_dtype: str | None = None
    joining: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Use:
        """Returns the use with some operands and parameters, by name."""
        own = {n: x for n, x in given.items() if n in FIELDS}
        return cls(**own, joining={n: x for n, x in given.items() if n not in FIELDS})

    def without_slopes(self) -> Use:
        """Returns the same, computed without rules for derivatives."""
        none = {"slopes": (), "slopes_up": ()}
        return dataclasses.replace(self, joining={**self.joining, **none})

    @property
    def dtype(self) -> Any:
        """The result's dtype."""
        return jnp.dtype(self.out_dtype or self.x.dtype)

    @property
    def by_row(self) -> dict[str, jax.Array]:
        """The present operands with rows."""
        return self._present("x", "rows_gate", "rows_up")

    @property
    def shared(self) -> dict[str, jax.Array]:
        """The present operands that all rows share."""
        return self._present("w_gate", "w_up", "b_gate", "b_up")

    def _present(self, *names: str) -> dict[str, jax.Array]:
        named = {name: getattr(self, name) for name in names}
        return {name: x for name, x in named.items() if x is not None}

    def branches(self, rows: Rows, dtype: Any = None) -> tuple[jax.Array, jax.Array]:
        """Returns both branches of some rows, before they are joined.

        Args:
            rows: The rows.
            dtype: The branches' dtype; at least float32 by default.
        """
        gate = self.b_gate, rows.get("rows_gate")
        up = self.b_up, rows.get("rows_up")
        return (
            branch(rows["x"], self.w_gate, gate, self.precision, dtype),
            branch(rows["x"], self.w_up, up, self.precision, dtype),
        )


FIELDS = frozenset(f.name for f in dataclasses.fields(Use)) - {"joining"}
"""The operands and parameters that say how branches are computed."""


def branch(
    x: jax.Array,
    w: jax.Array,
    added: Sequence[jax.Array | None],
    precision: str | None,
    dtype: Any = None,
) -> jax.Array:
    """Returns ``x·w`` plus addends, at least in float32 unless a dtype is given."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.matmul(x, w, precision=precision, preferred_element_type=wide)
    for b in added:
        y = y if b is None else y + b.astype(wide)
    return y


def combine(
    gate: jax.Array,
    up: jax.Array,
    activation: str = "silu",
    beta: float = 1.0,
    clip_gate: Bounds = (None, None),
    clip_up: Bounds = (None, None),
    up_shift: float = 0.0,
    slopes: Slopes = (),
    slopes_up: Slopes = (),
    activations: Mapping[str, Activation] = ACTIVATIONS,
    within: Callable[[jax.Array, Bounds], jax.Array] = clipped_by_choice,
) -> jax.Array:
    """Returns ``act(clip(gate)) · (clip(up) + up_shift)``.

    Args:
        gate: The branch that goes through the activation.
        up: The other branch.
        activation: One of `rewriter.ops.activations.ACTIVATIONS`.
        beta: The number of a parametric activation, such as the factor inside
            ``swish``: x · sigmoid(beta · x).
        clip_gate: Lower and upper bound of the gate branch, None for none.
        clip_up: The same for the other branch.
        up_shift: Added to the other branch after clipping.
        slopes: Derivatives of ``act(clip(y))`` at some numbers y, where the program's
            differ, such as 1/2 at 0 for ``max(y, 0)``.
        slopes_up: The same for the clip of the other branch.
        activations: The activations by name.
        within: Clips an array to bounds.
    """
    chosen = activations[activation]
    gate = with_slopes(lambda y: chosen(within(y, clip_gate), beta), slopes)(gate)
    up = with_slopes(lambda y: within(y, clip_up), slopes_up)(up)
    return gate * (up + up_shift if up_shift else up)


def refused_addends(spec: Spec) -> list[Verdict]:
    """Returns the refusals of arrays that are added to each row of a branch."""
    text = "addends for each row of a branch are not supported"
    return [no(name, text) for name in ("rows_gate", "rows_up") if spec.has(name)]
