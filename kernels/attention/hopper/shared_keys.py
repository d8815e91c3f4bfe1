"""Keys of which all heads share a part, as the rotary part of latent attention's.

    k[b, s, n, :] = own[b, s, n, :], common[b, s, 0, :]      or the other way round

Both arrays are copied to one block of shared memory, in panels of as many columns as a
tile has. So the product is that of joined keys, which are never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.hopper.dtypes import is_halved
from rewriter.kernels.attention.hopper.widths import WIDE_STEP

if TYPE_CHECKING:
    from jax import Array

SECOND = "k_more"
"""The name of the second array; the first has that of the keys."""


def takes_shared(given: Mapping[str, Any], unpadded: bool) -> bool:
    """Returns whether the kernel reads both arrays: they end where panels do.

    Args:
        given: What `forward` is given.
        unpadded: Whether the keys have a width that is copied.
    """
    config = given.get("config")
    both = given["shared"].get("k")
    plain = (
        unpadded
        and not is_halved(given["q"].dtype)
        and "k" not in given.get("packed", {})
    )
    short = config is not None and config.short
    swapped = "k" in given.get("swapped", ())
    return bool(
        both and plain and not (short or swapped or given.get("residuals"))
        and all(x.shape[3] % WIDE_STEP == 0 for x in both)
    )  # fmt: skip


def arrays(both: tuple[Array, Array]) -> dict[str, Array]:
    """Returns the arrays by the names that the kernel has for them."""
    return {"k": both[0], SECOND: both[1]}


def parts(
    given: Mapping[str, Any], at: tuple[Any, Any, Any], place: Any
) -> Iterator[tuple[Any, Any]]:
    """Yields parts of both arrays, and memory for each: what one copy moves.

    Args:
        given: The arrays by name.
        at: The batch entry, the rows, and the head.
        place: Memory [panels, rows, columns of a panel], in the view of copies.
    """
    from jax.experimental import pallas as pl  # slow to import; uses ask for `SECOND`

    (count, _, each), (entry, rows, head) = place.shape, at
    first = given["k"].shape[3]
    for i in range(count):
        column = i * each
        name, start = ("k", column) if column < first else (SECOND, column - first)
        source = given[name]
        own = 0 if source.shape[2] == 1 else head
        columns = () if source.shape[3] == each else (pl.ds(start, each),)
        yield source.at[(entry, rows, own, *columns)], place.at[i]
