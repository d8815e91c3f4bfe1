"""What is done with the product of a block: by XLA, or by kernels of a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from rewriter.kernels.cross_entropy.rows import Loss
from rewriter.kernels.linear_cross_entropy.chunks import Rows
from rewriter.kernels.linear_cross_entropy.head import Head
from rewriter.kernels.linear_cross_entropy.row_statistics import Reduced, of_product

Gradients = Callable[[Head, Loss, Rows], tuple[dict[str, jax.Array], jax.Array]]
"""Results of a loss and cotangents of a product, see `Steps`."""


@dataclass(frozen=True)
class Steps:
    """Functions of the product [n, v] of a block of rows.

    Attributes:
        reduced: Gives what is `Reduced` over the classes, as `of_product` does.
        gradients: ``gradients(head, loss, known)`` gives `Loss.results` and cotangents
            of the product with the scale, in the head's narrow dtype. `known` has of
            each row: classes, cotangent and product. None if they are computed from
            the former.
        replaced: The same with cotangents in place of the product, which nothing may
            read later. None as above.
        replaces: Whether `replaced` computes some head's gradients of a loss.
        of_weights: Does what `in_place.of_weights` does. None for that.
    """

    reduced: Callable[[Head, jax.Array, jax.Array], Reduced] = of_product
    gradients: Gradients | None = None
    replaced: Gradients | None = None
    replaces: Callable[[Head, Loss], bool] = lambda head, loss: False
    of_weights: Callable[..., jax.Array] | None = None

    def of(self, head: Head, loss: Loss) -> Gradients:
        """Returns `replaced` if it takes a loss, and else `gradients`."""
        found = self.replaced if self.replaces(head, loss) else self.gradients
        assert found is not None
        return found


PLAIN = Steps()
"""By XLA."""
