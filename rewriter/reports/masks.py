"""Says in words which keys the queries of a site see, and what a mask array costs.

Structure, such as segments, is a few numbers for each row. A mask that stays an array
is as large as the scores of one head, and is read as often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from rewriter.measure.measurement import time_text
from rewriter.rewrite.plan import Site
from rewriter.support.sizes import size_text

OPERAND = re.compile(r"(\w+) (\w+)\[([^\]]*)\]")
COMMA = re.compile(r",(?![^()]*\))")

STRUCTURE = {
    "kv_segments": "keys of the same segment",
    "kv_lengths": "keys up to a length",
    "prefix": "a prefix that all rows see",
    "offset": "positions at an offset",
    "kv_positions": "keys at positions that are data",
}
"""By operand, what is read of a mask beside a window."""


def structure(site: Site) -> Iterator[str]:
    """Yields what was read of a mask, in words."""
    shapes = _shapes(site)
    yield from (text for name, text in STRUCTURE.items() if name in shapes)
    if "mask" in shapes and not _is_whole(shapes["mask"]):
        yield "a boolean of each key"


def whole_mask(site: Site, rate: float = 0.0) -> str:
    """Returns what a mask costs that is read as an array, and what would not.

    Args:
        site: The site.
        rate: The device's bytes/s from memory; 0 if unknown.
    """
    shape = _shapes(site).get("mask")
    if shape is None or not _is_whole(shape):
        return ""
    cost = "×".join(map(str, shape))
    if all(isinstance(d, int) for d in shape):
        count = math.prod(shape)
        cost += f", {size_text(count)}"
        cost += f", {time_text(1e6 * count / rate)} or more," if rate else ""
    return (
        f"a mask of {cost} is read in each pass; segments that are compared, lengths "
        "of keys or whole numbers of positions would be read in its place"
    )


def _shapes(site: Site) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes by operand; a symbolic size is its text."""
    found = OPERAND.findall(site.shapes)
    return {
        name: tuple(int(d) if d.isdigit() else d for d in filter(None, COMMA.split(of)))
        for name, _, of in found
    }


def _is_whole(shape: tuple[int | str, ...]) -> bool:
    """Whether a mask says something else for each query and key."""
    return len(shape) > 1 and 1 not in shape[-2:]
